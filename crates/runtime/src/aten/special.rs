//! The error function and its inverse.

use std::f64::consts::FRAC_2_SQRT_PI;

use super::request::Number;
use super::value::Value;
use crate::pjrt::ElementType;

// Rational approximations from S. Moshier's Cephes library (ndtr.c), good to double precision:
// erf(x) = x T(x^2) / U(x^2) for |x| < 1; erfc(x) = exp(-x^2) P(x) / Q(x) for 1 <= x < 8, and
// exp(-x^2) R(x) / S(x) beyond.
const T: [f64; 5] = [
    9.604_973_739_870_516,
    9.002_601_972_038_427e1,
    2.232_005_345_946_843e3,
    7.003_325_141_128_051e3,
    5.559_230_130_103_949e4,
];
const U: [f64; 6] = [
    1.,
    3.356_171_416_475_031e1,
    5.213_579_497_801_527e2,
    4.594_323_829_709_801e3,
    2.262_900_006_138_909_5e4,
    4.926_739_426_086_359e4,
];
const P: [f64; 9] = [
    2.461_969_814_735_305e-10,
    5.641_895_648_310_689e-1,
    7.463_210_564_422_699,
    4.863_719_709_856_814e1,
    1.965_208_329_560_771e2,
    5.264_451_949_954_773e2,
    9.345_285_271_719_576e2,
    1.027_551_886_895_157_2e3,
    5.575_353_353_693_994e2,
];
const Q: [f64; 9] = [
    1.,
    1.322_819_511_547_449_9e1,
    8.670_721_408_859_897e1,
    3.549_377_788_878_199e2,
    9.757_085_017_432_055e2,
    1.823_909_166_879_097_3e3,
    2.246_337_608_187_109_7e3,
    1.656_663_091_941_613_4e3,
    5.575_353_408_177_277e2,
];
const R: [f64; 6] = [
    5.641_895_835_477_551e-1,
    1.275_366_707_599_781,
    5.019_050_422_511_805,
    6.160_210_979_930_536,
    7.409_742_699_504_489_5,
    2.978_866_653_721_002_2,
];
const S: [f64; 7] = [
    1.,
    2.260_528_632_201_172_6,
    9.396_035_249_380_015,
    1.204_895_398_080_966_6e1,
    1.708_144_507_475_659e1,
    9.608_968_090_632_859,
    3.369_076_451_000_815,
];

// M. Giles, "Approximating the erfinv function" (GPU Computing Gems, 2011), single precision: polynomials in
// w - 2.5 for w = -log(1 - x^2) < 5, in sqrt(w) - 3 beyond.
const CENTRAL: [f64; 9] = [
    2.810_226_36e-8,
    3.432_739_39e-7,
    -3.523_387_7e-6,
    -4.391_506_54e-6,
    2.185_808_7e-4,
    -1.253_725_03e-3,
    -4.177_681_64e-3,
    0.246_640_727,
    1.501_409_41,
];
const TAIL: [f64; 9] = [
    -2.002_142_57e-4,
    1.009_505_58e-4,
    1.349_343_22e-3,
    -3.673_428_44e-3,
    5.739_507_73e-3,
    -7.622_461_3e-3,
    9.438_870_47e-3,
    1.001_674_06,
    2.832_976_82,
];

/// erf(x) for |x| < 1.
fn inner(x: Value<'_>) -> Value<'_> {
    let square = x * x;
    x * square.polynomial(&T) / square.polynomial(&U)
}

/// erfc(|x|) for |x| >= 1.
fn outer(x: Value<'_>) -> Value<'_> {
    let size = x.abs();
    let near = size.polynomial(&P) / size.polynomial(&Q);
    let far = size.polynomial(&R) / size.polynomial(&S);
    let bounded = size.minimum(30.);
    (-bounded * bounded).exp() * size.lt(8.).select(near, far)
}

/// The error function.
pub(super) fn erf(x: Value<'_>) -> Value<'_> {
    let bounded = x.constant(Number::Float(-6.)).maximum(x.minimum(6.));
    let far = (1. - outer(bounded)).copy_sign(x);
    x.abs().lt(1.).select(inner(bounded), far)
}

/// 1 - erf(x), without loss where that is small.
pub(super) fn erfc(x: Value<'_>) -> Value<'_> {
    let bounded = x.constant(Number::Float(-30.)).maximum(x.minimum(30.));
    let tail = outer(bounded);
    let far = x.lt(0.).select(2. - tail, tail);
    x.abs().lt(1.).select(1. - inner(bounded), far)
}

/// The inverse of the error function.
pub(super) fn erf_inverse(y: Value<'_>) -> Value<'_> {
    let w = -((1. - y) * (1. + y)).log();
    let central = (w - 2.5).polynomial(&CENTRAL);
    let tail = (w.sqrt() - 3.).polynomial(&TAIL);
    let mut x = y * w.lt(5.).select(central, tail);
    if y.element() == ElementType::F64 {
        // Newton's method doubles the digits.
        for _ in 0..2 {
            x = x - (erf(x) - y) / (FRAC_2_SQRT_PI * (-(x * x)).exp());
        }
    }
    let infinite = y.constant(Number::Float(f64::INFINITY)).copy_sign(y);
    y.abs().eq(1.).select(infinite, x)
}
