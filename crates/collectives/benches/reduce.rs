//! Throughput of the reduction kernels beside that of copies, in bytes of one operand.
//!
//! `cargo bench -p tpu-dist-collectives --bench reduce -- [filter]`

use criterion::measurement::WallTime;
use criterion::{
    BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main,
};
use std::time::Duration;
use tpu_dist_collectives::reduce::{Isa, Reducer, copy, copy_nontemporal};
use tpu_dist_collectives::{DType, ReduceKind};

/// For the first-level, second-level and third-level cache, and for memory.
const SIZES: [usize; 4] = [8 << 10, 128 << 10, 1 << 20, 64 << 20];

/// Buffers of ones, whatever the type: no sum of them is denormal, infinite or NaN.
fn buffers(dtype: DType, bytes: usize) -> [Vec<u8>; 4] {
    let one: &[u8] = match dtype {
        DType::F64 => &1f64.to_le_bytes(),
        DType::F32 => &1f32.to_le_bytes(),
        DType::F16 => &0x3c00u16.to_le_bytes(),
        DType::BF16 => &0x3f80u16.to_le_bytes(),
        _ => &[1],
    };
    std::array::from_fn(|_| one.iter().copied().cycle().take(bytes).collect())
}

fn group<'c>(c: &'c mut Criterion, name: &str) -> BenchmarkGroup<'c, WallTime> {
    let mut group = c.benchmark_group(name);
    group
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(600));
    group
}

fn copies(c: &mut Criterion) {
    let mut group = group(c, "copy");
    let routines = [
        ("copy", copy as unsafe fn(*mut u8, *const u8, usize)),
        ("copy_nontemporal", copy_nontemporal),
    ];
    for (name, routine) in routines {
        for bytes in SIZES {
            let [mut dst, src, ..] = buffers(DType::U8, bytes);
            group.throughput(Throughput::BytesDecimal(bytes as u64));
            group.bench_function(BenchmarkId::new(name, bytes), |b| {
                // SAFETY: both buffers are that long.
                b.iter(|| unsafe { routine(dst.as_mut_ptr(), src.as_ptr(), bytes) });
            });
        }
    }
}

/// `a op= b` for every operator of `float32`, and sums of the other types.
fn in_place(c: &mut Criterion) {
    let types = [
        DType::F64,
        DType::BF16,
        DType::F16,
        DType::I64,
        DType::I32,
        DType::I8,
        DType::U8,
    ];
    let cases = ReduceKind::ALL
        .iter()
        .map(|&kind| (kind, DType::F32))
        .chain(types.map(|dtype| (ReduceKind::Sum, dtype)));
    let mut group = group(c, "in place");
    for (kind, dtype) in cases {
        let Ok(reducer) = Reducer::new(kind, dtype) else {
            continue;
        };
        let factors: &[f64] = if kind == ReduceKind::PremulSum {
            &[0.5, 0.5]
        } else {
            &[]
        };
        for bytes in SIZES {
            let [mut a, b, ..] = buffers(dtype, bytes);
            let (dst, src) = (a.as_mut_ptr(), b.as_ptr());
            group.throughput(Throughput::BytesDecimal(bytes as u64));
            group.bench_function(BenchmarkId::new(format!("{kind} {dtype}"), bytes), |b| {
                // SAFETY: both buffers are that long.
                b.iter(|| unsafe {
                    reducer.reduce(&[dst], &[dst, src], bytes / dtype.size(), factors, Some(2));
                });
            });
        }
    }
}

/// Sums in the other shapes that the engines use, and by other instruction sets.
fn shapes(c: &mut Criterion) {
    let mut group = group(c, "shapes");
    for dtype in [DType::F32, DType::BF16] {
        for bytes in SIZES {
            let [mut a, mut b, mut c, d] = buffers(dtype, bytes);
            let count = bytes / dtype.size();
            let (a, b, c, d) = (a.as_mut_ptr(), b.as_mut_ptr(), c.as_mut_ptr(), d.as_ptr());
            group.throughput(Throughput::BytesDecimal(bytes as u64));
            let mut bench =
                |name: String, reducer: Reducer, dsts: &[*mut u8], srcs: &[*const u8]| {
                    group.bench_function(BenchmarkId::new(format!("{name} {dtype}"), bytes), |b| {
                        // SAFETY: all buffers are that long.
                        b.iter(|| unsafe { reducer.reduce(dsts, srcs, count, &[], None) });
                    });
                };
            let sum = Reducer::new(ReduceKind::Sum, dtype).unwrap();
            bench("c = a + b".into(), sum, &[c], &[a, b]);
            bench("a, b = a + b".into(), sum, &[a, b], &[a, b]);
            bench("a = a + b + c + d".into(), sum, &[a], &[a, b, c, d]);
            for isa in Isa::available() {
                let sum = Reducer::with_isa(ReduceKind::Sum, dtype, isa).unwrap();
                bench(format!("{isa:?}"), sum, &[a], &[a, b]);
            }
        }
    }
}

criterion_group!(benches, copies, in_place, shapes);
criterion_main!(benches);
