//! Compiled programs in a directory that processes share.
//!
//! One file an entry, named by its key. An entry is written under another name and
//! renamed when complete, and carries a checksum of all of itself: a reader, who takes no
//! lock, finds a whole entry or none. Writers hold a lock on the directory, so that what
//! is half-written while it is held by someone else belongs to a dead process.
//! Reading sets an entry's modification time, by which the oldest go first when the
//! directory is full.

use std::fs::{self, DirBuilder, File, FileTimes, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use super::key::Key;
use super::lock::ByteLock;

const MAGIC: &[u8; 8] = b"TPUDXC01";
const DIGEST: usize = blake3::OUT_LEN;
/// Magic, digest of all that follows it, key, length of the payload.
const HEADER: usize = MAGIC.len() + DIGEST + Key::LENGTH + 8;

const LOCK: &str = "lock";
const TOTAL: &str = "total";
const UNFINISHED: &str = "tmp-";

/// How long to wait for those who change the directory, which takes them milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);

/// What became of a look-up.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The payload that was stored.
    Entry(Vec<u8>),
    /// Nothing is stored.
    Nothing,
    /// What is stored is damaged, or another key's; it has been removed.
    Rejected,
}

/// What became of a payload to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    /// Entries removed to make room.
    pub(super) evicted: u64,
}

/// The directory.
#[derive(Debug)]
pub(super) struct Disk {
    directory: PathBuf,
    max_bytes: u64,
}

