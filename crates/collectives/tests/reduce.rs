//! Every operator on every element type against an independent reference: integers of 128
//! bits, `f64`, the `half` crate, and the values that PyTorch gives the codes of 8-bit floats.

use std::collections::HashMap;

use half::{bf16, f16};
use tpu_dist_collectives::reduce::{self, Isa, Reducer};
use tpu_dist_collectives::{DType, ReduceKind};

const SOURCES: usize = 3;
const FACTORS: [f64; SOURCES] = [0.5, -3.0, 1.25];
const DIVISOR: u32 = 3;

/// A number in full precision.
#[derive(Clone, Copy, Debug)]
enum Value {
    Bool(bool),
    Int(i128),
    /// Any float; accumulations are rounded to `f32` after each step unless `DType::F64`.
    Float(f64),
    Complex(f64, f64),
}
use Value::{Bool, Complex, Float, Int};

/// The values of the codes of 8-bit floats: `torch.arange(256, dtype=torch.uint8).view(dtype)`.
fn float8_values(dtype: DType) -> Vec<f64> {
    let mut lines = include_str!("reduce_float8.csv").lines();
    let column = lines
        .next()
        .unwrap()
        .split(',')
        .position(|name| name == dtype.name())
        .unwrap();
    let values: Vec<f64> = lines
        .map(|line| line.split(',').nth(column).unwrap().parse().unwrap())
        .collect();
    assert_eq!(values.len(), 256);
    values
}

/// Rounds to the nearest code, ties to the even one, by looking at all of them.
fn float8_code(dtype: DType, values: &[f64], value: f64) -> u8 {
    let nan = values.iter().position(|value| value.is_nan()).unwrap() as u8;
    let negative = |value: f64| value.is_sign_negative();
    if value.is_nan() {
        return nan;
    }
    // What is past the middle between the largest number and the one that would follow is too
    // large.
    let largest = values
        .iter()
        .copied()
        .filter(|value| value.is_finite())
        .fold(0.0, f64::max);
    let step = largest
        - values
            .iter()
            .copied()
            .filter(|&v| v < largest)
            .fold(0.0, f64::max);
    let code_of = |value: f64| {
        values
            .iter()
            .position(|&v| v == value)
            .map(|code| code as u8)
    };
    let last_is_even = code_of(largest).unwrap() & 1 == 0;
    let middle = largest + step / 2.0;
    if value.abs() > middle || value.abs() == middle && !last_is_even {
        return match dtype {
            DType::F8E4M3FN => code_of(largest.copysign(value)).unwrap(),
            _ => code_of(f64::INFINITY.copysign(value)).unwrap_or(nan),
        };
    }
    let has_negative_zero = matches!(dtype, DType::F8E4M3FN | DType::F8E5M2);
    let code = (0..=255u8)
        .filter(|&code| values[code as usize].is_finite())
        .filter(|&code| negative(values[code as usize]) == (negative(value)) || code == 0)
        .min_by(|&a, &b| {
            let distance = |code: u8| (values[code as usize] - value).abs();
            distance(a)
                .total_cmp(&distance(b))
                .then((a & 1).cmp(&(b & 1)))
        })
        .unwrap();
    match code {
        0 if negative(value) && has_negative_zero => 0x80,
        code => code,
    }
}

/// Elements in memory to numbers and back.
struct Codec {
    dtype: DType,
    float8: Vec<f64>,
    codes: std::cell::RefCell<HashMap<u64, u8>>,
}

impl Codec {
    fn new(dtype: DType) -> Codec {
        let float8 = if dtype.name().starts_with("float8") {
            float8_values(dtype)
        } else {
            vec![]
        };
        Codec {
            dtype,
            float8,
            codes: Default::default(),
        }
    }

