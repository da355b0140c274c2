//! Strided views of storages: reading them, and writing into them.
//!
//! A storage's buffer is an array in row-major order. A view is read by a slice, transpose
//! and broadcast of that array, or of the same elements in other dimensions, if such dimensions
//! exist; else by a gather. Writing inverts that.

use super::body::{Body, Dims, Type};
use super::element;
use super::request::{Number, View};
use super::value::{Value, concatenate, iota};
use crate::pjrt::ElementType::{self, *};

/// A view as a slice of an array: which of its dimensions lies along which of the array's.
struct Fit {
    starts: Dims,
    limits: Dims,
    steps: Dims,
    /// Of each dimension of the array, the view's dimension along it.
    along: Vec<Option<usize>>,
}

impl Fit {
    /// `view` as a slice of an array of `dims`.
    fn find(dims: &[i64], view: &View) -> Option<Fit> {
        let strides = View::contiguous(dims).strides;
        let mut starts = Dims::new();
        let mut rest = view.offset;
        for &stride in &strides {
            starts.push(rest / stride);
            rest %= stride;
        }
        if rest != 0 {
            return None;
        }
        let mut fit = Fit {
            limits: starts.iter().map(|start| start + 1).collect(),
            steps: Dims::from_elem(1, dims.len()),
            along: vec![None; dims.len()],
            starts,
        };
        for (dimension, (&size, &stride)) in view.sizes.iter().zip(&view.strides).enumerate() {
            if size == 1 || stride == 0 {
                continue;
            }
            let place = (0..dims.len()).find(|&place| {
                let step = stride / strides[place];
                stride % strides[place] == 0
                    && dims[place] > 1
                    && fit.along[place].is_none()
                    && fit.starts[place] + (size - 1) * step < dims[place]
            })?;
            fit.along[place] = Some(dimension);
            fit.steps[place] = stride / strides[place];
            fit.limits[place] = fit.starts[place] + (size - 1) * fit.steps[place] + 1;
        }
        (0..dims.len())
            .all(|place| fit.limits[place] <= dims[place])
            .then_some(fit)
    }

    /// Dimensions of `count` elements in which a view may be a slice: those which its strides
    /// suggest.
    fn suggest(count: i64, view: &View) -> Dims {
        let mut strides: Vec<i64> = (0..view.sizes.len())
            .filter(|&i| view.sizes[i] > 1 && view.strides[i] > 0)
            .map(|i| view.strides[i])
            .collect();
        strides.sort_unstable_by(|a, b| b.cmp(a));
        let mut dims = Dims::new();
        let mut block = count;
        for stride in strides {
            let unit = gcd(block, stride);
            dims.push(block / unit);
            block = unit;
        }
        dims.push(block);
        dims
    }

    /// The view's dimensions that lie along the array's, in the array's order; and for each of them in the
    /// view's order its number in that list.
    fn dimensions(&self) -> (Vec<usize>, Vec<usize>) {
        let dimensions: Vec<usize> = self.along.iter().flatten().copied().collect();
        let mut order: Vec<usize> = (0..dimensions.len()).collect();
        order.sort_by_key(|&number| dimensions[number]);
        (dimensions, order)
    }