impl Disk {
    /// Opens a directory, making it if need be, for this user alone.
    pub(super) fn open(directory: &Path, max_bytes: u64) -> io::Result<Disk> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
        let directory = directory.canonicalize()?;
        Ok(Disk {
            directory,
            max_bytes,
        })
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.directory.join(key.to_string())
    }

    /// Looks `key` up.
    pub(super) fn get(&self, key: &Key) -> io::Result<Found> {
        let path = self.path(key);
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Found::Nothing),
            Err(error) => return Err(error),
        };
        match read_entry(&mut file, key)? {
            Some(payload) => {
                // Where the file system does not let us, the entry merely ages.
                let _ = file.set_times(FileTimes::new().set_modified(SystemTime::now()));
                Ok(Found::Entry(payload))
            }
            None => {
                self.remove(key)?;
                Ok(Found::Rejected)
            }
        }
    }

    /// Forgets `key`.
    pub(super) fn remove(&self, key: &Key) -> io::Result<()> {
        match fs::remove_file(self.path(key)) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Locks `key` against other processes that are about to make what it stands for;
    /// `None` when one still is after `timeout`.
    pub(super) fn lock(&self, key: &Key, timeout: Duration) -> io::Result<Option<ByteLock>> {
        let mut head = [0; 8];
        head.copy_from_slice(&key.as_bytes()[..8]);
        // Byte 0 is the directory's; a key's is any other.
        let byte = (u64::from_le_bytes(head) >> 2) as i64 + 1;
        ByteLock::acquire(&self.directory.join(LOCK), byte, timeout)
    }

    /// Stores `payload` under `key`, making room first. A payload larger than the
    /// directory may be is not stored.
    pub(super) fn put(&self, key: &Key, payload: &[u8]) -> io::Result<Stored> {
        let size = (HEADER + payload.len()) as u64;
        if size > self.max_bytes {
            return Err(io::Error::new(
                ErrorKind::FileTooLarge,
                format!("{size} bytes are more than the cache's {}", self.max_bytes),
            ));
        }
        let lock = ByteLock::acquire(&self.directory.join(LOCK), 0, PATIENCE)?;
        let Some(_lock) = lock else {
            return Err(io::Error::new(
                ErrorKind::TimedOut,
                "another process keeps the lock",
            ));
        };
        let mut evicted = 0;
        let mut total = self.total();
        if total.is_none_or(|total| total + size > self.max_bytes) {
            // With some room to spare, so that not every store has to look around.
            let room = self.max_bytes.saturating_sub(size.max(self.max_bytes / 16));
            let (left, removed) = self.shrink(room)?;
            total = Some(left);
            evicted = removed;
        }
        // Counted before it exists: a crash in between makes the total too large, which
        // the next look around corrects.
        self.set_total(total.unwrap_or(0) + size)?;
        let digest = digest(key, payload);
        let length = (payload.len() as u64).to_le_bytes();
        let parts: [&[u8]; 5] = [MAGIC, &digest, key.as_bytes(), &length, payload];
        self.replace(&self.path(key), &parts)?;
        Ok(Stored { evicted })
    }

    /// A hash of the file `path`, remembered for as long as nothing about the file
    /// changes: hashing a plugin takes a tenth of a second or more.
    pub(super) fn hash_of(&self, path: &Path) -> io::Result<blake3::Hash> {
        let meta = fs::metadata(path)?;
        let identity = format!(
            "{} {} {} {} {}.{} {}.{}",
            path.display(),
            meta.dev(),
            meta.ino(),
            meta.len(),
            meta.mtime(),
            meta.mtime_nsec(),
            meta.ctime(),
            meta.ctime_nsec()
        );
        let name = blake3::hash(identity.as_bytes());
        let memory = self.directory.join(format!("file-{}", name.to_hex()));
        let check = |hash: &[u8]| blake3::keyed_hash(name.as_bytes(), hash);
        if let Ok(bytes) = fs::read(&memory)
            && let Some((hash, digest)) = bytes.split_first_chunk::<DIGEST>()
            && check(hash).as_bytes()[..] == *digest
        {
            return Ok(blake3::Hash::from_bytes(*hash));
        }
        let hash = hash_file(path)?;
        self.replace(
            &memory,
            &[hash.as_bytes(), check(hash.as_bytes()).as_bytes()],
        )?;
        Ok(hash)
    }

    /// Writes a file whole or not at all.
    fn replace(&self, path: &Path, parts: &[&[u8]]) -> io::Result<()> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let unique = COUNTER.fetch_add(1, Ordering::Relaxed);
        let unfinished = self
            .directory
            .join(format!("{UNFINISHED}{}-{unique}", process::id()));
        let write = || {
            let mut file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&unfinished)?;
            for part in parts {
                file.write_all(part)?;
            }
            // Not synchronised to the medium: what a power failure spoils, the checksum
            // finds.
            drop(file);
            fs::rename(&unfinished, path)
        };
        let written = write();
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        written
    }

    /// The bytes of all entries, as those who changed the directory left it; never too
    /// small. `None` when it has to be counted anew.
    fn total(&self) -> Option<u64> {
        let bytes = fs::read(self.directory.join(TOTAL)).ok()?;
        let (total, check) = bytes.split_first_chunk::<8>()?;
        let total = u64::from_le_bytes(*total);
        (check == (!total).to_le_bytes()).then_some(total)
    }

    fn set_total(&self, total: u64) -> io::Result<()> {
        let bytes = [total.to_le_bytes(), (!total).to_le_bytes()];
        fs::write(self.directory.join(TOTAL), bytes.as_flattened())
    }

    /// Counts the entries, and removes the oldest until `room` holds the rest, and what
    /// dead processes left half-written. Returns the bytes left and entries removed. Call
    /// with the directory locked.
    fn shrink(&self, room: u64) -> io::Result<(u64, u64)> {
        let mut entries = Vec::new();
        let mut total = 0;
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(UNFINISHED) {
                let _ = fs::remove_file(entry.path());
            } else if name.len() == 2 * Key::LENGTH && name.bytes().all(|b| b.is_ascii_hexdigit()) {
                // It may be gone already: a reader removes damaged entries.
                if let Ok(meta) = entry.metadata() {
                    total += meta.len();
                    entries.push((meta.mtime(), meta.mtime_nsec(), meta.len(), entry.path()));
                }
            }
        }
        entries.sort_unstable();
        let mut removed = 0;
        for (.., size, path) in entries {
            if total <= room {
                break;
            }
            fs::remove_file(path).or_else(|error| match error.kind() {
                ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })?;
            total -= size;
            removed += 1;
        }
        Ok((total, removed))
    }
}

/// A hash of a file's contents.
pub(super) fn hash_file(path: &Path) -> io::Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(File::open(path)?)?;
    Ok(hasher.finalize())
}

