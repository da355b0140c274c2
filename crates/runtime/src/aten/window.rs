//! Reductions over sliding windows.

use super::body::{Dims, Type};
use super::request::Number;
use super::value::Value;

/// A window over all dimensions of an array.
#[derive(Clone)]
pub(super) struct Window {
    pub(super) size: Dims,
    pub(super) stride: Dims,
    pub(super) dilation: Dims,
    /// Elements before the first and after the last; negative ones are cut off.
    pub(super) low: Dims,
    pub(super) high: Dims,
}

impl Window {
    /// A window of one element over an array of `rank`.
    pub(super) fn point(rank: usize) -> Window {
        Window {
            size: Dims::from_elem(1, rank),
            stride: Dims::from_elem(1, rank),
            dilation: Dims::from_elem(1, rank),
            low: Dims::from_elem(0, rank),
            high: Dims::from_elem(0, rank),
        }
    }

    /// Sizes of the result over an array of `dims`.
    pub(super) fn result(&self, dims: &[i64]) -> Dims {
        (0..dims.len())
            .map(|i| {
                let span = (self.size[i] - 1) * self.dilation[i] + 1;
                let places = dims[i] + self.low[i] + self.high[i] - span;
                if places < 0 {
                    0
                } else {
                    places / self.stride[i] + 1
                }
            })
            .collect()
    }

    /// The attributes that describe it.
    pub(super) fn attributes(&self) -> String {
        let Window {
            size,
            stride,
            dilation,
            ..
        } = self;
        let rank = size.len();
        let padding = self.padding();
        let list = |numbers: &Dims| {
            let numbers: Vec<String> = numbers.iter().map(i64::to_string).collect();
            numbers.join(", ")
        };
        format!(
            "window_dimensions = array<i64: {}>, window_strides = array<i64: {}>, \
             window_dilations = array<i64: {}>, padding = dense<{padding}> : tensor<{rank}x2xi64>",
            list(size),
            list(stride),
            list(dilation)
        )
    }

    /// The padding as a list of pairs.
    pub(super) fn padding(&self) -> String {
        let pairs: Vec<[i64; 2]> = (self.low.iter().zip(&self.high))
            .map(|(&low, &high)| [low, high])
            .collect();
        format!("{pairs:?}")
    }
}

impl<'b> Value<'b> {
    /// Combines the elements of each place of a window.
    pub(super) fn reduce_window(
        self,
        operation: &str,
        initial: Number,
        window: &Window,
    ) -> Value<'b> {
        let (body, from) = (self.body(), self.ty());
        let ty = Type::new(from.element, &window.result(&from.dims));
        let start = self.point(initial);
        let number = start.ty();
        let region = combiner(self, operation);
        let attributes = window.attributes();
        body.push(
            ty.clone(),
            format_args!(
                "\"stablehlo.reduce_window\"({self}, {start}) <{{{attributes}}}> ({region}) : \
                 ({from}, {number}) -> {ty}"
            ),
        )
    }
}

impl<'b> Value<'b> {
    /// Combines each element along a dimension with all before it.
    pub(super) fn scan(self, operation: &str, initial: Number, dimension: usize) -> Value<'b> {
        let dims = self.dims();
        let mut window = Window::point(dims.len());
        window.size[dimension] = dims[dimension].max(1);
        window.low[dimension] = dims[dimension].max(1) - 1;
        self.reduce_window(operation, initial, &window)
    }
}

/// The region that combines two elements of `value`.
pub(super) fn combiner(value: Value<'_>, operation: &str) -> String {
    let number = Type::new(value.element(), &[]);
    value
        .body()
        .region(vec![number.clone(), number.clone()], |of| {
            let (a, b) = (of[0], of[1]);
            let joined = value.body().push(
                number.clone(),
                format_args!("stablehlo.{operation} {a}, {b} : {number}"),
            );
            vec![joined]
        })
}
