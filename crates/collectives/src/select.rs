//! Which algorithm to run.

use std::fmt;
use std::sync::Arc;

use crate::algorithm::{
    Algorithm, Binomial, CostModel, Direct, Dissemination, DoubleBinaryTree, HalvingDoubling,
    OneShot, Pairwise, Pat, Prediction, RecursiveDoubling, Ring, Swing, Transport,
};
use tpu_dist_mesh::cost::{Contender, why};

use crate::schedule::{Request, RequestError};
use crate::{DType, Kind, ReduceKind};

/// Bytes of the largest message of a plan between hosts, so that a receiver reduces one while
/// the next comes.
pub const MESSAGE_BYTES: u64 = 256 << 10;

/// Chooses an algorithm for each request by predicted time.
///
/// ```
/// use tpu_dist_collectives::algorithm::{Constants, Transport};
/// use tpu_dist_collectives::schedule::Request;
/// use tpu_dist_collectives::select::Selector;
/// use tpu_dist_collectives::{DType, Kind, ReduceKind};
///
/// let model = Constants::default();
/// let request = Request {
///     kind: Kind::AllReduce,
///     ranks: 8,
///     root: 0,
///     counts: vec![1 << 24],
///     element_size: 4,
///     max_message: 1 << 16,
/// };
/// let selector = Selector::new(&model, Transport::Network);
/// let choice = selector.select(&request, Some((ReduceKind::Sum, DType::F32)))?;
/// assert_ne!(choice.algorithm.name(), "one_shot");
/// println!("{}", choice.explanation);
/// # Ok::<(), tpu_dist_collectives::select::SelectError>(())
/// ```
#[derive(Clone)]
pub struct Selector<'a> {
    model: &'a dyn CostModel,
    transport: Transport,
    candidates: Vec<Arc<dyn Algorithm>>,
    forced: Option<String>,
}

/// An algorithm, and why.
#[derive(Clone, Debug)]
pub struct Choice {
    /// What to run.
    pub algorithm: Arc<dyn Algorithm>,
    /// What it was compared with.
    pub explanation: Explanation,
}

/// What was considered. Its text is a table, the fastest first.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// The collective.
    pub kind: Kind,
    /// Ranks in the group.
    pub ranks: u32,
    /// Bytes of all pieces.
    pub bytes: u64,
    /// How ranks reach each other.
    pub transport: Transport,
    /// Name of the algorithm that was chosen.
    pub chosen: &'static str,
    /// Whether the caller demanded it.
    pub forced: bool,
    /// All that were considered: usable ones by time, then the others.
    pub candidates: Vec<Candidate>,
}

/// One that was considered.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Its name.
    pub name: &'static str,
    /// What was found.
    pub verdict: Verdict,
}

/// What was found out about a candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Verdict {
    /// It can be used, and takes so long by the model.
    Predicted(Prediction),
    /// It does not do this collective for this group.
    Unsupported,
    /// It would round partial sums of a 16-bit or smaller type.
    RoundsOften,
}

/// A request for which nothing can be chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SelectError {
    /// The request itself is wrong.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The demanded algorithm does not exist.
    #[error("algorithm: expected one of {known}, got {name:?}")]
    Unknown {
        /// What was demanded.
        name: String,
        /// All names.
        known: String,
    },
}

impl<'a> Selector<'a> {
    /// Among the algorithms that need nothing but the request.
    pub fn new(model: &'a dyn CostModel, transport: Transport) -> Selector<'a> {
        Selector {
            model,
            transport,
            candidates: general(),
            forced: None,
        }
    }

    /// Among those that the host engine has: in one host's memory all ranks read all data, or each
    /// rank reduces a part; between hosts it has all.
    pub fn on_hosts(model: &'a dyn CostModel, transport: Transport) -> Selector<'a> {
        let mut selector = Selector::new(model, transport);
        if transport == Transport::Local {
            selector.candidates = vec![Arc::new(OneShot), Arc::new(Direct)];
        }
        selector
    }

    /// Also considers `algorithm`, for example one that knows the topology.
    pub fn with(mut self, algorithm: Arc<dyn Algorithm>) -> Selector<'a> {
        self.candidates.push(algorithm);
        self
    }

    /// Demands the algorithm of this name wherever it supports the request, whatever its predicted
    /// time and rounding; elsewhere the choice is free, since one algorithm serves few collectives.
    /// `None` demands nothing.
    pub fn force(mut self, name: Option<&str>) -> Selector<'a> {
        self.forced = name.map(str::to_owned);
        self
    }

    /// Chooses. `reduction` is the operator and element type of a reduction.
    ///
    /// Floating-point types of at most 16 bits use only algorithms that round sums and products
    /// once.
    ///
    /// # Errors
    /// For a bad request, and for a demanded algorithm that does not exist.
    pub fn select(
        &self,
        request: &Request,
        reduction: Option<(ReduceKind, DType)>,
    ) -> Result<Choice, SelectError> {
        request.check()?;
        let strict = request.is_reduction()
            && reduction.is_some_and(|(op, dtype)| loses_bits(op, dtype, request.ranks));
        let forced = self.forced(request)?;
        let mut considered: Vec<(Verdict, &Arc<dyn Algorithm>)> = self
            .candidates
            .iter()
            .map(|algorithm| {
                let verdict = if !algorithm.supports(request) {
                    Verdict::Unsupported
                } else if strict && !algorithm.rounds_once() {
                    Verdict::RoundsOften
                } else {
                    Verdict::Predicted(algorithm.cost(request, self.model, self.transport))
                };
                (verdict, algorithm)
            })
            .collect();
        considered.sort_by(|(a, _), (b, _)| a.rank().total_cmp(&b.rank()));
        // `Direct` supports every collective and rounds once.
        let chosen = forced.unwrap_or(considered[0].1);
        let explanation = Explanation {
            kind: request.kind,
            ranks: request.ranks,
            bytes: request.bytes(),
            transport: self.transport,
            chosen: chosen.name(),
            forced: forced.is_some(),
            candidates: considered
                .iter()
                .map(|&(verdict, algorithm)| Candidate {
                    name: algorithm.name(),
                    verdict,
                })
                .collect(),
        };
        Ok(Choice {
            algorithm: chosen.clone(),
            explanation,
        })
    }

