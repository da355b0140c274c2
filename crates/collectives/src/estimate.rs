//! How long a call of a process group takes.

use tpu_dist_mesh::cost::{self, Collective, Dimension, Prediction};
use tpu_dist_mesh::{Error, MultiSlice, assign};

use crate::Kind;
use crate::algorithm::{Constants, CostModel, Transport};
use crate::schedule::Request;
use crate::select::{MESSAGE_BYTES, SelectError, Selector};

/// Bytes that a barrier moves: one integer, see [`lower`](crate::lower).
const BARRIER_BYTES: f64 = 4.0;

/// Predicts the calls of one group: on the chips of a slice or between hosts.
///
/// ```
/// use tpu_dist_collectives::Kind;
/// use tpu_dist_collectives::estimate::Estimator;
///
/// let job = "v5p:4x4x4".parse()?;
/// let group: Vec<u32> = (0..64).collect();
/// let estimator = Estimator::on_chips(&job, &group)?;
/// let one = estimator.collective(Kind::AllReduce, 64 << 20)?;
/// let all = estimator.collective(Kind::AllReduce, 128 << 20)?;
/// assert!(one.seconds() < all.seconds());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Estimator {
    place: Place,
}

#[derive(Clone, Debug)]
enum Place {
    Chips {
        job: MultiSlice,
        ranks: Vec<u32>,
        dimensions: Vec<Dimension>,
    },
    Hosts {
        ranks: u32,
        transport: Transport,
    },
}

/// A call that cannot be predicted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EstimateError {
    /// Ranks that the topology does not have.
    #[error(transparent)]
    Mesh(#[from] Error),
    /// A collective that has no plan.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// A rank outside the group.
    #[error("peer: expected below {ranks}, got {peer}")]
    Peer {
        /// What was given.
        peer: u32,
        /// Ranks of the group.
        ranks: u32,
    },
}

/// How the processes of some ranks of a job reach each other, with one process a device: through
/// memory where one host has them all.
///
/// # Errors
/// For ranks that do not exist.
pub fn transport(job: &MultiSlice, ranks: &[u32]) -> Result<Transport, EstimateError> {
    let devices = job.devices();
    let mut hosts = Vec::with_capacity(ranks.len());
    for &rank in ranks {
        let device = devices.get(rank as usize).ok_or(EstimateError::Peer {
            peer: rank,
            ranks: devices.len() as u32,
        })?;
        hosts.push(device.process);
    }
    hosts.dedup();
    Ok(match hosts.len() {
        0 | 1 => Transport::Local,
        _ => Transport::Network,
    })
}

impl Estimator {
    /// For a group on the chips of `job`: rank p of the group is device `ranks[p]` of
    /// [`MultiSlice::devices`]. Groups like it are taken to be as busy.
    ///
    /// Calls are predicted as what [`lower`](crate::lower) makes of them, each by the algorithm for its
    /// dimensions (see [`cost::predict`]).
    ///
    /// # Errors
    /// For ranks that repeat or do not exist.
    pub fn on_chips(job: &MultiSlice, ranks: &[u32]) -> Result<Estimator, EstimateError> {
        Ok(Estimator {
            place: Place::Chips {
                job: job.clone(),
                ranks: ranks.to_vec(),
                dimensions: assign::group(job, ranks)?,
            },
        })
    }

    /// For a group of `ranks` processes that the host engine serves, by [`Constants::DEFAULT`].
    pub fn on_hosts(ranks: u32, transport: Transport) -> Estimator {
        Estimator {
            place: Place::Hosts { ranks, transport },
        }
    }

    /// A collective. `bytes` are, as `torch.distributed` has the tensors: the vector of an
    /// all_reduce, reduce or broadcast; all pieces of an all_gather, gather, reduce_scatter or scatter;
    /// all that the rank that brings most has for an all_to_all; nothing for a barrier.
    ///
    /// # Errors
    /// For `Send` and `Recv`, which are [`Estimator::message`].
    pub fn collective(&self, kind: Kind, bytes: u64) -> Result<Prediction, EstimateError> {
        match &self.place {
            Place::Chips { dimensions, .. } => {
                let bytes = bytes as f64;
                let (collective, bytes) = match kind {
                    Kind::AllReduce | Kind::Reduce | Kind::Broadcast => {
                        (Collective::AllReduce, bytes)
                    }
                    Kind::AllGather | Kind::Gather => (Collective::AllGather, bytes),
                    Kind::ReduceScatter => (Collective::ReduceScatter, bytes),
                    Kind::AllToAll | Kind::Scatter => (Collective::AllToAll, bytes),
                    Kind::Barrier | Kind::MonitoredBarrier => {
                        (Collective::AllReduce, BARRIER_BYTES)
                    }
                    Kind::Send | Kind::Recv => (Collective::Permute, bytes),
                };
                Ok(cost::predict(collective, bytes, dimensions))
            }
            &Place::Hosts { ranks, transport } => {
                let request = Request::of_bytes(kind, ranks, bytes, 1, MESSAGE_BYTES);
                let model = Constants::DEFAULT;
                let choice = Selector::on_hosts(&model, transport).select(&request, None)?;
                Ok(choice.algorithm.cost(&request, &model, transport))
            }
        }
    }

