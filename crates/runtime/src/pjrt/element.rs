//! Element types of buffers.

use tpu_dist_collectives::DType;

macro_rules! element_types {
    ($($variant:ident = $raw:literal, $name:literal, $size:literal;)*) => {
        /// The type of a buffer's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ElementType {
            $(#[doc = concat!("StableHLO's `", $name, "`.")] $variant,)*
        }

        impl ElementType {
            /// Every element type.
            pub const ALL: &'static [ElementType] = &[$(ElementType::$variant),*];

            /// The type PJRT writes as `raw`.
            pub const fn from_raw(raw: u32) -> Option<ElementType> {
                match raw { $($raw => Some(ElementType::$variant),)* _ => None }
            }

            /// PJRT's number.
            pub const fn raw(self) -> u32 {
                match self { $(ElementType::$variant => $raw),* }
            }

            /// StableHLO's name.
            pub const fn name(self) -> &'static str {
                match self { $(ElementType::$variant => $name),* }
            }

            /// Bytes an element takes in host memory; types of fewer than 8 bits take
            /// one byte each.
            pub const fn size(self) -> usize {
                match self { $(ElementType::$variant => $size),* }
            }
        }
    };
}

element_types! {
    Pred = 1, "i1", 1;
    S8 = 2, "i8", 1;
    S16 = 3, "i16", 2;
    S32 = 4, "i32", 4;
    S64 = 5, "i64", 8;
    U8 = 6, "ui8", 1;
    U16 = 7, "ui16", 2;
    U32 = 8, "ui32", 4;
    U64 = 9, "ui64", 8;
    F16 = 10, "f16", 2;
    F32 = 11, "f32", 4;
    F64 = 12, "f64", 8;
    BF16 = 13, "bf16", 2;
    C64 = 14, "complex<f32>", 8;
    C128 = 15, "complex<f64>", 16;
    F8E5M2 = 16, "f8E5M2", 1;
    F8E4M3FN = 17, "f8E4M3FN", 1;
    F8E4M3B11FNUZ = 18, "f8E4M3B11FNUZ", 1;
    F8E5M2FNUZ = 19, "f8E5M2FNUZ", 1;
    F8E4M3FNUZ = 20, "f8E4M3FNUZ", 1;
    S4 = 21, "i4", 1;
    U4 = 22, "ui4", 1;
    S2 = 24, "i2", 1;
    U2 = 25, "ui2", 1;
    F8E4M3 = 26, "f8E4M3", 1;
    F8E3M4 = 27, "f8E3M4", 1;
    F8E8M0FNU = 28, "f8E8M0FNU", 1;
    F4E2M1FN = 29, "f4E2M1FN", 1;
}

impl ElementType {
    /// The element type of a tensor; `None` for those XLA has none for: quantised types,
    /// `complex32`, and `float4_e2m1fn_x2`, which packs two elements in a byte.
    pub const fn from_dtype(dtype: DType) -> Option<ElementType> {
        Some(match dtype {
            DType::U8 => ElementType::U8,
            DType::I8 => ElementType::S8,
            DType::U16 => ElementType::U16,
            DType::I16 => ElementType::S16,
            DType::U32 => ElementType::U32,
            DType::I32 => ElementType::S32,
            DType::U64 => ElementType::U64,
            DType::I64 => ElementType::S64,
            DType::Bool => ElementType::Pred,
            DType::F16 => ElementType::F16,
            DType::BF16 => ElementType::BF16,
            DType::F32 => ElementType::F32,
            DType::F64 => ElementType::F64,
            DType::C64 => ElementType::C64,
            DType::C128 => ElementType::C128,
            DType::F8E4M3FN => ElementType::F8E4M3FN,
            DType::F8E5M2 => ElementType::F8E5M2,
            DType::F8E4M3FNUZ => ElementType::F8E4M3FNUZ,
            DType::F8E5M2FNUZ => ElementType::F8E5M2FNUZ,
            DType::F8E8M0FNU => ElementType::F8E8M0FNU,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip_and_sizes_agree_with_tensors() {
        for &element in ElementType::ALL {
            assert_eq!(ElementType::from_raw(element.raw()), Some(element));
        }
        // INVALID, TOKEN and what comes after the known.
        for raw in [0, 23, 99] {
            assert_eq!(ElementType::from_raw(raw), None);
        }
        let mut mapped = 0;
        for &dtype in DType::ALL {
            if let Some(element) = ElementType::from_dtype(dtype) {
                assert_eq!(element.size(), dtype.size(), "{dtype}");
                mapped += 1;
            }
        }
        assert_eq!(mapped, 20);
    }
}
