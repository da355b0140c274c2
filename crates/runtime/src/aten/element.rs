//! Kinds of element types, and torch's type promotion.

use super::request::{Kind, Number};
use crate::pjrt::ElementType::{self, *};

/// Real floating-point types.
pub(super) fn is_float(element: ElementType) -> bool {
    matches!(
        element,
        F16 | BF16
            | F32
            | F64
            | F8E5M2
            | F8E4M3FN
            | F8E4M3B11FNUZ
            | F8E5M2FNUZ
            | F8E4M3FNUZ
            | F8E4M3
            | F8E3M4
            | F8E8M0FNU
            | F4E2M1FN
    )
}

pub(super) fn is_complex(element: ElementType) -> bool {
    matches!(element, C64 | C128)
}

pub(super) fn is_unsigned(element: ElementType) -> bool {
    matches!(element, U8 | U16 | U32 | U64 | U4 | U2)
}

/// The type in which torch computes elementwise on tensors of `element`.
pub(super) fn opmath(element: ElementType) -> ElementType {
    if is_float(element) && element != F64 {
        F32
    } else {
        element
    }
}

/// The type of the parts of a complex type, any other type itself.
pub(super) fn real(element: ElementType) -> ElementType {
    match element {
        C64 => F32,
        C128 => F64,
        _ => element,
    }
}

/// The complex type with parts of type `element`.
pub(super) fn complex(element: ElementType) -> ElementType {
    if real(element) == F64 { C128 } else { C64 }
}

/// The least number of a type.
pub(super) fn lowest(element: ElementType) -> Number {
    match element {
        Pred => Number::Bool(false),
        S8 => Number::Int(i64::from(i8::MIN)),
        S16 => Number::Int(i64::from(i16::MIN)),
        S32 => Number::Int(i64::from(i32::MIN)),
        S64 => Number::Int(i64::MIN),
        _ if is_unsigned(element) => Number::Int(0),
        _ => Number::Float(f64::NEG_INFINITY),
    }
}

/// The greatest number of a type.
pub(super) fn highest(element: ElementType) -> Number {
    match element {
        Pred => Number::Bool(true),
        S8 => Number::Int(i64::from(i8::MAX)),
        S16 => Number::Int(i64::from(i16::MAX)),
        S32 => Number::Int(i64::from(i32::MAX)),
        S64 => Number::Int(i64::MAX),
        // All bits set; constants take integers modulo the type's range.
        _ if is_unsigned(element) => Number::Int(-1),
        _ => Number::Float(f64::INFINITY),
    }
}

/// What takes part in type promotion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    /// A number.
    Number,
    /// A 0-d tensor.
    Point,
    /// Any other tensor.
    Array,
}

/// The kind of a type: those of a lower rank count only if theirs is higher.
fn kind(element: ElementType) -> u8 {
    if is_complex(element) {
        3
    } else if is_float(element) {
        2
    } else {
        u8::from(element != Pred)
    }
}

/// The type two types have in common, of equal rank.
fn join(a: ElementType, b: ElementType) -> ElementType {
    if a == b {
        return a;
    }
    let (low, high) = if kind(a) <= kind(b) { (a, b) } else { (b, a) };
    match (kind(low), kind(high)) {
        (3, _) => C128,
        (2, 3) => {
            if low == F64 {
                C128
            } else {
                high
            }
        }
        (2, _) => {
            if low == F64 || high == F64 {
                F64
            } else {
                F32
            }
        }
        (1, 1) => integer_join(low, high),
        _ => high,
    }
}

fn integer_join(a: ElementType, b: ElementType) -> ElementType {
    let widest = if a.size() >= b.size() { a } else { b };
    if is_unsigned(a) == is_unsigned(b) {
        return widest;
    }
    let (unsigned, signed) = if is_unsigned(a) { (a, b) } else { (b, a) };
    if signed.size() > unsigned.size() {
        return signed;
    }
    match unsigned {
        U8 => S16,
        U16 => S32,
        _ => S64,
    }
}

/// The type that a number takes part with; numbers of kind float with torch's default type,
/// which is taken to be `f32`.
pub(super) fn of_kind(kind: Kind) -> ElementType {
    match kind {
        Kind::Bool => Pred,
        Kind::Int => S64,
        Kind::Float => F32,
        Kind::Complex => C64,
    }
}

impl Number {
    /// Its kind.
    pub(super) fn kind(self) -> Kind {
        match self {
            Number::Bool(_) => Kind::Bool,
            Number::Int(_) => Kind::Int,
            Number::Float(_) => Kind::Float,
            Number::Complex(..) => Kind::Complex,
        }
    }
}

/// torch's result type: tensors with dimensions decide, unless a 0-d tensor or else a number
/// is of a higher kind. `None` of nothing.
pub(super) fn promote(of: impl IntoIterator<Item = (Rank, ElementType)>) -> Option<ElementType> {
    let mut by_rank = [None; 3];
    for (rank, element) in of {
        let slot: &mut Option<ElementType> = &mut by_rank[rank as usize];
        *slot = Some(slot.map_or(element, |other| join(other, element)));
    }
    by_rank.into_iter().flatten().reduce(|lower, higher| {
        if kind(lower) <= kind(higher) {
            higher
        } else if is_complex(lower) && is_float(higher) {
            // The number's kind, the tensor's precision.
            complex(higher)
        } else {
            lower
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promotes_as_torch_does() {
        use Rank::*;
        // From torch.result_type of tensors and numbers.
        let cases: &[(&[(Rank, ElementType)], ElementType)] = &[
            (&[(Array, S32), (Array, U8)], S32),
            (&[(Array, S8), (Array, U8)], S16),
            (&[(Array, BF16), (Array, F16)], F32),
            (&[(Array, F16), (Array, S64)], F16),
            (&[(Array, F16), (Point, F64)], F16),
            (&[(Array, S32), (Point, F64)], F64),
            (&[(Point, S32), (Number, F32)], F32),
            (&[(Array, Pred), (Number, S64)], S64),
            (&[(Array, U8), (Point, S64), (Number, F32)], F32),
            (&[(Array, F64), (Number, C64)], C128),
            (&[(Array, C64), (Array, F64)], C128),
        ];
        for (of, expected) in cases {
            assert_eq!(promote(of.iter().copied()), Some(*expected), "{of:?}");
        }
        assert_eq!(promote([]), None);
    }
}
