//! Options handed to a plugin and attributes it reports.

use std::collections::BTreeMap;
use std::slice;

use super::sys::{self, named_value_kind as kind};

/// An option or attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Text.
    String(String),
    /// A number.
    Int(i64),
    /// Numbers, coordinates for example.
    IntList(Vec<i64>),
    /// A number.
    Float(f32),
    /// A switch.
    Bool(bool),
}

impl From<&str> for Value {
    fn from(value: &str) -> Value {
        Value::String(value.to_string())
    }
}

impl From<i64> for Value {
    fn from(value: i64) -> Value {
        Value::Int(value)
    }
}

impl From<Vec<i64>> for Value {
    fn from(value: Vec<i64>) -> Value {
        Value::IntList(value)
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Value {
        Value::Bool(value)
    }
}

/// Attributes by name.
pub type Attributes = BTreeMap<String, Value>;

/// PJRT's form of `options`, which the result points into.
pub(super) fn lower(options: &[(&str, Value)]) -> Vec<sys::NamedValue> {
    options
        .iter()
        .map(|(name, value)| {
            let mut lowered = sys::NamedValue::new();
            lowered.name = name.as_ptr().cast();
            lowered.name_size = name.len();
            lowered.value_size = 1;
            match value {
                Value::String(text) => {
                    lowered.kind = kind::STRING;
                    lowered.value.string = text.as_ptr().cast();
                    lowered.value_size = text.len();
                }
                Value::Int(number) => {
                    lowered.kind = kind::INT64;
                    lowered.value.int64 = *number;
                }
                Value::IntList(numbers) => {
                    lowered.kind = kind::INT64_LIST;
                    lowered.value.int64_list = numbers.as_ptr();
                    lowered.value_size = numbers.len();
                }
                Value::Float(number) => {
                    lowered.kind = kind::FLOAT;
                    lowered.value.float = *number;
                }
                Value::Bool(switch) => {
                    lowered.kind = kind::BOOL;
                    lowered.value.boolean = *switch;
                }
            }
            lowered
        })
        .collect()
}

/// Copies attributes out of a plugin. Those of a kind this crate does not know are left
/// out.
///
/// # Safety
/// `values` points to `count` named values that stay valid during the call.
pub(super) unsafe fn read(values: *const sys::NamedValue, count: usize) -> Attributes {
    // SAFETY: the caller's promise.
    let values = unsafe { list(values, count) };
    values
        .iter()
        .filter_map(|raw| {
            // SAFETY: a named value names its text, and its kind says which member of
            // the union is set and what `value_size` counts.
            let (name, value) = unsafe {
                let value = match raw.kind {
                    kind::STRING => Value::String(text(raw.value.string, raw.value_size)),
                    kind::INT64 => Value::Int(raw.value.int64),
                    kind::INT64_LIST => {
                        Value::IntList(list(raw.value.int64_list, raw.value_size).to_vec())
                    }
                    kind::FLOAT => Value::Float(raw.value.float),
                    kind::BOOL => Value::Bool(raw.value.boolean),
                    _ => return None,
                };
                (text(raw.name, raw.name_size), value)
            };
            Some((name, value))
        })
        .collect()
}

/// A slice of `count` values, of which none need exist when `count` is 0.
///
/// # Safety
/// `first` points to `count` values that stay valid for `'a`.
pub(super) unsafe fn list<'a, T>(first: *const T, count: usize) -> &'a [T] {
    if count == 0 || first.is_null() {
        return &[];
    }
    // SAFETY: the caller's promise; plugins align what they hand out.
    unsafe { slice::from_raw_parts(first, count) }
}

/// Text of a plugin; bytes that are not UTF-8 are replaced.
///
/// # Safety
/// As [`list`], for the duration of the call.
pub(super) unsafe fn text(first: *const std::ffi::c_char, size: usize) -> String {
    // SAFETY: the caller's promise.
    String::from_utf8_lossy(unsafe { list(first.cast::<u8>(), size) }).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_round_trip() {
        let options = [
            ("text", Value::from("v5p:2x2x1")),
            ("empty", Value::from("")),
            ("number", Value::from(-3)),
            ("list", Value::from(vec![1, 2, 3])),
            ("no list", Value::from(Vec::new())),
            ("float", Value::Float(0.5)),
            ("switch", Value::from(true)),
        ];
        let lowered = lower(&options);
        // SAFETY: `lowered` and what it points into live until the end of the test.
        let read = unsafe { read(lowered.as_ptr(), lowered.len()) };
        assert_eq!(
            read,
            options
                .map(|(name, value)| (name.to_string(), value))
                .into()
        );
        assert!(lowered.iter().all(|value| value.struct_size == 56));
    }
}
