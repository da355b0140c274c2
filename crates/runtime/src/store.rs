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

    /// Adds `amount` to the number at `key`, which begins at 0; returns the sum.
    fn add(&self, key: &str, amount: i64) -> Result<i64, Error>;

    /// Which of `keys` exist, without waiting.
    fn present(&self, keys: &[String]) -> Result<Vec<bool>, Error>;
}

/// A store in a directory that all ranks see: a file for each key. For programs without
/// PyTorch, such as the benchmarks.
#[derive(Clone, Debug)]
pub struct DirectoryStore(std::path::PathBuf);

impl DirectoryStore {
    /// A store in `directory`, which exists.
    pub fn new(directory: impl Into<std::path::PathBuf>) -> DirectoryStore {
        DirectoryStore(directory.into())
    }

    fn path(&self, key: &str) -> std::path::PathBuf {
        self.0.join(key.replace('/', "%"))
    }
}

impl Store for DirectoryStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        let path = self.path(key);
        let partial = path.with_extension("part");
        // Renaming shows the value whole or not at all.
        std::fs::write(&partial, value)
            .and_then(|()| std::fs::rename(&partial, &path))
            .map_err(|error| Error::Store(format!("{}: {error}", path.display())))
    }

    fn multi_get(&self, keys: &[String], timeout: Duration) -> Result<Vec<Vec<u8>>, Error> {
        let deadline = std::time::Instant::now() + timeout;
        let get = |key: &String| loop {
            match std::fs::read(self.path(key)) {
                Ok(value) => return Ok(value),
                Err(_) if std::time::Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => {
                    return Err(Error::Store(format!(
                        "{}: {error}",
                        self.path(key).display()
                    )));
                }
            }
        };
        keys.iter().map(get).collect()
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64, Error> {
        let path = self.path(key);
        let failed = |error: std::io::Error| Error::Store(format!("{}: {error}", path.display()));
        let mut file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(failed)?;
        file.lock().map_err(failed)?;
        let mut text = String::new();
        std::io::Read::read_to_string(&mut file, &mut text).map_err(failed)?;
        let sum = text.parse::<i64>().unwrap_or(0) + amount;
        std::os::unix::fs::FileExt::write_all_at(&file, sum.to_string().as_bytes(), 0)
            .map_err(failed)?;
        Ok(sum)
    }

    fn present(&self, keys: &[String]) -> Result<Vec<bool>, Error> {
        Ok(keys.iter().map(|key| self.path(key).exists()).collect())
    }
}
