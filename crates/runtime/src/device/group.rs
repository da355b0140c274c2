//! Collectives and messages on storages.
//!
//! An operation takes its place in the group's order when it is started, and begins when
//! the programs before it have filled its storages. Programs launched later wait for it
//! where they use them. The host waits for neither.

use std::sync::{Arc, Mutex};

use super::{Cell, CellWork, Device, lock};
use crate::pjrt::Code;
use crate::{Call, Communicator, Completion, Deferred, Error, MessageCall, Operation};

/// Storages on loan to an operation.
#[derive(Default)]
struct Loan {
    memory: Arc<Deferred>,
    state: Mutex<State>,
}

#[derive(Default)]
enum State {
    #[default]
    Waiting,
    Lent(CellWork),
    Ended(Result<(), Error>),
}

impl Loan {
    /// The storages are filled.
    fn lend(&self, work: CellWork) {
        let blocks = work.memory().map_err(ToString::to_string);
        {
            let mut state = lock(&self.state);
            match &*state {
                State::Ended(result) => {
                    let result = result.clone();
                    drop(state);
                    give_back(work, &result);
                    return;
                }
                State::Waiting | State::Lent(_) => *state = State::Lent(work),
            }
        }
        match blocks {
            Ok(blocks) => self.memory.provide(&blocks),
            Err(reason) => self.memory.fail(reason),
        }
    }
}

fn give_back(work: CellWork, result: &Result<(), Error>) {
    match result {
        Ok(()) => work.finish(Ok(())),
        Err(error) => {
            let code = match error {
                Error::Timeout { .. } => Code::DeadlineExceeded,
                Error::PeerLost { .. } => Code::Unavailable,
                Error::Aborted { .. } => Code::Aborted,
                _ => Code::Internal,
            };
            work.finish(Err((code, &error.to_string())));
        }
    }
}

/// Gives the storages back when the operation ends.
struct Return(Arc<Loan>);

impl Completion for Return {
    fn complete(self: Box<Self>, result: &Result<(), Error>) {
        let before = {
            let mut state = lock(&self.0.state);
            std::mem::replace(&mut *state, State::Ended(result.clone()))
        };
        if let State::Lent(work) = before {
            give_back(work, result);
        }
    }
}

impl Device {
    /// Starts a collective on `cells`; the call's segments are
    /// [deferred](crate::Segment::deferred) ones, whose blocks are the cells.
    ///
    /// # Errors
    /// As [`Communicator::collective`], and [`Error::Resource`] when the device refuses its
    /// memory: the group has failed then. How the collective went is told by the operation,
    /// and by whatever uses the storages.
    ///
    /// # Safety
    /// All segments are deferred ones.
    pub unsafe fn collective(
        &self,
        group: &Communicator,
        mut call: Call,
        cells: &[&Cell],
    ) -> Result<Arc<Operation>, Error> {
        let name = call.kind.name();
        let loan = Arc::<Loan>::default();
        call.memory = Some(loan.memory.clone());
        call.asynchronous = true;
        // SAFETY: the memory is the operation's from when it is lent until it is returned.
        let operation = unsafe { group.collective(call, Some(Box::new(Return(loan.clone())))) }?;
        self.lend(name, cells, &loan)?;
        Ok(operation)
    }

    /// Starts a message on `cell`, the only block of its deferred segment.
    ///
    /// # Errors
    /// As [`Device::collective`].
    ///
    /// # Safety
    /// The message's data is a deferred segment.
    pub unsafe fn message(
        &self,
        group: &Communicator,
        mut call: MessageCall,
        cell: &Cell,
    ) -> Result<Arc<Operation>, Error> {
        let loan = Arc::<Loan>::default();
        let name = call.kind.name();
        call.memory = Some(loan.memory.clone());
        // SAFETY: as in `collective`.
        let operation = unsafe { group.message(call, Some(Box::new(Return(loan.clone())))) }?;
        self.lend(name, &[cell], &loan)?;
        Ok(operation)
    }

    fn lend(&self, name: &str, cells: &[&Cell], loan: &Arc<Loan>) -> Result<(), Error> {
        let lender = loan.clone();
        self.host_work(name, cells, move |work| lender.lend(work))
            .map_err(|error| {
                let reason = error.to_string();
                loan.memory.fail(reason.clone());
                Error::Resource(reason)
            })
    }
}
