//! What PJRT reports, and what is found before it is asked.

use std::fmt;
use std::path::PathBuf;

/// PJRT's status codes, which are Abseil's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Code {
    Cancelled,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
    /// A code this crate does not know.
    Other(u32),
}

const NAMES: [(Code, &str); 16] = [
    (Code::Cancelled, "CANCELLED"),
    (Code::Unknown, "UNKNOWN"),
    (Code::InvalidArgument, "INVALID_ARGUMENT"),
    (Code::DeadlineExceeded, "DEADLINE_EXCEEDED"),
    (Code::NotFound, "NOT_FOUND"),
    (Code::AlreadyExists, "ALREADY_EXISTS"),
    (Code::PermissionDenied, "PERMISSION_DENIED"),
    (Code::ResourceExhausted, "RESOURCE_EXHAUSTED"),
    (Code::FailedPrecondition, "FAILED_PRECONDITION"),
    (Code::Aborted, "ABORTED"),
    (Code::OutOfRange, "OUT_OF_RANGE"),
    (Code::Unimplemented, "UNIMPLEMENTED"),
    (Code::Internal, "INTERNAL"),
    (Code::Unavailable, "UNAVAILABLE"),
    (Code::DataLoss, "DATA_LOSS"),
    (Code::Unauthenticated, "UNAUTHENTICATED"),
];

impl Code {
    /// The code PJRT writes as `raw`; 0, success, is not an error and gives `Other(0)`.
    pub fn from_raw(raw: u32) -> Code {
        match raw
            .checked_sub(1)
            .and_then(|index| NAMES.get(index as usize))
        {
            Some((code, _)) => *code,
            None => Code::Other(raw),
        }
    }

    /// PJRT's number.
    pub fn raw(self) -> u32 {
        match self {
            Code::Other(raw) => raw,
            known => {
                // Every variant but `Other` is in the table.
                NAMES
                    .iter()
                    .position(|(code, _)| *code == known)
                    .unwrap_or(1) as u32
                    + 1
            }
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, NAMES.iter().find(|(code, _)| code == self)) {
            (_, Some((_, name))) => f.write_str(name),
            (Code::Other(raw), None) => write!(f, "status {raw}"),
            (_, None) => f.write_str("UNKNOWN"),
        }
    }
}

/// Why a call of PJRT failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// PJRT returned an error.
    #[error("{function}: {code}: {message}")]
    Status {
        /// PJRT's name of the function.
        function: &'static str,
        /// PJRT's code.
        code: Code,
        /// PJRT's text.
        message: String,
    },
    /// An argument is wrong; PJRT was not called.
    #[error("{argument}: {message}")]
    InvalidArgument {
        /// The argument at fault.
        argument: &'static str,
        /// What was expected and what came.
        message: String,
    },
    /// The plugin is older than the function.
    #[error("PJRT plugin {} (API {major}.{minor}) has no {function}", path.display())]
    Missing {
        /// The plugin.
        path: PathBuf,
        /// Its version.
        major: i32,
        /// Its version.
        minor: i32,
        /// PJRT's name of the function.
        function: &'static str,
    },
    /// The file is not a plugin this crate can use.
    #[error("cannot load PJRT plugin {}: {reason}", path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// What was found.
        reason: String,
    },
}

impl Error {
    /// PJRT's code for the failure; that of the nearest meaning where PJRT was not asked.
    pub fn code(&self) -> Code {
        match self {
            Error::Status { code, .. } => *code,
            Error::InvalidArgument { .. } => Code::InvalidArgument,
            Error::Missing { .. } => Code::Unimplemented,
            Error::Load { .. } => Code::NotFound,
        }
    }

    pub(super) fn argument(argument: &'static str, message: impl Into<String>) -> Error {
        Error::InvalidArgument {
            argument,
            message: message.into(),
        }
    }

    /// For a plugin that reports success and breaks its promise.
    pub(super) fn broken(function: &'static str, message: &str) -> Error {
        Error::Status {
            function,
            code: Code::Internal,
            message: message.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for raw in 1..=16 {
            let code = Code::from_raw(raw);
            assert!(!matches!(code, Code::Other(_)));
            assert_eq!(code.raw(), raw);
        }
        assert_eq!(Code::from_raw(3).to_string(), "INVALID_ARGUMENT");
        assert_eq!(Code::from_raw(16).to_string(), "UNAUTHENTICATED");
        for raw in [0, 17, u32::MAX] {
            assert_eq!(Code::from_raw(raw), Code::Other(raw));
            assert_eq!(Code::Other(raw).raw(), raw);
        }
    }
}
