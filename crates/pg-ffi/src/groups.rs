//! The groups of this process, for statistics.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tpu_dist_runtime::Communicator;

static GROUPS: Mutex<Vec<Weak<Communicator>>> = Mutex::new(Vec::new());

/// Remembers a group for as long as it lives.
pub(crate) fn register(group: &Arc<Communicator>) {
    let mut groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
    groups.retain(|group| group.strong_count() > 0);
    groups.push(Arc::downgrade(group));
}

/// What each live group of this process has done.
///
/// Returns a list of dictionaries, one for each group, kind of operation and transport:
/// `group` (its id), `size` (ranks), `kind`, `transport` ("shm", "tcp" or "self"),
/// `calls`, `bytes`, `written` and `seconds`.
#[pyfunction]
pub(crate) fn stats(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let groups: Vec<Arc<Communicator>> = {
        let groups = GROUPS.lock().unwrap_or_else(PoisonError::into_inner);
        groups.iter().filter_map(Weak::upgrade).collect()
    };
    let rows = PyList::empty(py);
    for group in groups {
        for stat in group.stats() {
            let row = PyDict::new(py);
            row.set_item("group", group.id())?;
            row.set_item("size", group.size())?;
            row.set_item("kind", stat.kind.name())?;
            row.set_item("transport", stat.transport)?;
            row.set_item("calls", stat.calls)?;
            row.set_item("bytes", stat.bytes)?;
            row.set_item("written", stat.written)?;
            row.set_item("seconds", stat.time.as_secs_f64())?;
            rows.append(row)?;
        }
    }
    Ok(rows)
}
