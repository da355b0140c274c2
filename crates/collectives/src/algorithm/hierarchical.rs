use std::sync::Arc;

use super::{Algorithm, CostModel, Prediction, Transport};
use crate::Kind;
use crate::schedule::{Buffer, Chunk, Pieces, RankPlan, Request, Step};

/// An all-reduce in three parts: reduce-scatter inside each group of ranks, all-reduce across
/// the groups, all-gather inside each group.
///
/// The data is cut into as many shards as the smallest group has ranks. Member i of every
/// group has shard i; further members of larger groups bring their data and get the
/// result. Which algorithm does a part is free: `inner` must support uneven
/// pieces where groups differ in size. Results are bit-equal when those of
/// `outer` are.
///
/// Alpha terms: those of the three parts. Elements sent by a rank between groups: those of
/// the outer all-reduce on count / k elements for groups of k ranks.
///
/// Use: where ranks of a group reach each other faster than others: hosts with shared memory,
/// slices joined by DCN. Source: Cho, Finkler, Serrano, Kung, Hunter, "BlueConnect:
/// Decomposing all-reduce for deep learning on heterogeneous network hierarchy",
/// IBM J. R&D 2019.
#[derive(Clone, Debug)]
pub struct Hierarchical {
    groups: Arc<[Vec<u32>]>,
    /// The group of each rank and its number in it; empty where the groups do not name every
    /// rank once.
    places: Arc<[(u32, u32)]>,
    /// Shards, and so all-reduces across groups: the ranks of the smallest group.
    shards: u32,
    inner: Arc<dyn Algorithm>,
    outer: Arc<dyn Algorithm>,
    transports: (Transport, Transport),
}

impl Hierarchical {
    /// Over `groups`, which together name every rank once. Requests that they do not fit
    /// are not supported.
    pub fn new(
        groups: impl Into<Arc<[Vec<u32>]>>,
        inner: Arc<dyn Algorithm>,
        outer: Arc<dyn Algorithm>,
    ) -> Hierarchical {
        let groups = groups.into();
        Hierarchical {
            places: places(&groups).into(),
            shards: groups.iter().map(Vec::len).min().unwrap_or(0) as u32,
            groups,
            inner,
            outer,
            transports: (Transport::Local, Transport::Network),
        }
    }

    /// For the cost: how ranks of a group and how groups reach each other. Else local, and
    /// over the network.
    pub fn over(self, inside: Transport, across: Transport) -> Hierarchical {
        Hierarchical {
            transports: (inside, across),
            ..self
        }
    }

    /// The request for a part inside a group of `members` ranks.
    fn inside(&self, request: &Request, kind: Kind, members: usize) -> Request {
        let shards = self.shards;
        let split = Pieces::split(request.counts[0], shards);
        let counts = (0..members as u32).map(|member| {
            if member < shards {
                split.count(member)
            } else {
                0
            }
        });
        Request {
            kind,
            ranks: members as u32,
            root: 0,
            counts: counts.collect(),
            ..request.clone()
        }
    }

    /// The request for the part across groups on `shard`.
    fn across(&self, request: &Request, shard: u32) -> Request {
        let count = Pieces::split(request.counts[0], self.shards).count(shard);
        Request {
            ranks: self.groups.len() as u32,
            root: 0,
            counts: vec![count],
            ..request.clone()
        }
    }
}

