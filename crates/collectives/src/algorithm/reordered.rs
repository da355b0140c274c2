use std::sync::Arc;

use super::order::Order;
use super::{Algorithm, CostModel, Prediction, Transport};
use crate::Kind;
use crate::schedule::{RankPlan, Request, Step};

/// Another algorithm on other places: the rank `order[p]` does what it plans for rank p.
///
/// For algorithms whose ranks have physical places, as [`Bucket`](super::Bucket), in
/// groups that are numbered otherwise. Only for collectives of one piece and barriers, where
/// a rank's number says nothing about its data.
#[derive(Clone, Debug)]
pub struct Reordered {
    algorithm: Arc<dyn Algorithm>,
    order: Order,
}

impl Reordered {
    /// `order` names every rank once; requests for another number of ranks are not
    /// supported.
    pub fn new(algorithm: Arc<dyn Algorithm>, order: impl Into<Arc<[u32]>>) -> Reordered {
        Reordered {
            algorithm,
            order: Order::new(order.into()),
        }
    }

    fn moved(&self, request: &Request) -> Request {
        let root = self.order.place(request.root);
        Request {
            root,
            ..request.clone()
        }
    }
}

impl Algorithm for Reordered {
    fn name(&self) -> &'static str {
        self.algorithm.name()
    }

    fn supports(&self, request: &Request) -> bool {
        matches!(
            request.kind,
            Kind::AllReduce
                | Kind::Broadcast
                | Kind::Reduce
                | Kind::Barrier
                | Kind::MonitoredBarrier
        ) && self.order.fits(request.ranks)
            && self.algorithm.supports(&self.moved(request))
    }

    fn rounds_once(&self) -> bool {
        self.algorithm.rounds_once()
    }

    fn steps(&self, request: &Request, rank: u32) -> RankPlan {
        let mut plan = self
            .algorithm
            .steps(&self.moved(request), self.order.place(rank));
        for step in &mut plan.steps {
            match step {
                Step::Send { to: peer, .. }
                | Step::Recv { from: peer, .. }
                | Step::RecvReduce { from: peer, .. } => *peer = self.order.rank(*peer),
                Step::Reduce { .. } | Step::Copy { .. } | Step::Finish { .. } => {}
            }
        }
        plan
    }

    fn cost(&self, request: &Request, model: &dyn CostModel, transport: Transport) -> Prediction {
        self.algorithm.cost(&self.moved(request), model, transport)
    }
}