    fn decode(&self, bytes: &[u8]) -> Value {
        macro_rules! read {
            ($type:ty, $i:literal) => {
                <$type>::from_ne_bytes(
                    bytes[$i * size_of::<$type>()..][..size_of::<$type>()]
                        .try_into()
                        .unwrap(),
                )
            };
        }
        match self.dtype {
            DType::U8 => Int(read!(u8, 0).into()),
            DType::I8 => Int(read!(i8, 0).into()),
            DType::U16 => Int(read!(u16, 0).into()),
            DType::I16 => Int(read!(i16, 0).into()),
            DType::U32 => Int(read!(u32, 0).into()),
            DType::I32 => Int(read!(i32, 0).into()),
            DType::U64 => Int(read!(u64, 0).into()),
            DType::I64 => Int(read!(i64, 0).into()),
            DType::Bool => Bool(bytes[0] != 0),
            DType::F16 => Float(read!(f16, 0).into()),
            DType::BF16 => Float(read!(bf16, 0).into()),
            DType::F32 => Float(read!(f32, 0).into()),
            DType::F64 => Float(read!(f64, 0)),
            DType::C32 => Complex(read!(f16, 0).into(), read!(f16, 1).into()),
            DType::C64 => Complex(read!(f32, 0).into(), read!(f32, 1).into()),
            DType::C128 => Complex(read!(f64, 0), read!(f64, 1)),
            _ => Float(self.float8[bytes[0] as usize]),
        }
    }

    fn encode(&self, value: Value) -> Vec<u8> {
        match (self.dtype, value) {
            // `as` keeps the lower bits, which is what wrapping means.
            (DType::U8 | DType::I8, Int(value)) => (value as u8).to_ne_bytes().to_vec(),
            (DType::U16 | DType::I16, Int(value)) => (value as u16).to_ne_bytes().to_vec(),
            (DType::U32 | DType::I32, Int(value)) => (value as u32).to_ne_bytes().to_vec(),
            (DType::U64 | DType::I64, Int(value)) => (value as u64).to_ne_bytes().to_vec(),
            (DType::Bool, Bool(value)) => vec![value.into()],
            (DType::F16, Float(value)) => f16::from_f32(value as f32).to_ne_bytes().to_vec(),
            (DType::BF16, Float(value)) => bf16::from_f32(value as f32).to_ne_bytes().to_vec(),
            (DType::F32, Float(value)) => (value as f32).to_ne_bytes().to_vec(),
            (DType::F64, Float(value)) => value.to_ne_bytes().to_vec(),
            (DType::C32, Complex(re, im)) => [re, im]
                .map(|part| f16::from_f32(part as f32).to_ne_bytes())
                .concat(),
            (DType::C64, Complex(re, im)) => {
                [re, im].map(|part| (part as f32).to_ne_bytes()).concat()
            }
            (DType::C128, Complex(re, im)) => [re, im].map(f64::to_ne_bytes).concat(),
            (dtype, Float(value)) => {
                let mut codes = self.codes.borrow_mut();
                let code = codes
                    .entry(value.to_bits())
                    .or_insert_with(|| float8_code(dtype, &self.float8, value));
                vec![*code]
            }
            (dtype, value) => panic!("{value:?} is no {dtype}"),
        }
    }

    /// Rounds to the type of the accumulation. Sums and products of two `f32` are right after
    /// rounding to `f64` first.
    fn round(&self, value: f64) -> f64 {
        match self.dtype {
            DType::F64 | DType::C128 => value,
            _ => f64::from(value as f32),
        }
    }

    fn wrap(&self, value: i128) -> i128 {
        match self.decode(&self.encode(Int(value))) {
            Int(value) => value,
            other => panic!("{other:?}"),
        }
    }