impl Algorithm for Hierarchical {
    fn name(&self) -> &'static str {
        "hierarchical"
    }

    fn supports(&self, request: &Request) -> bool {
        request.kind == Kind::AllReduce
            && self.places.len() == request.ranks as usize
            && self.shards > 0
            && self.outer.supports(&self.across(request, 0))
            && self.groups.iter().all(|group| {
                self.inner
                    .supports(&self.inside(request, Kind::ReduceScatter, group.len()))
                    && self
                        .inner
                        .supports(&self.inside(request, Kind::AllGather, group.len()))
            })
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        let (number, shard) = self.places[rank as usize];
        let group = &self.groups[number as usize];
        let count = match shard < self.shards {
            true => Pieces::split(request.counts[0], self.shards).count(shard),
            false => 0,
        };
        // The shard is at the start of scratch; the parts have theirs after it.
        let mut plan = RankPlan {
            scratch: count,
            steps: Vec::new(),
        };
        let mut add = |part: RankPlan,
                       ranks: &dyn Fn(u32) -> u32,
                       input: Buffer,
                       output: Buffer,
                       last: bool| {
            plan.scratch = plan.scratch.max(count + part.scratch);
            let place = |chunk: Chunk| match chunk.buffer {
                Buffer::Scratch => Chunk {
                    offset: chunk.offset + count,
                    ..chunk
                },
                Buffer::Input => Chunk {
                    buffer: input,
                    ..chunk
                },
                Buffer::Output => Chunk {
                    buffer: output,
                    ..chunk
                },
            };
            plan.steps.reserve(part.steps.len());
            plan.steps.extend(part.steps.into_iter().filter_map(|step| {
                Some(match step {
                    Step::Send { to, chunk } => Step::Send {
                        to: ranks(to),
                        chunk: place(chunk),
                    },
                    Step::Recv { from, chunk } => Step::Recv {
                        from: ranks(from),
                        chunk: place(chunk),
                    },
                    Step::RecvReduce { from, chunk } => Step::RecvReduce {
                        from: ranks(from),
                        chunk: place(chunk),
                    },
                    Step::Reduce { dst, sources } => Step::Reduce {
                        dst: place(dst),
                        sources: sources.into_iter().map(place).collect(),
                    },
                    Step::Copy { src, dst } => Step::Copy {
                        src: place(src),
                        dst: place(dst),
                    },
                    // What is reduced inside a group is not a result yet.
                    Step::Finish { .. } if !last => return None,
                    Step::Finish { chunk } => Step::Finish {
                        chunk: place(chunk),
                    },
                })
            }));
        };
        let inside = |kind| {
            self.inner
                .steps(&self.inside(request, kind, group.len()), shard)
        };
        let to_member = |member: u32| group[member as usize];
        add(
            inside(Kind::ReduceScatter),
            &to_member,
            Buffer::Output,
            Buffer::Scratch,
            false,
        );
        if count > 0 {
            let part = self.outer.steps(&self.across(request, shard), number);
            let to_group = |number: u32| self.groups[number as usize][shard as usize];
            add(part, &to_group, Buffer::Output, Buffer::Scratch, true);
        }
        add(
            inside(Kind::AllGather),
            &to_member,
            Buffer::Scratch,
            Buffer::Output,
            false,
        );
        plan
    }

    /// An estimate: groups are not in step.
    fn cost(&self, request: &Request, model: &dyn CostModel, _: Transport) -> Prediction {
        let members = self.groups.iter().map(Vec::len).max().unwrap_or(0);
        let (inside, across) = self.transports;
        let inner = |kind| {
            self.inner
                .cost(&self.inside(request, kind, members), model, inside)
                .seconds()
        };
        let outer = self.outer.cost(&self.across(request, 0), model, across);
        Prediction::Estimate(inner(Kind::ReduceScatter) + outer.seconds() + inner(Kind::AllGather))
    }
}

fn places(groups: &[Vec<u32>]) -> Vec<(u32, u32)> {
    let ranks = groups.iter().map(Vec::len).sum();
    let mut places = vec![None; ranks];
    for (number, group) in groups.iter().enumerate() {
        for (member, &rank) in group.iter().enumerate() {
            match places.get_mut(rank as usize) {
                Some(free @ None) => *free = Some((number as u32, member as u32)),
                _ => return Vec::new(),
            }
        }
    }
    places.into_iter().flatten().collect()
}