    fn read<'b>(&self, array: Value<'b>, view: &View) -> Value<'b> {
        let (mut dimensions, order) = self.dimensions();
        let sizes: Dims = dimensions
            .iter()
            .map(|&dimension| view.sizes[dimension])
            .collect();
        let part = array
            .slice(&self.starts, &self.limits, &self.steps)
            .reshape(&sizes)
            .transpose(&order);
        dimensions.sort_unstable();
        part.broadcast_in_dim(&view.sizes, &dimensions)
    }

    /// The array with `value`, of the view's sizes, in place of the slice.
    fn write<'b>(&self, array: Value<'b>, view: &View, value: Value<'b>) -> Value<'b> {
        let (dimensions, order) = self.dimensions();
        let sizes: Dims = order
            .iter()
            .map(|&number| view.sizes[dimensions[number]])
            .collect();
        let mut back: Vec<usize> = (0..order.len()).collect();
        back.sort_by_key(|&place| order[place]);
        let slice: Dims = (self.along.iter())
            .map(|along| along.map_or(1, |dimension| view.sizes[dimension]))
            .collect();
        let part = value.reshape(&sizes).transpose(&back).reshape(&slice);
        let dims = array.dims();
        if part.dims() == dims {
            return part;
        }
        let body = array.body();
        if self.steps.iter().all(|&step| step == 1) {
            let index = Type::new(S64, &[]);
            let starts: Vec<Value<'b>> = self
                .starts
                .iter()
                .map(|&start| body.constant(Number::Int(start), index.clone()))
                .collect();
            return array.update(part, &starts);
        }
        let high: Dims = (0..dims.len()).map(|i| dims[i] - self.limits[i]).collect();
        let interior: Dims = self.steps.iter().map(|step| step - 1).collect();
        let spread = |part: Value<'b>| {
            let zero = part.point(Number::Int(0));
            part.pad(zero, &self.starts, &high, &interior)
        };
        let mask = body.constant(Number::Bool(true), Type::new(Pred, &part.dims()));
        spread(mask).select(spread(part), array)
    }
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// One past the last element of a view that is not empty, or the greatest number if that is less.
pub(super) fn end(view: &View) -> i64 {
    let span: i128 = (view.sizes.iter().zip(&view.strides))
        .map(|(&size, &stride)| i128::from(size - 1) * i128::from(stride))
        .fold(i128::from(view.offset) + 1, i128::saturating_add);
    i64::try_from(span).unwrap_or(i64::MAX)
}

/// A buffer's contents as elements of another type; `None` if their bytes do not make up whole
/// elements. Complex numbers are pairs, truth values bytes.
pub(super) fn reinterpret(array: Value<'_>, to: ElementType) -> Option<Value<'_>> {
    let from = array.element();
    if from == to {
        return Some(array);
    }
    if from.size() != to.size() && array.count() == 0 {
        return Some(array.body().constant(Number::Int(0), Type::new(to, &[0])));
    }
    if from == Pred {
        return reinterpret(array.convert(U8), to);
    }
    if to == Pred {
        return reinterpret(array, U8).map(|bytes| bytes.convert(Pred));
    }
    if array.is_complex() {
        let parts = [array.real(), array.imag()].map(|part| part.unsqueeze(array.rank()));
        return reinterpret(concatenate(&parts, array.rank()), to);
    }
    if element::is_complex(to) {
        let parts = pairs(reinterpret(array, element::real(to))?)?;
        let last = parts.rank() - 1;
        let part = |number| parts.narrow(last, number, number + 1).squeeze(last);
        return Some(part(0).complex(part(1)));
    }
    let mut ty = Type::new(to, &array.dims());
    if from.size() > to.size() {
        ty.dims.push((from.size() / to.size()) as i64);
        return Some(array.bitcast_to(ty));
    }
    if from.size() < to.size() {
        let ratio = (to.size() / from.size()) as i64;
        let grouped = groups(array, ratio)?;
        ty.dims = grouped.dims();
        ty.dims.pop();
        return Some(grouped.bitcast_to(ty));
    }
    Some(array.bitcast_to(ty))
}

fn pairs(array: Value<'_>) -> Option<Value<'_>> {
    groups(array, 2)
}

/// Splits the last dimension, or if that cannot be all elements, into groups.
fn groups(array: Value<'_>, size: i64) -> Option<Value<'_>> {
    let mut dims = array.dims();
    match dims.last_mut() {
        Some(last) if *last % size == 0 => *last /= size,
        _ if array.count() % size == 0 => dims = Dims::from_slice(&[array.count() / size]),
        _ => return None,
    }
    dims.push(size);
    Some(array.reshape(&dims))
}

/// Index of each element of a view in its storage, in the view's sizes.
fn indices<'b>(body: &'b Body, view: &View) -> Value<'b> {
    let element = if end(view) < i64::from(i32::MAX) {
        S32
    } else {
        S64
    };
    let constant = |number| body.constant(Number::Int(number), Type::new(element, &view.sizes));
    let mut index = constant(view.offset);
    for (dimension, &stride) in view.strides.iter().enumerate() {
        if view.sizes[dimension] > 1 && stride != 0 {
            let along = iota(body, element, &view.sizes, dimension);
            index = index + along * constant(stride);
        }
    }
    index
}

/// The elements of a view of a buffer, which has the view's element type.
pub(super) fn read<'b>(array: Value<'b>, view: &View) -> Value<'b> {
    if view.sizes.contains(&0) {
        let empty = Type::new(array.element(), &view.sizes);
        return array.body().constant(Number::Int(0), empty);
    }
    if let Some(fit) = Fit::find(&array.dims(), view) {
        return fit.read(array, view);
    }
    let count = array.count();
    let dims = Fit::suggest(count, view);
    if let Some(fit) = Fit::find(&dims, view) {
        return fit.read(array.reshape(&dims), view);
    }
    // From its first element on, and to a whole number of its longest stride.
    let flat = array.flatten().narrow(0, view.offset, end(view));
    let here = View {
        offset: 0,
        ..view.clone()
    };
    let count = flat.count();
    let stride = view.strides.iter().copied().max().unwrap_or(1).max(1);
    let missing = (stride - count % stride) % stride;
    let dims = Fit::suggest(count + missing, &here);
    if let Some(fit) = Fit::find(&dims, &here) {
        let padded = flat.pad(flat.point(Number::Int(0)), &[0], &[missing], &[0]);
        return fit.read(padded.reshape(&dims), &here);
    }
    let index = indices(flat.body(), &here);
    let (from, to) = (flat.ty(), index.ty());
    let ty = Type::new(flat.element(), &view.sizes);
    let vector = view.sizes.len();
    flat.body().push(
        ty.clone(),
        format_args!(
            "\"stablehlo.gather\"({flat}, {index}) {{dimension_numbers = #stablehlo.gather<\
             collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = {vector}>, \
             slice_sizes = array<i64: 1>, indices_are_sorted = false}} : ({from}, {to}) -> {ty}"
        ),
    )
}

