//! Programs as text, one operation a line.

use std::fmt::{self, Write};

use super::element::Element;
use super::{Grid, LowerError};
use crate::DType;
use crate::op::ReduceKind;

/// A tensor type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Type {
    element: Element,
    sides: Vec<u64>,
}

impl Type {
    pub(super) fn line(element: Element, count: u64) -> Type {
        Type {
            element,
            sides: vec![count],
        }
    }

    pub(super) fn scalar(element: Element) -> Type {
        Type {
            element,
            sides: Vec::new(),
        }
    }

    fn with(&self, element: Element) -> Type {
        Type {
            element,
            sides: self.sides.clone(),
        }
    }

    /// Elements of a line.
    fn count(&self) -> u64 {
        self.sides.iter().product()
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensor<")?;
        for side in &self.sides {
            write!(f, "{side}x")?;
        }
        write!(f, "{}>", self.element.name())
    }
}

/// A result of an operation, or an argument.
#[derive(Clone, Debug)]
pub(super) struct Value {
    name: String,
    ty: Type,
}

impl Value {
    pub(super) fn element(&self) -> Element {
        self.ty.element
    }
}

/// The groups of a collective: of equal size, naming every partition once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Groups(Vec<Vec<u32>>);

impl Groups {
    pub(super) fn new(groups: &[Vec<u32>]) -> Result<Groups, LowerError> {
        let fail = |message| Err(LowerError::Groups(message));
        let size = groups.first().map_or(0, Vec::len);
        if size == 0 {
            return fail("expected at least one rank, got none".to_owned());
        }
        if let Some(other) = groups.iter().map(Vec::len).find(|&other| other != size) {
            return fail(format!(
                "expected groups of equal size, got {size} and {other} ranks"
            ));
        }
        let partitions = size * groups.len();
        let mut seen = vec![false; partitions];
        for &partition in groups.iter().flatten() {
            match seen.get_mut(partition as usize) {
                None => {
                    return fail(format!(
                        "expected partitions below {partitions}, got {partition}"
                    ));
                }
                Some(true) => return fail(format!("partition {partition} is named twice")),
                Some(seen) => *seen = true,
            }
        }
        Ok(Groups(groups.to_vec()))
    }

    pub(super) fn size(&self) -> usize {
        self.0[0].len()
    }

    pub(super) fn partitions(&self) -> u32 {
        self.0.iter().map(Vec::len).sum::<usize>() as u32
    }

    /// For each side of the grid that the ranks of a group fill, the fastest first: the
    /// groups of ranks that differ in that dimension only.
    pub(super) fn lines(&self, grid: &Grid) -> Vec<Groups> {
        let mut lines = Vec::new();
        let mut stride = 1;
        for &side in grid.sides().iter().filter(|&&side| side > 1) {
            let side = side as usize;
            let mut line = Vec::new();
            for group in &self.0 {
                let at = |place: usize| group[grid.order()[place] as usize];
                let starts = (0..group.len()).filter(|place| place / stride % side == 0);
                line.extend(starts.map(|start| {
                    (0..side)
                        .map(|step| at(start + step * stride))
                        .collect::<Vec<u32>>()
                }));
            }
            lines.push(Groups(line));
            stride *= side;
        }
        if lines.is_empty() {
            lines.push(self.clone());
        }
        lines
    }
}

/// As an attribute.
impl fmt::Display for Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A list of lists has the same form in MLIR.
        write!(
            f,
            "dense<{:?}> : tensor<{}x{}xi64>",
            self.0,
            self.0.len(),
            self.size()
        )
    }
}

/// The function that a program consists of.
pub(super) struct Body {
    arguments: Vec<Value>,
    lines: String,
    values: usize,
    channels: usize,
}

impl Body {
    pub(super) fn new() -> Body {
        Body {
            arguments: Vec::new(),
            lines: String::new(),
            values: 0,
            channels: 0,
        }
    }

