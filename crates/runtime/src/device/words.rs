//! A call of an operator as words, which compare and hash fast.
//!
//! A call is: the number of the operator in [`operators`](crate::aten::operators); a number that tells its
//! variants (in place, `out=`) apart, with the precision of `f32` products (0 highest, 1
//! high, 2 medium) from bit 32; its arguments; and the tensors of `out=`, each behind an [`OUT`]. A word that starts an argument has a tag in its lowest byte:
//!
//! | tag | bits 8 to 15 | 16 to 31 | 32 to 63 | words that follow |
//! |---|---|---|---|---|
//! | [`NONE`] | | | | |
//! | [`TENSOR`] | element type | dimensions | storage | offset, sizes, strides |
//! | [`TENSORS`] | | | count | so many `TENSOR` or `NONE` |
//! | [`CONSTANT`] | [`Kind`] | | | the value; a complex one takes two |
//! | [`RUNTIME`] | [`Kind`] | | index | |
//! | [`SCALARS`] | | | count | so many `CONSTANT` or `RUNTIME` |
//! | [`BOOL`] | | | value | |
//! | [`INT`], [`FLOAT`] | | | | the value |
//! | [`INTS`], [`FLOATS`], [`BOOLS`] | | | count | the values |
//! | [`ELEMENT`] | element type | | | |
//! | [`TEXT`] | | | bytes | the bytes, eight to a word |
//! | [`OPAQUE`] | | | | |
//!
//! Element types are PJRT's numbers. The results of a call are words of the same form:
//! `NONE` for an undefined tensor, [`NEW`] with sizes and strides, [`INTO`] as a `TENSOR`; a
//! [`LIST`] before those that the operator returns as a list.

use std::sync::Arc;

use super::Error;
use super::interned::BufferType;
use crate::aten::{
    Argument, Destination, Kind, Number, Operand, Precision, Request, ResultType, Scalar,
    StorageType, View,
};
use crate::pjrt::ElementType;

