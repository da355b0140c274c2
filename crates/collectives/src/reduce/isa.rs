//! The instruction sets that kernels are compiled for.

use std::fmt;
use std::sync::LazyLock;

use super::kernel::{Operand, Operands};
use super::operator::Operator;

/// An instruction set that the kernels are compiled for and that this CPU has.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Isa(pub(super) Level);

impl Isa {
    /// Every instruction set that this CPU has, from the least to the best.
    pub fn available() -> impl DoubleEndedIterator<Item = Isa> {
        let levels = Level::ALL.iter().copied();
        levels.filter(|level| level.is_available()).map(Isa)
    }

    /// The best one that this CPU has.
    pub fn best() -> Isa {
        static BEST: LazyLock<Isa> =
            LazyLock::new(|| Isa::available().next_back().unwrap_or(Isa(Level::Baseline)));
        *BEST
    }
}

impl fmt::Debug for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One operator on one element type, compiled for one instruction set.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub(super) isa: Isa,
    /// The kernel takes each element for this many smaller ones.
    pub(super) parts: usize,
    pub(super) reduce: unsafe fn(Operands<'_>),
    /// The fewest elements that `reduce` takes.
    pub(super) shortest: usize,
    /// For fewer elements.
    pub(super) reduce_few: unsafe fn(Operands<'_>),
}

/// Compiles the kernels for an instruction set.
pub(super) trait InstructionSet {
    fn kernel<X: Operand, O: Operator<X::Acc>>() -> Kernel;
}

macro_rules! instruction_sets {
    ($(
        $(#[doc = $doc:literal])*
        $(#[cfg($cfg:meta)])?
        $isa:ident($($feature:tt),*);
    )*) => {
        /// From the least to the best.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Level {
            $($(#[doc = $doc])* $(#[cfg($cfg)])? $isa,)*
        }

        impl Level {
            const ALL: &'static [Level] = &[$($(#[cfg($cfg)])? Level::$isa),*];

            /// Whether this CPU has it.
            fn is_available(self) -> bool {
                match self {
                    $($(#[cfg($cfg)])? Level::$isa => {
                        true $(&& std::arch::is_x86_feature_detected!($feature))*
                    })*
                }
            }
        }

        $(
            $(#[cfg($cfg)])?
            pub(super) struct $isa;

            $(#[cfg($cfg)])?
            impl InstructionSet for $isa {
                fn kernel<X: Operand, O: Operator<X::Acc>>() -> Kernel {
                    $(#[target_feature(enable = $feature)])*
                    unsafe fn compiled<X: Operand, O: Operator<X::Acc>>(operands: Operands<'_>) {
                        // SAFETY: the contract is the same, and the instruction set is enabled.
                        unsafe { X::reduce::<O>(operands) }
                    }
                    Kernel {
                        isa: Isa(Level::$isa),
                        parts: 1,
                        reduce: compiled::<X, O>,
                        shortest: X::SHORTEST,
                        reduce_few: compiled::<X, O>,
                    }
                }
            }
        )*
    };
}

instruction_sets! {
    /// What every CPU of this architecture has: SSE2 on x86-64, NEON on AArch64.
    Baseline();
    /// x86-64-v3.
    #[cfg(target_arch = "x86_64")]
    Avx2("avx2", "f16c");
    /// x86-64-v4 and BF16: Sapphire Rapids, Zen 4. On earlier CPUs with AVX-512 the longer
    /// vectors gain nothing, as memory is slower than AVX2, but lower the clock.
    #[cfg(target_arch = "x86_64")]
    Avx512(
        "avx2", "f16c", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512bf16"
    );
}
