use super::cost::{Domain, Formula};
use super::{Algorithm, CostModel, Prediction, Transport};
use crate::Kind;
use crate::schedule::{RankPlan, Request};

/// A barrier in which each rank tells the rank 1, 2, 4, ... places after it that it, and all it
/// has heard of, have come.
///
/// Alpha terms and messages of a rank: log2 n, rounded up. No elements.
///
/// Use: barriers of more than a few ranks. Source: Hensgen, Finkel, Manber, "Two algorithms
/// for barrier synchronization", IJPP 1988.
#[derive(Clone, Copy, Debug, Default)]
pub struct Dissemination;

impl Algorithm for Dissemination {
    fn name(&self) -> &'static str {
        "dissemination"
    }

    fn supports(&self, request: &Request) -> bool {
        request.kind == Kind::Barrier
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        let ranks = request.ranks;
        let mut plan = RankPlan::default();
        let distances = std::iter::successors(Some(1u32), |distance| distance.checked_mul(2));
        for distance in distances.take_while(|&distance| distance < ranks) {
            plan.signal((rank + distance) % ranks);
            plan.await_signal((rank + ranks - distance) % ranks);
        }
        plan
    }

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction {
        let rounds = request.ranks.next_power_of_two().ilog2();
        Formula::predict(request, model, transport, Domain::Every, |formula| {
            formula.signals(rounds.into(), 1.0)
        })
    }
}
