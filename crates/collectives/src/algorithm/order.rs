use std::sync::Arc;

/// An order of the ranks of a group, both ways.
#[derive(Clone, Debug)]
pub(super) struct Order {
    ranks: Arc<[u32]>,
    /// The place of each rank; empty where `ranks` does not name every rank once.
    places: Arc<[u32]>,
}

impl Order {
    pub(super) fn new(ranks: Arc<[u32]>) -> Order {
        let mut places = vec![u32::MAX; ranks.len()];
        for (place, &rank) in ranks.iter().enumerate() {
            match places.get_mut(rank as usize) {
                Some(free) if *free == u32::MAX => *free = place as u32,
                _ => {
                    places.clear();
                    break;
                }
            }
        }
        Order {
            ranks,
            places: places.into(),
        }
    }

    /// Whether it is one of `ranks` ranks.
    pub(super) fn fits(&self, ranks: u32) -> bool {
        self.places.len() == ranks as usize
    }

    /// Where a rank stands; 0 for one that it does not name.
    pub(super) fn place(&self, rank: u32) -> u32 {
        self.places.get(rank as usize).copied().unwrap_or(0)
    }

    /// Who stands at a place.
    pub(super) fn rank(&self, place: u32) -> u32 {
        self.ranks[place as usize]
    }
}