    pub(super) fn argument(&mut self, ty: Type) -> Value {
        let value = Value {
            name: format!("%arg{}", self.arguments.len()),
            ty,
        };
        self.arguments.push(value.clone());
        value
    }

    /// The whole program, which returns `result`.
    pub(super) fn finish(self, name: &str, partitions: u32, result: &Value) -> String {
        let arguments: Vec<String> = self
            .arguments
            .iter()
            .map(|value| format!("{}: {}", value.name, value.ty))
            .collect();
        format!(
            "module @{name} attributes {{mhlo.num_partitions = {partitions} : i32, \
             mhlo.num_replicas = 1 : i32}} {{\n  \
             func.func public @main({}) -> {} {{\n{}    return {} : {}\n  }}\n}}\n",
            arguments.join(", "),
            result.ty,
            self.lines,
            result.name,
            result.ty,
        )
    }

    /// Adds an operation in generic or short form, without its result.
    fn push(&mut self, ty: Type, operation: &str) -> Value {
        let name = format!("%{}", self.values);
        self.values += 1;
        writeln!(self.lines, "    {name} = {operation}").expect("a string can be written to");
        Value { name, ty }
    }

    fn channel(&mut self) -> usize {
        self.channels += 1;
        self.channels
    }

    fn constant(&mut self, literal: &str, ty: Type) -> Value {
        let operation = format!("stablehlo.constant dense<{literal}> : {ty}");
        self.push(ty, &operation)
    }

    pub(super) fn zeros_like(&mut self, value: &Value) -> Value {
        self.constant(value.element().zero(), value.ty.clone())
    }

    /// The values in another type.
    pub(super) fn convert(&mut self, value: &Value, to: Element) -> Value {
        if value.element() == to {
            return value.clone();
        }
        let ty = value.ty.with(to);
        let operation = format!("stablehlo.convert {} : ({}) -> {ty}", value.name, value.ty);
        self.push(ty, &operation)
    }

    /// The bits in another type of the same size.
    pub(super) fn bitcast(&mut self, value: &Value, to: Element) -> Value {
        // A truth value has no whole byte.
        if value.element().is_bool() || to.is_bool() {
            return self.convert(value, to);
        }
        if value.element() == to {
            return value.clone();
        }
        let ty = value.ty.with(to);
        let operation = format!(
            "stablehlo.bitcast_convert {} : ({}) -> {ty}",
            value.name, value.ty
        );
        self.push(ty, &operation)
    }

    fn reshape(&mut self, value: &Value, sides: Vec<u64>) -> Value {
        let ty = Type {
            element: value.element(),
            sides,
        };
        let operation = format!("stablehlo.reshape {} : ({}) -> {ty}", value.name, value.ty);
        self.push(ty, &operation)
    }

    /// Elements `start` to `end` of a line.
    pub(super) fn slice(&mut self, value: &Value, start: u64, end: u64) -> Value {
        if start == 0 && end == value.ty.count() {
            return value.clone();
        }
        let ty = Type::line(value.element(), end - start);
        let operation = format!(
            "stablehlo.slice {} [{start}:{end}] : ({}) -> {ty}",
            value.name, value.ty
        );
        self.push(ty, &operation)
    }

    /// Joins values along a dimension.
    fn concatenate(&mut self, values: &[Value], dimension: usize) -> Value {
        if let [value] = values {
            return value.clone();
        }
        let mut ty = values[0].ty.clone();
        ty.sides[dimension] = values.iter().map(|value| value.ty.sides[dimension]).sum();
        let names: Vec<_> = values.iter().map(|value| value.name.as_str()).collect();
        let types: Vec<_> = values.iter().map(|value| value.ty.to_string()).collect();
        let operation = format!(
            "stablehlo.concatenate {}, dim = {dimension} : ({}) -> {ty}",
            names.join(", "),
            types.join(", ")
        );
        self.push(ty, &operation)
    }

