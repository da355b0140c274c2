use super::cost::{Domain, Formula, Reduce};
use super::{Algorithm, CostModel, Prediction, Transport};
use crate::Kind;
use crate::schedule::{Buffer, Chunk, RankPlan, Request};

/// An all-reduce in which every rank sends all it has to every other, and each reduces all.
///
/// A reduction is one [`Step::Reduce`](crate::schedule::Step::Reduce) in rank order, so it
/// is rounded once, and all ranks do the same operations in the same order: results are
/// bit-equal.
///
/// Alpha terms: 1. Elements sent by a rank: (n - 1) x count.
///
/// Use: the smallest sizes. Source: the "linear" or "flat" algorithms of MPI libraries;
/// NVIDIA's and AMD's "one-shot" all-reduces in shared memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct OneShot;

impl Algorithm for OneShot {
    fn name(&self) -> &'static str {
        "one_shot"
    }

    fn supports(&self, request: &Request) -> bool {
        request.kind == Kind::AllReduce
    }

    fn rounds_once(&self) -> bool {
        true
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        let Request {
            ranks, max_message, ..
        } = *request;
        let whole = Chunk::new(Buffer::Output, 0..request.counts[0]);
        let rounds = whole.count.div_ceil(max_message);
        let cut = |round: u64| whole.cut(round, max_message);
        let size = max_message.min(whole.count);
        let peers = u64::from(ranks - 1);
        let mut plan = RankPlan {
            scratch: rounds.min(2) * peers * size,
            steps: Vec::new(),
        };
        // Places for two rounds, one for each peer.
        let slot = |from: u32, round: u64| {
            let index = round % 2 * peers + u64::from(from) - u64::from(from > rank);
            Chunk::new(
                Buffer::Scratch,
                index * size..index * size + cut(round).count,
            )
        };
        for round in 0..=rounds {
            for distance in 1..ranks {
                plan.send((rank + distance) % ranks, cut(round));
            }
            let Some(done) = round.checked_sub(1) else {
                continue;
            };
            for distance in 1..ranks {
                let from = (rank + ranks - distance) % ranks;
                plan.recv(from, slot(from, done));
            }
            let operand = |from| {
                if from == rank {
                    cut(done)
                } else {
                    slot(from, done)
                }
            };
            plan.reduce(cut(done), (0..ranks).map(operand).collect());
            plan.finish(cut(done));
        }
        plan
    }

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction {
        let domain = Domain::Every;
        Formula::predict(request, model, transport, domain, |formula| {
            let whole = request.counts[0] as f64 * formula.element;
            let peers = f64::from(request.ranks - 1);
            formula.rounds(1.0, peers, whole, Reduce::Together)
        })
    }
}
