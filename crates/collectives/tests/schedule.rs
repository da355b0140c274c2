//! Every algorithm's plan is proved correct for every group size, by the symbolic verifier.

use tpu_dist_collectives::Kind;
use tpu_dist_collectives::algorithm::{self, Algorithm, Direct};
use tpu_dist_collectives::schedule::verify::{Report, verify};
use tpu_dist_collectives::schedule::{IN_FLIGHT, Request};

const KINDS: [Kind; 10] = [
    Kind::Barrier,
    Kind::MonitoredBarrier,
    Kind::Broadcast,
    Kind::AllReduce,
    Kind::Reduce,
    Kind::AllGather,
    Kind::ReduceScatter,
    Kind::AllToAll,
    Kind::Gather,
    Kind::Scatter,
];

/// Requests of a kind: several sizes, uneven and empty pieces, several message limits and
/// roots.
fn requests(kind: Kind, ranks: u32) -> Vec<Request> {
    let n = u64::from(ranks);
    let counts: Vec<Vec<u64>> = match kind {
        Kind::Barrier | Kind::MonitoredBarrier => vec![vec![]],
        Kind::AllReduce | Kind::Reduce | Kind::Broadcast => [0, 1, n - 1, n, 3 * n + 1, 40]
            .map(|count| vec![count])
            .into(),
        Kind::AllToAll => [0, 1, 5].map(|count| vec![count]).into(),
        _ => vec![
            vec![0],
            vec![1],
            vec![7],
            (0..n).map(|rank| rank % 4 * (rank % 3)).collect(),
            (0..n)
                .map(|rank| if rank == n / 2 { 11 } else { 0 })
                .collect(),
        ],
    };
    let mut requests = Vec::new();
    for counts in counts {
        for max_message in [1, 3, 1 << 20] {
            let request = Request {
                kind,
                ranks,
                root: 0,
                counts: counts.clone(),
                element_size: 4,
                max_message,
            };
            let roots = if request.is_rooted() {
                vec![0, ranks / 2, ranks - 1]
            } else {
                vec![0]
            };
            requests.extend(roots.into_iter().map(|root| Request {
                root,
                ..request.clone()
            }));
        }
    }
    requests
}

fn prove(algorithm: &dyn Algorithm, request: &Request) -> Report {
    let schedule = algorithm::plan(algorithm, request).expect("supported");
    match verify(request, &schedule, IN_FLIGHT) {
        Ok(report) => report,
        Err(error) => panic!("{}: {request:?}: {error}\n{schedule}", algorithm.name()),
    }
}

#[test]
fn direct_serves_every_kind() {
    for ranks in 1..=16 {
        for kind in KINDS {
            for request in requests(kind, ranks) {
                assert!(Direct.supports(&request));
                let report = prove(&Direct, &request);
                assert_eq!(report.hazards, [], "{request:?}");
                assert!(report.bit_equal);
                assert!(report.roundings <= 1);
            }
        }
    }
}
