use super::cost::{Domain, Formula, Reduce, Rounds};
use super::timeline::{Clock, Timeline};
use super::{Algorithm, CostModel, Prediction, Transport};
use crate::Kind;
use crate::schedule::{Buffer, Chunk, RankPlan, Request};

/// An all-to-all in n - 1 rounds: in round i a rank sends to the one i places after it and
/// receives from the one i places before it.
///
/// Alpha terms: n - 1. Elements sent by a rank: (n - 1) x piece.
///
/// Use: large pieces, where each rank should send to and receive from one rank at a time.
/// Source: Thakur, Rabenseifner, Gropp, IJHPCA 2005.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pairwise;

impl Algorithm for Pairwise {
    fn name(&self) -> &'static str {
        "pairwise"
    }

    fn supports(&self, request: &Request) -> bool {
        request.kind == Kind::AllToAll
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        let ranks = request.ranks;
        let pieces = request.pieces();
        let piece = |buffer, of: u32| Chunk::new(buffer, pieces.range(of..of + 1));
        let clock = Clock::new(0, pieces.largest(), request.max_message);
        let mut timeline = Timeline::default();
        for round in 1..ranks {
            let (to, from) = ((rank + round) % ranks, (rank + ranks - round) % ranks);
            for message in clock.messages(u64::from(round - 1), piece(Buffer::Input, to)) {
                timeline.send(message.sent, to, message.part);
            }
            for message in clock.messages(u64::from(round - 1), piece(Buffer::Output, from)) {
                timeline.recv(message.received, from, message.part);
            }
        }
        timeline.copy_meanwhile(0, piece(Buffer::Input, rank), piece(Buffer::Output, rank));
        timeline.into_plan(0)
    }

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction {
        let domain = Domain::Every;
        Formula::predict(request, model, transport, domain, |formula| {
            let piece = request.counts[0] as f64 * formula.element;
            let rounds = Rounds {
                count: f64::from(request.ranks - 1),
                fan: 1.0,
                bytes: piece,
                reduce: Reduce::No,
            };
            formula.stream(&[rounds], piece)
        })
    }
}