macro_rules! tags {
    ($($(#[$doc:meta])* $name:ident = $value:literal;)*) => {
        $($(#[$doc])* pub const $name: u64 = $value;)*
    };
}

tags! {
    /// An argument that is not given, or an undefined tensor.
    NONE = 0;
    /// A tensor.
    TENSOR = 1;
    /// A list of tensors.
    TENSORS = 2;
    /// A number that is part of the program.
    CONSTANT = 3;
    /// A number that the program gets when it runs.
    RUNTIME = 4;
    /// A list of numbers.
    SCALARS = 5;
    /// A truth value.
    BOOL = 6;
    /// An integer.
    INT = 7;
    /// A real number.
    FLOAT = 8;
    /// A list of integers.
    INTS = 9;
    /// A list of real numbers.
    FLOATS = 10;
    /// A list of truth values.
    BOOLS = 11;
    /// An element type.
    ELEMENT = 12;
    /// Text.
    TEXT = 13;
    /// What does not matter to the computation.
    OPAQUE = 14;
    /// A tensor of `out=` follows.
    OUT = 15;
    /// A result in a new storage.
    NEW = 16;
    /// A result that is written into a storage.
    INTO = 17;
    /// So many results that follow (bits 32 to 63) are one list.
    LIST = 18;
}

/// The kind of number that bits 8 to 15 mean.
fn kind(code: u64) -> Option<Kind> {
    Some(match code {
        0 => Kind::Bool,
        1 => Kind::Int,
        2 => Kind::Float,
        3 => Kind::Complex,
        _ => return None,
    })
}

/// A number of code [`kind`] from its bits; only complex ones have an imaginary part.
pub fn number(code: u8, bits: [u64; 2]) -> Option<Number> {
    Some(match kind(code.into())? {
        Kind::Bool => Number::Bool(bits[0] != 0),
        Kind::Int => Number::Int(bits[0] as i64),
        Kind::Float => Number::Float(f64::from_bits(bits[0])),
        Kind::Complex => Number::Complex(f64::from_bits(bits[0]), f64::from_bits(bits[1])),
    })
}

struct Reader<'a> {
    words: &'a [u64],
    at: usize,
}

impl<'a> Reader<'a> {
    fn bad(&self) -> Error {
        let at = self.at.saturating_sub(1);
        Error::Words {
            at,
            word: self.words.get(at).copied().unwrap_or_default(),
        }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u64], Error> {
        let end = self.at.checked_add(count);
        let taken = end.and_then(|end| self.words.get(self.at..end));
        self.at += count;
        taken.ok_or_else(|| self.bad())
    }

    fn word(&mut self) -> Result<u64, Error> {
        Ok(self.take(1)?[0])
    }

    fn ints(&mut self, count: usize) -> Result<Vec<i64>, Error> {
        Ok(self.take(count)?.iter().map(|word| *word as i64).collect())
    }

    fn element(&self, head: u64) -> Result<ElementType, Error> {
        ElementType::from_raw(field(head, 8, 8) as u32).ok_or_else(|| self.bad())
    }

    fn operand(&mut self, head: u64) -> Result<Operand, Error> {
        let dims = field(head, 16, 16) as usize;
        Ok(Operand {
            storage: field(head, 32, 32) as usize,
            element: self.element(head)?,
            view: View {
                offset: self.word()? as i64,
                sizes: self.ints(dims)?,
                strides: self.ints(dims)?,
            },
        })
    }

    fn scalar(&mut self, head: u64) -> Result<Scalar, Error> {
        let code = field(head, 8, 8);
        match head & 0xff {
            CONSTANT => {
                let real = self.word()?;
                let imaginary = if code == 3 { self.word()? } else { 0 };
                let number = number(code as u8, [real, imaginary]).ok_or_else(|| self.bad())?;
                Ok(Scalar::Constant(number))
            }
            RUNTIME => Ok(Scalar::Runtime {
                index: field(head, 32, 32) as usize,
                kind: kind(code).ok_or_else(|| self.bad())?,
            }),
            _ => Err(self.bad()),
        }
    }

    fn argument(&mut self) -> Result<Argument, Error> {
        let head = self.word()?;
        let count = field(head, 32, 32) as usize;
        Ok(match head & 0xff {
            NONE => Argument::None,
            TENSOR => Argument::Tensor(self.operand(head)?),
            TENSORS => {
                let mut tensors = Vec::with_capacity(count.min(self.words.len()));
                for _ in 0..count {
                    let head = self.word()?;
                    tensors.push(match head & 0xff {
                        NONE => None,
                        TENSOR => Some(self.operand(head)?),
                        _ => return Err(self.bad()),
                    });
                }
                Argument::Tensors(tensors)
            }
            CONSTANT | RUNTIME => Argument::Scalar(self.scalar(head)?),
            SCALARS => {
                let mut scalars = Vec::with_capacity(count.min(self.words.len()));
                for _ in 0..count {
                    let head = self.word()?;
                    scalars.push(self.scalar(head)?);
                }
                Argument::Scalars(scalars)
            }
            BOOL => Argument::Bool(count != 0),
            INT => Argument::Int(self.word()? as i64),
            FLOAT => Argument::Float(f64::from_bits(self.word()?)),
            INTS => Argument::Ints(self.ints(count)?),
            FLOATS => {
                let words = self.take(count)?;
                Argument::Floats(words.iter().map(|word| f64::from_bits(*word)).collect())
            }
            BOOLS => Argument::Bools(self.take(count)?.iter().map(|word| *word != 0).collect()),
            ELEMENT => Argument::Element(self.element(head)?),
            TEXT => {
                let mut bytes: Vec<u8> = self
                    .take(count.div_ceil(8))?
                    .iter()
                    .flat_map(|word| word.to_le_bytes())
                    .collect();
                bytes.truncate(count);
                let text = String::from_utf8(bytes).map_err(|_| self.bad())?;
                Argument::Text(Arc::from(text))
            }
            OPAQUE => Argument::Opaque,
            _ => return Err(self.bad()),
        })
    }
}

fn field(word: u64, start: u32, bits: u32) -> u64 {
    word >> start & ((1 << bits) - 1)
}

/// The number of the operator that `words` call.
pub(super) fn operator(words: &[u64]) -> usize {
    words.first().map_or(usize::MAX, |word| *word as usize)
}

/// The precision of products of `f32` that `words` ask for.
pub(super) fn precision(words: &[u64]) -> Precision {
    match words.get(1).map(|word| word >> 32) {
        Some(1) => Precision::High,
        Some(2) => Precision::Medium,
        _ => Precision::Highest,
    }
}

/// What `words` ask for, on storages of the given sizes and buffers, with `results` as
/// results.
pub(super) fn request<'a>(
    operator: &'a str,
    words: &[u64],
    storages: impl Iterator<Item = (u64, Option<Arc<BufferType>>)>,
    results: &[u64],
) -> Result<Request<'a>, Error> {
    let mut reader = Reader { words, at: 2 };
    let mut arguments = Vec::new();
    while reader.at < words.len() && words[reader.at] != OUT {
        arguments.push(reader.argument()?);
    }
    let storages = storages
        .map(|(bytes, buffer)| match buffer {
            Some(buffer) => StorageType {
                element: buffer.element,
                dims: buffer.dims.clone(),
                absent: false,
                bytes,
            },
            None => StorageType {
                element: ElementType::U8,
                dims: Vec::new(),
                absent: true,
                bytes,
            },
        })
        .collect();
    Ok(Request {
        operator,
        arguments,
        storages,
        results: self::results(results)?,
    })
}

fn results(words: &[u64]) -> Result<Vec<Option<ResultType>>, Error> {
    let mut reader = Reader { words, at: 0 };
    let mut results = Vec::new();
    while reader.at < words.len() {
        let head = reader.word()?;
        let dims = field(head, 16, 16) as usize;
        results.push(match head & 0xff {
            LIST => continue,
            NONE => None,
            NEW => Some(ResultType {
                element: reader.element(head)?,
                view: View {
                    sizes: reader.ints(dims)?,
                    strides: reader.ints(dims)?,
                    offset: 0,
                },
                destination: Destination::New,
            }),
            INTO => {
                let Operand {
                    storage,
                    element,
                    view,
                } = reader.operand(head)?;
                Some(ResultType {
                    element,
                    view: view.clone(),
                    destination: Destination::Into { storage, view },
                })
            }
            _ => return Err(reader.bad()),
        });
    }
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_are_documented() {
        let f32 = u64::from(ElementType::F32.raw());
        let words = [
            7,
            0,
            // A 2 x 3 tensor on storage 1, transposed, from element 4.
            TENSOR | f32 << 8 | 2 << 16 | 1 << 32,
            4,
            2,
            3,
            1,
            2,
            TENSORS | 1 << 32,
            NONE,
            CONSTANT | 2 << 8,
            0.5_f64.to_bits(),
            SCALARS | 2 << 32,
            RUNTIME | 1 << 8 | 3 << 32,
            CONSTANT | 3 << 8,
            1.0_f64.to_bits(),
            2.0_f64.to_bits(),
            BOOL | 1 << 32,
            INTS | 2 << 32,
            -1_i64 as u64,
            5,
            ELEMENT | f32 << 8,
            TEXT | 3 << 32,
            u64::from_le_bytes(*b"abc\0\0\0\0\0"),
            OPAQUE,
            OUT,
            TENSOR,
        ];
        let results = [LIST | 1 << 32, NONE, NEW | f32 << 8 | 1 << 16, 6, 1];
        let buffer = BufferType {
            element: ElementType::F32,
            dims: vec![12],
        };
        let storages = [(4, None), (48, Some(Arc::new(buffer)))];
        let request = request("op", &words, storages.into_iter(), &results).expect("words");
        assert_eq!(operator(&words), 7);
        let view = View {
            sizes: vec![2, 3],
            strides: vec![1, 2],
            offset: 4,
        };
        assert_eq!(
            request.arguments,
            [
                Argument::Tensor(Operand {
                    storage: 1,
                    element: ElementType::F32,
                    view
                }),
                Argument::Tensors(vec![None]),
                Argument::Scalar(Scalar::Constant(Number::Float(0.5))),
                Argument::Scalars(vec![
                    Scalar::Runtime {
                        index: 3,
                        kind: Kind::Int
                    },
                    Scalar::Constant(Number::Complex(1.0, 2.0)),
                ]),
                Argument::Bool(true),
                Argument::Ints(vec![-1, 5]),
                Argument::Element(ElementType::F32),
                Argument::Text("abc".into()),
                Argument::Opaque,
            ]
        );
        assert!(request.storages[0].absent && !request.storages[1].absent);
        assert_eq!(request.results[0], None);
        let new = request.results[1].as_ref().expect("a result");
        assert_eq!(new.view.sizes, [6]);
        assert_eq!(new.destination, Destination::New);
    }

    #[test]
    fn words_that_say_nothing_are_refused() {
        for words in [
            &[0, 0, 99][..],
            &[0, 0, INT],
            &[0, 0, TENSOR | 255 << 8, 0],
            &[0, 0, TENSOR | 11 << 8 | 9 << 16, 0],
            &[0, 0, INTS | u64::MAX << 32],
            &[0, 0, CONSTANT | 9 << 8, 0],
        ] {
            let request = request("op", words, std::iter::empty(), &[]);
            assert!(matches!(request, Err(Error::Words { .. })), "{words:?}");
        }
    }
}
