//! What processes say to each other.
//!
//! [`Frame`] heads every message between two processes; it has a fixed size and is
//! checked before use. [`Hello`] opens a connection, [`Control`] travels on the control
//! connection; both are length-prefixed.

use rkyv::rancor::Failure;
use wincode::{SchemaRead, SchemaWrite};

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum FrameKind {
    /// A whole message: `bytes` of payload follow.
    Eager = 1,
    /// A message of `bytes` waits at the sender under `id`; the receiver may read it at address
    /// `other` of the sender's memory, unless that is 0.
    Offer = 2,
    /// The receiver is ready: send to its `id`; `other` is the offer's id, or 0 for a
    /// collective, whose messages are not offered.
    Ready = 3,
    /// `bytes` of payload follow, for offset `other` of receive `id`.
    Data = 4,
    /// The offer `id` does not fit: the receiver has room for `bytes`.
    Refuse = 5,
    /// The sender gave up on receive `id`.
    Cancelled = 6,
    /// `bytes` of eager payload were consumed.
    Credit = 7,
    /// The receiver has read the offer `id` from the sender's memory.
    Pulled = 8,
}

/// Two kinds of traffic that never match each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum Class {
    /// `channel` is the user's tag.
    PointToPoint = 0,
    /// `channel` is a collective's sequence number.
    Collective = 1,
    /// `channel` numbers a monitored barrier.
    Monitor = 2,
}

/// The head of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: FrameKind,
    pub(crate) class: Class,
    pub(crate) group: u64,
    pub(crate) channel: u64,
    /// Group rank of the sender.
    pub(crate) source: u32,
    pub(crate) id: u64,
    pub(crate) other: u64,
    pub(crate) bytes: u64,
}

/// [`Frame`] on the wire; no padding, so that all its bytes are defined.
#[derive(rkyv::Archive)]
#[expect(dead_code, reason = "only its archived form is used")]
struct Wire {
    group: u64,
    channel: u64,
    id: u64,
    other: u64,
    bytes: u64,
    source: u32,
    magic: u16,
    kind: u8,
    class: u8,
}

const MAGIC: u16 = 0x7dd1;

impl Frame {
    /// Bytes of a frame.
    pub(crate) const LEN: usize = 48;

    pub(crate) fn encode(&self) -> [u8; Frame::LEN] {
        let archived = ArchivedWire {
            group: self.group.into(),
            channel: self.channel.into(),
            id: self.id.into(),
            other: self.other.into(),
            bytes: self.bytes.into(),
            source: self.source.into(),
            magic: MAGIC.into(),
            kind: self.kind as u8,
            class: self.class as u8,
        };
        const { assert!(size_of::<ArchivedWire>() == Frame::LEN) };
        // SAFETY: equal sizes (asserted), integers only, and the fields leave no padding:
        // five of 8 bytes, one of 4, one of 2, two of 1.
        unsafe { std::mem::transmute::<ArchivedWire, [u8; Frame::LEN]>(archived) }
    }

    /// Reads a frame; `None` for bytes that no peer of this version writes.
    pub(crate) fn decode(bytes: &[u8; Frame::LEN]) -> Option<Frame> {
        #[repr(align(16))]
        struct Aligned([u8; Frame::LEN]);
        let aligned = Aligned(*bytes);
        let wire = rkyv::access::<ArchivedWire, Failure>(&aligned.0).ok()?;
        if wire.magic != MAGIC {
            return None;
        }
        Some(Frame {
            kind: match wire.kind {
                1 => FrameKind::Eager,
                2 => FrameKind::Offer,
                3 => FrameKind::Ready,
                4 => FrameKind::Data,
                5 => FrameKind::Refuse,
                6 => FrameKind::Cancelled,
                7 => FrameKind::Credit,
                8 => FrameKind::Pulled,
                _ => return None,
            },
            class: match wire.class {
                0 => Class::PointToPoint,
                1 => Class::Collective,
                2 => Class::Monitor,
                _ => return None,
            },
            group: wire.group.into(),
            channel: wire.channel.into(),
            source: wire.source.into(),
            id: wire.id.into(),
            other: wire.other.into(),
            bytes: wire.bytes.into(),
        })
    }
}

