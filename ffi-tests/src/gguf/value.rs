//! Metadata values: the types of GGUF keys, and how each is laid out in the file.

use std::io::{Result, Write};

/// One metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Type 0.
    U8(u8),
    /// Type 1.
    I8(i8),
    /// Type 2.
    U16(u16),
    /// Type 3.
    I16(i16),
    /// Type 4.
    U32(u32),
    /// Type 5.
    I32(i32),
    /// Type 6.
    F32(f32),
    /// Type 7.
    Bool(bool),
    /// Type 8.
    String(String),
    /// Type 9.
    Array(Array),
    /// Type 10.
    U64(u64),
    /// Type 11.
    I64(i64),
    /// Type 12.
    F64(f64),
}

/// An array of one element type. Kinds that no model here has are kept as the bytes of the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    /// Of 32-bit integers.
    I32(Vec<i32>),
    /// Of 32-bit floats.
    F32(Vec<f32>),
    /// Of strings.
    String(Vec<String>),
    /// Of any other fixed-size element: its type number, and the elements' bytes.
    Raw(u32, Vec<u8>),
}

/// Bytes of a fixed-size value of that type number.
pub(super) fn fixed_size(number: u32) -> Option<usize> {
    match number {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

impl Value {
    pub(super) fn number(&self) -> u32 {
        match self {
            Value::U8(_) => 0,
            Value::I8(_) => 1,
            Value::U16(_) => 2,
            Value::I16(_) => 3,
            Value::U32(_) => 4,
            Value::I32(_) => 5,
            Value::F32(_) => 6,
            Value::Bool(_) => 7,
            Value::String(_) => 8,
            Value::Array(_) => 9,
            Value::U64(_) => 10,
            Value::I64(_) => 11,
            Value::F64(_) => 12,
        }
    }

    /// The value of a fixed-size type, from exactly its bytes.
    pub(super) fn from_fixed(number: u32, bytes: &[u8]) -> Option<Value> {
        Some(match number {
            0 => Value::U8(*bytes.first()?),
            1 => Value::I8(i8::from_le_bytes(bytes.try_into().ok()?)),
            2 => Value::U16(u16::from_le_bytes(bytes.try_into().ok()?)),
            3 => Value::I16(i16::from_le_bytes(bytes.try_into().ok()?)),
            4 => Value::U32(u32::from_le_bytes(bytes.try_into().ok()?)),
            5 => Value::I32(i32::from_le_bytes(bytes.try_into().ok()?)),
            6 => Value::F32(f32::from_le_bytes(bytes.try_into().ok()?)),
            7 => Value::Bool(*bytes.first()? != 0),
            10 => Value::U64(u64::from_le_bytes(bytes.try_into().ok()?)),
            11 => Value::I64(i64::from_le_bytes(bytes.try_into().ok()?)),
            12 => Value::F64(f64::from_le_bytes(bytes.try_into().ok()?)),
            _ => return None,
        })
    }

    pub(super) fn write(&self, out: &mut impl Write) -> Result<()> {
        match self {
            Value::U8(v) => out.write_all(&v.to_le_bytes()),
            Value::I8(v) => out.write_all(&v.to_le_bytes()),
            Value::U16(v) => out.write_all(&v.to_le_bytes()),
            Value::I16(v) => out.write_all(&v.to_le_bytes()),
            Value::U32(v) => out.write_all(&v.to_le_bytes()),
            Value::I32(v) => out.write_all(&v.to_le_bytes()),
            Value::F32(v) => out.write_all(&v.to_le_bytes()),
            Value::Bool(v) => out.write_all(&[u8::from(*v)]),
            Value::String(v) => write_string(out, v),
            Value::U64(v) => out.write_all(&v.to_le_bytes()),
            Value::I64(v) => out.write_all(&v.to_le_bytes()),
            Value::F64(v) => out.write_all(&v.to_le_bytes()),
            Value::Array(Array::I32(v)) => write_array(out, 5, v.len(), v.iter().try_fold(Vec::new(), |b, x| extend(b, &x.to_le_bytes()))?),
            Value::Array(Array::F32(v)) => write_array(out, 6, v.len(), v.iter().try_fold(Vec::new(), |b, x| extend(b, &x.to_le_bytes()))?),
            Value::Array(Array::Raw(number, bytes)) => {
                write_array(out, *number, bytes.len() / fixed_size(*number).unwrap_or(1), bytes.clone())
            }
            Value::Array(Array::String(v)) => {
                write_array(out, 8, v.len(), Vec::new())?;
                v.iter().try_for_each(|s| write_string(out, s))
            }
        }
    }
}

fn extend(mut bytes: Vec<u8>, more: &[u8]) -> Result<Vec<u8>> {
    bytes.extend_from_slice(more);
    Ok(bytes)
}

fn write_array(out: &mut impl Write, number: u32, len: usize, elements: Vec<u8>) -> Result<()> {
    out.write_all(&number.to_le_bytes())?;
    out.write_all(&(len as u64).to_le_bytes())?;
    out.write_all(&elements)
}

pub(super) fn write_string(out: &mut impl Write, s: &str) -> Result<()> {
    out.write_all(&(s.len() as u64).to_le_bytes())?;
    out.write_all(s.as_bytes())
}
