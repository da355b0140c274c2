//! The names people use for slices.

use std::str::FromStr;

use crate::{Error, Generation, MultiSlice, Shape, Slice};

/// Reads extents with an optional suffix, as `4x4x8`, `4x4x8_twisted` or `16x16_untwisted`.
///
/// # Errors
/// [`Error::Parse`] with what is wrong.
///
/// ```
/// use tpu_dist_mesh::{Shape, parse};
/// assert_eq!(parse::shape("4x4x8_twisted")?, (Shape::new3(4, 4, 8), true));
/// # Ok::<(), tpu_dist_mesh::Error>(())
/// ```
pub fn shape(text: &str) -> Result<(Shape, bool), Error> {
    let fail = |reason: &str| Error::Parse {
        text: text.to_owned(),
        reason: reason.to_owned(),
    };
    let lower = text.trim().to_ascii_lowercase();
    let (extents, twisted) = match lower.strip_suffix("_untwisted") {
        Some(extents) => (extents, false),
        None => match lower.strip_suffix("_twisted") {
            Some(extents) => (extents, true),
            None => (lower.as_str(), false),
        },
    };
    let extents: Vec<u32> = extents
        .split('x')
        .map(|extent| match extent.parse() {
            Ok(0) | Err(_) => Err(fail("expected positive extents joined by x, as 4x4x8")),
            Ok(extent) => Ok(extent),
        })
        .collect::<Result<_, _>>()?;
    let chips = extents
        .iter()
        .try_fold(1u32, |product, &extent| product.checked_mul(extent));
    if chips.is_none() {
        return Err(fail("more chips than any slice has"));
    }
    match extents[..] {
        [x, y] => Ok((Shape::new2(x, y), twisted)),
        [x, y, z] => Ok((Shape::new3(x, y, z), twisted)),
        _ => Err(fail("expected two or three extents, as 4x4 or 4x4x8")),
    }
}

/// The slice of a generation's name and a topology, as GKE's and Ray's labels give them:
/// (`tpu-v5p-slice`, `2x2x1`), (`TPU-V6E`, `4x4`), (`tpu7x`, `4x4x8`).
///
/// # Errors
/// [`Error::UnknownGeneration`], [`Error::Parse`] or [`Error::IllegalShape`].
pub fn labels(generation: &str, topology: &str) -> Result<Slice, Error> {
    slice_of(generation.parse()?, topology)
}

fn slice_of(generation: Generation, topology: &str) -> Result<Slice, Error> {
    let (mut shape, twisted) = shape(topology)?;
    let dimensions = generation.spec().dimensions as usize;
    match (shape.dimensions(), dimensions, shape.extents()) {
        (3, 2, [x, y, 1]) => shape = Shape::new2(x, y),
        (2, 3, [x, y, _]) => shape = Shape::new3(x, y, 1),
        _ => {}
    }
    Slice::new(generation, shape)?.with_twist(twisted)
}

/// The slice with so many chips that a cloud accelerator type means: the most cubic one.
fn slice_of_count(generation: Generation, count: u32) -> Result<Slice, Error> {
    let spec = generation.spec();
    let (unit, per_chip) = if spec.type_counts_cores {
        ("cores", spec.cores_per_chip)
    } else {
        ("chips", 1)
    };
    let legal = generation.legal_slices();
    let fits = |chips: u32| chips * per_chip == count;
    let best = legal
        .iter()
        .filter(|slice| !slice.twisted && fits(slice.shape.chips()))
        .min_by_key(|slice| (slice.shape.extents().iter().sum::<u32>(), slice.shape));
    let Some(best) = best else {
        let mut counts: Vec<_> = legal.iter().map(|s| s.shape.chips() * per_chip).collect();
        counts.sort_unstable();
        counts.dedup();
        let mut list: Vec<_> = counts.iter().take(16).map(u32::to_string).collect();
        if counts.len() > list.len() {
            list.push(format!("... {}", counts[counts.len() - 1]));
        }
        return Err(Error::IllegalCount {
            generation,
            count,
            unit,
            legal: list.join(", "),
        });
    };
    let slice = Slice::new(generation, best.shape)?;
    // v5litepod-8 and v6e-8 are machines of one host with 8 chips.
    if spec.dimensions == 2 && best.shape == Shape::new2(2, 4) {
        return slice.with_chips_per_host([2, 4, 1]);
    }
    Ok(slice)
}

/// Reads a slice: `v5e:4x4`, `tpu7x:4x4x8_twisted`, `v5p=2x2x2`, `tpu-v5p-slice:2x2x1`, or a
/// cloud accelerator type: `v5p-128` (cores), `v5litepod-16` and `v6e-16` (chips).
impl FromStr for Slice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Slice, Error> {
        let text = text.trim();
        let is_extents = |t: &str| shape(t).is_ok();
        if let Some((generation, topology)) = text.split_once([':', '=']) {
            return slice_of(generation.parse()?, topology);
        }
        if let Some((generation, tail)) = text.rsplit_once('-') {
            if let Ok(count) = tail.parse() {
                return slice_of_count(generation.parse()?, count);
            }
            if is_extents(tail) {
                return slice_of(generation.parse()?, tail);
            }
        }
        let reason = if is_extents(text) {
            "the generation is missing: write it in front, as v5p:4x4x8"
        } else {
            "expected generation and extents, as v5p:4x4x8, or a cloud accelerator type, as v5p-128"
        };
        Err(Error::Parse {
            text: text.to_owned(),
            reason: reason.to_owned(),
        })
    }
}

/// Reads a slice, or several as `2*v5e:16x16`.
impl FromStr for MultiSlice {
    type Err = Error;

    fn from_str(text: &str) -> Result<MultiSlice, Error> {
        match text.split_once('*') {
            None => Ok(text.parse::<Slice>()?.into()),
            Some((count, slice)) => {
                let count = count.trim().parse().map_err(|_| Error::Parse {
                    text: text.to_owned(),
                    reason: "expected a number of slices before *, as 2*v5e:16x16".to_owned(),
                })?;
                MultiSlice::new(slice.parse()?, count)
            }
        }
    }
}
