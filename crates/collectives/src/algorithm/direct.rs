use super::cost::{Domain, Formula, Reduce, Rounds};
use super::{Algorithm, CostModel, Prediction, Transport};
use crate::Kind;
use crate::schedule::{Buffer, Chunk, Pieces, RankPlan, Request};

/// Every rank sends to every other what that one needs, in one hop.
///
/// A reduction is one [`Step::Reduce`](crate::schedule::Step::Reduce) over all operands in
/// rank order, on the rank that owns the element, so it is rounded once. The
/// all-reduce is such a reduce-scatter, then an all-gather; results are bit-equal because
/// each element has one reducer. All kinds, all group sizes, all counts.
///
/// Messages go round by round, one to each peer in a round, so that at most
/// `2 (n - 1) max_message` elements of scratch hold what waits to be reduced.
///
/// | kind | alpha terms | elements sent by a rank |
/// |---|---|---|
/// | all_reduce | 2 | 2 count (n - 1) / n |
/// | all_gather | 1 | (n - 1) x its piece |
/// | reduce_scatter | 1 | all pieces but its own |
/// | all_to_all | 1 | (n - 1) x piece |
/// | broadcast, scatter | 1 | root: (n - 1) x count, all pieces but its own |
/// | reduce, gather | 1 | count, its piece (the root receives (n - 1) times that) |
/// | barrier | 1 | none, n - 1 messages |
/// | monitored_barrier | 2 | none; the root collects all, then releases all |
///
/// Use: latency-bound sizes on a network where all pairs are near, and 16-bit types.
/// The number of messages grows with n^2. Source: MPI's "linear" or "spread-out"
/// algorithms; Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication
/// Operations in MPICH", IJHPCA 2005.
#[derive(Clone, Copy, Debug, Default)]
pub struct Direct;

impl Algorithm for Direct {
    fn name(&self) -> &'static str {
        "direct"
    }

    fn supports(&self, request: &Request) -> bool {
        !matches!(request.kind, Kind::Send | Kind::Recv)
    }

    fn rounds_once(&self) -> bool {
        true
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        let mut part = Part {
            request,
            rank,
            pieces: request.pieces(),
            plan: RankPlan::default(),
        };
        match request.kind {
            Kind::Barrier => part.barrier(),
            Kind::MonitoredBarrier => part.monitored_barrier(),
            Kind::AllReduce => part.all_reduce(),
            Kind::ReduceScatter => part.reduce_scatter(),
            Kind::Reduce => part.reduce(),
            Kind::AllGather | Kind::AllToAll | Kind::Broadcast | Kind::Gather | Kind::Scatter => {
                part.exchange()
            }
            Kind::Send | Kind::Recv => {}
        }
        part.plan
    }

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction {
        // Both halves of an all-reduce that is cut meet at the ports; a root copies meanwhile.
        let cut = request.pieces().largest() > request.max_message;
        let domain = match request.kind {
            Kind::AllReduce | Kind::Scatter if cut => Domain::Small,
            _ => Domain::Every,
        };
        Formula::predict(request, model, transport, domain, |formula| {
            let pieces = request.pieces();
            let piece = pieces.largest() as f64 * formula.element;
            let whole = pieces.total() as f64 * formula.element;
            let peers = f64::from(request.ranks - 1);
            let round = |reduce| Rounds {
                count: 1.0,
                fan: peers,
                bytes: piece,
                reduce,
            };
            match request.kind {
                Kind::Barrier => formula.signals(1.0, peers),
                Kind::MonitoredBarrier => formula.signals(1.0, 1.0) + formula.signals(1.0, peers),
                // Both halves run at the same time, one round apart.
                Kind::AllReduce => formula.halves(peers, piece),
                Kind::ReduceScatter => formula.stream(&[round(Reduce::Together)], 0.0),
                Kind::AllGather | Kind::AllToAll => formula.stream(&[round(Reduce::No)], piece),
                Kind::Broadcast => formula.tree(1.0, peers, peers, whole, 0.0),
                Kind::Scatter => formula.tree(1.0, peers, peers, piece, 0.0),
                Kind::Reduce => formula.collect(peers, whole, peers),
                Kind::Gather => formula.collect(peers, piece, 0.0),
                Kind::Send | Kind::Recv => 0.0,
            }
        })
    }
}

