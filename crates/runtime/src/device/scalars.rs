//! Numbers that programs get when they run.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

use lru::LruCache;
use smallvec::SmallVec;

use super::{Error, lock};
use crate::aten::Number;
use crate::executor::Executor;
use crate::pjrt::{Buffer, ElementType};

type Bytes = SmallVec<[u8; 16]>;

const KEPT: NonZeroUsize = NonZeroUsize::new(512).expect("not zero");

/// Buffers of numbers. Hyperparameters come again in every step.
#[derive(Debug)]
pub(super) struct Scalars(Mutex<LruCache<(ElementType, Bytes), Arc<Buffer>>>);

impl Default for Scalars {
    fn default() -> Scalars {
        Scalars(Mutex::new(LruCache::new(KEPT)))
    }
}

impl Scalars {
    pub(super) fn get(
        &self,
        executor: &Executor,
        number: Number,
        element: ElementType,
    ) -> Result<Arc<Buffer>, Error> {
        let key = (element, bytes(number, element));
        if let Some(buffer) = lock(&self.0).get(&key) {
            return Ok(Arc::clone(buffer));
        }
        let buffer = Arc::new(executor.upload(&key.1, element, &[])?);
        let _old = lock(&self.0).push(key, Arc::clone(&buffer));
        Ok(buffer)
    }
}

/// `number` as an element, in the machine's byte order.
fn bytes(number: Number, element: ElementType) -> Bytes {
    let (real, imaginary) = match number {
        Number::Bool(value) => (f64::from(u8::from(value)), 0.0),
        Number::Int(value) => (value as f64, 0.0),
        Number::Float(value) => (value, 0.0),
        Number::Complex(real, imaginary) => (real, imaginary),
    };
    let integer = match number {
        Number::Int(value) => value,
        Number::Bool(value) => i64::from(value),
        _ => real as i64,
    };
    match element {
        ElementType::Pred => Bytes::from_slice(&[u8::from(real != 0.0)]),
        ElementType::S64 => Bytes::from_slice(&integer.to_ne_bytes()),
        ElementType::F64 => Bytes::from_slice(&real.to_ne_bytes()),
        ElementType::C64 => [real, imaginary]
            .iter()
            .flat_map(|part| (*part as f32).to_ne_bytes())
            .collect(),
        ElementType::C128 => [real, imaginary]
            .iter()
            .flat_map(|part| part.to_ne_bytes())
            .collect(),
        _ => Bytes::from_slice(&(real as f32).to_ne_bytes()),
    }
}