    /// A message of `bytes` from one rank of the group to another.
    ///
    /// # Errors
    /// For ranks outside the group.
    pub fn message(&self, from: u32, to: u32, bytes: u64) -> Result<Prediction, EstimateError> {
        let members = match &self.place {
            Place::Chips { ranks, .. } => ranks.len() as u32,
            Place::Hosts { ranks, .. } => *ranks,
        };
        for peer in [from, to] {
            if peer >= members {
                return Err(EstimateError::Peer {
                    peer,
                    ranks: members,
                });
            }
        }
        if from == to {
            return Ok(Prediction::Formula(0.0));
        }
        match &self.place {
            Place::Chips { job, ranks, .. } => {
                let pair = [from, to].map(|rank| ranks[rank as usize]);
                let dimensions = assign::group(job, &pair)?;
                Ok(cost::predict(
                    Collective::Permute,
                    bytes as f64,
                    &dimensions,
                ))
            }
            &Place::Hosts { transport, .. } => {
                let model = Constants::DEFAULT;
                let start = model.overhead(transport) + model.alpha(transport);
                Ok(Prediction::Formula(
                    start + bytes as f64 * model.beta(transport),
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn chips(name: &str, ranks: &[u32]) -> Estimator {
        Estimator::on_chips(&name.parse().expect("legal"), ranks).expect("distinct")
    }

    #[test]
    fn chips_take_what_the_scaling_book_says() {
        let all: Vec<u32> = (0..64).collect();
        let cube = chips("v5p:4x4x4", &all);
        let seconds = |kind, bytes| cube.collective(kind, bytes).expect("known").seconds();
        // Twice the bytes through six links of 90 GB/s, and 18 hops of 1 us.
        let link = 90e9;
        let bytes = (1u64 << 30) as f64;
        let reduce = 2.0 * bytes * (63.0 / 64.0) / (6.0 * link);
        let at = |bandwidth: f64| reduce * link / bandwidth + 18e-6;
        let spec = "v5p:4x4x4"
            .parse::<MultiSlice>()
            .expect("legal")
            .slice()
            .generation()
            .spec();
        let expected = at(spec.link_bandwidth);
        let ours = seconds(Kind::AllReduce, 1 << 30);
        assert!((ours / expected - 1.0).abs() < 1e-6, "{ours} {expected}");
        for (kind, like) in [
            (Kind::Reduce, Kind::AllReduce),
            (Kind::Broadcast, Kind::AllReduce),
            (Kind::Gather, Kind::AllGather),
            (Kind::Scatter, Kind::AllToAll),
        ] {
            assert_eq!(seconds(kind, MIB), seconds(like, MIB), "{kind}");
        }
        let half = seconds(Kind::ReduceScatter, 1 << 30);
        assert!((ours / half - 2.0).abs() < 1e-9);
        assert!(seconds(Kind::Barrier, 0) < 19e-6 && seconds(Kind::Barrier, 0) > 1e-6);
        // Neighbours, and opposite corners: six hops.
        let message = |to, bytes| cube.message(0, to, bytes).expect("a rank").seconds();
        assert!((message(1, 0) - 1e-6).abs() < 1e-9);
        assert!(message(42, 0) > message(1, 0));
        assert_eq!(cube.message(5, 5, MIB), Ok(Prediction::Formula(0.0)));
        let error = cube.message(0, 64, 1).expect_err("no such rank");
        assert_eq!(error.to_string(), "peer: expected below 64, got 64");
    }

    #[test]
    fn a_group_is_where_its_ranks_are() {
        // Along one ring, across slices, and alone.
        let line = chips("v6e:16x16", &[0, 1, 4, 5]);
        let slices = chips("2*v5e:2x2", &[0, 4]);
        let time = |estimator: &Estimator| {
            let prediction = estimator.collective(Kind::AllReduce, MIB);
            prediction.expect("known").seconds()
        };
        assert!(time(&slices) > 10.0 * time(&line));
        let job: MultiSlice = "v6e:16x16".parse().expect("legal");
        assert_eq!(transport(&job, &[0, 1]), Ok(Transport::Local));
        assert_eq!(transport(&job, &[0, 255]), Ok(Transport::Network));
        assert!(transport(&job, &[256]).is_err());
        assert_eq!(time(&chips("v5e:2x2", &[3])), 0.0);
        let job: MultiSlice = "v5e:2x2".parse().expect("legal");
        let error = Estimator::on_chips(&job, &[0, 0]).expect_err("twice");
        assert!(error.to_string().contains("0 repeats"), "{error}");
    }

    #[test]
    fn hosts_take_what_the_selected_plan_takes() {
        for transport in [Transport::Local, Transport::Network] {
            let estimator = Estimator::on_hosts(8, transport);
            let mut before = 0.0;
            for bytes in [0, 64, 64 << 10, 64 << 20] {
                let prediction = estimator.collective(Kind::AllReduce, bytes);
                let seconds = prediction.expect("known").seconds();
                assert!(seconds >= before);
                before = seconds;
            }
            for &kind in Kind::ALL {
                match kind {
                    Kind::Send | Kind::Recv => {
                        let error = estimator.collective(kind, 1).expect_err("a message");
                        assert!(error.to_string().contains("is not a collective"), "{error}");
                    }
                    _ => {
                        let prediction = estimator.collective(kind, MIB).expect("known");
                        assert!(prediction.seconds() > 0.0, "{kind}");
                    }
                }
            }
            let message = estimator.message(0, 1, MIB).expect("ranks").seconds();
            assert!(message > 0.0 && message < before);
        }
    }
}
