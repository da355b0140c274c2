//! Pooling over windows.

use super::matmul::transform;
use super::operands;
use crate::aten::Error;
use crate::aten::body::{Dims, List, Type, Types};
use crate::aten::call::Call;
use crate::aten::element::lowest;
use crate::aten::reduce::precedes;
use crate::aten::request::Number;
use crate::aten::scatter::Combine;
use crate::aten::table::{OperatorRow, Several};
use crate::aten::value::{Value, iota};
use crate::aten::window::Window;
use crate::pjrt::ElementType::{self, S32};

pub(super) static ROWS: &[OperatorRow] = &[
    OperatorRow::several("max_pool2d_with_indices", |call| max_pool(call, 2)),
    OperatorRow::several("max_pool3d_with_indices", |call| max_pool(call, 3)),
    OperatorRow::new("max_pool2d_with_indices_backward", |call| {
        max_pool_backward(call, 2)
    }),
    OperatorRow::new("max_pool3d_with_indices_backward", |call| {
        max_pool_backward(call, 3)
    }),
    OperatorRow::new("avg_pool2d", |call| average_pool(call, 2)),
    OperatorRow::new("avg_pool3d", |call| average_pool(call, 3)),
    OperatorRow::new("avg_pool2d_backward", |call| average_pool_backward(call, 2)),
    OperatorRow::new("avg_pool3d_backward", |call| average_pool_backward(call, 3)),
    OperatorRow::new("_adaptive_avg_pool2d", |call| adaptive_pool(call, 2)),
    OperatorRow::new("_adaptive_avg_pool3d", |call| adaptive_pool(call, 3)),
    OperatorRow::new("_adaptive_avg_pool2d_backward", |call| {
        adaptive_pool_backward(call, 2)
    }),
    OperatorRow::new("_adaptive_avg_pool3d_backward", |call| {
        adaptive_pool_backward(call, 3)
    }),
];

/// The numbers for each of `spatial` dimensions that argument `index` gives, one for all or none for
/// `default`.
fn spatial_list(
    call: &Call<'_>,
    index: usize,
    spatial: usize,
    default: &[i64],
) -> Result<Dims, Error> {
    match call.ints(index)? {
        [] => Ok(Dims::from_slice(default)),
        [one] => Ok(Dims::from_elem(*one, spatial)),
        all if all.len() == spatial => Ok(Dims::from_slice(all)),
        other => call.malformed(
            format!("argument {index}"),
            format!("{spatial} numbers"),
            other,
        ),
    }
}

/// The window whose size, stride and padding are arguments `first` and the next two, over arrays of
/// `dims` whose last dimensions are reduced to `places`.
fn window(
    call: &Call<'_>,
    first: usize,
    dilation: &[i64],
    dims: &[i64],
    places: &[i64],
) -> Result<Window, Error> {
    let spatial = dilation.len();
    let outer = dims.len() - spatial;
    let size = spatial_list(call, first, spatial, &[])?;
    let stride = spatial_list(call, first + 1, spatial, &size)?;
    let padding = spatial_list(call, first + 2, spatial, &[])?;
    let mut window = Window::point(dims.len());
    for i in 0..spatial {
        let place = outer + i;
        window.size[place] = size[i];
        window.stride[place] = stride[i];
        window.dilation[place] = dilation[i];
        window.low[place] = padding[i];
        // As far as the last window reaches, which `ceil_mode` moves.
        let end = (places[place] - 1) * stride[i] + (size[i] - 1) * dilation[i] + 1;
        window.high[place] = end - dims[place] - padding[i];
    }
    Ok(window)
}

fn max_pool<'b>(call: &Call<'b>, spatial: usize) -> Several<'b> {
    let value = call.tensor(0)?;
    let dims = value.dims();
    let dilation = spatial_list(call, 4, spatial, &[])?;
    let window = window(call, 1, &dilation, &dims, &call.result(0)?.view.sizes)?;
    let outer = dims.len() - spatial;
    let body = call.body();
    let plane: i64 = dims[outer..].iter().product();
    let index = iota(body, S32, &[plane], 0)
        .reshape(&dims[outer..])
        .expand(&dims);
    let parameters = [value.element(), S32].map(|element| Type::new(element, &[]));
    let start = [
        body.constant(lowest(value.element()), parameters[0].clone()),
        body.constant(Number::Int(i64::from(i32::MAX)), parameters[1].clone()),
    ];
    let region = body.region([&parameters[..], &parameters[..]].concat(), |of| {
        let first = precedes(true, [of[0], of[2]], [of[1], of[3]]);
        vec![first.select(of[0], of[2]), first.select(of[1], of[3])]
    });
    let result = window.result(&dims);
    let types = vec![Type::new(value.element(), &result), Type::new(S32, &result)];
    let (value_type, index_type) = (types[0].clone(), types[1].clone());
    let all = [value, index, start[0], start[1]];
    let (names, operand_types, attributes) = (List(&all), Types(&all), window.attributes());
    let results = body.push_all(
        types,
        format_args!(
            "\"stablehlo.reduce_window\"({names}) <{{{attributes}}}> ({region}) : \
             ({operand_types}) -> ({value_type}, {index_type})"
        ),
    );
    Ok(results.into_iter().map(Some).collect())
}

