use super::cost::{Domain, Formula};
use super::timeline::Timeline;
use super::{Algorithm, CostModel, Prediction, Transport};
use crate::Kind;
use crate::schedule::{Buffer, Chunk, Pieces, RankPlan, Request};

/// A binomial tree: the root feeds a rank at each distance that is a power of two, and each of those
/// the ranks between it and the next.
///
/// | kind | alpha terms | elements sent |
/// |---|---|---|
/// | broadcast | log2 n | root: count log2 n |
/// | reduce | log2 n | count |
/// | all_reduce | 2 log2 n: to rank 0 and back | rank 0: count log2 n |
///
/// An inner rank reduces its children and itself at once. Results of the all-reduce are
/// bit-equal: rank 0 finishes them.
///
/// Use: small sizes on a network where all pairs are near. Source: Thakur, Rabenseifner,
/// Gropp, IJHPCA 2005.
#[derive(Clone, Copy, Debug, Default)]
pub struct Binomial;

/// Two binary trees, each for half of the data; a rank that has children in one is a leaf
/// in the other. Messages follow one another through the trees.
///
/// | kind | alpha terms | elements sent by a rank, at most |
/// |---|---|---|
/// | broadcast, reduce | log2 n | count |
/// | all_reduce | 2 log2 n | 2 count |
///
/// and one alpha and beta term for each message beyond the first. The root of a
/// broadcast or reduce stands above both trees. Results of the all-reduce are bit-equal: the
/// root of a tree finishes its half.
///
/// Use: large sizes on many ranks of a network where all pairs are near; needs several
/// messages to fill the pipeline. Source: Sanders, Speck, Träff, "Two-tree algorithms
/// for full bandwidth broadcast, reduction and scan", Parallel Computing 2009.
#[derive(Clone, Copy, Debug, Default)]
pub struct DoubleBinaryTree;

/// Ticks from a message's start to its receipt: so many messages of a pair may be on their way.
const FLIGHT: u64 = 2;

/// A rank's place in a tree.
struct Node {
    parent: Option<u32>,
    children: Vec<u32>,
    /// Messages between it and the root.
    depth: u64,
    /// Depth of the deepest rank of the tree, or more.
    height: u64,
}

impl Node {
    /// The binomial tree below `root`.
    fn binomial(ranks: u32, root: u32, rank: u32) -> Node {
        let relative = (rank + ranks - root) % ranks;
        let absolute = |relative: u32| (relative + root) % ranks;
        let levels = ranks.next_power_of_two().ilog2();
        let below = if relative == 0 {
            levels
        } else {
            relative.trailing_zeros()
        };
        Node {
            parent: (relative > 0).then(|| absolute(relative & (relative - 1))),
            children: (0..below)
                .rev()
                .map(|bit| relative + (1 << bit))
                .filter(|&child| child < ranks)
                .map(absolute)
                .collect(),
            depth: relative.count_ones().into(),
            height: levels.into(),
        }
    }

    /// A binary search tree on the places 1 to `count`, in which odd places are leaves, mapped
    /// to ranks by `rank_at`.
    fn binary(count: u32, place: u32, rank_at: impl Fn(u32) -> u32) -> Node {
        let parent = |place: u32| {
            let low = place & place.wrapping_neg();
            let above = (place ^ low) | (low << 1);
            let up = if above <= count { above } else { place ^ low };
            (up > 0).then_some(up)
        };
        let low = place & place.wrapping_neg();
        let left = (low > 1).then(|| place - low / 2);
        let right = (0..low.ilog2())
            .rev()
            .map(|bit| place + (1 << bit))
            .find(|&right| right <= count);
        Node {
            parent: parent(place).map(&rank_at),
            children: left.into_iter().chain(right).map(&rank_at).collect(),
            depth: std::iter::successors(parent(place), |&up| parent(up)).count() as u64,
            height: Node::height(count),
        }
    }

    /// Tree `which` of two over `count` ranks, of which this is number `number`.
    fn of_two(which: u32, count: u32, number: u32, rank_of: impl Fn(u32) -> u32) -> Node {
        match which {
            0 => Node::binary(count, number + 1, |place| rank_of(place - 1)),
            // Places of the other parity: mirrored, or moved on by one.
            _ if count.is_multiple_of(2) => {
                Node::binary(count, count - number, |place| rank_of(count - place))
            }
            _ => Node::binary(count, (number + 1) % count + 1, |place| {
                rank_of((place + count - 2) % count)
            }),
        }
    }

