//! The barrier that names the ranks which did not come.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Error;
use crate::call::Segment;
use crate::communicator::{Group, LEAVE_GRACE};
use crate::link::{Key, Mode, Transfer};
use crate::progress::{Interrupted, Step, wait};
use crate::wire::Class;

impl Group {
    /// Rank 0 collects all others, and tells them how it went.
    pub(crate) fn monitored_barrier(
        self: &Arc<Group>,
        timeout: Duration,
        wait_all_ranks: bool,
    ) -> Result<(), Error> {
        let start = Instant::now();
        let key = Key {
            class: Class::Monitor,
            group: self.key,
            channel: 0,
        };
        let me = self.spec.rank;
        let milliseconds = timeout.as_millis();
        if me == 0 && timeout.is_zero() {
            return Err(Error::Monitored {
                message: format!("Rank 0 timed out in monitoredBarrier after {milliseconds} ms"),
                missing: Vec::new(),
            });
        }
        // The answer of rank 0: nothing, or the ranks that are missing.
        let mut answer = [0u8; 256];
        let answer_segment = Segment {
            ptr: answer.as_mut_ptr(),
            bytes: answer.len(),
        };
        let nothing = Segment {
            ptr: std::ptr::null_mut(),
            bytes: 0,
        };
        let begin = |rank: u32, segment: Segment, send: bool| {
            // SAFETY: `answer` lives until the end of this call, before which every transfer that
            // uses it has ended or is cancelled by its guard.
            let transfer = unsafe { Transfer::new(&[segment], None) };
            let link = &self.peer(rank).link;
            if send {
                link.send(key, me, transfer.clone(), Mode::Collective);
            } else {
                link.receive(key, me, transfer.clone(), Mode::Collective);
            }
            Pending {
                group: self,
                rank,
                transfer,
            }
        };
        let await_all = |list: &[Pending<'_>], end: Instant| {
            let ended = || {
                list.iter()
                    .all(|pending| pending.transfer.result().is_some())
            };
            let failed = || self.failure.get().cloned();
            wait(
                &self.fabric,
                self.crowded,
                || Step::of(ended().then_some(None)),
                |now| failed().map(Some).or_else(|| (now >= end).then_some(None)),
            )
        };
        let interrupted = |Interrupted| Error::Interrupted {
            context: format!("group '{}', monitored_barrier", self.spec.name),
        };
        let others: Vec<u32> = (1..self.spec.size).collect();
        if me != 0 {
            let sent = [begin(0, nothing, true)];
            let answered = [begin(0, answer_segment, false)];
            // Rank 0 speaks at its own timeout: its word is awaited a little longer than that.
            let end = start + timeout + LEAVE_GRACE;
            if let Some(error) = await_all(&answered, end).map_err(interrupted)? {
                return Err(error);
            }
            let passed = answered[0].transfer.result() == Some(Ok(()));
            drop((sent, answered));
            if passed && answer[0] == 0 {
                return Ok(());
            }
            let text = answer.split(|&byte| byte == 0).next().unwrap_or_default();
            return Err(Error::Monitored {
                message: format!(
                    "Rank {me} successfully reached monitoredBarrier, but received errors while waiting for \
                     send/recv from rank 0: {}",
                    if passed {
                        String::from_utf8_lossy(text)
                    } else {
                        "it did not answer".into()
                    }
                ),
                missing: Vec::new(),
            });
        }
        let arrived: Vec<Pending<'_>> = others
            .iter()
            .map(|&rank| begin(rank, nothing, false))
            .collect();
        if let Some(error) = await_all(&arrived, start + timeout).map_err(interrupted)? {
            return Err(error);
        }
        let passed = |pending: &&Pending<'_>| pending.transfer.result() == Some(Ok(()));
        let present: Vec<u32> = arrived
            .iter()
            .filter(passed)
            .map(|pending| pending.rank)
            .collect();
        let missing: Vec<u32> = others
            .iter()
            .copied()
            .filter(|rank| !present.contains(rank))
            .collect();
        drop(arrived);
        let result = if missing.is_empty() {
            Ok(())
        } else {
            let named: Vec<u32> = if wait_all_ranks {
                missing.clone()
            } else {
                vec![missing[0]]
            };
            let list: Vec<String> = named.iter().map(u32::to_string).collect();
            let places: Vec<String> = named.iter().map(|&rank| self.name(rank)).collect();
            let message = format!(
                "[Rank 0]: Rank{} {} failed to pass monitoredBarrier in {milliseconds} ms: {}",
                if wait_all_ranks { "s" } else { "" },
                list.join(", "),
                places.join(", ")
            );
            let bytes = message.as_bytes();
            let length = bytes.len().min(answer.len() - 1);
            answer[..length].copy_from_slice(&bytes[..length]);
            Err(Error::Monitored { message, missing })
        };
        let answers: Vec<Pending<'_>> = present
            .iter()
            .map(|&rank| begin(rank, answer_segment, true))
            .collect();
        await_all(&answers, Instant::now() + LEAVE_GRACE.max(timeout)).map_err(interrupted)?;
        result
    }
}

/// A message of a monitored barrier, given up when dropped.
struct Pending<'a> {
    group: &'a Group,
    rank: u32,
    transfer: Arc<Transfer>,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if self.transfer.result().is_none() {
            self.group.peer(self.rank).link.cancel(&self.transfer);
        }
    }
}
