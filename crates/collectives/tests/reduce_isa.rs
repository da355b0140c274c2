//! All instruction sets give the same bits, for any number of sources and destinations, of any
//! length, at any address, in place or not.

use std::ptr;

use proptest::prelude::*;
use proptest::sample::select;
use tpu_dist_collectives::reduce::{Isa, Reducer};
use tpu_dist_collectives::{DType, ReduceKind};

/// A reduction of sources that lie in one buffer each, at some offset.
#[derive(Clone, Debug)]
struct Case {
    kind: ReduceKind,
    dtype: DType,
    count: usize,
    /// Offsets of the sources and what is there.
    sources: Vec<(usize, Vec<u8>)>,
    /// A source that the destination shares with it, or an offset.
    destinations: Vec<Result<usize, usize>>,
    factors: Vec<f64>,
    divisor: Option<u32>,
}

/// Bits of a type that are often special: zeros, ones, infinities, NaNs, denormals.
fn part(size: usize) -> impl Strategy<Value = Vec<u8>> {
    let exponents = select(vec![
        0u64,
        0x7f80_0000,
        0x7c00,
        0x7f80,
        0x7ff0 << 48,
        0x3f80_0000,
        0x78,
        0x80,
    ]);
    let bits = prop_oneof![
        4 => any::<u64>(),
        1 => (exponents, any::<u64>(), 0u32..64).prop_map(|(e, noise, shift)| e | noise.checked_shr(shift).unwrap_or(0)),
        1 => select(vec![0, 1, 2, u64::MAX, 1 << 63, 1 << 31, 1 << 15, 1 << 7]),
    ];
    bits.prop_map(move |bits| bits.to_le_bytes()[..size].to_vec())
}

fn case() -> impl Strategy<Value = Case> {
    let pairs: Vec<(ReduceKind, DType)> = ReduceKind::ALL
        .iter()
        .flat_map(|&kind| DType::ALL.iter().map(move |&dtype| (kind, dtype)))
        .filter(|&(kind, dtype)| Reducer::new(kind, dtype).is_ok())
        .collect();
    (select(pairs), 0usize..=200, 1usize..=5, any::<bool>()).prop_flat_map(
        |((kind, dtype), count, sources, final_result)| {
            let (part_size, parts) = match dtype {
                DType::C128 => (8, 2 * count),
                _ if dtype.size() == 8 && dtype == DType::C64 => (4, 2 * count),
                DType::C32 => (2, 2 * count),
                _ => (dtype.size(), count),
            };
            let bytes =
                prop::collection::vec(part(part_size), parts).prop_map(|parts| parts.concat());
            let source = (0usize..70, bytes);
            let destination = prop_oneof![(0..sources).prop_map(Ok), (0usize..70).prop_map(Err),];
            (
                prop::collection::vec(source, sources),
                prop::collection::vec(destination, 1..=2),
                prop::collection::vec(
                    prop_oneof![
                        -4.0..4.0,
                        select(vec![0.0, 1.0, f64::INFINITY, f64::NAN, 1e-42])
                    ],
                    sources,
                ),
                select(vec![1, 2, 3, 7, 8, 300, 70_000]),
            )
                .prop_map(move |(sources, destinations, factors, divisor)| Case {
                    kind,
                    dtype,
                    count,
                    sources,
                    destinations,
                    factors: if kind == ReduceKind::PremulSum {
                        factors
                    } else {
                        vec![]
                    },
                    divisor: final_result.then_some(divisor),
                })
        },
    )
}

/// The buffers of all destinations after the reduction.
fn run(case: &Case, isa: Isa) -> Vec<Vec<u8>> {
    const MARGIN: usize = 64;
    let len = case.count * case.dtype.size();
    let buffer = |offset: usize, content: &[u8]| {
        let mut buffer = vec![0xee; offset];
        buffer.extend_from_slice(content);
        buffer.resize(offset + len + MARGIN, 0xee);
        buffer
    };
    let mut sources: Vec<Vec<u8>> = case
        .sources
        .iter()
        .map(|(offset, content)| buffer(*offset, content))
        .collect();
    let mut outputs: Vec<Vec<u8>> = case
        .destinations
        .iter()
        .map(|destination| match destination {
            Ok(_) => vec![],
            Err(offset) => buffer(*offset, &vec![0xee; len]),
        })
        .collect();

    let srcs: Vec<*mut u8> = sources
        .iter_mut()
        .zip(&case.sources)
        .map(|(buffer, source)| buffer[source.0..].as_mut_ptr())
        .collect();
    let mut dsts: Vec<*mut u8> = vec![];
    for (destination, output) in case.destinations.iter().zip(&mut outputs) {
        let dst = match *destination {
            Ok(source) => srcs[source],
            Err(offset) => output[offset..].as_mut_ptr(),
        };
        // Two destinations are never the same.
        if !dsts.iter().any(|&other| ptr::eq(other, dst)) {
            dsts.push(dst);
        }
    }
    let srcs: Vec<*const u8> = srcs.into_iter().map(<*mut u8>::cast_const).collect();
    let reducer = Reducer::with_isa(case.kind, case.dtype, isa).unwrap();
    // SAFETY: every buffer holds `count` elements after its offset, and destinations are
    // sources or buffers of their own.
    unsafe { reducer.reduce(&dsts, &srcs, case.count, &case.factors, case.divisor) };
    sources.into_iter().chain(outputs).collect()
}

/// Gives all NaNs the same bits.
fn canonical(dtype: DType, bytes: &[u8]) -> Vec<u8> {
    let (size, infinity) = match dtype {
        DType::F64 | DType::C128 => (8, 0x7ff0 << 48),
        DType::F32 | DType::C64 => (4, 0x7f80_0000),
        DType::BF16 => (2, 0x7f80),
        DType::F16 | DType::C32 => (2, 0x7c00),
        DType::F8E5M2 => (1, 0x7c),
        DType::F8E4M3FN => (1, 0x7e),
        _ => return bytes.to_vec(),
    };
    let sign = 1u64 << (8 * size - 1);
    let canonical = |number: &[u8]| {
        let mut bits = [0; 8];
        bits[..number.len()].copy_from_slice(number);
        let is_nan = number.len() == size && u64::from_le_bytes(bits) & (sign - 1) > infinity;
        if is_nan {
            vec![0xff; size]
        } else {
            number.to_vec()
        }
    };
    bytes.chunks(size).flat_map(canonical).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6000))]

    #[test]
    fn all_instruction_sets_agree(case in case()) {
        let baseline = Isa::available().next().unwrap();
        let expected = run(&case, baseline);
        let offsets = case.sources.iter().map(|source| source.0);
        let offsets: Vec<usize> = offsets
            .chain(case.destinations.iter().map(|destination| destination.unwrap_or_else(|offset| offset)))
            .collect();
        for isa in Isa::available().skip(1) {
            let actual = run(&case, isa);
            for ((actual, expected), &offset) in actual.iter().zip(&expected).zip(&offsets) {
                if expected.is_empty() {
                    continue;
                }
                let end = expected.len() - 64;
                prop_assert_eq!(&actual[..offset], &expected[..offset], "{:?}", isa);
                prop_assert_eq!(&actual[end..], &expected[end..], "{:?}", isa);
                prop_assert_eq!(
                    canonical(case.dtype, &actual[offset..end]),
                    canonical(case.dtype, &expected[offset..end]),
                    "{:?}",
                    isa
                );
            }
        }
    }
}
