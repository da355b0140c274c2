//! Element types.

use std::fmt;

macro_rules! dtypes {
    ($($variant:ident = $code:literal, $name:literal, $size:literal;)*) => {
        /// The element type of a tensor, under PyTorch's names.
        ///
        /// The discriminants travel between processes; they never change.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum DType {
            $(#[doc = concat!("`torch.", $name, "`")] $variant = $code,)*
        }

        impl DType {
            /// Every element type.
            pub const ALL: &'static [DType] = &[$(DType::$variant),*];

            /// PyTorch's name without `torch.`, for example `bfloat16`.
            pub const fn name(self) -> &'static str {
                match self { $(DType::$variant => $name),* }
            }

            /// Bytes an element.
            pub const fn size(self) -> usize {
                match self { $(DType::$variant => $size),* }
            }

            /// The type with this discriminant; `None` for a byte that names none.
            pub const fn from_code(code: u8) -> Option<DType> {
                match code { $($code => Some(DType::$variant),)* _ => None }
            }
        }
    };
}

dtypes! {
    U8 = 0, "uint8", 1;
    I8 = 1, "int8", 1;
    U16 = 2, "uint16", 2;
    I16 = 3, "int16", 2;
    U32 = 4, "uint32", 4;
    I32 = 5, "int32", 4;
    U64 = 6, "uint64", 8;
    I64 = 7, "int64", 8;
    Bool = 8, "bool", 1;
    F16 = 9, "float16", 2;
    BF16 = 10, "bfloat16", 2;
    F32 = 11, "float32", 4;
    F64 = 12, "float64", 8;
    C32 = 13, "complex32", 4;
    C64 = 14, "complex64", 8;
    C128 = 15, "complex128", 16;
    F8E4M3FN = 16, "float8_e4m3fn", 1;
    F8E5M2 = 17, "float8_e5m2", 1;
    F8E4M3FNUZ = 18, "float8_e4m3fnuz", 1;
    F8E5M2FNUZ = 19, "float8_e5m2fnuz", 1;
    F8E8M0FNU = 20, "float8_e8m0fnu", 1;
    F4E2M1FNX2 = 21, "float4_e2m1fn_x2", 1;
    QI8 = 22, "qint8", 1;
    QU8 = 23, "quint8", 1;
    QI32 = 24, "qint32", 4;
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype as u8), Some(dtype));
        }
        assert_eq!(DType::from_code(200), None);
    }
}