fn digest(key: &Key, payload: &[u8]) -> [u8; DIGEST] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(key.as_bytes());
    hasher.update(&(payload.len() as u64).to_le_bytes());
    hasher.update(payload);
    *hasher.finalize().as_bytes()
}

/// The payload of an entry, when `file` is a whole one for `key`.
fn read_entry(file: &mut File, key: &Key) -> io::Result<Option<Vec<u8>>> {
    let size = file.metadata()?.len();
    let Some(length) = size.checked_sub(HEADER as u64) else {
        return Ok(None);
    };
    let mut header = [0; HEADER];
    file.read_exact(&mut header)?;
    let (magic, rest) = header.split_at(MAGIC.len());
    let (expected, rest) = rest.split_at(DIGEST);
    let (stored_key, stored_length) = rest.split_at(Key::LENGTH);
    if magic != MAGIC || stored_key != key.as_bytes() || stored_length != length.to_le_bytes() {
        return Ok(None);
    }
    let mut payload = Vec::with_capacity(length as usize);
    file.read_to_end(&mut payload)?;
    Ok((digest(key, &payload) == *expected).then_some(payload))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::thread;

    use super::super::key::KeyBuilder;
    use super::*;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("disk-{name}-{}", process::id()));
            let _ = fs::remove_dir_all(&path);
            Scratch(path)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap();
            entries
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn key(n: u64) -> Key {
        KeyBuilder::new().part(&n.to_le_bytes()).finish()
    }

    #[test]
    fn gives_back_what_was_stored() {
        let scratch = Scratch::new("gives");
        let disk = Disk::open(&scratch.0, 1 << 20).unwrap();
        assert_eq!(
            fs::metadata(&scratch.0).unwrap().permissions().mode() & 0o777,
            0o700
        );
        assert_eq!(disk.get(&key(1)).unwrap(), Found::Nothing);
        for payload in [&b""[..], b"program", &[7; 100_000]] {
            disk.put(&key(1), payload).unwrap();
            assert_eq!(disk.get(&key(1)).unwrap(), Found::Entry(payload.to_vec()));
            let again = Disk::open(&scratch.0, 1 << 20).unwrap();
            assert_eq!(again.get(&key(1)).unwrap(), Found::Entry(payload.to_vec()));
        }
        assert_eq!(disk.get(&key(2)).unwrap(), Found::Nothing);
        disk.remove(&key(1)).unwrap();
        disk.remove(&key(1)).unwrap();
        assert_eq!(disk.get(&key(1)).unwrap(), Found::Nothing);
    }

    #[test]
    fn every_damaged_byte_and_every_truncation_is_found() {
        let scratch = Scratch::new("damaged");
        let disk = Disk::open(&scratch.0, 1 << 20).unwrap();
        let payload: Vec<u8> = (0..200u8).collect();
        disk.put(&key(1), &payload).unwrap();
        let path = disk.path(&key(1));
        let whole = fs::read(&path).unwrap();
        assert_eq!(whole.len(), HEADER + payload.len());
        let rejected = |bytes: &[u8], what: &str| {
            fs::write(&path, bytes).unwrap();
            assert_eq!(disk.get(&key(1)).unwrap(), Found::Rejected, "{what}");
            assert!(!path.exists(), "{what} was left");
        };
        for index in 0..whole.len() {
            for flip in [1, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[index] ^= flip;
                rejected(&bytes, &format!("byte {index} ^ {flip}"));
            }
            rejected(&whole[..index], &format!("the first {index} bytes"));
        }
        rejected(&[&whole[..], &[0]].concat(), "one byte more");
        rejected(&vec![0; whole.len()], "zeros");
        // A header that promises more memory than there is.
        let mut bytes = whole.clone();
        bytes[HEADER - 8..HEADER].fill(0xff);
        rejected(&bytes, "a huge length");
        // Another key's entry under this name.
        disk.put(&key(2), &payload).unwrap();
        fs::rename(disk.path(&key(2)), &path).unwrap();
        assert_eq!(disk.get(&key(1)).unwrap(), Found::Rejected);
        fs::write(&path, &whole).unwrap();
        assert_eq!(disk.get(&key(1)).unwrap(), Found::Entry(payload));
    }

    #[test]
    fn the_longest_unused_go_first() {
        let scratch = Scratch::new("oldest");
        let entry = HEADER as u64 + 1000;
        let disk = Disk::open(&scratch.0, 10 * entry).unwrap();
        let payload = [1; 1000];
        let age = |n: u64, seconds: u64| {
            let file = File::open(disk.path(&key(n))).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(seconds))
                .unwrap();
        };
        for n in 0..10 {
            assert_eq!(disk.put(&key(n), &payload).unwrap().evicted, 0);
            age(n, 1000 - n);
        }
        // Used again, so no longer the oldest.
        assert!(matches!(disk.get(&key(0)).unwrap(), Found::Entry(_)));
        fs::write(scratch.0.join("tmp-1-1"), "left by a dead process").unwrap();
        fs::write(scratch.0.join("README"), "not ours").unwrap();
        let evicted = disk.put(&key(10), &payload).unwrap().evicted;
        assert!((1..=2).contains(&evicted), "{evicted}");
        let kept: Vec<_> = (0..=10)
            .filter(|n| disk.get(&key(*n)).unwrap() != Found::Nothing)
            .collect();
        let expected: Vec<_> = (0..=10).filter(|n| !(1..=evicted).contains(n)).collect();
        assert_eq!(kept, expected);
        assert!(!scratch.names().iter().any(|name| name.starts_with("tmp-")));
        assert!(scratch.0.join("README").exists());

        // Whatever happens to the count, the bound holds.
        for spoiled in [&b""[..], b"too long to be a count", &[0; 16]] {
            fs::write(scratch.0.join(TOTAL), spoiled).unwrap();
            for n in 100..130 {
                disk.put(&key(n), &payload).unwrap();
                let sizes = scratch.names().into_iter().filter(|name| name.len() == 64);
                let total: u64 = sizes
                    .map(|name| fs::metadata(scratch.0.join(name)).unwrap().len())
                    .sum();
                assert!(total <= 10 * entry, "{total}");
            }
        }
        let error = disk.put(&key(1), &[0; 20_000]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
    }

    #[test]
    fn locks_exclude_and_are_given_back() {
        let scratch = Scratch::new("locks");
        let disk = Disk::open(&scratch.0, 1 << 20).unwrap();
        let short = Duration::from_millis(5);
        let held = disk.lock(&key(1), short).unwrap().unwrap();
        assert!(disk.lock(&key(1), short).unwrap().is_none());
        // Neither other keys nor stores wait for it.
        let other = disk.lock(&key(2), short).unwrap();
        assert!(other.is_some());
        disk.put(&key(1), b"program").unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| disk.lock(&key(1), Duration::from_secs(60)).unwrap());
            thread::sleep(short);
            drop(held);
            assert!(waiting.join().unwrap().is_some());
        });
    }

    #[test]
    fn a_files_hash_follows_its_contents() {
        let scratch = Scratch::new("hash");
        let disk = Disk::open(&scratch.0, 1 << 20).unwrap();
        let file = scratch.0.join("plugin.so");
        fs::write(&file, "one").unwrap();
        let one = disk.hash_of(&file).unwrap();
        assert_eq!(one, blake3::hash(b"one"));
        assert_eq!(disk.hash_of(&file).unwrap(), one);
        let remembered = || {
            let mut names = scratch.names();
            names.retain(|name| name.starts_with("file-"));
            names
        };
        // What is remembered is checked.
        let memory = scratch.0.join(&remembered()[0]);
        let mut bytes = fs::read(&memory).unwrap();
        for index in 0..bytes.len() {
            bytes[index] ^= 1;
            fs::write(&memory, &bytes).unwrap();
            assert_eq!(disk.hash_of(&file).unwrap(), one);
            bytes[index] ^= 1;
        }
        // Of the same length, and made to look as old.
        let old = fs::metadata(&file).unwrap().modified().unwrap();
        fs::write(&file, "two").unwrap();
        File::open(&file).unwrap().set_modified(old).unwrap();
        assert_eq!(disk.hash_of(&file).unwrap(), blake3::hash(b"two"));
        assert_eq!(remembered().len(), 2);
    }
}
