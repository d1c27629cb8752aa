//! Writes GGUF files for tests: right ones, and wrong ones on purpose.
//!
//! Owns: the encoding, independent of the reader. Must not know: what a test wants to prove.

/// A file under construction.
pub(crate) struct File {
    version: u32,
    alignment: u64,
    pairs: Vec<Vec<u8>>,
    tensors: Vec<Vec<u8>>,
    next: u64,
    /// Bytes of data behind the header, if not as many as the tensors need.
    pub(crate) data_bytes: Option<u64>,
}

pub(crate) fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

/// A header's first 24 bytes.
pub(crate) fn counts(version: u32, tensors: u64, pairs: u64) -> Vec<u8> {
    [&b"GGUF"[..], &version.to_le_bytes(), &tensors.to_le_bytes(), &pairs.to_le_bytes()].concat()
}

/// One tensor description.
pub(crate) fn tensor(name: &[u8], dims: &[u64], ty: u32, offset: u64) -> Vec<u8> {
    let mut v = string(name);
    v.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|d| v.extend(d.to_le_bytes()));
    v.extend(ty.to_le_bytes());
    v.extend(offset.to_le_bytes());
    v
}

impl File {
    pub(crate) fn new(version: u32) -> File {
        File { version, alignment: 32, pairs: Vec::new(), tensors: Vec::new(), next: 0, data_bytes: None }
    }

    /// A pair with a value in the file's own encoding.
    pub(crate) fn pair(mut self, key: &str, ty: u32, value: &[u8]) -> File {
        self.pairs.push([&string(key.as_bytes())[..], &ty.to_le_bytes(), value].concat());
        self
    }

    pub(crate) fn u16(self, key: &str, v: u16) -> File {
        self.pair(key, 2, &v.to_le_bytes())
    }

    pub(crate) fn u32(self, key: &str, v: u32) -> File {
        self.pair(key, 4, &v.to_le_bytes())
    }

    pub(crate) fn i32(self, key: &str, v: i32) -> File {
        self.pair(key, 5, &v.to_le_bytes())
    }

    pub(crate) fn str(self, key: &str, v: &str) -> File {
        self.pair(key, 8, &string(v.as_bytes()))
    }

    pub(crate) fn strings(self, key: &str, all: &[&str]) -> File {
        let mut v = [&8u32.to_le_bytes()[..], &(all.len() as u64).to_le_bytes()].concat();
        all.iter().for_each(|s| v.extend(string(s.as_bytes())));
        self.pair(key, 9, &v)
    }

    pub(crate) fn alignment(mut self, alignment: u32) -> File {
        self.alignment = alignment.into();
        self.u32("general.alignment", alignment)
    }

    /// A tensor behind the last one, aligned.
    pub(crate) fn tensor(mut self, name: &str, dims: &[u64], ty: u32) -> File {
        let info = super::GgmlType(ty).info().unwrap();
        let bytes = dims.iter().product::<u64>() / info.block_elements * info.block_bytes;
        self.tensors.push(tensor(name.as_bytes(), dims, ty, self.next));
        self.next = (self.next + bytes).div_ceil(self.alignment) * self.alignment;
        self
    }

    /// A tensor description as it is.
    pub(crate) fn raw_tensor(mut self, name: &[u8], dims: &[u64], ty: u32, offset: u64) -> File {
        self.tensors.push(tensor(name, dims, ty, offset));
        self
    }

    /// The header without padding.
    pub(crate) fn header(&self) -> Vec<u8> {
        let mut v = counts(self.version, self.tensors.len() as u64, self.pairs.len() as u64);
        self.pairs.iter().chain(&self.tensors).for_each(|b| v.extend(b));
        v
    }

    /// The whole file; the data is zeros.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut v = self.header();
        let start = (v.len() as u64).div_ceil(self.alignment) * self.alignment;
        v.resize((start + self.data_bytes.unwrap_or(self.next)) as usize, 0);
        v
    }
}