    /// The pieces of a line, each lengthened to `largest` elements by zeros.
    pub(super) fn spread(&mut self, value: &Value, pieces: &[u64], largest: u64) -> Value {
        if pieces.iter().all(|&piece| piece == largest) {
            return value.clone();
        }
        let zero = self.constant(value.element().zero(), Type::scalar(value.element()));
        let mut start = 0;
        let mut parts = Vec::with_capacity(pieces.len());
        for &piece in pieces {
            let part = self.slice(value, start, start + piece);
            start += piece;
            let ty = Type::line(value.element(), largest);
            let operation = format!(
                "stablehlo.pad {}, {}, low = [0], high = [{}], interior = [0] : ({}, {}) -> {ty}",
                part.name,
                zero.name,
                largest - piece,
                part.ty,
                zero.ty,
            );
            parts.push(if piece == largest {
                part
            } else {
                self.push(ty, &operation)
            });
        }
        self.concatenate(&parts, 0)
    }

    /// The pieces at the starts of runs of `largest` elements, one after the other.
    pub(super) fn collect(&mut self, value: &Value, pieces: &[u64], largest: u64) -> Value {
        if pieces.iter().all(|&piece| piece == largest) {
            return value.clone();
        }
        let parts: Vec<Value> = pieces
            .iter()
            .enumerate()
            .filter(|&(_, &piece)| piece > 0)
            .map(|(number, &piece)| {
                let start = number as u64 * largest;
                self.slice(value, start, start + piece)
            })
            .collect();
        self.concatenate(&parts, 0)
    }

    /// The equal pieces of a line in another order.
    pub(super) fn reorder(&mut self, value: &Value, order: &[u32]) -> Value {
        let count = value.ty.count();
        let size = count / order.len() as u64;
        let rows = self.reshape(value, vec![order.len() as u64, size]);
        let index = Type::line(Element::of(DType::I32), order.len() as u64);
        let order = self.constant(&format!("{order:?}"), index);
        let operation = format!(
            "\"stablehlo.gather\"({}, {}) {{dimension_numbers = #stablehlo.gather<offset_dims = [1], \
             collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, \
             slice_sizes = array<i64: 1, {size}>}} : ({}, {}) -> {}",
            rows.name, order.name, rows.ty, order.ty, rows.ty
        );
        let rows = self.push(rows.ty.clone(), &operation);
        self.reshape(&rows, vec![count])
    }

    /// The real parts of each of `pieces` equal pieces, then its imaginary parts. Others are left
    /// as they are.
    pub(super) fn as_real(&mut self, value: &Value, pieces: u64) -> Value {
        if !value.element().is_complex() {
            return value.clone();
        }
        let count = value.ty.count();
        let real = value.ty.with(value.element().real());
        let parts = ["real", "imag"].map(|part| {
            let operation = format!("stablehlo.{part} {} : ({}) -> {real}", value.name, value.ty);
            let part = self.push(real.clone(), &operation);
            self.reshape(&part, vec![pieces, count / pieces])
        });
        let joined = self.concatenate(&parts, 1);
        self.reshape(&joined, vec![2 * count])
    }

    /// One piece of [`Body::as_real`] as what it was.
    pub(super) fn as_complex(&mut self, value: &Value, element: Element) -> Value {
        if !element.is_complex() {
            return value.clone();
        }
        let count = value.ty.count() / 2;
        let real = self.slice(value, 0, count);
        let imaginary = self.slice(value, count, 2 * count);
        let ty = Type::line(element, count);
        let operation = format!("stablehlo.complex {}, {} : {ty}", real.name, imaginary.name);
        self.push(ty, &operation)
    }

    /// `value` times a scalar.
    pub(super) fn scale(&mut self, value: &Value, factor: &Value) -> Value {
        let operation = format!(
            "stablehlo.broadcast_in_dim {}, dims = [] : ({}) -> {}",
            factor.name, factor.ty, value.ty
        );
        let factors = self.push(value.ty.clone(), &operation);
        self.binary("multiply", value, &factors)
    }