/// The buffer with `value` in a view of it; all have the same element type. The view must not
/// overlap itself.
pub(super) fn write<'b>(array: Value<'b>, view: &View, value: Value<'b>) -> Value<'b> {
    if view.sizes.contains(&0) {
        return array;
    }
    if let Some(fit) = Fit::find(&array.dims(), view) {
        return fit.write(array, view, value);
    }
    let dims = Fit::suggest(array.count(), view);
    if let Some(fit) = Fit::find(&dims, view) {
        let whole = fit.write(array.reshape(&dims), view, value);
        return whole.reshape(&array.dims());
    }
    let (flat, updates) = (array.flatten(), value.flatten());
    let index = indices(array.body(), view).reshape(&[value.count(), 1]);
    let number = Type::new(array.element(), &[]);
    let region = array
        .body()
        .region(vec![number.clone(), number], |both| vec![both[1]]);
    let ty = flat.ty();
    let (positions, parts) = (index.ty(), updates.ty());
    let whole = array.body().push(
        ty.clone(),
        format_args!(
            "\"stablehlo.scatter\"({flat}, {index}, {updates}) <{{scatter_dimension_numbers = \
             #stablehlo.scatter<inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], \
             index_vector_dim = 1>, unique_indices = true}}> ({region}) : \
             ({ty}, {positions}, {parts}) -> {ty}"
        ),
    );
    whole.reshape(&array.dims())
}

/// Whether a view is all of a storage of `count` elements, each once, in some order of its
/// dimensions: that order, descending by stride.
pub(super) fn memory_order(view: &View, count: i64) -> Option<Vec<usize>> {
    let order = by_stride(view);
    if view.sizes.contains(&0) {
        return (count == 0).then_some(order);
    }
    let mut expected = 1;
    for &dimension in order.iter().rev() {
        if view.sizes[dimension] != 1 {
            if view.strides[dimension] != expected {
                return None;
            }
            expected *= view.sizes[dimension];
        }
    }
    (view.offset == 0 && expected == count).then_some(order)
}

/// Dimensions by descending stride; those of size 1 stay next to the one after them.
fn by_stride(view: &View) -> Vec<usize> {
    let mut strides = view.strides.clone();
    // The stride of a dimension of size 1 says nothing.
    for i in (0..strides.len()).rev() {
        if view.sizes[i] == 1 {
            strides[i] = strides.get(i + 1).copied().unwrap_or(0);
        }
    }
    let mut order: Vec<usize> = (0..strides.len()).collect();
    order.sort_by_key(|&dimension| std::cmp::Reverse(strides[dimension]));
    order
}