fn max_pool_backward<'b>(call: &Call<'b>, spatial: usize) -> Result<Value<'b>, Error> {
    let [gradient, value] = operands(call, [0, 1])?;
    let dims = value.dims();
    let dilation = spatial_list(call, 5, spatial, &[])?;
    if dilation.iter().all(|&step| step == 1) {
        let window = window(call, 2, &dilation, &dims, &gradient.dims())?;
        return Ok(select_and_scatter(value, gradient, &window));
    }
    // With gaps in the windows, by the indices of the elements in their planes.
    let outer = dims.len() - spatial;
    let plane = |value: Value<'b>| {
        let dims = value.dims();
        let size = dims[outer..].iter().product();
        value.reshape(&[dims[..outer].iter().product(), size])
    };
    let zeros = plane(value.zeros());
    let index = plane(call.tensor(7)?.convert(S32));
    let sum = zeros.scatter(1, index, plane(gradient), Combine::By("add"));
    Ok(sum.reshape(&dims))
}

/// Zeros, with each element of `gradient` added where its window of `value` has its first greatest
/// element.
fn select_and_scatter<'b>(value: Value<'b>, gradient: Value<'b>, window: &Window) -> Value<'b> {
    let (body, ty) = (value.body(), value.ty());
    // The operation has no padding without elements: let those be the least there are.
    let negative = window
        .high
        .iter()
        .map(|&high| high.min(0))
        .collect::<Dims>();
    let none = Dims::from_elem(0, ty.dims.len());
    let used = value.pad(value.zero(), &none, &negative, &none);
    let number = Type::new(ty.element, &[]);
    let select = body.region(vec![number.clone(), number.clone()], |of| {
        vec![of[0].ge(of[1]).or(of[0].is_nan())]
    });
    let add = crate::aten::window::combiner(value, "add");
    let zero = value.zero();
    let mut window = window.clone();
    for high in &mut window.high {
        *high = (*high).max(0);
    }
    let list = |numbers: &Dims| {
        let numbers: Vec<String> = numbers.iter().map(i64::to_string).collect();
        numbers.join(", ")
    };
    let (used_type, gradient_type) = (used.ty(), gradient.ty());
    let scattered = body.push(
        used_type.clone(),
        format_args!(
            "\"stablehlo.select_and_scatter\"({used}, {gradient}, {zero}) <{{window_dimensions = \
             array<i64: {}>, window_strides = array<i64: {}>, padding = dense<{}> : tensor<{}x2xi64>}}> \
             ({select}, {add}) : ({used_type}, {gradient_type}, {number}) -> {used_type}",
            list(&window.size),
            list(&window.stride),
            window.padding(),
            window.size.len(),
        ),
    );
    let back: Dims = negative.iter().map(|high| -high).collect();
    scattered.pad(zero, &none, &back, &none)
}

/// Average pooling: its window, and the number of elements that each place is divided by.
struct Average<'b> {
    window: Window,
    divisor: Value<'b>,
}

