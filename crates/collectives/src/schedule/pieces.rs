use std::ops::Range;

/// How a run of elements is cut into pieces, one for each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pieces {
    ranks: u32,
    layout: Layout,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Layout {
    /// Every piece has this many elements.
    Uniform(u64),
    /// The whole has this many elements; pieces differ by at most one.
    Split(u64),
    /// Where each piece starts, and at last where the last one ends.
    Uneven(Vec<u64>),
}

impl Pieces {
    /// `ranks` pieces of `count` elements.
    pub fn uniform(count: u64, ranks: u32) -> Pieces {
        Pieces {
            ranks,
            layout: Layout::Uniform(count),
        }
    }

    /// `count` elements in `ranks` pieces that differ by at most one element.
    pub fn split(count: u64, ranks: u32) -> Pieces {
        Pieces {
            ranks,
            layout: Layout::Split(count),
        }
    }

    /// One piece for each entry of `counts`.
    pub fn uneven(counts: &[u64]) -> Pieces {
        let mut starts = Vec::with_capacity(counts.len() + 1);
        let mut start = 0;
        starts.push(0);
        for count in counts {
            start += count;
            starts.push(start);
        }
        Pieces {
            ranks: counts.len() as u32,
            layout: Layout::Uneven(starts),
        }
    }

    /// Number of pieces.
    pub fn len(&self) -> u32 {
        self.ranks
    }

    /// Whether there is no piece at all.
    pub fn is_empty(&self) -> bool {
        self.ranks == 0
    }

    /// First element of piece `rank`; the total for `rank == len()`.
    pub fn offset(&self, rank: u32) -> u64 {
        match &self.layout {
            Layout::Uniform(count) => count * u64::from(rank),
            Layout::Split(count) => bound(*count, rank.into(), self.ranks.max(1).into()),
            Layout::Uneven(starts) => starts[rank as usize],
        }
    }

    /// Elements of piece `rank`.
    pub fn count(&self, rank: u32) -> u64 {
        self.offset(rank + 1) - self.offset(rank)
    }

    /// The elements of the pieces `ranks`.
    pub fn range(&self, ranks: Range<u32>) -> Range<u64> {
        self.offset(ranks.start)..self.offset(ranks.end)
    }

    /// Elements of all pieces.
    pub fn total(&self) -> u64 {
        self.offset(self.ranks)
    }

    /// Elements of the largest piece.
    pub fn largest(&self) -> u64 {
        match &self.layout {
            Layout::Uniform(count) => *count,
            Layout::Split(count) => count.div_ceil(u64::from(self.ranks.max(1))),
            Layout::Uneven(starts) => starts.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0),
        }
    }
}

/// Where part `index` of `count` elements begins, of `parts` that differ by at most one;
/// `index` is at most `parts`.
pub(super) fn bound(count: u64, index: u64, parts: u64) -> u64 {
    match count.checked_mul(index) {
        Some(product) => product / parts,
        // The quotient is at most `count`.
        None => (u128::from(count) * u128::from(index) / u128::from(parts)) as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_tile_the_whole() {
        let cases = [
            (Pieces::uniform(3, 4), 12, 3),
            (Pieces::split(10, 4), 10, 3),
            (Pieces::split(2, 4), 2, 1),
            (Pieces::split(u64::MAX, 3), u64::MAX, u64::MAX / 3),
            (Pieces::uneven(&[2, 0, 5]), 7, 5),
            (Pieces::uneven(&[]), 0, 0),
        ];
        for (pieces, total, largest) in cases {
            assert_eq!(pieces.total(), total);
            assert_eq!(pieces.largest(), largest);
            let counts: Vec<u64> = (0..pieces.len()).map(|rank| pieces.count(rank)).collect();
            assert_eq!(counts.iter().sum::<u64>(), total);
            assert_eq!(counts.iter().max().copied().unwrap_or(0), largest);
        }
    }
}
