//! The key-value store through which processes find each other.

use std::time::Duration;

use crate::Error;

/// A store shared by the ranks of a group: c10d's, through the PyTorch boundary.
pub trait Store: Send + Sync {
    /// Sets `key`.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), Error>;

    /// Waits for all `keys` and returns their values in order, in one round trip where
    /// the store can.
    ///
    /// # Errors
    /// [`Error::Store`] when `timeout` runs out or the store is gone.
    fn multi_get(&self, keys: &[String], timeout: Duration) -> Result<Vec<Vec<u8>>, Error>;

    /// Which of `keys` exist, without waiting.
    fn present(&self, keys: &[String]) -> Result<Vec<bool>, Error>;
}
