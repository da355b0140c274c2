//! Reading and writing elements at indices that the program computes.

use super::body::{Dims, Type};
use super::request::Number;
use super::value::{Value, concatenate, iota};
use super::window::combiner;
use crate::pjrt::ElementType::{S32, S64};

/// How a written element meets the one that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Combine {
    Replace,
    /// By an operation of StableHLO.
    By(&'static str),
}

/// A list as an attribute, `array<i64: ...>` without the frame.
fn list(numbers: impl IntoIterator<Item = usize>) -> String {
    let numbers: Vec<String> = numbers
        .into_iter()
        .map(|number| number.to_string())
        .collect();
    format!("[{}]", numbers.join(", "))
}

impl<'b> Value<'b> {
    /// Negative indices count from the end of a dimension of `size`.
    pub(super) fn wrap_index(self, size: i64) -> Value<'b> {
        self.lt(0.)
            .select(self + self.constant(Number::Int(size)), self)
    }

    /// The slices of dimension `dimension` at `index`, whose dimensions take that one's place.
    pub(super) fn take(self, dimension: usize, index: Value<'b>) -> Value<'b> {
        self.take_at(&[dimension], &[index], dimension)
    }

    /// The slices at `indices` of dimensions `at`; the dimensions of the indices, which are all of
    /// the same sizes, come at `place` among those that remain.
    pub(super) fn take_at(self, at: &[usize], indices: &[Value<'b>], place: usize) -> Value<'b> {
        let from = self.ty();
        let shape = indices[0].dims();
        let vectors = vectors(indices, &from.dims);
        let remaining = super::reduce::without(&from.dims, at);
        let mut dims = Dims::from_slice(&remaining[..place]);
        dims.extend(shape.iter().copied());
        dims.extend(remaining[place..].iter().copied());
        let offsets = (0..place).chain(place + shape.len()..dims.len());
        let sizes: Vec<String> = (0..from.dims.len())
            .map(|i| if at.contains(&i) { 1 } else { from.dims[i] }.to_string())
            .collect();
        let ty = Type::new(from.element, &dims);
        let index_type = vectors.ty();
        let (offsets, at, vector, sizes) = (
            list(offsets),
            list(at.iter().copied()),
            shape.len(),
            sizes.join(", "),
        );
        self.body().push(
            ty.clone(),
            format_args!(
                "\"stablehlo.gather\"({self}, {vectors}) <{{dimension_numbers = #stablehlo.gather<\
                 offset_dims = {offsets}, collapsed_slice_dims = {at}, start_index_map = {at}, \
                 index_vector_dim = {vector}>, slice_sizes = array<i64: {sizes}>, \
                 indices_are_sorted = false}}> : ({from}, {index_type}) -> {ty}"
            ),
        )
    }

    /// This with `updates`, of the sizes that [`Value::take_at`] gives, at the indices.
    pub(super) fn put_at(
        self,
        at: &[usize],
        indices: &[Value<'b>],
        place: usize,
        updates: Value<'b>,
        combine: Combine,
    ) -> Value<'b> {
        let ty = self.ty();
        let shape = indices[0].rank();
        let vectors = vectors(indices, &ty.dims);
        let windows = list((0..place).chain(place + shape..updates.rank()));
        let region = match combine {
            Combine::By(operation) => combiner(self, operation),
            Combine::Replace => {
                let number = Type::new(ty.element, &[]);
                self.body()
                    .region(vec![number.clone(), number], |both| vec![both[1]])
            }
        };
        let at = list(at.iter().copied());
        let (index_type, update_type) = (vectors.ty(), updates.ty());
        self.body().push(
            ty.clone(),
            format_args!(
                "\"stablehlo.scatter\"({self}, {vectors}, {updates}) <{{scatter_dimension_numbers = \
                 #stablehlo.scatter<update_window_dims = {windows}, inserted_window_dims = {at}, \
                 scatter_dims_to_operand_dims = {at}, index_vector_dim = {shape}>, \
                 indices_are_sorted = false, unique_indices = false}}> ({region}) : \
                 ({ty}, {index_type}, {update_type}) -> {ty}"
            ),
        )
    }

    /// `result[i][j][k] = self[i][index[i][j][k]][k]` along a dimension.
    pub(super) fn gather(self, dimension: usize, index: Value<'b>) -> Value<'b> {
        let indices = coordinates(dimension, index);
        let all: Vec<usize> = (0..self.rank()).collect();
        self.take_at(&all, &indices, 0)
    }

    /// This with `updates[i][j][k]` at `[i][index[i][j][k]][k]`, both of the same sizes.
    pub(super) fn scatter(
        self,
        dimension: usize,
        index: Value<'b>,
        updates: Value<'b>,
        combine: Combine,
    ) -> Value<'b> {
        let indices = coordinates(dimension, index);
        let all: Vec<usize> = (0..self.rank()).collect();
        self.put_at(&all, &indices, 0, updates, combine)
    }
}

/// The index vectors of elements of an array of `dims` whose indices along each dimension are given.
fn vectors<'b>(indices: &[Value<'b>], dims: &[i64]) -> Value<'b> {
    // A TPU has no integers of 64 bits.
    let short = dims.iter().all(|&size| size < i64::from(i32::MAX));
    let element = if short { S32 } else { S64 };
    let rank = indices[0].rank();
    let parts: Vec<_> = (indices.iter())
        .map(|index| index.convert(element).unsqueeze(rank))
        .collect();
    concatenate(&parts, rank)
}

/// The indices of each place along all dimensions, with `index` along one.
fn coordinates(dimension: usize, index: Value<'_>) -> Vec<Value<'_>> {
    let dims = index.dims();
    (0..dims.len())
        .map(|other| {
            if other == dimension {
                index
            } else {
                iota(index.body(), S64, &dims, other)
            }
        })
        .collect()
}
