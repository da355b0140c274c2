//! Why a call has no program.

/// Why a call has no program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operator is lowered, but not for these types or options. It can run elsewhere.
    #[error("{operator}: not lowered {what}")]
    Unsupported {
        /// The operator.
        operator: String,
        /// For what it is not lowered: "for complex elements".
        what: String,
    },
    /// The request contradicts itself or the operator's schema.
    #[error("{operator}: {argument}: expected {expected}, got {found}")]
    Malformed {
        /// The operator.
        operator: String,
        /// The argument, result or storage.
        argument: String,
        /// What was expected.
        expected: String,
        /// What came.
        found: String,
    },
}
