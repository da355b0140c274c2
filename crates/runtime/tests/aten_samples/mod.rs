//! A sample call of every lowered operator, and how calls are written down.
//!
//! A call is a line: `operator arguments -> results`, separated by spaces.
//! Arguments: `f32[2,3]` a tensor (contiguous, on a storage of its own), `{f32[2] -}` a list of
//! tensors, some undefined, `(?f s2)` one of numbers, `s1`, `s0.5` a constant number, `?f`, `?i` a number known at run time, `b1` a truth
//! value, `n3` an integer, `x0.5` a float, `[1,2]` integers, `"text"`, `f32` an element type, `-` none,
//! `_` something without meaning. Results: `f32[2,3]`, `@0` into argument 0's tensor, `-` undefined.

// Each test binary uses a part of this.
#![allow(dead_code)]

use tpu_dist_runtime::aten::{
    Argument, Destination, Kind, Number, Operand, Request, ResultType, Scalar, StorageType, View,
};
use tpu_dist_runtime::pjrt::ElementType;

pub(crate) const SAMPLES: &str = include_str!("samples.txt");

/// The lines with calls.
pub(crate) fn samples() -> impl Iterator<Item = &'static str> {
    SAMPLES
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// The call that a line describes.
pub(crate) fn parse(line: &str) -> Request<'_> {
    let (left, right) = line.split_once("->").expect("a call has results");
    let mut tokens = left.split_whitespace();
    let operator = tokens.next().expect("a call has an operator");
    let mut request = Request {
        operator,
        arguments: Vec::new(),
        storages: Vec::new(),
        results: Vec::new(),
    };
    let mut scalars = 0;
    let mut list: Option<Vec<Argument>> = None;
    for token in tokens {
        let inner = token.trim_start_matches(['{', '(']);
        if inner.len() < token.len() {
            list = Some(Vec::new());
        }
        let inner = inner.trim_end_matches(['}', ')']);
        let argument = argument(inner, &mut request.storages, &mut scalars);
        match &mut list {
            Some(_) if inner.is_empty() => {}
            Some(list) => list.push(argument),
            None => request.arguments.push(argument),
        }
        if token.ends_with('}') {
            let tensors = list.take().unwrap().into_iter();
            request.arguments.push(Argument::Tensors(
                tensors
                    .map(|argument| match argument {
                        Argument::Tensor(operand) => Some(operand),
                        _ => None,
                    })
                    .collect(),
            ));
        } else if token.ends_with(')') {
            let numbers = list.take().unwrap().into_iter();
            request.arguments.push(Argument::Scalars(
                numbers
                    .map(|argument| match argument {
                        Argument::Scalar(scalar) => scalar,
                        other => panic!("{other:?} is no number"),
                    })
                    .collect(),
            ));
        }
    }
    request.results = right
        .split_whitespace()
        .map(|token| result(token, &request.arguments))
        .collect();
    request
}

/// Element type and sizes of `f32[2,3]`.
fn tensor(token: &str) -> Option<(ElementType, Vec<i64>)> {
    let (element, sizes) = token.strip_suffix(']')?.split_once('[')?;
    Some((element_type(element)?, integers(sizes)))
}

fn integers(list: &str) -> Vec<i64> {
    list.split(',')
        .filter(|number| !number.is_empty())
        .map(|number| number.parse().unwrap())
        .collect()
}

fn element_type(name: &str) -> Option<ElementType> {
    let name = match name {
        "c64" => "complex<f32>",
        "u8" => "ui8",
        other => other,
    };
    (ElementType::ALL.iter().copied()).find(|element| element.name() == name)
}

fn argument(token: &str, storages: &mut Vec<StorageType>, scalars: &mut usize) -> Argument {
    if let Some((element, sizes)) = tensor(token) {
        let count: i64 = sizes.iter().product();
        storages.push(StorageType {
            element,
            dims: sizes.clone(),
            absent: false,
            bytes: count as u64 * element.size() as u64,
        });
        return Argument::Tensor(Operand {
            storage: storages.len() - 1,
            element,
            view: View::contiguous(&sizes),
        });
    }
    if let Some(element) = element_type(token) {
        return Argument::Element(element);
    }
    let mut runtime = |kind| {
        *scalars += 1;
        Argument::Scalar(Scalar::Runtime {
            index: *scalars - 1,
            kind,
        })
    };
    match token {
        "-" | "" => return Argument::None,
        "_" => return Argument::Opaque,
        "?f" => return runtime(Kind::Float),
        "?i" => return runtime(Kind::Int),
        _ => {}
    }
    let (first, rest) = token.split_at(1);
    match first {
        "s" => Argument::Scalar(Scalar::Constant(match rest.parse() {
            Ok(number) => Number::Int(number),
            Err(_) => Number::Float(rest.parse().unwrap()),
        })),
        "b" => Argument::Bool(rest == "1"),
        "n" => Argument::Int(rest.parse().unwrap()),
        "x" => Argument::Float(rest.parse().unwrap()),
        "[" => Argument::Ints(integers(rest.strip_suffix(']').unwrap())),
        "\"" => Argument::Text(rest.trim_end_matches('"').into()),
        _ => panic!("what is {token:?}?"),
    }
}

fn result(token: &str, arguments: &[Argument]) -> Option<ResultType> {
    if token == "-" {
        return None;
    }
    if let Some((element, sizes)) = tensor(token) {
        return Some(ResultType {
            element,
            view: View::contiguous(&sizes),
            destination: Destination::New,
        });
    }
    // `@1.0` is the first tensor of a list that is argument 1.
    let place = token
        .strip_prefix('@')
        .expect("a result is a tensor, @ or -");
    let (argument, item) = place.split_once('.').unwrap_or((place, "0"));
    let operand = match &arguments[argument.parse::<usize>().unwrap()] {
        Argument::Tensor(operand) => operand,
        Argument::Tensors(operands) => operands[item.parse::<usize>().unwrap()].as_ref().unwrap(),
        other => panic!("{other:?} is no tensor"),
    };
    Some(ResultType {
        element: operand.element,
        view: operand.view.clone(),
        destination: Destination::Into {
            storage: operand.storage,
            view: operand.view.clone(),
        },
    })
}
