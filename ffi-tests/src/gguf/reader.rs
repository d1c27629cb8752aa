//! Reads a GGUF file's header, and tensor data on request. Every length is checked against the file's size before it is believed.

use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use super::value::fixed_size;
use super::{ALIGNMENT, Array, MAGIC, Type, VERSION, Value, align_up};

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Its block format.
    pub ty: Type,
    /// Its dimensions, the contiguous one first.
    pub dims: Vec<u64>,
    /// Where its data starts: in the file when read, in the data section when written.
    pub offset: u64,
    /// Bytes of its data.
    pub bytes: u64,
}

/// An open GGUF file.
pub struct Gguf {
    file: File,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
}

impl Gguf {
    /// Reads the header of `path`.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let size = file.metadata()?.len();
        let mut r = Bounded { inner: BufReader::new(file.try_clone()?), at: 0, size };
        let (metadata, tensors) = header(&mut r).with_context(|| format!("{} at byte {}", path.display(), r.at))?;
        Ok(Gguf { file, metadata, tensors })
    }

    /// All metadata, in the order of the file.
    pub fn metadata(&self) -> &[(String, Value)] {
        &self.metadata
    }

    /// The value of a key.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(k, _)| k == key).map(|(_, v)| v)
    }

    /// The value of a key that holds a string.
    pub fn string(&self, key: &str) -> Option<&str> {
        match self.value(key) {
            Some(Value::String(s)) => Some(s),
            _ => None,
        }
    }

    /// All tensors, in the order of the file.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The bytes of a tensor of this file.
    pub fn data(&self, tensor: &TensorInfo) -> Result<Vec<u8>> {
        let mut data = vec![0; usize::try_from(tensor.bytes)?];
        self.file.read_exact_at(&mut data, tensor.offset).with_context(|| tensor.name.clone())?;
        Ok(data)
    }
}

type Metadata = Vec<(String, Value)>;

fn header(r: &mut Bounded) -> Result<(Metadata, Vec<TensorInfo>)> {
    ensure!(r.u32()? == MAGIC, "not a GGUF file");
    let version = r.u32()?;
    ensure!(version == VERSION, "GGUF version {version}, not {VERSION}");
    // A key takes at least 13 bytes (length, type, one byte of value), a tensor 32: more cannot be in the file.
    let n_tensors = r.count(32)?;
    let n_keys = r.count(13)?;
    let mut metadata = Vec::with_capacity(n_keys);
    for _ in 0..n_keys {
        let key = r.string()?;
        let number = r.u32()?;
        let value = r.value(number).with_context(|| format!("key {key}"))?;
        metadata.push((key, value));
    }
    let mut tensors = Vec::with_capacity(n_tensors);
    for _ in 0..n_tensors {
        tensors.push(tensor(r)?);
    }
    let alignment = match metadata.iter().find(|(k, _)| k == "general.alignment") {
        None => ALIGNMENT,
        // Any but zero, as the format says; stock wants a power of two.
        Some((_, Value::U32(a))) if *a > 0 => u64::from(*a),
        Some((_, other)) => bail!("general.alignment is {other:?}"),
    };
    let start = align_up(r.at, alignment);
    for t in &mut tensors {
        ensure!(t.offset % alignment == 0, "{} is not aligned to {alignment}", t.name);
        t.offset = start.checked_add(t.offset).with_context(|| format!("{}: offset overflows", t.name))?;
        let end = t.offset.checked_add(t.bytes).with_context(|| format!("{}: size overflows", t.name))?;
        ensure!(end <= r.size, "{} ends at {end}, the file at {}", t.name, r.size);
    }
    Ok((metadata, tensors))
}

fn tensor(r: &mut Bounded) -> Result<TensorInfo> {
    let name = r.string()?;
    let n = r.u32()?;
    ensure!((1..=4).contains(&n), "{name} has {n} dimensions");
    let dims = (0..n).map(|_| r.u64()).collect::<Result<Vec<_>>>()?;
    let ty = Type::from_number(r.u32()?).with_context(|| name.clone())?;
    let bytes = ty.bytes(&dims).with_context(|| name.clone())?;
    Ok(TensorInfo { name, ty, bytes, dims, offset: r.u64()? })
}

/// A reader that knows how much is left.
struct Bounded {
    inner: BufReader<File>,
    at: u64,
    size: u64,
}

impl Bounded {
    fn bytes(&mut self, n: u64) -> Result<Vec<u8>> {
        ensure!(n <= self.size - self.at, "{n} bytes are wanted, {} are left", self.size - self.at);
        let mut bytes = vec![0; usize::try_from(n)?];
        self.inner.read_exact(&mut bytes)?;
        self.at += n;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.bytes(N as u64)?);
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A count of items of at least `least` bytes each.
    fn count(&mut self, least: u64) -> Result<usize> {
        let n = self.u64()?;
        ensure!(n.checked_mul(least).is_some_and(|b| b <= self.size - self.at), "{n} items cannot be in {} bytes", self.size - self.at);
        Ok(usize::try_from(n)?)
    }

    fn string(&mut self) -> Result<String> {
        let n = self.u64()?;
        String::from_utf8(self.bytes(n)?).context("a string is not UTF-8")
    }

    fn value(&mut self, number: u32) -> Result<Value> {
        match number {
            8 => Ok(Value::String(self.string()?)),
            9 => self.array_value().map(Value::Array),
            _ => {
                let size = fixed_size(number).with_context(|| format!("value type {number}"))?;
                let bytes = self.bytes(size as u64)?;
                Value::from_fixed(number, &bytes).with_context(|| format!("value type {number}"))
            }
        }
    }

    fn array_value(&mut self) -> Result<Array> {
        let number = self.u32()?;
        if number == 8 {
            let n = self.count(8)?;
            return (0..n).map(|_| self.string()).collect::<Result<_>>().map(Array::String);
        }
        let size = fixed_size(number).with_context(|| format!("an array of type {number}"))? as u64;
        let n = self.count(size)? as u64;
        let bytes = self.bytes(n * size)?;
        let (words, _) = bytes.as_chunks::<4>();
        Ok(match number {
            5 => Array::I32(words.iter().map(|w| i32::from_le_bytes(*w)).collect()),
            6 => Array::F32(words.iter().map(|w| f32::from_le_bytes(*w)).collect()),
            _ => Array::Raw(number, bytes),
        })
    }
}