/// Version of everything in this file and of the shared-memory layouts.
pub(crate) const VERSION: u16 = 2;

/// A process, as it publishes itself in the store.
#[derive(Clone, Debug, PartialEq, Eq, SchemaWrite, SchemaRead)]
pub(crate) struct ProcessInfo {
    pub(crate) version: u16,
    /// Random identity of the process.
    pub(crate) process: u128,
    /// Proof that a connecting process read the store.
    pub(crate) token: u128,
    /// Fresh for each bootstrap, so that two in a row differ.
    pub(crate) nonce: u64,
    pub(crate) pid: u32,
    pub(crate) host: String,
    /// Equal for processes of one machine.
    pub(crate) machine: u64,
    /// Equal for processes that can share memory: same machine, same network namespace.
    pub(crate) domain: u64,
    /// TCP addresses to try, best first.
    pub(crate) addresses: Vec<String>,
}

/// The first message on a connection, in both directions.
#[derive(Clone, Debug, PartialEq, Eq, SchemaWrite, SchemaRead)]
pub(crate) struct Hello {
    /// Who speaks.
    pub(crate) info: ProcessInfo,
    /// The token of the process spoken to.
    pub(crate) token: u128,
    /// Number of the data connection, from 1; 0 for the control connection.
    pub(crate) stream: u32,
    /// Number of data connections that the connecting side opens.
    pub(crate) streams: u32,
    /// With shared memory: where in the speaker's region its incoming ring lies.
    pub(crate) ring: u64,
    /// With shared memory: the bit of the listener in the speaker's inbox.
    pub(crate) inbox_bit: u32,
    /// On the same host: where in the speaker's memory its identity stands.
    pub(crate) identity: u64,
}

/// What travels on a control connection.
#[derive(Clone, Debug, PartialEq, Eq, SchemaWrite, SchemaRead)]
pub(crate) enum Control {
    /// Says that the connection lives.
    Heartbeat,
    /// The process ends in good order.
    Goodbye,
    /// A group was aborted, or failed, at the sender.
    Abort { group: u64, reason: String },
    /// The sender left the group in good order.
    Leave { group: u64 },
    /// Which collective of the group have you entered?
    Probe { id: u64, group: u64 },
    /// Answer to a probe: number of collectives entered; `None`: no such group.
    Entered { id: u64, count: Option<u64> },
}

/// Longest control message or hello.
pub(crate) const MESSAGE_MAX: usize = 64 << 10;

macro_rules! messages {
    ($($type:ty),*) => {$(
        impl $type {
            pub(crate) fn encode(&self) -> Vec<u8> {
                wincode::serialize(self).expect("plain data always serialises")
            }

            /// `None` for bytes that are not exactly one such message.
            pub(crate) fn decode(bytes: &[u8]) -> Option<$type> {
                if bytes.len() > MESSAGE_MAX {
                    return None;
                }
                let message: $type = wincode::deserialize(bytes).ok()?;
                let length = wincode::serialized_size(&message).ok()?;
                (length == bytes.len() as u64).then_some(message)
            }
        }
    )*};
}
messages!(ProcessInfo, Hello, Control);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip() {
        let frame = Frame {
            kind: FrameKind::Data,
            class: Class::Collective,
            group: 1,
            channel: 2,
            source: 3,
            id: 4,
            other: 5,
            bytes: u64::MAX,
        };
        let bytes = frame.encode();
        assert_eq!(Frame::decode(&bytes), Some(frame));
        for (at, value) in [(44, 0), (46, 0), (46, 9), (47, 3)] {
            let mut bytes = bytes;
            bytes[at] = value;
            assert_eq!(Frame::decode(&bytes), None, "byte {at} = {value}");
        }
    }

    #[test]
    fn messages_round_trip() {
        let control = Control::Abort {
            group: 7,
            reason: "why".into(),
        };
        let mut bytes = control.encode();
        assert_eq!(Control::decode(&bytes), Some(control));
        bytes.push(0);
        assert_eq!(Control::decode(&bytes), None);
    }
}