    /// The number of the rank at the top of tree `which` of two; none without ranks.
    fn top_of_two(which: u32, count: u32) -> Option<u32> {
        let place = 1 << count.checked_ilog2()?;
        Some(match which {
            0 => place - 1,
            _ if count.is_multiple_of(2) => count - place,
            _ => (place + count - 2) % count,
        })
    }

    /// Depth of the deepest of `count` places in a binary tree, or more.
    fn height(count: u32) -> u64 {
        u64::from(u32::BITS - count.leading_zeros())
    }

    /// Hops from the top to the last rank that a message reaches, and how many messages leave
    /// the ports on its way.
    fn longest_way(count: u32) -> (f64, f64) {
        let hops = f64::from(count.ilog2());
        let full = if (count + 1).is_power_of_two() {
            0.0
        } else {
            1.0
        };
        (hops, 2.0 * hops - full)
    }

    /// The same tree under one more rank, `root`, as the only parent of its top.
    fn under(mut self, root: u32) -> Node {
        self.parent.get_or_insert(root);
        self.depth += 1;
        self.height += 1;
        self
    }

    /// Passes the messages of `chunk` from the parent to the children; message k is at the root
    /// at tick `start + k`.
    fn pass_down(&self, timeline: &mut Timeline, start: u64, chunk: Chunk, max_message: u64) {
        for (number, part) in chunk.cuts(max_message).enumerate() {
            let at = start + number as u64 + FLIGHT * self.depth;
            if let Some(parent) = self.parent {
                timeline.recv(at, parent, part);
            }
            for &child in &self.children {
                timeline.send(at, child, part);
            }
        }
    }

    /// Reduces in place what the children send, and sends it on; message k is at the root
    /// at tick `k + FLIGHT height`.
    fn pass_up_in_place(&self, timeline: &mut Timeline, chunk: Chunk, max_message: u64) {
        for (number, part) in chunk.cuts(max_message).enumerate() {
            let at = number as u64 + FLIGHT * (self.height - self.depth);
            for &child in self.children.iter().rev() {
                timeline.recv_reduce(at, child, part);
            }
            match self.parent {
                Some(parent) => timeline.send(at, parent, part),
                None => timeline.finish(at, part),
            }
        }
    }

    /// Reduces what the children send without writing to `chunk`, unless this is the root.
    /// Returns the end of the scratch memory it uses from `scratch` on.
    fn pass_up(
        &self,
        timeline: &mut Timeline,
        chunk: Chunk,
        max_message: u64,
        scratch: u64,
    ) -> u64 {
        let size = chunk.count.min(max_message);
        // For each of two messages, one slot for each child and one for the sum.
        let slots = self.children.len() as u64 + 1;
        for (number, part) in chunk.cuts(max_message).enumerate() {
            let at = number as u64 + FLIGHT * (self.height - self.depth);
            let slot = |index: u64| {
                let start = scratch + (number as u64 % 2 * slots + index) * size;
                Chunk::new(Buffer::Scratch, start..start + part.count)
            };
            let mut sources = vec![part];
            for (index, &child) in self.children.iter().rev().enumerate() {
                timeline.recv(at, child, slot(index as u64));
                sources.push(slot(index as u64));
            }
            let sum = if self.parent.is_none() {
                part
            } else {
                slot(slots - 1)
            };
            if sources.len() > 1 {
                timeline.reduce(at, sum, sources);
            }
            match self.parent {
                None => timeline.finish(at, part),
                Some(parent) if self.children.is_empty() => timeline.send(at, parent, part),
                Some(parent) => timeline.send(at, parent, sum),
            }
        }
        if self.children.is_empty() {
            scratch
        } else {
            scratch + 2 * slots * size
        }
    }
}

