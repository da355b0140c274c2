//! Which algorithm is chosen, and what is said about it.

use std::sync::Arc;

use tpu_dist_collectives::algorithm::{
    Algorithm, Constants, Direct, Hierarchical, Ring, Transport,
};
use tpu_dist_collectives::schedule::Request;
use tpu_dist_collectives::select::{SelectError, Selector, Verdict};
use tpu_dist_collectives::{DType, Kind, ReduceKind};

const MODEL: Constants = Constants::DEFAULT;

fn request(kind: Kind, ranks: u32, count: u64) -> Request {
    Request {
        kind,
        ranks,
        root: 0,
        counts: vec![count],
        element_size: 4,
        max_message: 1 << 16,
    }
}

fn choose(transport: Transport, request: &Request, dtype: DType) -> &'static str {
    let selector = Selector::new(&MODEL, transport);
    let choice = selector
        .select(request, Some((ReduceKind::Sum, dtype)))
        .expect("selects");
    assert_eq!(choice.explanation.chosen, choice.algorithm.name());
    choice.algorithm.name()
}

#[test]
fn size_and_type_decide() {
    use Transport::{Local, Network};
    for (transport, kind, ranks, count, dtype, expected) in [
        (Local, Kind::AllReduce, 4, 2, DType::F32, "one_shot"),
        (Local, Kind::AllReduce, 4, 2, DType::BF16, "one_shot"),
        (Local, Kind::AllReduce, 4, 1 << 24, DType::BF16, "direct"),
        (
            Network,
            Kind::AllReduce,
            64,
            2,
            DType::F32,
            "recursive_doubling",
        ),
        (Network, Kind::AllReduce, 64, 1 << 24, DType::F16, "direct"),
    ] {
        let request = request(kind, ranks, count);
        assert_eq!(
            choose(transport, &request, dtype),
            expected,
            "{transport:?} {request:?}"
        );
    }
    // Large f32 goes by one that moves the least, whichever it is.
    let large = request(Kind::AllReduce, 64, 1 << 26);
    let name = choose(Network, &large, DType::F32);
    assert!(
        !["one_shot", "recursive_doubling", "binomial"].contains(&name),
        "{name}"
    );
    let barrier = Request {
        counts: vec![],
        ..request(Kind::Barrier, 64, 0)
    };
    assert_eq!(choose(Network, &barrier, DType::F32), "dissemination");
}

#[test]
fn narrow_types_round_once() {
    for ranks in 2..=64 {
        for kind in [Kind::AllReduce, Kind::Reduce, Kind::ReduceScatter] {
            for count in [1, 1 << 10, 1 << 22] {
                let selector = Selector::new(&MODEL, Transport::Network);
                let request = request(kind, ranks, count);
                for op in [ReduceKind::Avg, ReduceKind::PremulSum] {
                    let choice = selector
                        .select(&request, Some((op, DType::BF16)))
                        .expect("selects");
                    assert!(choice.algorithm.rounds_once(), "{request:?}");
                }
                let choice = selector.select(&request, Some((ReduceKind::Max, DType::BF16)));
                let candidates = choice.expect("selects").explanation.candidates;
                assert!(candidates.iter().all(|c| c.verdict != Verdict::RoundsOften));
            }
        }
    }
}

#[test]
fn every_collective_gets_an_algorithm() {
    for &kind in Kind::ALL {
        let mut request = request(kind, 5, 100);
        if matches!(kind, Kind::Barrier | Kind::MonitoredBarrier) {
            request.counts.clear();
        }
        let choice = Selector::new(&MODEL, Transport::Local).select(&request, None);
        match kind {
            Kind::Send | Kind::Recv => assert!(matches!(choice, Err(SelectError::Request(_)))),
            _ => assert!(choice.expect("selects").algorithm.supports(&request)),
        }
    }
}

#[test]
fn a_demand_is_met_where_it_can_be() {
    let selector = Selector::new(&MODEL, Transport::Network);
    let small = request(Kind::AllReduce, 64, 2);
    let reduction = Some((ReduceKind::Sum, DType::BF16));
    let choice = selector
        .clone()
        .force(Some("ring"))
        .select(&small, reduction)
        .expect("supported");
    assert_eq!(choice.algorithm.name(), "ring");
    assert!(choice.explanation.to_string().contains("ring, as demanded"));
    // An algorithm that does not do this leaves the choice free.
    let choice = selector
        .clone()
        .force(Some("pairwise"))
        .select(&small, reduction)
        .expect("selects");
    assert!(!choice.explanation.forced && choice.algorithm.supports(&small));
    for (name, request, message) in [
        (
            "rung",
            small,
            "expected one of direct, one_shot, recursive_doubling",
        ),
        (
            "ring",
            request(Kind::AllReduce, 0, 1),
            "ranks: expected at least 1",
        ),
    ] {
        let error = selector.clone().force(Some(name)).select(&request, None);
        let error = error.expect_err(message).to_string();
        assert!(error.contains(message), "{error:?} lacks {message:?}");
    }
}

#[test]
fn topology_is_considered() {
    // Four hosts of eight ranks that share a port.
    let groups: Vec<Vec<u32>> = (0..4)
        .map(|host| (host * 8..host * 8 + 8).collect())
        .collect();
    let hierarchical: Arc<dyn Algorithm> = Arc::new(Hierarchical::new(
        groups,
        Arc::new(Direct),
        Arc::new(Ring::new()),
    ));
    let mut model = MODEL;
    model.network.beta *= 8.0;
    let selector = Selector::new(&model, Transport::Network).with(hierarchical);
    let request = request(Kind::AllReduce, 32, 1 << 16);
    let choice = selector
        .select(&request, Some((ReduceKind::Sum, DType::F32)))
        .expect("selects");
    assert_eq!(
        choice.algorithm.name(),
        "hierarchical",
        "{}",
        choice.explanation
    );
}

#[test]
fn explanations_list_all() {
    let request = request(Kind::AllReduce, 64, 1 << 10);
    let selector = Selector::new(&MODEL, Transport::Network);
    let choice = selector
        .select(&request, Some((ReduceKind::Sum, DType::BF16)))
        .expect("selects");
    let text = choice.explanation.to_string();
    let first =
        "all_reduce of 4096 bytes, 64 ranks over the network: one_shot, predicted fastest\n";
    assert!(text.starts_with(first), "{text}");
    for line in [
        "ring                 rounds partial sums",
        "pat                  not for this",
    ] {
        assert!(text.contains(line), "{text}");
    }
    let times: Vec<f64> = choice
        .explanation
        .candidates
        .iter()
        .filter_map(|candidate| match candidate.verdict {
            Verdict::Predicted(prediction) => Some(prediction.seconds()),
            _ => None,
        })
        .collect();
    assert_eq!(times.len(), 2);
    assert!(times.is_sorted());
}
