//! The simulator against closed formulas, and at scale.

use tpu_dist_mesh::cost::{self, Collective};
use tpu_dist_mesh::{Coord, Fabric, MultiSlice, assign};

use tpu_dist_collectives::Kind;
use tpu_dist_collectives::algorithm::*;
use tpu_dist_collectives::schedule::Request;
use tpu_dist_collectives::sim::{Compute, FabricNetwork, Outcome, Simulation, Switch};

const FIGURES: Figures = Figures {
    alpha: 10e-6,
    beta: 1e-10,
    overhead: 0.5e-6,
    gamma: 2e-11,
};

fn request(kind: Kind, ranks: u32, count: u64, max_message: u64) -> Request {
    Request {
        kind,
        ranks,
        root: 0,
        counts: vec![count],
        element_size: 4,
        max_message,
    }
}

fn simulate(algorithm: &dyn Algorithm, request: &Request, figures: Figures) -> f64 {
    let network = Switch {
        ranks: request.ranks,
        bandwidth: 1.0 / figures.beta,
        latency: figures.alpha,
    };
    let compute = Compute {
        overhead: figures.overhead,
        seconds_per_byte: figures.gamma,
    };
    let mut simulation = Simulation::new(&network).compute(compute);
    simulation.add(algorithm, request).expect("plans");
    simulation.run().expect("ends").seconds
}

#[test]
fn formulas_agree_on_a_switch() {
    let algorithms: [&dyn Algorithm; 14] = [
        &Direct,
        &OneShot,
        &Ring::new(),
        &Ring::bidirectional(),
        &HalvingDoubling,
        &RecursiveDoubling,
        &Swing::new(),
        &Binomial,
        &DoubleBinaryTree,
        &Pat,
        &Pairwise,
        &Dissemination,
        &Bucket::new([4, 4]),
        &Swing::torus([4, 4]),
    ];
    let wires = Figures {
        overhead: 0.0,
        gamma: 0.0,
        ..FIGURES
    };
    let sizes = [
        (1 << 8, 1 << 20),
        (1 << 14, 1 << 20),
        (1 << 17, 1 << 20),
        (1 << 20, 1 << 20),
        (1 << 17, 1 << 14),
        (1 << 20, 1 << 14),
        (1 << 22, 1 << 17),
    ];
    let (mut formulas, mut estimates) = (0, 0);
    for algorithm in algorithms {
        for &kind in Kind::ALL {
            for ranks in [2, 3, 4, 5, 6, 7, 8, 13, 16, 32] {
                for (count, max_message) in sizes {
                    let mut request = request(kind, ranks, count, max_message);
                    if matches!(kind, Kind::Barrier | Kind::MonitoredBarrier) {
                        request.counts.clear();
                    }
                    if request.check().is_err() || !algorithm.supports(&request) {
                        continue;
                    }
                    // Wires alone, and with the work of the ranks themselves.
                    for figures in [wires, FIGURES] {
                        let model = Constants {
                            local: figures,
                            network: figures,
                        };
                        let prediction = algorithm.cost(&request, &model, Transport::Network);
                        let played = simulate(algorithm, &request, figures);
                        let what = format!("{} {request:?} {figures:?}", algorithm.name());
                        let ratio = prediction.seconds() / played;
                        match prediction {
                            Prediction::Formula(_) => {
                                assert!((ratio - 1.0).abs() <= 0.02, "{what}: {ratio:.3}");
                                formulas += 1;
                            }
                            Prediction::Estimate(_) => {
                                assert!((0.7..1.35).contains(&ratio), "{what}: {ratio:.3}");
                                estimates += 1;
                            }
                        }
                    }
                }
            }
        }
    }
    assert!(
        formulas > 2300,
        "{formulas} formulas, {estimates} estimates"
    );
}

fn fabric(name: &str) -> Fabric {
    Fabric::new(&name.parse::<MultiSlice>().expect("legal"))
}

fn play_all_reduce(fabric: &Fabric, count: u64) -> Outcome {
    let network = FabricNetwork::new(fabric);
    let mut simulation = Simulation::new(&network);
    for (algorithm, request) in network.all_reduce(count, 4) {
        simulation.add(&*algorithm, &request).expect("plans");
    }
    simulation.run().expect("ends")
}

/// Seconds for which this thread has run, others on the machine not counted.
fn busy() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts it");
    let nanoseconds = text.split(' ').next().expect("a number");
    nanoseconds.parse::<f64>().expect("a number") / 1e9
}

/// 9216 chips with two devices each, in 200 MiB.
#[test]
#[cfg_attr(debug_assertions, ignore = "takes ten seconds without optimisation")]
fn a_pod_is_played_in_seconds() {
    let fabric = fabric("tpu7x:16x24x24");
    let start = busy();
    let played = play_all_reduce(&fabric, 1 << 26);
    let busy = busy() - start;
    assert_eq!(played.messages, 18432 * 6 * (2 * (15 + 23 + 23) + 2));
    // Sides that are nearly equal: between what the links can carry at best and the formula,
    // which takes the colours' slowest dimension for all.
    let all: Vec<u32> = (0..fabric.ranks()).collect();
    let dimensions = assign::group(fabric.job(), &all).expect("distinct");
    let bytes = 4.0 * f64::from(1 << 26);
    let most = cost::Algorithm::Bucket.seconds(Collective::AllReduce, bytes, &dimensions);
    let least = 2.0 * bytes / (6.0 * fabric.links().bandwidth());
    assert!(
        (least..1.02 * most.expect("applies")).contains(&played.seconds),
        "{}",
        played.seconds
    );
    assert!(busy < 6.0, "took {busy} s");
}

#[test]
fn what_cannot_be_played_is_refused() {
    let network = Switch {
        ranks: 2,
        bandwidth: 1e9,
        latency: 1e-6,
    };
    let three = request(Kind::AllReduce, 3, 4, 4);
    let mut simulation = Simulation::new(&network);
    let error = simulation
        .add(&Direct, &three)
        .expect_err("too many ranks")
        .to_string();
    assert_eq!(error, "ranks: network has 2, program has 3");
    let error = simulation.add(&Pairwise, &request(Kind::AllReduce, 2, 4, 4));
    let error = error.expect_err("not for this").to_string();
    assert!(
        error.contains("pairwise does not support all_reduce of 2 ranks"),
        "{error}"
    );

    let two = request(Kind::AllReduce, 2, 4, 4);
    let mut schedule = plan(&Direct, &two).expect("supported");
    schedule.steps[0].clear();
    simulation.add(&Direct, &two).expect("plans");
    simulation.add_schedule(&two, &schedule).expect("routes");
    let error = simulation
        .run()
        .expect_err("rank 0 sends nothing")
        .to_string();
    assert_eq!(error, "program 1: rank 1 waits for ever");

    let mut links = fabric("v5p:4x4x4").links().clone();
    links.kill_chip(Coord([1, 0, 0])).expect("a chip");
    let fabric = Fabric::with_links(links);
    let network = FabricNetwork::new(&fabric);
    let request = request(Kind::Barrier, 64, 0, 1);
    let request = Request {
        counts: vec![],
        ..request
    };
    let error = Simulation::new(&network)
        .add(&Direct, &request)
        .expect_err("a dead chip");
    assert!(
        error
            .to_string()
            .starts_with("no route from rank 0 to rank"),
        "{error}"
    );
}
