use crate::DType;
use crate::op::ReduceKind;

/// An element type as StableHLO has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Element {
    name: &'static str,
    class: Class,
    /// Bits of an element, or of one part of a complex one.
    width: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Bool,
    Signed,
    Unsigned,
    Float,
    Complex,
    /// Moved, but not computed with.
    Opaque,
}

impl Element {
    pub(super) fn of(dtype: DType) -> Element {
        let (name, class, width) = match dtype {
            DType::U8 => ("ui8", Class::Unsigned, 8),
            DType::I8 => ("i8", Class::Signed, 8),
            DType::U16 => ("ui16", Class::Unsigned, 16),
            DType::I16 => ("i16", Class::Signed, 16),
            DType::U32 => ("ui32", Class::Unsigned, 32),
            DType::I32 => ("i32", Class::Signed, 32),
            DType::U64 => ("ui64", Class::Unsigned, 64),
            DType::I64 => ("i64", Class::Signed, 64),
            DType::Bool => ("i1", Class::Bool, 1),
            DType::F16 => ("f16", Class::Float, 16),
            DType::BF16 => ("bf16", Class::Float, 16),
            DType::F32 => ("f32", Class::Float, 32),
            DType::F64 => ("f64", Class::Float, 64),
            DType::C64 => ("complex<f32>", Class::Complex, 32),
            DType::C128 => ("complex<f64>", Class::Complex, 64),
            DType::F8E4M3FN => ("f8E4M3FN", Class::Float, 8),
            DType::F8E5M2 => ("f8E5M2", Class::Float, 8),
            DType::F8E4M3FNUZ => ("f8E4M3FNUZ", Class::Float, 8),
            DType::F8E5M2FNUZ => ("f8E5M2FNUZ", Class::Float, 8),
            DType::F8E8M0FNU => ("f8E8M0FNU", Class::Opaque, 8),
            // PJRT has no such types: their bytes.
            DType::C32 => ("ui32", Class::Opaque, 32),
            DType::F4E2M1FNX2 | DType::QU8 => ("ui8", Class::Opaque, 8),
            DType::QI8 => ("i8", Class::Opaque, 8),
            DType::QI32 => ("i32", Class::Opaque, 32),
        };
        Element { name, class, width }
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// The type of the parts of a complex number; itself for others.
    pub(super) fn real(&self) -> Element {
        match (self.class, self.width) {
            (Class::Complex, 32) => Element::of(DType::F32),
            (Class::Complex, _) => Element::of(DType::F64),
            _ => *self,
        }
    }

    /// Whether an operator is defined.
    pub(super) fn allows(&self, op: ReduceKind) -> bool {
        use ReduceKind::{Avg, BitAnd, BitOr, BitXor, PremulSum, Sum};
        match self.class {
            Class::Opaque => false,
            Class::Bool => !matches!(op, Avg | PremulSum),
            Class::Signed | Class::Unsigned => op != PremulSum,
            Class::Float => !matches!(op, BitAnd | BitOr | BitXor),
            Class::Complex => matches!(op, Sum | Avg | PremulSum),
        }
    }

    /// The type in which a narrow floating-point type accumulates without loss.
    pub(super) fn wide(&self) -> Element {
        let narrow = self.class == Class::Float && self.width <= 16;
        if narrow {
            Element::of(DType::F32)
        } else {
            *self
        }
    }

    /// The type in which a sum can be divided by any number of ranks.
    pub(super) fn divisible(&self) -> Element {
        match self.class {
            Class::Signed if self.width < 32 => Element::of(DType::I32),
            Class::Unsigned if self.width < 32 => Element::of(DType::U32),
            _ => *self,
        }
    }

    /// Whether libtpu compiles an `all_reduce` of this real type.
    pub(super) fn reduces_natively(&self, op: ReduceKind) -> bool {
        use ReduceKind::{Avg, PremulSum, Sum};
        self.width < 64 || matches!(op, Sum | Avg | PremulSum)
    }

    /// Whether libtpu compiles a `reduce_scatter` of this real type.
    pub(super) fn scatters_natively(&self, op: ReduceKind) -> bool {
        self.reduces_natively(op) && !(self.class == Class::Float && self.width == 64)
    }

    /// The unsigned type with the same bits; none where libtpu cannot reinterpret them.
    pub(super) fn bits(&self) -> Option<Element> {
        Some(Element::of(match (self.class, self.width) {
            (Class::Float | Class::Complex, 64) => return None,
            (_, 1 | 8) => DType::U8,
            (_, 16) => DType::U16,
            (_, 32) => DType::U32,
            _ => DType::U64,
        }))
    }

    /// Whether the same bits are another type by a conversion of values, since one
    /// element is no whole byte.
    pub(super) fn is_bool(&self) -> bool {
        self.class == Class::Bool
    }

    pub(super) fn is_complex(&self) -> bool {
        self.class == Class::Complex
    }

    pub(super) fn is_float(&self) -> bool {
        self.class == Class::Float
    }

    /// Zero as a literal.
    pub(super) fn zero(&self) -> &'static str {
        match self.class {
            Class::Bool => "false",
            Class::Complex => "(0.0, 0.0)",
            _ if self.name.starts_with('f') || self.name == "bf16" => "0.0",
            _ => "0",
        }
    }
}
