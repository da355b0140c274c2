//! Entry points of the fuzz targets (`fuzz/`): all code that reads what a peer wrote.

use std::io;

use crate::call::Segment;
use crate::link::{Key, Link, Mode, ReadPart, Stream, Transfer, WritePart};
use crate::wire::{Class, Control, Frame, Hello, ProcessInfo};

/// The parsers.
pub fn wire(bytes: &[u8]) {
    if let Some(head) = bytes.first_chunk()
        && let Some(frame) = Frame::decode(head)
    {
        assert_eq!(&frame.encode(), head);
    }
    let _ = ProcessInfo::decode(bytes);
    let _ = Hello::decode(bytes);
    if let Some(control) = Control::decode(bytes) {
        assert_eq!(Control::decode(&control.encode()), Some(control));
    }
}

/// A peer's bytes, handed out in pieces whose sizes they set themselves.
struct Script {
    bytes: Vec<u8>,
    at: usize,
}

impl Stream for Script {
    fn write(&mut self, parts: &[WritePart]) -> io::Result<usize> {
        Ok(parts.iter().map(|part| part.bytes).sum())
    }

    fn read(&mut self, parts: &[ReadPart]) -> io::Result<usize> {
        let Some(&first) = self.bytes.get(self.at) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let mut left = usize::from(first) + 1;
        let mut read = 0;
        for part in parts {
            let count = part.bytes.min(left).min(self.bytes.len() - self.at);
            // SAFETY: a part is writable memory; the source lies in `bytes`.
            unsafe {
                part.ptr
                    .copy_from_nonoverlapping(self.bytes[self.at..].as_ptr(), count)
            };
            self.at += count;
            left -= count;
            read += count;
        }
        Ok(read)
    }
}

/// A link with receives and sends under way whose peer says `bytes`. Every transfer ends,
/// and no byte lands outside its memory.
pub fn link(bytes: &[u8]) {
    const GUARD: u8 = 0xa5;
    let link = Link::new(std::sync::Arc::default());
    link.add_stream(Box::new(Script {
        bytes: bytes.to_vec(),
        at: 0,
    }));
    let mut memory = vec![GUARD; 3 * 4096];
    let start = memory.as_mut_ptr();
    let key = Key {
        class: Class::PointToPoint,
        group: 2,
        channel: 1,
    };
    let segment = |bytes| Segment {
        ptr: start.wrapping_add(4096),
        bytes,
    };
    let mut data = vec![0u8; 100_000];
    let large = Segment {
        ptr: data.as_mut_ptr(),
        bytes: data.len(),
    };
    // SAFETY: the memory outlives the link's use of it: every transfer has ended below.
    let transfers = unsafe {
        [
            Transfer::new(&[segment(16)], None),
            Transfer::new(&[segment(4096)], None),
            Transfer::new(&[large], None),
            Transfer::new(&[segment(0)], None),
        ]
    };
    link.receive(key, 0, transfers[0].clone(), Mode::PointToPoint);
    link.receive(key, 0, transfers[1].clone(), Mode::PointToPoint);
    link.send(key, 0, transfers[2].clone(), Mode::PointToPoint);
    link.cancel(&transfers[3]);
    while link.progress() {}
    link.close("the script is over");
    assert!(transfers.iter().all(|transfer| transfer.result().is_some()));
    assert!(
        memory[..4096]
            .iter()
            .chain(&memory[2 * 4096..])
            .all(|&byte| byte == GUARD)
    );
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::FrameKind;

    prop_compose! {
        /// Frames that are well formed, and payloads of the size they name or nearly.
        fn message()(
            kind in 1u8..8, class in 0u8..3, group in 1u64..3, channel in 0u64..3,
            id in 0u64..4, other in 0u64..40, bytes in 0u64..60, off in 0usize..3,
        ) -> Vec<u8> {
            let kinds = [
                FrameKind::Eager, FrameKind::Offer, FrameKind::Ready, FrameKind::Data,
                FrameKind::Refuse, FrameKind::Cancelled, FrameKind::Credit,
            ];
            let class = [Class::PointToPoint, Class::Collective, Class::Monitor][class as usize];
            let kind = kinds[kind as usize - 1];
            let frame = Frame { kind, class, group, channel, source: 1, id, other, bytes };
            let mut message = frame.encode().to_vec();
            if matches!(kind, FrameKind::Eager | FrameKind::Data) {
                message.resize(Frame::LEN + bytes as usize + off.saturating_sub(1), 7);
            }
            message
        }
    }

    proptest! {
        #[test]
        fn no_bytes_break_the_parsers(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            wire(&bytes);
            link(&bytes);
        }

        #[test]
        fn no_messages_break_a_link(messages in proptest::collection::vec(message(), 0..20)) {
            link(&messages.concat());
        }
    }
}
