//! c10d's store as the runtime's.

use std::time::Duration;

use tpu_dist_runtime::{Error, Store};

use crate::bridge::ffi;

/// A c10d store.
pub(crate) struct C10dStore(cxx::UniquePtr<ffi::Store>);

// SAFETY: c10d stores may be used from several threads: each guards its connection
// with a lock.
unsafe impl Send for C10dStore {}
// SAFETY: as above.
unsafe impl Sync for C10dStore {}

impl C10dStore {
    pub(crate) fn new(store: cxx::UniquePtr<ffi::Store>) -> C10dStore {
        C10dStore(store)
    }
}

fn error(exception: cxx::Exception) -> Error {
    Error::Store(exception.what().to_owned())
}

impl Store for C10dStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        self.0.set(key, value).map_err(error)
    }

    fn multi_get(&self, keys: &[String], timeout: Duration) -> Result<Vec<Vec<u8>>, Error> {
        let timeout_ms = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
        let values = self
            .0
            .multi_get(&keys.to_vec(), timeout_ms)
            .map_err(error)?;
        Ok(values.into_iter().map(|value| value.bytes).collect())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, Error> {
        self.0.add(key, amount).map_err(error)
    }

    fn present(&self, keys: &[String]) -> Result<Vec<bool>, Error> {
        let present = self.0.present(&keys.to_vec()).map_err(error)?;
        Ok(present.into_iter().map(|byte| byte != 0).collect())
    }
}