    fn combine(&self, kind: ReduceKind, left: Value, right: Value) -> Value {
        use ReduceKind::*;
        match (left, right) {
            (Bool(a), Bool(b)) => Bool(match kind {
                Sum | Max | BitOr => a || b,
                Product | Min | BitAnd => a && b,
                BitXor => a != b,
                Avg | PremulSum => panic!("no {kind} of booleans"),
            }),
            (Int(a), Int(b)) => Int(self.wrap(match kind {
                Sum | Avg | PremulSum => a + b,
                Product => a.wrapping_mul(b),
                Min => a.min(b),
                Max => a.max(b),
                BitAnd => a & b,
                BitOr => a | b,
                BitXor => a ^ b,
            })),
            (Float(a), Float(b)) => Float(self.round(match kind {
                Sum | Avg | PremulSum => a + b,
                Product => a * b,
                Min | Max if a.is_nan() || b.is_nan() => f64::NAN,
                Min => {
                    if a < b {
                        a
                    } else {
                        b
                    }
                }
                Max => {
                    if a > b {
                        a
                    } else {
                        b
                    }
                }
                BitAnd | BitOr | BitXor => panic!("no {kind} of floats"),
            })),
            (Complex(a, b), Complex(c, d)) => match kind {
                Sum | Avg | PremulSum => Complex(self.round(a + c), self.round(b + d)),
                Product => {
                    let times = |x: f64, y: f64| self.round(x * y);
                    let re = self.round(times(a, c) - times(b, d));
                    Complex(re, self.round(times(a, d) + times(b, c)))
                }
                _ => panic!("no {kind} of complex numbers"),
            },
            mixed => panic!("{mixed:?}"),
        }
    }

    fn scale(&self, value: Value, factor: f64) -> Value {
        match value {
            Int(value) => {
                // The factor is cast to the type of the elements: truncated and saturated.
                let range = match self.dtype {
                    DType::U8 | DType::U16 | DType::U32 | DType::U64 => 0..=i128::MAX,
                    _ => i128::MIN..=i128::MAX,
                };
                Int(self.wrap(value * (factor as i128).clamp(*range.start(), *range.end())))
            }
            Float(value) => Float(self.round(value * factor)),
            Complex(re, im) => Complex(self.round(re * factor), self.round(im * factor)),
            Bool(_) => panic!("no factors of booleans"),
        }
    }

    fn divide(&self, value: Value, divisor: u32) -> Value {
        match value {
            Int(value) => Int(value / i128::from(divisor)),
            Float(value) => Float(self.round(value / f64::from(divisor))),
            Complex(re, im) => {
                let [re, im] = [re, im].map(|part| self.round(part / f64::from(divisor)));
                Complex(re, im)
            }
            Bool(_) => panic!("no average of booleans"),
        }
    }

    /// What the reduction of `operands` must give, in memory.
    fn expect(&self, kind: ReduceKind, operands: &[&[u8]]) -> Vec<u8> {
        let operands = operands.iter().enumerate().map(|(source, operand)| {
            let value = self.decode(operand);
            if kind == ReduceKind::PremulSum {
                self.scale(value, FACTORS[source])
            } else {
                value
            }
        });
        let mut result = operands
            .reduce(|left, right| self.combine(kind, left, right))
            .unwrap();
        if kind == ReduceKind::Avg {
            result = self.divide(result, DIVISOR);
        }
        self.encode(result)
    }

    /// Equal bits, or NaNs with any.
    fn is_equal(&self, a: &[u8], b: &[u8]) -> bool {
        let is_nan = |bytes: &[u8]| match self.decode(bytes) {
            Float(value) => [value.is_nan(), false],
            Complex(re, im) => [re.is_nan(), im.is_nan()],
            _ => [false; 2],
        };
        let half = a.len() / 2;
        match (is_nan(a), is_nan(b)) {
            (x, y) if x != y => false,
            ([false, false], _) => a == b,
            ([true, true], _) => true,
            ([true, false], _) => !matches!(self.decode(a), Complex(..)) || a[half..] == b[half..],
            ([false, true], _) => a[..half] == b[..half],
        }
    }
}

