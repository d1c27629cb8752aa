//! GGUF version 3 as a file format: block formats, a bounds-checked reader, a streaming writer. Written from the format's description; it
//! shares no code with Berth, so that a mistake there cannot hide here.

mod reader;
pub mod split;
mod types;
mod value;
mod writer;

pub use reader::{Gguf, TensorInfo};
pub use types::Type;
pub use value::{Array, Value};
pub use writer::Writer;

/// `GGUF` as little-endian bytes.
const MAGIC: u32 = u32::from_le_bytes(*b"GGUF");
const VERSION: u32 = 3;
/// The alignment of tensor data where the file does not say otherwise.
const ALIGNMENT: u64 = 32;

/// `n` rounded up to a multiple of `alignment` (a power of two or not).
fn align_up(n: u64, alignment: u64) -> u64 {
    n.next_multiple_of(alignment)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn written(tensors: &[(&str, Type, Vec<u64>)]) -> Vec<u8> {
        let mut w = Writer::new("llama");
        w.set("llama.block_count", Value::U32(3));
        w.set("tokens", Value::Array(Array::String(vec!["a".into(), "".into(), "ü".into()])));
        w.set("scores", Value::Array(Array::F32(vec![0.5, -1.0])));
        w.set("flag", Value::Bool(true));
        for (name, ty, dims) in tensors {
            w.tensor(name, *ty, dims).unwrap();
        }
        let mut file = Vec::new();
        let mut data = 0u8;
        w.write(&mut file, |_, info, out| {
            data += 1;
            out.write_all(&vec![data; info.bytes as usize])?;
            Ok(())
        })
        .unwrap();
        file
    }

    fn read(bytes: &[u8]) -> anyhow::Result<Gguf> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(bytes)?;
        Gguf::open(file.path())
    }

    #[test]
    fn what_is_written_is_read_back() {
        let bytes = written(&[("x", Type::F32, vec![3]), ("y.exps", Type::Q4_K, vec![256, 2, 5])]);
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&bytes).unwrap();
        let g = Gguf::open(file.path()).unwrap();
        assert_eq!(g.string("general.architecture"), Some("llama"));
        assert_eq!(g.value("llama.block_count"), Some(&Value::U32(3)));
        assert_eq!(g.value("tokens"), Some(&Value::Array(Array::String(vec!["a".into(), "".into(), "ü".into()]))));
        assert_eq!(g.value("scores"), Some(&Value::Array(Array::F32(vec![0.5, -1.0]))));
        let [x, y] = g.tensors() else { panic!("{:?}", g.tensors()) };
        assert_eq!((x.name.as_str(), x.ty, x.dims.as_slice(), x.bytes), ("x", Type::F32, [3].as_slice(), 12));
        assert_eq!((y.ty, y.dims.as_slice(), y.bytes), (Type::Q4_K, [256, 2, 5].as_slice(), 1440));
        assert_eq!(g.data(x).unwrap(), vec![1; 12]);
        assert_eq!(g.data(y).unwrap(), vec![2; 1440]);
        assert_eq!(y.offset % ALIGNMENT, 0);
    }

    #[test]
    fn a_row_that_is_not_whole_blocks_is_refused() {
        assert!(Writer::new("x").tensor("t", Type::Q4_K, &[255]).is_err());
    }

    #[test]
    fn every_truncation_is_an_error_and_never_a_panic() {
        let bytes = written(&[("x", Type::F32, vec![3]), ("y", Type::Q8_0, vec![64])]);
        for n in 0..bytes.len() - 31 {
            assert!(read(&bytes[..n]).is_err(), "{n} of {} bytes", bytes.len());
        }
    }

    #[test]
    fn a_damaged_header_is_an_error_or_harmless_and_never_a_panic() {
        let bytes = written(&[("x", Type::F32, vec![3]), ("y", Type::Q8_0, vec![64])]);
        let header = bytes.len() - 128;
        for at in 0..header {
            for value in [0x00, 0x7f, 0x80, 0xff] {
                let mut damaged = bytes.clone();
                damaged[at] = value;
                // Text and numbers may well stay valid; what is tested is that nothing panics or allocates without bound.
                let _ = read(&damaged);
            }
        }
    }
}