    /// `value` divided by a number of ranks; integers truncate.
    pub(super) fn divide(&mut self, value: &Value, ranks: u64) -> Value {
        let wide = self.convert(value, value.element().divisible());
        let literal = if wide.element().is_float() {
            format!("{ranks}.0")
        } else {
            ranks.to_string()
        };
        let divisor = self.constant(&literal, wide.ty.clone());
        let quotient = self.binary("divide", &wide, &divisor);
        self.convert(&quotient, value.element())
    }

    fn binary(&mut self, name: &str, a: &Value, b: &Value) -> Value {
        let operation = format!("stablehlo.{name} {}, {} : {}", a.name, b.name, a.ty);
        self.push(a.ty.clone(), &operation)
    }

    pub(super) fn select(&mut self, which: &Value, yes: &Value, no: &Value) -> Value {
        let operation = format!(
            "stablehlo.select {}, {}, {} : {}, {}",
            which.name, yes.name, no.name, which.ty, yes.ty
        );
        self.push(yes.ty.clone(), &operation)
    }

    /// The root's rank and this rank's, as arguments.
    pub(super) fn root_and_rank(&mut self) -> [Value; 2] {
        let ty = Type::scalar(Element::of(DType::I32));
        [(); 2].map(|()| self.argument(ty.clone()))
    }

    /// Whether two scalars are equal.
    pub(super) fn equal(&mut self, a: &Value, b: &Value) -> Value {
        let ty = Type::scalar(Element::of(DType::Bool));
        let operation = format!(
            "stablehlo.compare EQ, {}, {} : ({}, {}) -> {ty}",
            a.name, b.name, a.ty, b.ty
        );
        self.push(ty, &operation)
    }

    /// Piece `number` of a line of pieces of `count` elements.
    pub(super) fn piece(&mut self, value: &Value, number: &Value, count: u64) -> Value {
        let size = self.constant(&count.to_string(), number.ty.clone());
        let start = self.binary("multiply", number, &size);
        let ty = Type::line(value.element(), count);
        let operation = format!(
            "stablehlo.dynamic_slice {}, {}, sizes = [{count}] : ({}, {}) -> {ty}",
            value.name, start.name, value.ty, start.ty
        );
        self.push(ty, &operation)
    }

    /// The region that combines two elements.
    fn combiner(element: Element, op: ReduceKind) -> String {
        let ty = Type::scalar(element);
        format!(
            "({{\n    ^bb0(%a: {ty}, %b: {ty}):\n      %c = stablehlo.{} %a, %b : {ty}\n      \
             stablehlo.return %c : {ty}\n    }})",
            operator(op)
        )
    }

    pub(super) fn all_reduce(&mut self, value: &Value, op: ReduceKind, groups: &Groups) -> Value {
        let channel = self.channel();
        let operation = format!(
            "\"stablehlo.all_reduce\"({}) {} {{channel_handle = #stablehlo.channel_handle<handle = \
             {channel}, type = 1>, replica_groups = {groups}, use_global_device_ids}} : ({}) -> {}",
            value.name,
            Body::combiner(value.element(), op),
            value.ty,
            value.ty
        );
        self.push(value.ty.clone(), &operation)
    }

    /// Reduces a line and leaves each rank its part.
    pub(super) fn reduce_scatter(
        &mut self,
        value: &Value,
        op: ReduceKind,
        groups: &Groups,
    ) -> Value {
        let channel = self.channel();
        let ty = Type::line(value.element(), value.ty.count() / groups.size() as u64);
        let operation = format!(
            "\"stablehlo.reduce_scatter\"({}) {} {{channel_handle = \
             #stablehlo.channel_handle<handle = {channel}, type = 1>, replica_groups = {groups}, \
             scatter_dimension = 0 : i64, use_global_device_ids}} : ({}) -> {ty}",
            value.name,
            Body::combiner(value.element(), op),
            value.ty,
        );
        self.push(ty, &operation)
    }

