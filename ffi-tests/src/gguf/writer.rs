//! Writes a GGUF file in one pass: metadata and tensor headers first, then each tensor's data as its producer gives it, never all at once.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::value::write_string;
use super::{ALIGNMENT, MAGIC, TensorInfo, Type, VERSION, Value, align_up};

/// A file being described. Nothing is written before [`Writer::write`].
pub struct Writer {
    metadata: Vec<(String, Value)>,
    tensors: Vec<TensorInfo>,
    end: u64,
    alignment: u64,
}

impl Writer {
    /// A file for a model of that architecture.
    pub fn new(architecture: &str) -> Self {
        let architecture = ("general.architecture".to_owned(), Value::String(architecture.to_owned()));
        Writer { metadata: vec![architecture], tensors: Vec::new(), end: 0, alignment: ALIGNMENT }
    }

    /// Another alignment of tensor data, in bytes, at least 1. Must come before the first tensor. (Stock only reads powers of two.)
    pub fn align(&mut self, alignment: u32) {
        self.alignment = alignment.into();
        self.set("general.alignment", Value::U32(alignment));
    }

    /// Adds a metadata key.
    pub fn set(&mut self, key: &str, value: Value) {
        self.metadata.push((key.to_owned(), value));
    }

    /// Adds a tensor; dimensions in the file's order, the contiguous one first. Data comes in the order of these calls.
    pub fn tensor(&mut self, name: &str, ty: Type, dims: &[u64]) -> Result<()> {
        let bytes = ty.bytes(dims)?;
        let offset = align_up(self.end, self.alignment);
        self.end = offset + bytes;
        self.tensors.push(TensorInfo { name: name.to_owned(), ty, dims: dims.to_vec(), offset, bytes });
        Ok(())
    }

    /// Bytes of everything before the data.
    fn head(&self) -> Result<Vec<u8>> {
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
        head.resize(usize::try_from(align_up(head.len() as u64, self.alignment))?, 0);
        Ok(head)
    }

    /// Writes a file whose data are zeros that take no room on the disk, except for a mark of 8 bytes (its own offset, plus one) at every
    /// `every` bytes of the data; 0 for none.
    pub fn write_sparse(&self, path: &Path, every: u64) -> Result<()> {
        let head = self.head()?;
        let start = head.len() as u64;
        let file = File::create(path).with_context(|| path.display().to_string())?;
        file.write_all_at(&head, 0)?;
        file.set_len(start + self.end)?;
        let step = if every == 0 { usize::MAX } else { usize::try_from(every)? };
        let marks = (0..self.end.saturating_sub(8)).step_by(step).filter(|_| every > 0);
        for at in marks.map(|offset| start + offset) {
            file.write_all_at(&(at + 1).to_le_bytes(), at)?;
        }
        Ok(())
    }

    /// Writes the file. `data` is called once per tensor, in order, with its index, and must write exactly its bytes.
    pub fn write<W: Write>(&self, out: &mut W, mut data: impl FnMut(usize, &TensorInfo, &mut Counter<'_, W>) -> Result<()>) -> Result<()> {
        out.write_all(&self.head()?)?;
        let mut out = Counter { out, written: 0 };
        for (i, tensor) in self.tensors.iter().enumerate() {
            data(i, tensor, &mut out)?;
            let written = out.written - tensor.offset;
            ensure!(written == tensor.bytes, "{}: {written} bytes were written, {} expected", tensor.name, tensor.bytes);
            let padding = align_up(out.written, self.alignment) - out.written;
            out.write_all(&vec![0; usize::try_from(padding)?])?;
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
