//! What a compiled program is known by.

use std::fmt;

/// Everything that decides what a compiler makes, hashed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key([u8; Key::LENGTH]);

impl Key {
    /// Bytes of a key.
    pub const LENGTH: usize = blake3::OUT_LEN;

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8; Key::LENGTH] {
        &self.0
    }
}

/// Hexadecimal digits, which name a key's file.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&blake3::Hash::from_bytes(self.0).to_hex())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Gathers what a key depends on, in order.
#[derive(Clone)]
pub struct KeyBuilder(blake3::Hasher);

impl KeyBuilder {
    /// Depends on nothing yet.
    pub fn new() -> KeyBuilder {
        KeyBuilder(blake3::Hasher::new_derive_key(
            "tpu_dist compile cache, entries of format 1",
        ))
    }

    /// Adds a part. Its length is hashed too, so that parts do not run into each other.
    pub fn part(mut self, bytes: &[u8]) -> KeyBuilder {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    /// The key of the parts.
    pub fn finish(self) -> Key {
        Key(*self.0.finalize().as_bytes())
    }
}

impl Default for KeyBuilder {
    fn default() -> KeyBuilder {
        KeyBuilder::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_run_into_each_other() {
        let key = |parts: &[&str]| {
            parts
                .iter()
                .fold(KeyBuilder::new(), |key, part| key.part(part.as_bytes()))
                .finish()
        };
        let keys = [
            key(&[]),
            key(&[""]),
            key(&["ab", "c"]),
            key(&["a", "bc"]),
            key(&["abc"]),
        ];
        for (index, one) in keys.iter().enumerate() {
            assert!(keys[..index].iter().all(|other| one != other));
        }
        assert_eq!(key(&["ab", "c"]), keys[2]);
        assert_eq!(keys[0].to_string().len(), 64);
    }
}