impl<'b> Average<'b> {
    /// With arguments from `first` on, of an array of `dims` reduced to `places`.
    fn read(
        call: &Call<'b>,
        first: usize,
        spatial: usize,
        [dims, places]: [&[i64]; 2],
        element: ElementType,
    ) -> Result<Average<'b>, Error> {
        let ones = Dims::from_elem(1, spatial);
        let window = window(call, first, &ones, dims, places)?;
        let outer = dims.len() - spatial;
        if call.has(first + 5) {
            let divisor = Number::Int(call.int(first + 5)?);
            let divisor = call.body().constant(divisor, Type::new(element, &[]));
            return Ok(Average { window, divisor });
        }
        // The elements of a window that count: those of the array, and its padding if included.
        let include_padding = call.bool(first + 4)?;
        let mut ones = call.zeros(element, &dims[outer..]) + 1.;
        let mut counting = Window::point(spatial);
        let none = Dims::from_elem(0, spatial);
        for i in 0..spatial {
            counting.size[i] = window.size[outer + i];
            counting.stride[i] = window.stride[outer + i];
            counting.low[i] = window.low[outer + i];
            counting.high[i] = window.high[outer + i];
        }
        if include_padding {
            let padding = counting.low.clone();
            ones = ones.pad(ones.point(Number::Int(1)), &padding, &padding, &none);
            for i in 0..spatial {
                counting.high[i] -= padding[i];
            }
            counting.low = none;
        }
        let divisor = ones.reduce_window("add", Number::Int(0), &counting);
        Ok(Average { window, divisor })
    }
}

fn average_pool<'b>(call: &Call<'b>, spatial: usize) -> Result<Value<'b>, Error> {
    let [value] = operands(call, [0])?;
    let sizes = [&value.dims()[..], &call.result(0)?.view.sizes];
    let average = Average::read(call, 1, spatial, sizes, value.element())?;
    let sum = value.reduce_window("add", Number::Int(0), &average.window);
    Ok(sum / average.divisor)
}

fn average_pool_backward<'b>(call: &Call<'b>, spatial: usize) -> Result<Value<'b>, Error> {
    let [gradient, value] = operands(call, [0, 1])?;
    let dims = value.dims();
    let sizes = [&dims[..], &gradient.dims()];
    let Average { window, divisor } = Average::read(call, 2, spatial, sizes, value.element())?;
    // Each element goes to all places of its window: a window over elements as far apart as those.
    let rank = dims.len();
    let interior: Dims = window.stride.iter().map(|stride| stride - 1).collect();
    let low: Dims = (0..rank)
        .map(|i| window.size[i] - 1 - window.low[i])
        .collect();
    let high: Dims = (0..rank)
        .map(|i| {
            let spread = (gradient.dims()[i] - 1) * window.stride[i] + 1;
            dims[i] + window.size[i] - 1 - spread - low[i]
        })
        .collect();
    let gradient = gradient / divisor;
    let spread = gradient.pad(gradient.zero(), &low, &high, &interior);
    let back = Window {
        size: window.size,
        ..Window::point(rank)
    };
    Ok(spread.reduce_window("add", Number::Int(0), &back))
}

/// The matrix by which `size` elements become `places` averages of adjacent ones.
fn averages<'b>(call: &Call<'b>, element: ElementType, places: i64, size: i64) -> Value<'b> {
    let dims = [places, size];
    let (place, number) = (
        iota(call.body(), S32, &dims, 0),
        iota(call.body(), S32, &dims, 1),
    );
    let constant = |value: i64| place.constant(Number::Int(value));
    let start = place * constant(size) / constant(places);
    let end = ((place + 1.) * constant(size) + constant(places - 1)) / constant(places);
    let inside = number.ge(start).and(number.lt(end));
    let count = (end - start).convert(element);
    inside.select(1. / count, 0.)
}

/// Applies the matrices of averages to the last dimensions: those of the large array's sizes and the
/// small one's. `along` is the matrices' dimension that goes with the value.
fn apply_averages<'b>(
    call: &Call<'b>,
    value: Value<'b>,
    spatial: usize,
    [large, small]: [&[i64]; 2],
    along: usize,
) -> Value<'b> {
    (large.len() - spatial..large.len()).fold(value, |value, dimension| {
        let (size, places) = (large[dimension], small[dimension]);
        if size == places {
            return value;
        }
        let matrix = averages(call, value.element(), places, size);
        transform(call, value, matrix, dimension, along)
    })
}

fn adaptive_pool<'b>(call: &Call<'b>, spatial: usize) -> Result<Value<'b>, Error> {
    let [value] = operands(call, [0])?;
    let sizes = [&value.dims()[..], &call.result(0)?.view.sizes];
    Ok(apply_averages(call, value, spatial, sizes, 1))
}

fn adaptive_pool_backward<'b>(call: &Call<'b>, spatial: usize) -> Result<Value<'b>, Error> {
    let [gradient, value] = operands(call, [0, 1])?;
    let sizes = [&value.dims()[..], &gradient.dims()];
    Ok(apply_averages(call, gradient, spatial, sizes, 0))
}
