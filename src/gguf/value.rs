//! Metadata values.
//!
//! Owns: the thirteen value types and typed, borrowed views of them. Must not know: which keys exist.

/// The type of a metadata value, as numbered in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it all")]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Str,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    pub(super) fn from_number(number: u32) -> Option<ValueType> {
        use ValueType as T;
        const ALL: [ValueType; 13] =
            [T::U8, T::I8, T::U16, T::I16, T::U32, T::I32, T::F32, T::Bool, T::Str, T::Array, T::U64, T::I64, T::F64];
        ALL.get(number as usize).copied()
    }

    /// Bytes of one value; `None` for strings and arrays, whose size varies.
    pub fn size(self) -> Option<u64> {
        use ValueType as T;
        match self {
            T::U8 | T::I8 | T::Bool => Some(1),
            T::U16 | T::I16 => Some(2),
            T::U32 | T::I32 | T::F32 => Some(4),
            T::U64 | T::I64 | T::F64 => Some(8),
            T::Str | T::Array => None,
        }
    }
}

/// A metadata value, borrowed from its [`super::Header`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(missing_docs, reason = "the names say it all")]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    /// Not checked to be UTF-8: a token may be half a character.
    Str(&'a [u8]),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// An array value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    /// The type of its elements.
    pub element: ValueType,
    /// How many elements there are.
    pub len: u64,
    /// The elements as they stand in the file. `None` if the array is too large to be kept (vocabularies are).
    pub(super) bytes: Option<&'a [u8]>,
}

/// Takes `N` bytes off the front.
fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = bytes.split_first_chunk::<N>()?;
    *bytes = tail;
    Some(*head)
}

/// Decodes a value of type `t`, which is not an array, from the front of `bytes`.
pub(super) fn decode<'a>(t: ValueType, bytes: &mut &'a [u8]) -> Option<Value<'a>> {
    use ValueType as T;
    Some(match t {
        T::U8 => Value::U8(u8::from_le_bytes(take(bytes)?)),
        T::I8 => Value::I8(i8::from_le_bytes(take(bytes)?)),
        T::U16 => Value::U16(u16::from_le_bytes(take(bytes)?)),
        T::I16 => Value::I16(i16::from_le_bytes(take(bytes)?)),
        T::U32 => Value::U32(u32::from_le_bytes(take(bytes)?)),
        T::I32 => Value::I32(i32::from_le_bytes(take(bytes)?)),
        T::F32 => Value::F32(f32::from_le_bytes(take(bytes)?)),
        // Stock reads any byte but 0 as true.
        T::Bool => Value::Bool(take::<1>(bytes)? != [0]),
        T::U64 => Value::U64(u64::from_le_bytes(take(bytes)?)),
        T::I64 => Value::I64(i64::from_le_bytes(take(bytes)?)),
        T::F64 => Value::F64(f64::from_le_bytes(take(bytes)?)),
        T::Str => {
            let len = usize::try_from(u64::from_le_bytes(take(bytes)?)).ok()?;
            let (text, rest) = bytes.split_at_checked(len)?;
            *bytes = rest;
            Value::Str(text)
        }
        T::Array => return None,
    })
}

impl<'a> Value<'a> {
    /// An integer of any width, if it is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// A string, if it is UTF-8.
    pub fn as_str(&self) -> Option<&'a str> {
        match *self {
            Value::Str(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// An array.
    pub fn as_array(&self) -> Option<Array<'a>> {
        match *self {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }
}

impl<'a> Array<'a> {
    /// The elements; `None` if the array was too large to be kept.
    pub fn iter(&self) -> Option<impl Iterator<Item = Value<'a>> + use<'a>> {
        let element = self.element;
        let mut bytes = self.bytes?;
        Some(std::iter::from_fn(move || if bytes.is_empty() { None } else { decode(element, &mut bytes) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_type_number_round_trips_and_the_next_is_unknown() {
        for n in 0..13 {
            assert_eq!(ValueType::from_number(n).unwrap() as u32, n);
        }
        assert!(ValueType::from_number(13).is_none());
        assert!(ValueType::from_number(u32::MAX).is_none());
    }

    #[test]
    fn negative_integer_is_not_a_count() {
        assert_eq!(Value::I32(-1).as_u64(), None);
        assert_eq!(Value::I8(7).as_u64(), Some(7));
        assert_eq!(Value::U64(u64::MAX).as_u64(), Some(u64::MAX));
    }
}
