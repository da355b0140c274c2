//! Every algorithm's plan is proved correct for every group size, by the symbolic verifier.

use std::sync::Arc;

use tpu_dist_collectives::Kind;
use tpu_dist_collectives::algorithm::*;
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
    let schedule = plan(algorithm, request).expect("supported");
    match verify(request, &schedule, IN_FLIGHT) {
        Ok(report) => report,
        Err(error) => panic!("{}: {request:?}: {error}\n{schedule}", algorithm.name()),
    }
}

/// Algorithms that serve groups of `ranks` ranks, with orders, tori and groupings of all
/// kinds, and the kinds in which their plans write to what a send may still read.
fn algorithms(ranks: u32) -> Vec<(Box<dyn Algorithm>, &'static [Kind])> {
    let mut all: Vec<(Box<dyn Algorithm>, &'static [Kind])> = vec![
        (Box::new(Direct), &[]),
        (Box::new(Ring::new()), &[Kind::ReduceScatter]),
        (Box::new(Ring::bidirectional()), &[Kind::ReduceScatter]),
        (Box::new(HalvingDoubling), &[]),
        (Box::new(RecursiveDoubling), &[Kind::AllReduce]),
        (Box::new(Swing::new()), &[]),
        (Box::new(Binomial), &[Kind::Reduce]),
        (Box::new(DoubleBinaryTree), &[Kind::Reduce]),
        (Box::new(Pat), &[Kind::ReduceScatter]),
        (Box::new(OneShot), &[Kind::AllReduce]),
        (Box::new(Pairwise), &[]),
        (Box::new(Dissemination), &[]),
    ];
    let shuffled: Vec<u32> = (0..ranks)
        .map(|at| {
            if at % 2 == 0 {
                at / 2
            } else {
                ranks - 1 - at / 2
            }
        })
        .collect();
    all.push((
        Box::new(Ring::bidirectional().along(shuffled.clone())),
        &[Kind::ReduceScatter],
    ));
    let moved = Arc::new(DoubleBinaryTree);
    all.push((
        Box::new(Reordered::new(moved, shuffled.clone())),
        &[Kind::Reduce],
    ));
    for sides in tori(ranks) {
        if sides.iter().all(|side| side.is_power_of_two()) {
            all.push((Box::new(Swing::torus(sides.clone())), &[]));
        }
        let bucket = Bucket::new(sides.clone());
        let last = bucket.colours()[bucket.colours().len() - 1];
        let backward = Bucket::with_colours(sides, [last]);
        all.push((Box::new(bucket), &[Kind::ReduceScatter]));
        all.push((Box::new(backward), &[Kind::ReduceScatter]));
    }
    let algorithms: [Arc<dyn Algorithm>; 3] = [
        Arc::new(Direct),
        Arc::new(Ring::new()),
        Arc::new(HalvingDoubling),
    ];
    for (number, size) in [1, 2, 3, 4, 8].into_iter().enumerate() {
        // The last group is smaller where the size does not divide.
        let groups: Vec<Vec<u32>> = shuffled.chunks(size).map(<[u32]>::to_vec).collect();
        let inner = algorithms[number % 2].clone();
        let outer = algorithms[number % 3].clone();
        all.push((
            Box::new(Hierarchical::new(groups, inner, outer)),
            &[Kind::AllReduce],
        ));
    }
    all
}

/// The ways to write `ranks` as a torus of up to three dimensions.
fn tori(ranks: u32) -> Vec<Vec<u32>> {
    let mut tori = vec![vec![ranks]];
    for x in (1..=ranks).filter(|x| ranks.is_multiple_of(*x)) {
        tori.push(vec![x, ranks / x]);
        let rest = ranks / x;
        tori.extend(
            (2..rest)
                .filter(|y| rest.is_multiple_of(*y))
                .map(|y| vec![x, y, rest / y]),
        );
    }
    tori
}

fn prove_all(sizes: impl Iterator<Item = u32>, choose: fn(u32, usize) -> bool) {
    for ranks in sizes {
        for (algorithm, hazardous) in algorithms(ranks) {
            let mut requests: Vec<Request> = KINDS
                .into_iter()
                .flat_map(|kind| requests(kind, ranks))
                .collect();
            requests.retain(|request| algorithm.supports(request));
            assert_ne!(
                requests,
                [],
                "{algorithm:?} serves nothing on {ranks} ranks"
            );
            for (number, request) in requests.into_iter().enumerate() {
                if !choose(ranks, number) {
                    continue;
                }
                let report = prove(&*algorithm, &request);
                if !hazardous.contains(&request.kind) {
                    assert_eq!(report.hazards, [], "{}: {request:?}", algorithm.name());
                }
                assert!(report.bit_equal, "{}: {request:?}", algorithm.name());
                if algorithm.rounds_once() {
                    assert!(report.roundings <= 1, "{}: {request:?}", algorithm.name());
                }
            }
        }
    }
}

#[test]
fn all_algorithms_are_right_on_small_groups() {
    prove_all(1..=12, |_, _| true);
}

#[test]
fn all_algorithms_are_right_on_large_groups() {
    // Each size has its turn of the requests; the small groups have had all of them.
    prove_all(13..=64, |ranks, number| {
        (number + ranks as usize).is_multiple_of(11)
    });
}

#[test]
fn direct_serves_every_kind() {
    for request in (1..=64).flat_map(|n| KINDS.into_iter().flat_map(move |kind| requests(kind, n)))
    {
        assert!(Direct.supports(&request), "{request:?}");
    }
}