    /// Why an algorithm was chosen: what its time consists of, and what it saves against the next.
    pub fn why(&self, request: &Request, choice: &Choice) -> String {
        let latency = WithoutBytes(self.model);
        let contender = |algorithm: &dyn Algorithm| Contender {
            name: algorithm.name(),
            seconds: algorithm
                .cost(request, self.model, self.transport)
                .seconds(),
            latency: algorithm.cost(request, &latency, self.transport).seconds(),
        };
        let mut candidates = choice.explanation.candidates.iter();
        let next = candidates
            .find(|candidate| {
                candidate.name != choice.explanation.chosen
                    && matches!(candidate.verdict, Verdict::Predicted(_))
            })
            .and_then(|next| self.candidates.iter().find(|a| a.name() == next.name));
        why(
            &contender(&*choice.algorithm),
            next.map(|next| contender(&**next)).as_ref(),
        )
    }

    fn forced(&self, request: &Request) -> Result<Option<&Arc<dyn Algorithm>>, SelectError> {
        let Some(name) = &self.forced else {
            return Ok(None);
        };
        let named = |algorithm: &&Arc<dyn Algorithm>| algorithm.name() == name;
        if !self.candidates.iter().any(|algorithm| named(&algorithm)) {
            let known: Vec<_> = self
                .candidates
                .iter()
                .map(|algorithm| algorithm.name())
                .collect();
            return Err(SelectError::Unknown {
                name: name.clone(),
                known: known.join(", "),
            });
        }
        Ok(self
            .candidates
            .iter()
            .filter(named)
            .find(|algorithm| algorithm.supports(request)))
    }
}

/// A model in which bytes cost nothing.
struct WithoutBytes<'a>(&'a dyn CostModel);

impl CostModel for WithoutBytes<'_> {
    fn alpha(&self, transport: Transport) -> f64 {
        self.0.alpha(transport)
    }

    fn beta(&self, _: Transport) -> f64 {
        0.0
    }

    fn overhead(&self, transport: Transport) -> f64 {
        self.0.overhead(transport)
    }

    fn gamma(&self, _: Transport) -> f64 {
        0.0
    }
}

/// Every algorithm that needs nothing but the request.
pub fn general() -> Vec<Arc<dyn Algorithm>> {
    vec![
        Arc::new(Direct),
        Arc::new(OneShot),
        Arc::new(RecursiveDoubling),
        Arc::new(HalvingDoubling),
        Arc::new(Swing::new()),
        Arc::new(Ring::new()),
        Arc::new(Ring::bidirectional()),
        Arc::new(Binomial),
        Arc::new(DoubleBinaryTree),
        Arc::new(Pat),
        Arc::new(Pairwise),
        Arc::new(Dissemination),
    ]
}

/// Whether rounding partial results of this type matters. Two operands are rounded once
/// whatever the algorithm, but the mean of two may overflow in between.
fn loses_bits(op: ReduceKind, dtype: DType, ranks: u32) -> bool {
    let narrow = matches!(
        dtype,
        DType::F16
            | DType::BF16
            | DType::C32
            | DType::F8E4M3FN
            | DType::F8E5M2
            | DType::F8E4M3FNUZ
            | DType::F8E5M2FNUZ
            | DType::F8E8M0FNU
            | DType::F4E2M1FNX2
    );
    narrow
        && match op {
            ReduceKind::Sum | ReduceKind::Product => ranks > 2,
            ReduceKind::Avg | ReduceKind::PremulSum => ranks > 1,
            ReduceKind::Min
            | ReduceKind::Max
            | ReduceKind::BitAnd
            | ReduceKind::BitOr
            | ReduceKind::BitXor => false,
        }
}

impl Verdict {
    /// Seconds; infinite for what cannot be used.
    fn rank(self) -> f64 {
        match self {
            Verdict::Predicted(prediction) => prediction.seconds(),
            Verdict::Unsupported | Verdict::RoundsOften => f64::INFINITY,
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Explanation {
            kind,
            ranks,
            bytes,
            chosen,
            ..
        } = self;
        let place = match self.transport {
            Transport::Local => "in one host's memory",
            Transport::Network => "over the network",
        };
        let why = if self.forced {
            "as demanded"
        } else {
            "predicted fastest"
        };
        writeln!(
            f,
            "{kind} of {bytes} bytes, {ranks} ranks {place}: {chosen}, {why}"
        )?;
        for Candidate { name, verdict } in &self.candidates {
            match verdict {
                Verdict::Predicted(prediction) => {
                    let about = match prediction {
                        Prediction::Formula(_) => "",
                        Prediction::Estimate(_) => "  estimated",
                    };
                    let seconds = prediction.seconds();
                    writeln!(f, "  {name:<20} {:>12.3} us{about}", seconds * 1e6)?;
                }
                Verdict::Unsupported => writeln!(f, "  {name:<20} not for this")?,
                Verdict::RoundsOften => writeln!(f, "  {name:<20} rounds partial sums")?,
            }
        }
        Ok(())
    }
}
