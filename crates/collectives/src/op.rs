//! Collective kinds and reduce operations.

use std::fmt;

macro_rules! names {
    ($(#[$meta:meta])* $type:ident { $($variant:ident = $code:literal, $name:literal;)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum $type {
            $(#[doc = concat!("`", $name, "`")] $variant = $code,)*
        }

        impl $type {
            /// Every variant.
            pub const ALL: &'static [$type] = &[$($type::$variant),*];

            /// The name users know it by.
            pub const fn name(self) -> &'static str {
                match self { $($type::$variant => $name),* }
            }

            /// The variant with this discriminant; `None` for a byte that names none.
            pub const fn from_code(code: u8) -> Option<$type> {
                match code { $($code => Some($type::$variant),)* _ => None }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

names! {
    /// What a collective does, under `torch.distributed`'s names.
    ///
    /// The discriminants travel between processes; they never change.
    Kind {
        Barrier = 0, "barrier";
        Broadcast = 1, "broadcast";
        AllReduce = 2, "all_reduce";
        Reduce = 3, "reduce";
        AllGather = 4, "all_gather";
        ReduceScatter = 5, "reduce_scatter";
        AllToAll = 6, "all_to_all";
        Gather = 7, "gather";
        Scatter = 8, "scatter";
        Send = 9, "send";
        Recv = 10, "recv";
        MonitoredBarrier = 11, "monitored_barrier";
    }
}

names! {
    /// The operator of a reduction, without its operands.
    ReduceKind {
        Sum = 0, "SUM";
        Avg = 1, "AVG";
        Product = 2, "PRODUCT";
        Min = 3, "MIN";
        Max = 4, "MAX";
        BitAnd = 5, "BAND";
        BitOr = 6, "BOR";
        BitXor = 7, "BXOR";
        PremulSum = 8, "PREMUL_SUM";
    }
}

/// A reduction: how the elements of all ranks become one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReduceOp {
    /// Sum of all ranks.
    Sum,
    /// Sum divided by the number of ranks; integers truncate towards zero.
    Avg,
    /// Product of all ranks.
    Product,
    /// Smallest; NaN wins.
    Min,
    /// Largest; NaN wins.
    Max,
    /// Bitwise and.
    BitAnd,
    /// Bitwise or.
    BitOr,
    /// Bitwise exclusive or.
    BitXor,
    /// Sum of each rank's input times that rank's factor. Ranks may differ in it.
    PremulSum(f64),
}

impl ReduceOp {
    /// The operator without its operand.
    pub const fn kind(self) -> ReduceKind {
        match self {
            ReduceOp::Sum => ReduceKind::Sum,
            ReduceOp::Avg => ReduceKind::Avg,
            ReduceOp::Product => ReduceKind::Product,
            ReduceOp::Min => ReduceKind::Min,
            ReduceOp::Max => ReduceKind::Max,
            ReduceOp::BitAnd => ReduceKind::BitAnd,
            ReduceOp::BitOr => ReduceKind::BitOr,
            ReduceOp::BitXor => ReduceKind::BitXor,
            ReduceOp::PremulSum(_) => ReduceKind::PremulSum,
        }
    }
}
