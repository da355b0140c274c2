//! The reduction kernels against independent references.

use tpu_dist_collectives::reduce::Reducer;
use tpu_dist_collectives::{DType, ReduceKind};

#[test]
fn sums_averages_and_premultiplied_sums_of_f32() {
    let a: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let b: Vec<f32> = (0..1000).map(|i| (i * i) as f32).collect();
    for (kind, scales, divisor, expected) in [
        (
            ReduceKind::Sum,
            &[][..],
            None,
            (|a, b| a + b) as fn(f32, f32) -> f32,
        ),
        (ReduceKind::Avg, &[], Some(2), |a, b| (a + b) / 2.0),
        (ReduceKind::PremulSum, &[0.5, 3.0], None, |a, b| {
            a * 0.5 + b * 3.0
        }),
        (ReduceKind::Max, &[], None, f32::max),
    ] {
        let reducer = Reducer::new(kind, DType::F32).unwrap();
        let mut out = a.clone();
        let dst = out.as_mut_ptr().cast::<u8>();
        // SAFETY: 1000 elements each; the destination is one of the sources.
        unsafe { reducer.reduce(&[dst], &[dst, b.as_ptr().cast()], 1000, scales, divisor) };
        for i in 0..1000 {
            assert_eq!(out[i], expected(a[i], b[i]), "{kind} at {i}");
        }
    }
}