struct Part<'a> {
    request: &'a Request,
    rank: u32,
    pieces: Pieces,
    plan: RankPlan,
}

impl Part<'_> {
    /// The other ranks, each rank beginning with another one so that nobody is
    /// everybody's first.
    fn receivers(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, ranks) = (self.rank, self.request.ranks);
        (1..ranks).map(move |distance| (rank + distance) % ranks)
    }

    fn senders(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, ranks) = (self.rank, self.request.ranks);
        (1..ranks).map(move |distance| (rank + ranks - distance) % ranks)
    }

    fn piece(&self, buffer: Buffer, rank: u32) -> Chunk {
        Chunk::new(buffer, self.pieces.range(rank..rank + 1))
    }

    fn own(&self, buffer: Buffer) -> Chunk {
        Chunk::new(buffer, 0..self.pieces.count(self.rank))
    }

    fn whole(&self) -> Chunk {
        Chunk::new(Buffer::Output, 0..self.pieces.total())
    }

    /// Part `round` of a chunk.
    fn cut(&self, chunk: Chunk, round: u64) -> Chunk {
        chunk.cut(round, self.request.max_message)
    }

    /// Rounds for a chunk of `count` elements.
    fn rounds(&self, count: u64) -> u64 {
        count.div_ceil(self.request.max_message)
    }

    fn barrier(&mut self) {
        for peer in self.receivers() {
            self.plan.signal(peer);
        }
        for peer in self.senders() {
            self.plan.await_signal(peer);
        }
    }

    fn monitored_barrier(&mut self) {
        let root = self.request.root;
        if self.rank != root {
            self.plan.signal(root);
            self.plan.await_signal(root);
            return;
        }
        let others = (0..self.request.ranks).filter(|&peer| peer != root);
        for peer in others.clone() {
            self.plan.await_signal(peer);
        }
        for peer in others {
            self.plan.signal(peer);
        }
    }

    /// What this rank sends to `to`, for the kinds that reduce nothing.
    fn outgoing(&self, to: u32) -> Option<Chunk> {
        let (root, at_root) = (self.request.root, self.rank == self.request.root);
        match self.request.kind {
            Kind::AllGather => Some(self.own(Buffer::Input)),
            Kind::AllToAll => Some(self.piece(Buffer::Input, to)),
            Kind::Broadcast if at_root => Some(self.whole()),
            Kind::Scatter if at_root => Some(self.piece(Buffer::Input, to)),
            Kind::Gather if to == root => Some(self.own(Buffer::Input)),
            _ => None,
        }
    }

    /// Where this rank puts what `from` sends to it.
    fn incoming(&self, from: u32) -> Option<Chunk> {
        let (root, at_root) = (self.request.root, self.rank == self.request.root);
        match self.request.kind {
            Kind::AllGather | Kind::AllToAll => Some(self.piece(Buffer::Output, from)),
            Kind::Broadcast if from == root => Some(self.whole()),
            Kind::Scatter if from == root => Some(self.own(Buffer::Output)),
            Kind::Gather if at_root => Some(self.piece(Buffer::Output, from)),
            _ => None,
        }
    }

    fn exchange(&mut self) {
        let outgoing: Vec<_> = self
            .receivers()
            .filter_map(|to| Some((to, self.outgoing(to)?)))
            .collect();
        let incoming: Vec<_> = self
            .senders()
            .filter_map(|from| Some((from, self.incoming(from)?)))
            .collect();
        let most = outgoing
            .iter()
            .chain(&incoming)
            .map(|(_, chunk)| chunk.count)
            .max();
        let own = match self.request.kind {
            // Memory that is its own input and output needs no copy.
            Kind::Broadcast => None,
            _ => self.outgoing(self.rank).zip(self.incoming(self.rank)),
        };
        for round in 0..=self.rounds(most.unwrap_or(0)) {
            for &(to, chunk) in &outgoing {
                self.plan.send(to, self.cut(chunk, round));
            }
            if round == 0
                && let Some((src, dst)) = own
            {
                self.plan.copy(src, dst);
            }
            if round > 0 {
                for &(from, chunk) in &incoming {
                    self.plan.recv(from, self.cut(chunk, round - 1));
                }
            }
        }
    }

    /// Where the contribution of `from` in `round` waits to be reduced.
    fn slot(&self, from: u32, round: u64, count: u64) -> Chunk {
        let peers = u64::from(self.request.ranks - 1);
        let slot = round % 2 * peers + u64::from(from) - u64::from(from > self.rank);
        let start = slot * self.request.max_message.min(self.slot_size());
        Chunk::new(Buffer::Scratch, start..start + count)
    }

    /// Elements of the largest contribution to what this rank owns.
    fn slot_size(&self) -> u64 {
        match self.request.kind {
            Kind::Reduce => self.pieces.total(),
            _ => self.pieces.count(self.rank),
        }
    }

    /// Receives the contributions of a round to `dst`, and reduces them with `own`.
    fn collect(&mut self, dst: Chunk, own: Chunk, round: u64) {
        let (dst, own) = (self.cut(dst, round), self.cut(own, round));
        for from in self.senders() {
            self.plan.recv(from, self.slot(from, round, dst.count));
        }
        let sources = (0..self.request.ranks)
            .map(|from| {
                if from == self.rank {
                    own
                } else {
                    self.slot(from, round, dst.count)
                }
            })
            .collect();
        self.plan.reduce(dst, sources);
        self.plan.finish(dst);
    }

    fn reserve_slots(&mut self) {
        let slots = self.rounds(self.slot_size()).min(2) * u64::from(self.request.ranks - 1);
        self.plan.scratch = slots * self.request.max_message.min(self.slot_size());
    }

    fn contribute(&mut self, buffer: Buffer, round: u64) {
        for to in self.receivers() {
            self.plan.send(to, self.cut(self.piece(buffer, to), round));
        }
    }

    fn all_reduce(&mut self) {
        self.reserve_slots();
        let mine = self.piece(Buffer::Output, self.rank);
        let rounds = self.rounds(self.pieces.largest());
        self.contribute(Buffer::Output, 0);
        for round in 0..=rounds {
            self.contribute(Buffer::Output, round + 1);
            if round < rounds {
                self.collect(mine, mine, round);
                for to in self.receivers() {
                    self.plan.send(to, self.cut(mine, round));
                }
            }
            if round > 0 {
                for from in self.senders() {
                    self.plan
                        .recv(from, self.cut(self.piece(Buffer::Output, from), round - 1));
                }
            }
        }
    }

    fn reduce_scatter(&mut self) {
        self.reserve_slots();
        let own = self.piece(Buffer::Input, self.rank);
        let dst = self.own(Buffer::Output);
        self.contribute(Buffer::Input, 0);
        for round in 0..self.rounds(self.pieces.largest()) {
            self.contribute(Buffer::Input, round + 1);
            self.collect(dst, own, round);
        }
    }

    fn reduce(&mut self) {
        let whole = self.whole();
        if self.rank != self.request.root {
            for part in whole.cuts(self.request.max_message) {
                self.plan.send(self.request.root, part);
            }
            return;
        }
        self.reserve_slots();
        for round in 0..self.rounds(whole.count) {
            self.collect(whole, whole, round);
        }
    }
}