/// Elements of a type: its special values in all combinations, then random bits.
fn elements(dtype: DType, source: usize) -> Vec<u8> {
    let part = match dtype {
        DType::C32 => DType::F16,
        DType::C64 => DType::F32,
        DType::C128 => DType::F64,
        other => other,
    };
    let special: Vec<u64> = match part {
        DType::F64 => [
            0.0,
            -0.0,
            1.0,
            -1.5,
            f64::MAX,
            f64::MIN,
            f64::MIN_POSITIVE,
            5e-324,
            -5e-324,
        ]
        .into_iter()
        .chain([f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1e-310, 3.0])
        .map(f64::to_bits)
        .collect(),
        DType::F32 => [
            0.0,
            -0.0,
            1.0,
            -1.5,
            f32::MAX,
            f32::MIN,
            f32::MIN_POSITIVE,
            1e-45,
            -1e-45,
        ]
        .into_iter()
        .chain([f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-40, 3.0])
        .map(|value| value.to_bits().into())
        .collect(),
        DType::BF16 => vec![
            0, 0x8000, 0x3f80, 0xbfc0, 0x7f7f, 0xff7f, 0x80, 1, 0x8001, 0x7f80, 0xff80, 0x7fc0,
            0x7fff, 0xffff, 0x7f81, 0x40, 0x7f, 0x4040,
        ],
        DType::F16 => vec![
            0, 0x8000, 0x3c00, 0xbe00, 0x7bff, 0xfbff, 0x400, 1, 0x8001, 0x7c00, 0xfc00, 0x7e00,
            0x7fff, 0xffff, 0x3ff, 0x200, 0x4200,
        ],
        _ => {
            let top = 1u64 << (8 * part.size() - 1);
            vec![
                0,
                1,
                2,
                3,
                100,
                top - 1,
                top,
                top + 1,
                u64::MAX,
                u64::MAX - 1,
                u64::MAX - 6,
            ]
        }
    };
    let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(source as u64 + 1);
    let parts = if dtype == part { 1 } else { 2 };
    let combinations = special.len().pow(SOURCES as u32);
    let mut bytes = vec![];
    for i in 0..parts * (combinations + 3000) {
        let bits = if i < parts * combinations {
            // The parts of a complex number come from different places of the list.
            let i = i / parts + i % parts * 5;
            special[i / special.len().pow(source as u32) % special.len()]
        } else {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let bits = state ^ (state >> 31);
            match part {
                // Every other one of ordinary size: random bits of floats rarely interact.
                DType::F64 if i % 2 == 0 => bits >> 2 & 0x000f_ffff_ffff_ffff | 0x3ff << 52,
                DType::F32 if i % 2 == 0 => bits & 0x80ff_ffff | 0x3f00_0000,
                DType::BF16 if i % 2 == 0 => bits & 0x81ff | 0x3f00,
                DType::F16 if i % 2 == 0 => bits & 0x8fff | 0x3000,
                _ => bits,
            }
        };
        bytes.extend_from_slice(&bits.to_le_bytes()[..part.size()]);
    }
    bytes
}

#[test]
fn every_operator_on_every_type_is_right() {
    let mut unsupported = vec![];
    for &dtype in DType::ALL {
        let inputs: Vec<Vec<u8>> = (0..SOURCES).map(|source| elements(dtype, source)).collect();
        let count = inputs[0].len() / dtype.size();
        for &kind in ReduceKind::ALL {
            let reducer = match Reducer::new(kind, dtype) {
                Ok(reducer) => reducer,
                Err(error) => {
                    assert_eq!((error.op, error.dtype), (kind, dtype));
                    unsupported.push((kind, dtype));
                    continue;
                }
            };
            assert_eq!((reducer.kind(), reducer.dtype()), (kind, dtype));
            let codec = Codec::new(dtype);
            let scales = if kind == ReduceKind::PremulSum {
                &FACTORS[..]
            } else {
                &[]
            };
            let sources: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr()).collect();
            let operands = |i: usize| -> Vec<&[u8]> {
                inputs
                    .iter()
                    .map(|input| &input[i * dtype.size()..][..dtype.size()])
                    .collect()
            };
            let expected: Vec<Vec<u8>> = (0..count)
                .map(|i| codec.expect(kind, &operands(i)))
                .collect();
            for isa in Isa::available() {
                let reducer = Reducer::with_isa(kind, dtype, isa).unwrap();
                let mut output = vec![0; inputs[0].len()];
                // SAFETY: all buffers hold `count` elements.
                unsafe {
                    let output = output.as_mut_ptr();
                    reducer.reduce(&[output], &sources, count, scales, Some(DIVISOR));
                }
                for (i, (actual, expected)) in
                    output.chunks(dtype.size()).zip(&expected).enumerate()
                {
                    assert!(
                        codec.is_equal(actual, expected),
                        "{kind} of {dtype} by {isa:?} at {i}: {:02x?} gave {actual:02x?} and not {expected:02x?}",
                        operands(i),
                    );
                }
            }
        }
    }

    use DType::*;
    use ReduceKind::*;
    let floats = [
        F16, BF16, F32, F64, F8E4M3FN, F8E5M2, F8E4M3FNUZ, F8E5M2FNUZ,
    ];
    for &dtype in DType::ALL {
        for &kind in ReduceKind::ALL {
            let expected = match dtype {
                F8E8M0FNU | F4E2M1FNX2 | QI8 | QU8 | QI32 => false,
                Bool => !matches!(kind, Avg | PremulSum),
                C32 | C64 | C128 => matches!(kind, Sum | Avg | Product | PremulSum),
                _ if floats.contains(&dtype) => !matches!(kind, BitAnd | BitOr | BitXor),
                _ => true,
            };
            assert_eq!(
                !unsupported.contains(&(kind, dtype)),
                expected,
                "{kind} of {dtype}"
            );
        }
    }
}

