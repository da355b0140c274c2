//! Reductions of values over dimensions.

use super::body::{Dims, Type};
use super::element::{highest, lowest};
use super::request::Number;
use super::value::{Value, iota};
use crate::pjrt::ElementType;

/// `dims` without `dimensions`.
pub(super) fn without(dims: &[i64], dimensions: &[usize]) -> Dims {
    (0..dims.len())
        .filter(|dimension| !dimensions.contains(dimension))
        .map(|dimension| dims[dimension])
        .collect()
}

impl<'b> Value<'b> {
    /// Combines the elements along `dimensions`, which disappear.
    pub(super) fn reduce(
        self,
        operation: &str,
        initial: Number,
        dimensions: &[usize],
    ) -> Value<'b> {
        if dimensions.is_empty() {
            return self;
        }
        let from = self.ty();
        let start = self.point(initial);
        let ty = Type::new(from.element, &without(&from.dims, dimensions));
        let number = start.ty();
        self.body().push(
            ty.clone(),
            format_args!(
                "stablehlo.reduce({self} init: {start}) applies stablehlo.{operation} across \
                 dimensions = {dimensions:?} : ({from}, {number}) -> {ty}"
            ),
        )
    }

    pub(super) fn sum(self, dimensions: &[usize]) -> Value<'b> {
        self.reduce("add", Number::Int(0), dimensions)
    }

    /// The greatest; not a number if any is not.
    pub(super) fn max(self, dimensions: &[usize]) -> Value<'b> {
        self.reduce("maximum", lowest(self.element()), dimensions)
    }

    /// The least; not a number if any is not.
    pub(super) fn min(self, dimensions: &[usize]) -> Value<'b> {
        self.reduce("minimum", highest(self.element()), dimensions)
    }

    pub(super) fn mean(self, dimensions: &[usize]) -> Value<'b> {
        let dims = self.dims();
        let count: i64 = dimensions
            .iter()
            .map(|&dimension| dims[dimension])
            .product();
        self.sum(dimensions) / count as f64
    }

    /// Gives what was reduced over `dimensions` of an array of `dims` these back, of size 1.
    pub(super) fn keep(self, dims: &[i64], dimensions: &[usize]) -> Value<'b> {
        let mut dims = Dims::from_slice(dims);
        for &dimension in dimensions {
            dims[dimension] = 1;
        }
        self.reshape(&dims)
    }

    /// The extreme element along a dimension, and the first index of it. What is not a number counts
    /// as more extreme than any.
    pub(super) fn extreme(self, greatest: bool, dimension: usize) -> [Value<'b>; 2] {
        let (dims, along) = (self.dims(), [dimension]);
        let value = if greatest {
            self.max(&along)
        } else {
            self.min(&along)
        };
        // Two passes, which XLA makes vectors of, unlike one over pairs.
        let hit = self.eq(value.keep(&dims, &along)).or(self.is_nan());
        let index = iota(self.body(), ElementType::S32, &dims, dimension);
        let nowhere = index.constant(Number::Int(i64::from(i32::MAX)));
        [value, hit.select(index, nowhere).min(&along)]
    }
}

/// Whether the first of two values is more extreme, or as extreme and of the lower index.
pub(super) fn precedes<'b>(
    greatest: bool,
    values: [Value<'b>; 2],
    indices: [Value<'b>; 2],
) -> Value<'b> {
    let [a, b] = values;
    let (mut more, mut same) = (if greatest { a.gt(b) } else { a.lt(b) }, a.eq(b));
    if a.is_float() {
        let (nan, other) = (a.is_nan(), b.is_nan());
        more = more.or(nan.and(!other));
        same = same.or(nan.and(other));
    }
    more.or(same.and(indices[0].lt(indices[1])))
}
