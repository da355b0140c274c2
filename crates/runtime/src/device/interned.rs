//! Types of buffers, as small numbers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::lock;
use crate::pjrt::ElementType;

/// Element type and dimensions of a buffer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct BufferType {
    pub(super) element: ElementType,
    pub(super) dims: Vec<i64>,
}

/// Stands for a [`BufferType`]: equal where the types are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TypeId(u32);

impl TypeId {
    pub(super) const fn number(self) -> u64 {
        self.0 as u64
    }
}

#[derive(Default)]
struct Types {
    ids: HashMap<Arc<BufferType>, TypeId>,
    types: Vec<Arc<BufferType>>,
}

static TYPES: Mutex<Option<Types>> = Mutex::new(None);

/// The number of a type.
pub(super) fn id(of: BufferType) -> TypeId {
    let mut types = lock(&TYPES);
    let types = types.get_or_insert_default();
    if let Some(id) = types.ids.get(&of) {
        return *id;
    }
    let id = TypeId(types.types.len() as u32);
    let of = Arc::new(of);
    types.types.push(Arc::clone(&of));
    types.ids.insert(of, id);
    id
}

/// The type of a number that [`id`] gave.
pub(super) fn get(id: TypeId) -> Arc<BufferType> {
    let mut types = lock(&TYPES);
    Arc::clone(&types.get_or_insert_default().types[id.0 as usize])
}