#[test]
fn every_pair_of_8_bit_floats_is_right() {
    for dtype in [
        DType::F8E4M3FN,
        DType::F8E5M2,
        DType::F8E4M3FNUZ,
        DType::F8E5M2FNUZ,
    ] {
        let codec = Codec::new(dtype);
        let left: Vec<u8> = (0..=u16::MAX).map(|pair| pair as u8).collect();
        let right: Vec<u8> = (0..=u16::MAX).map(|pair| (pair >> 8) as u8).collect();
        for kind in [ReduceKind::Sum, ReduceKind::Product] {
            let reducer = Reducer::new(kind, dtype).unwrap();
            let mut output = vec![0; left.len()];
            // SAFETY: all buffers hold that many elements.
            unsafe {
                let sources = [left.as_ptr(), right.as_ptr()];
                reducer.reduce(&[output.as_mut_ptr()], &sources, left.len(), &[], None);
            }
            for (i, &actual) in output.iter().enumerate() {
                let expected = codec.expect(kind, &[&[left[i]], &[right[i]]]);
                assert!(
                    codec.is_equal(&[actual], &expected),
                    "{kind} of {dtype}: {:#x} and {:#x} gave {actual:#x} and not {expected:x?}",
                    left[i],
                    right[i]
                );
            }
        }
    }
}

#[test]
fn averages_of_integers_truncate_for_every_divisor() {
    let numbers: Vec<i16> = (i16::MIN..=i16::MAX).collect();
    let reducer = Reducer::new(ReduceKind::Avg, DType::I16).unwrap();
    let mut output = vec![0i16; numbers.len()];
    for divisor in (1..300).chain([
        4096,
        32767,
        32768,
        65535,
        65536,
        1 << 24,
        u32::MAX - 1,
        u32::MAX,
    ]) {
        // SAFETY: both buffers hold that many elements.
        unsafe {
            let (dst, src) = (output.as_mut_ptr().cast(), numbers.as_ptr().cast());
            reducer.reduce(&[dst], &[src], numbers.len(), &[], Some(divisor));
        }
        for (&number, &actual) in numbers.iter().zip(&output) {
            assert_eq!(
                i64::from(actual),
                i64::from(number) / i64::from(divisor),
                "{number} / {divisor}"
            );
        }
    }

    let numbers = [
        i32::MIN,
        i32::MIN + 1,
        -1_000_000_007,
        -1,
        0,
        1,
        7,
        999_999_937,
        i32::MAX,
    ];
    let reducer = Reducer::new(ReduceKind::Avg, DType::I32).unwrap();
    for divisor in [
        1,
        2,
        3,
        7,
        1009,
        65537,
        999_999_937,
        2_147_483_647,
        2_147_483_648,
        u32::MAX,
    ] {
        let mut output = numbers;
        // SAFETY: the buffer holds that many elements.
        unsafe { reducer.finish(output.as_mut_ptr().cast(), output.len(), divisor) };
        for (&number, &actual) in numbers.iter().zip(&output) {
            assert_eq!(
                i64::from(actual),
                i64::from(number) / i64::from(divisor),
                "{number} / {divisor}"
            );
        }
    }
}

