//! Writes a GGUF file in one pass: metadata and tensor headers first, then each tensor's data as its producer gives it, never all at once.

use std::io::Write;

use anyhow::{Result, ensure};

use super::value::write_string;
use super::{ALIGNMENT, MAGIC, TensorInfo, Type, VERSION, Value, align_up};

/// A file being described. Nothing is written before [`Writer::write`].
pub struct Writer {
    metadata: Vec<(String, Value)>,
    tensors: Vec<TensorInfo>,
    end: u64,
}

impl Writer {
    /// A file for a model of that architecture.
    pub fn new(architecture: &str) -> Self {
        let architecture = ("general.architecture".to_owned(), Value::String(architecture.to_owned()));
        Writer { metadata: vec![architecture], tensors: Vec::new(), end: 0 }
    }

    /// Adds a metadata key.
    pub fn set(&mut self, key: &str, value: Value) {
        self.metadata.push((key.to_owned(), value));
    }

    /// Adds a tensor; dimensions in the file's order, the contiguous one first. Data comes in the order of these calls.
    pub fn tensor(&mut self, name: &str, ty: Type, dims: &[u64]) -> Result<()> {
        let bytes = ty.bytes(dims)?;
        let offset = align_up(self.end, ALIGNMENT);
        self.end = offset + bytes;
        self.tensors.push(TensorInfo { name: name.to_owned(), ty, dims: dims.to_vec(), offset, bytes });
        Ok(())
    }

    /// Writes the file. `data` is called once per tensor, in order, with its index, and must write exactly its bytes.
    pub fn write<W: Write>(&self, out: &mut W, mut data: impl FnMut(usize, &TensorInfo, &mut Counter<'_, W>) -> Result<()>) -> Result<()> {
        let mut head = Vec::new();
        head.extend(MAGIC.to_le_bytes());
        head.extend(VERSION.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            write_string(&mut head, key)?;
            head.extend(value.number().to_le_bytes());
            value.write(&mut head)?;
        }
        for tensor in &self.tensors {
            write_string(&mut head, &tensor.name)?;
            head.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|d| head.extend(d.to_le_bytes()));
            head.extend((tensor.ty as u32).to_le_bytes());
            head.extend(tensor.offset.to_le_bytes());
        }
        head.resize(align_up(head.len() as u64, ALIGNMENT) as usize, 0);
        out.write_all(&head)?;

        let mut out = Counter { out, written: 0 };
        for (i, tensor) in self.tensors.iter().enumerate() {
            data(i, tensor, &mut out)?;
            let written = out.written - tensor.offset;
            ensure!(written == tensor.bytes, "{}: {written} bytes were written, {} expected", tensor.name, tensor.bytes);
            let padding = align_up(out.written, ALIGNMENT) - out.written;
            out.write_all(&[0; ALIGNMENT as usize][..padding as usize])?;
        }
        Ok(())
    }
}

/// Where tensor data goes; it counts.
pub struct Counter<'a, W: Write> {
    out: &'a mut W,
    written: u64,
}

impl<W: Write> Write for Counter<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.written += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}
