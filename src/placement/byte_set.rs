//! Sets of bytes: what a class in a pattern matches.
//!
//! Owns: membership, the named classes of the C locale. Must not know: the grammar of patterns.

/// A set of bytes.
#[derive(Clone, Copy, Default)]
pub(super) struct ByteSet([u64; 4]);

impl ByteSet {
    pub(super) fn of(member: impl Fn(u8) -> bool) -> ByteSet {
        let mut set = ByteSet::default();
        (0..=255).filter(|&b| member(b)).for_each(|b| set.add(b));
        set
    }

    /// A class by name, in the C locale; libstdc++ ignores the name's case. `d`, `s` and `w` are names too.
    pub(super) fn named(name: &[u8]) -> Option<ByteSet> {
        Some(match name.to_ascii_lowercase().as_slice() {
            b"alnum" => ByteSet::of(|b| b.is_ascii_alphanumeric()),
            b"alpha" => ByteSet::of(|b| b.is_ascii_alphabetic()),
            b"blank" => ByteSet::of(|b| b == b' ' || b == b'\t'),
            b"cntrl" => ByteSet::of(|b| b.is_ascii_control()),
            b"d" | b"digit" => ByteSet::of(|b| b.is_ascii_digit()),
            b"graph" => ByteSet::of(|b| b.is_ascii_graphic()),
            b"lower" => ByteSet::of(|b| b.is_ascii_lowercase()),
            b"print" => ByteSet::of(|b| b.is_ascii_graphic() || b == b' '),
            b"punct" => ByteSet::of(|b| b.is_ascii_punctuation()),
            b"s" | b"space" => ByteSet::of(|b| b == b' ' || (9..=13).contains(&b)),
            b"upper" => ByteSet::of(|b| b.is_ascii_uppercase()),
            b"w" => ByteSet::of(|b| b.is_ascii_alphanumeric() || b == b'_'),
            b"xdigit" => ByteSet::of(|b| b.is_ascii_hexdigit()),
            _ => return None,
        })
    }

    pub(super) fn has(&self, byte: u8) -> bool {
        self.0[usize::from(byte >> 6)] >> (byte & 63) & 1 == 1
    }

    pub(super) fn add(&mut self, byte: u8) {
        self.0[usize::from(byte >> 6)] |= 1 << (byte & 63);
    }

    pub(super) fn add_all(&mut self, other: &ByteSet) {
        self.0.iter_mut().zip(other.0).for_each(|(a, b)| *a |= b);
    }

    pub(super) fn complement(mut self) -> ByteSet {
        self.0.iter_mut().for_each(|a| *a = !*a);
        self
    }

    pub(super) fn ranges(&self) -> Vec<(u8, u8)> {
        let mut ranges: Vec<(u8, u8)> = Vec::new();
        for byte in (0..=255).filter(|&b| self.has(b)) {
            match ranges.last_mut() {
                Some((_, to)) if byte - *to == 1 => *to = byte,
                _ => ranges.push((byte, byte)),
            }
        }
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_exactly_the_members() {
        for name in ["alnum", "W", "space", "punct", "cntrl", "xdigit", "print"] {
            let set = ByteSet::named(name.as_bytes()).unwrap();
            let covered = |b: u8| set.ranges().iter().any(|&(from, to)| (from..=to).contains(&b));
            assert!((0..=255).all(|b| covered(b) == set.has(b)), "{name}");
            assert!((0..=255).all(|b| set.complement().has(b) != set.has(b)), "{name}");
        }
        assert!(ByteSet::default().ranges().is_empty());
        assert_eq!(ByteSet::default().complement().ranges(), [(0, 255)]);
        assert!(ByteSet::named(b"word").is_none());
    }
}