#[test]
fn partial_results_are_finished_and_scaled_in_place() {
    let input: Vec<f32> = (0..1000).map(|i| i as f32 - 300.0).collect();
    let run = |kind: ReduceKind| {
        let reducer = Reducer::new(kind, DType::F32).unwrap();
        let (mut finished, mut scaled) = (input.clone(), input.clone());
        // SAFETY: the buffers hold that many elements.
        unsafe {
            reducer.finish(finished.as_mut_ptr().cast(), finished.len(), 7);
            reducer.scale(scaled.as_mut_ptr().cast(), scaled.len(), 1.25);
        }
        (finished, scaled)
    };
    let (finished, scaled) = run(ReduceKind::Avg);
    assert_eq!(finished, input.iter().map(|x| x / 7.0).collect::<Vec<_>>());
    assert_eq!(scaled, input);
    let (finished, scaled) = run(ReduceKind::PremulSum);
    assert_eq!(finished, input);
    assert_eq!(scaled, input.iter().map(|x| x * 1.25).collect::<Vec<_>>());
    assert_eq!(run(ReduceKind::Sum), (input.clone(), input.clone()));
}

#[test]
fn errors_name_the_operator_the_type_and_the_reason() {
    for (kind, dtype, message) in [
        (
            ReduceKind::BitAnd,
            DType::F32,
            "BAND cannot reduce elements of type float32: bitwise operators take integers and booleans only",
        ),
        (
            ReduceKind::Max,
            DType::C64,
            "MAX cannot reduce elements of type complex64: complex numbers have no order",
        ),
        (
            ReduceKind::Avg,
            DType::Bool,
            "AVG cannot reduce elements of type bool: booleans have no average and no factor; \
             convert to a number first",
        ),
        (
            ReduceKind::Sum,
            DType::QI8,
            "SUM cannot reduce elements of type qint8: quantised tensors may differ in scale and zero point",
        ),
    ] {
        assert_eq!(Reducer::new(kind, dtype).unwrap_err().to_string(), message);
    }
}

#[test]
#[should_panic(expected = "2 factors for 1 sources")]
fn factors_must_match_the_sources() {
    let reducer = Reducer::new(ReduceKind::PremulSum, DType::F32).unwrap();
    let mut data = [0f32; 4];
    let data = data.as_mut_ptr().cast::<u8>();
    // SAFETY: the buffer holds that many elements.
    unsafe { reducer.reduce(&[data], &[data], 4, &[1.0, 2.0], None) };
}

#[test]
fn copies_are_exact_at_any_offset_and_length() {
    let source: Vec<u8> = (0..100_000u32)
        .map(|i| (i.wrapping_mul(i) >> 7) as u8)
        .collect();
    for copy in [
        reduce::copy as unsafe fn(*mut u8, *const u8, usize),
        reduce::copy_nontemporal,
    ] {
        for len in (0..300).chain([4095, 4096, 4097, 99_000]) {
            for (to, from) in [(0, 0), (1, 0), (0, 1), (17, 5), (63, 64)] {
                let mut target = vec![0xaa; len + 128];
                // SAFETY: both buffers are long enough.
                unsafe { copy(target.as_mut_ptr().add(to), source.as_ptr().add(from), len) };
                assert!(target[..to].iter().all(|&byte| byte == 0xaa));
                assert_eq!(target[to..to + len], source[from..from + len]);
                assert!(target[to + len..].iter().all(|&byte| byte == 0xaa));
            }
        }
    }
}
