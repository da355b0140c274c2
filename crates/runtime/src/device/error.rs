//! What can go wrong on the device.

use crate::executor;
use crate::pjrt::{self, Code};

/// Why the device could not do something.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing to run on.
    #[error(
        "no device: this host has no TPU with the package libtpu, and none of the packages \
         lammps-jax-pjrt-cpu and xla-cpu-pjrt, which run programs on the CPU, is installed \
         (pip install lammps-jax-pjrt-cpu), and TPU_DIST_PJRT_PLUGIN does not name a plugin"
    )]
    NoPlugin,
    /// The process was forked from one that used the device.
    #[error(
        "the device cannot be used in a process forked from one that used it: start processes \
         by spawn, or fork before the first use"
    )]
    Forked,
    /// The executor failed, or a program.
    #[error(transparent)]
    Executor(#[from] executor::Error),
    /// An operator has no program, and may not run on the CPU.
    #[error("{operator}: no program for the device ({reason}), and TPU_DIST_FALLBACK=error")]
    NoLowering {
        /// The operator.
        operator: String,
        /// Why there is none.
        reason: String,
    },
    /// A storage is not as big as the data for it.
    #[error("storage: expected {expected} bytes, got {found}")]
    Size {
        /// What the storage has.
        expected: u64,
        /// What came.
        found: u64,
    },
    /// Words that say nothing.
    #[error("internal error: word {at} of a call is {word:#x}")]
    Words {
        /// Index of the word.
        at: usize,
        /// The word.
        word: u64,
    },
}

impl Error {
    /// PJRT's code for the failure, where it has one.
    pub fn code(&self) -> Option<Code> {
        match self {
            Error::Executor(error) => error.code(),
            _ => None,
        }
    }
}

impl From<pjrt::Error> for Error {
    fn from(error: pjrt::Error) -> Error {
        Error::Executor(error.into())
    }
}