    pub(super) fn all_gather(&mut self, value: &Value, groups: &Groups) -> Value {
        let channel = self.channel();
        let ty = Type::line(value.element(), value.ty.count() * groups.size() as u64);
        let operation = format!(
            "\"stablehlo.all_gather\"({}) {{all_gather_dim = 0 : i64, channel_handle = \
             #stablehlo.channel_handle<handle = {channel}, type = 1>, replica_groups = {groups}, \
             use_global_device_ids}} : ({}) -> {ty}",
            value.name, value.ty,
        );
        self.push(ty, &operation)
    }

    pub(super) fn all_to_all(&mut self, value: &Value, groups: &Groups) -> Value {
        let channel = self.channel();
        let operation = format!(
            "\"stablehlo.all_to_all\"({}) {{channel_handle = #stablehlo.channel_handle<handle = \
             {channel}, type = 1>, concat_dimension = 0 : i64, replica_groups = {groups}, \
             split_count = {} : i64, split_dimension = 0 : i64}} : ({}) -> {}",
            value.name,
            groups.size(),
            value.ty,
            value.ty,
        );
        self.push(value.ty.clone(), &operation)
    }

    pub(super) fn permute(&mut self, value: &Value, pairs: &[(u32, u32)]) -> Value {
        let channel = self.channel();
        let list: Vec<[u32; 2]> = pairs.iter().map(|&(from, to)| [from, to]).collect();
        let list = if list.is_empty() {
            String::new()
        } else {
            format!("{list:?}")
        };
        let operation = format!(
            "\"stablehlo.collective_permute\"({}) {{channel_handle = \
             #stablehlo.channel_handle<handle = {channel}, type = 1>, source_target_pairs = \
             dense<{list}> : tensor<{}x2xi64>}} : ({}) -> {}",
            value.name,
            pairs.len(),
            value.ty,
            value.ty,
        );
        self.push(value.ty.clone(), &operation)
    }

    pub(super) fn ragged_all_to_all(
        &mut self,
        data: &Value,
        result: &Value,
        sizes: &[Value],
        groups: &Groups,
    ) -> Value {
        let channel = self.channel();
        let values = || [data, result].into_iter().chain(sizes);
        let names: Vec<_> = values().map(|value| value.name.as_str()).collect();
        let types: Vec<_> = values().map(|value| value.ty.to_string()).collect();
        let operation = format!(
            "stablehlo.custom_call @ragged_all_to_all({}) {{api_version = 4 : i32, backend_config = \
             {{channel_id = {channel} : i64, replica_groups = {groups}}}}} : ({}) -> {}",
            names.join(", "),
            types.join(", "),
            result.ty,
        );
        self.push(result.ty.clone(), &operation)
    }

    /// Reduces `ranks` equal pieces of a line in their order.
    pub(super) fn reduce(&mut self, value: &Value, op: ReduceKind, ranks: u64) -> Value {
        let count = value.ty.count() / ranks;
        let mut total = self.slice(value, 0, count);
        for rank in 1..ranks {
            let piece = self.slice(value, rank * count, (rank + 1) * count);
            total = self.binary(operator(op), &total, &piece);
        }
        total
    }
}

/// StableHLO's name for an operator. On truth values `add` is or and `multiply` is and.
fn operator(op: ReduceKind) -> &'static str {
    match op {
        ReduceKind::Sum | ReduceKind::Avg | ReduceKind::PremulSum => "add",
        ReduceKind::Product => "multiply",
        ReduceKind::Min => "minimum",
        ReduceKind::Max => "maximum",
        ReduceKind::BitAnd => "and",
        ReduceKind::BitOr => "or",
        ReduceKind::BitXor => "xor",
    }
}
