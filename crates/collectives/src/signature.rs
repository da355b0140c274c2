//! What a rank says it is about to do, so that ranks that diverge find out.

use std::fmt;

use crate::{DType, Kind, ReduceKind};

/// The facts of a collective that all ranks of a group must agree on.
///
/// A fixed-size record: it stands in shared memory and in every frame header. Two
/// ranks agree when their records are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Signature {
    /// What is done.
    pub kind: Kind,
    /// The operator, for reductions.
    pub op: Option<ReduceKind>,
    /// Element type; `None` for a barrier.
    pub dtype: Option<DType>,
    /// Root rank in the group; `None` where there is none.
    pub root: Option<u32>,
    /// Number of tensors a rank brings (more than one when coalesced).
    pub tensors: u32,
    /// Elements in all of a rank's tensors, in the units that `kind` compares: the
    /// input of a reduction or gather, the whole of all pieces where pieces differ.
    pub count: u64,
    /// Hash over all counts and splits that must be equal on all ranks.
    pub layout: u64,
}

impl Signature {
    /// Bytes of [`Signature::encode`].
    pub const LEN: usize = 32;

    /// The layout hash of a list of counts.
    pub fn layout_of(counts: impl IntoIterator<Item = u64>) -> u64 {
        let mut hash = 0x9e37_79b9_7f4a_7c15u64;
        for count in counts {
            hash = (hash ^ count).wrapping_mul(0xff51_afd7_ed55_8ccd);
            hash ^= hash >> 32;
        }
        hash
    }

    /// The record as bytes, little-endian.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = self.kind as u8;
        bytes[1] = self.op.map_or(u8::MAX, |op| op as u8);
        bytes[2] = self.dtype.map_or(u8::MAX, |dtype| dtype as u8);
        bytes[3] = u8::from(self.root.is_some());
        bytes[4..8].copy_from_slice(&self.root.unwrap_or(0).to_le_bytes());
        bytes[8..12].copy_from_slice(&self.tensors.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.count.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.layout.to_le_bytes());
        bytes
    }

    /// Reads what [`Signature::encode`] wrote; `None` for bytes that it cannot have
    /// written.
    pub fn decode(bytes: &[u8; Self::LEN]) -> Option<Signature> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        Some(Signature {
            kind: Kind::from_code(bytes[0])?,
            op: match bytes[1] {
                u8::MAX => None,
                code => Some(ReduceKind::from_code(code)?),
            },
            dtype: match bytes[2] {
                u8::MAX => None,
                code => Some(DType::from_code(code)?),
            },
            root: match bytes[3] {
                0 => None,
                1 => Some(word(4)),
                _ => return None,
            },
            tensors: word(8),
            count: long(16),
            layout: long(24),
        })
    }
}

/// As `all_reduce(SUM, float32, 1024 elements)`.
impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}(", self.kind)?;
        let mut separator = "";
        if let Some(op) = self.op {
            write!(f, "{op}")?;
            separator = ", ";
        }
        if let Some(dtype) = self.dtype {
            let plural = if self.count == 1 { "" } else { "s" };
            write!(f, "{separator}{dtype}, {} element{plural}", self.count)?;
            if self.tensors > 1 {
                write!(f, " in {} tensors", self.tensors)?;
            }
            write!(f, ", layout {:08x}", self.layout as u32)?;
            separator = ", ";
        }
        if let Some(root) = self.root {
            write!(f, "{separator}root {root}")?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoding_round_trips() {
        let signature = Signature {
            kind: Kind::AllReduce,
            op: Some(ReduceKind::Sum),
            dtype: Some(DType::BF16),
            root: None,
            tensors: 1,
            count: 7,
            layout: Signature::layout_of([7]),
        };
        assert_eq!(Signature::decode(&signature.encode()), Some(signature));
        assert!(
            signature
                .to_string()
                .starts_with("all_reduce(SUM, bfloat16, 7 elements")
        );
        let mut bytes = signature.encode();
        bytes[0] = 99;
        assert_eq!(Signature::decode(&bytes), None);
    }

    #[test]
    fn layout_depends_on_order() {
        assert_ne!(Signature::layout_of([1, 2]), Signature::layout_of([2, 1]));
        assert_ne!(Signature::layout_of([]), Signature::layout_of([0]));
    }
}