impl Algorithm for Binomial {
    fn name(&self) -> &'static str {
        "binomial"
    }

    fn supports(&self, request: &Request) -> bool {
        matches!(
            request.kind,
            Kind::Broadcast | Kind::Reduce | Kind::AllReduce
        )
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        let root = if request.kind == Kind::AllReduce {
            0
        } else {
            request.root
        };
        let node = Node::binomial(request.ranks, root, rank);
        let whole = Chunk::new(Buffer::Output, 0..request.counts[0]);
        let max = request.max_message;
        let mut timeline = Timeline::default();
        let mut scratch = 0;
        match request.kind {
            Kind::Broadcast => node.pass_down(&mut timeline, 0, whole, max),
            Kind::Reduce => scratch = node.pass_up(&mut timeline, whole, max, 0),
            _ => {
                node.pass_up_in_place(&mut timeline, whole, max);
                node.pass_down(&mut timeline, FLIGHT * node.height, whole, max);
            }
        }
        timeline.into_plan(scratch)
    }

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction {
        // Messages of a pipeline meet at the ports, and so do those of subtrees of different depth.
        let cut = request.counts[0] > request.max_message;
        let domain = match request.kind {
            Kind::Broadcast => Domain::Every,
            _ if cut || !request.ranks.is_power_of_two() => Domain::Small,
            _ => Domain::Idle,
        };
        Formula::predict(request, model, transport, domain, |formula| {
            let whole = request.counts[0] as f64 * formula.element;
            let hops = f64::from(request.ranks.ilog2());
            let children = f64::from(request.ranks.next_power_of_two().ilog2());
            match request.kind {
                Kind::Broadcast => formula.tree(hops, children, children, whole, 0.0),
                Kind::Reduce => formula.tree(hops, children, children, whole, children),
                // Up and down use different ports.
                _ => formula.tree(2.0 * hops, 2.0 * children, children, whole, children),
            }
        })
    }
}

impl Algorithm for DoubleBinaryTree {
    fn name(&self) -> &'static str {
        "double_binary_tree"
    }

    fn supports(&self, request: &Request) -> bool {
        matches!(
            request.kind,
            Kind::Broadcast | Kind::Reduce | Kind::AllReduce
        )
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        let Request {
            ranks,
            root,
            max_message,
            ..
        } = *request;
        let shares = Pieces::split(request.counts[0], 2);
        let mut timeline = Timeline::default();
        let mut scratch = 0;
        for which in 0..2 {
            let share = Chunk::new(Buffer::Output, shares.range(which..which + 1));
            if request.kind == Kind::AllReduce {
                let node = Node::of_two(which, ranks, rank, |number| number);
                node.pass_up_in_place(&mut timeline, share, max_message);
                node.pass_down(&mut timeline, FLIGHT * node.height, share, max_message);
                continue;
            }
            // The trees span all ranks but the root.
            let rank_of = |number: u32| (root + 1 + number) % ranks;
            let node = if rank != root {
                let number = (rank + ranks - root - 1) % ranks;
                Node::of_two(which, ranks - 1, number, rank_of).under(root)
            } else {
                let top = Node::top_of_two(which, ranks - 1).map(rank_of);
                let height = Node::height(ranks - 1) + 1;
                Node {
                    parent: None,
                    children: top.into_iter().collect(),
                    depth: 0,
                    height,
                }
            };
            if request.kind == Kind::Broadcast {
                node.pass_down(&mut timeline, 0, share, max_message);
            } else {
                scratch = node.pass_up(&mut timeline, share, max_message, scratch);
            }
        }
        timeline.into_plan(scratch)
    }

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction {
        // How the messages of two trees share a port depends on their shapes.
        let domain = Domain::Small;
        Formula::predict(request, model, transport, domain, |formula| {
            let half = request.counts[0] as f64 * formula.element / 2.0;
            if request.ranks == 1 {
                return 0.0;
            }
            // The busiest rank has children in one tree and none in the other. On the longest way a
            // rank sends to its second child, but where the last level is not full one to its first.
            let (hops, sends) = match request.kind {
                Kind::AllReduce => Node::longest_way(request.ranks),
                _ => Node::longest_way(request.ranks - 1),
            };
            match request.kind {
                Kind::AllReduce if request.ranks == 2 => formula.tree(2.0, 2.0, 2.0, half, 1.0),
                Kind::AllReduce => formula.tree(2.0 * hops, 2.0 * sends, 4.0, half, 2.0),
                Kind::Reduce => formula.tree(hops + 1.0, sends + 2.0, 2.0, half, 2.0),
                _ => formula.tree(hops + 1.0, sends + 2.0, 2.0, half, 0.0),
            }
        })
    }
}
