//! The simulator against closed formulas, and at scale.

use std::sync::Arc;

use tpu_dist_mesh::cost::{self, Collective, Dimension};
use tpu_dist_mesh::{Fabric, MultiSlice};

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

/// By how much the formula is off.
fn error(algorithm: &dyn Algorithm, request: &Request, figures: Figures) -> f64 {
    let model = Constants {
        local: figures,
        network: figures,
    };
    let formula = algorithm.cost(request, &model, Transport::Network);
    let played = simulate(algorithm, request, figures);
    if played == 0.0 {
        formula
    } else {
        (formula / played - 1.0).abs()
    }
}

/// How far the formula may be off on wires alone: 2 % but where it leaves out what it says
/// it does.
fn tolerance(algorithm: &dyn Algorithm, request: &Request) -> f64 {
    let pipelined = request
        .counts
        .first()
        .is_some_and(|&count| count > request.max_message);
    match algorithm.name() {
        // How the messages of two trees share a port depends on their shapes.
        "double_binary_tree" if pipelined => 0.06,
        // Up and down overlap in part.
        "binomial" if pipelined && request.kind == Kind::AllReduce => 0.2,
        // Folded ranks start while others wait.
        "halving_doubling" | "recursive_doubling" | "swing" if !request.ranks.is_power_of_two() => {
            0.35
        }
        _ => 0.02,
    }
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
        (1 << 20, 1 << 20),
        (1 << 20, 1 << 14),
        (1 << 22, 1 << 17),
    ];
    let mut compared = 0;
    for algorithm in algorithms {
        for &kind in Kind::ALL {
            for ranks in [2, 4, 6, 8, 13, 16] {
                for (count, max_message) in sizes {
                    let mut request = request(kind, ranks, count, max_message);
                    if matches!(kind, Kind::Barrier | Kind::MonitoredBarrier) {
                        request.counts.clear();
                    }
                    if request.check().is_err() || !algorithm.supports(&request) {
                        continue;
                    }
                    compared += 1;
                    let what = format!("{} {request:?}", algorithm.name());
                    let off = error(algorithm, &request, wires);
                    assert!(off <= tolerance(algorithm, &request), "{what}: {off:.3}");
                    // Work of the ranks themselves overlaps with the wires in part.
                    let off = error(algorithm, &request, FIGURES);
                    assert!(
                        off <= tolerance(algorithm, &request).max(0.25),
                        "{what}: {off:.3}"
                    );
                }
            }
        }
    }
    assert!(compared > 700, "{compared}");
}

/// The sides of a slice, and its chips with x fastest, each as the ranks of its devices.
fn chips(fabric: &Fabric) -> (Vec<u32>, Vec<Vec<u32>>) {
    let shape = fabric.job().slice().shape();
    let mut chips = vec![Vec::new(); (shape.chips() * fabric.job().slices()) as usize];
    for (rank, device) in fabric.devices().iter().enumerate() {
        let chip = shape.chips() * device.slice + shape.chip(device.coords).0;
        chips[chip as usize].push(rank as u32);
    }
    (shape.extents().to_vec(), chips)
}

/// Plays an all-reduce on one slice: the devices of a chip share it, then all colours of a
/// bucket, each on its share.
fn play_bucket(fabric: &Fabric, count: u64) -> Outcome {
    let network = FabricNetwork::new(fabric);
    let (sides, chips) = chips(fabric);
    let bucket = Bucket::new(sides);
    let colours = bucket.colours() as u64;
    let chips: Arc<[Vec<u32>]> = chips.into();
    let mut simulation = Simulation::new(&network);
    for colour in 0..bucket.colours() {
        let outer = Arc::new(bucket.only(colour));
        let algorithm = Hierarchical::new(chips.clone(), Arc::new(Direct), outer);
        let request = request(Kind::AllReduce, fabric.ranks(), count / colours, u64::MAX);
        simulation.add(&algorithm, &request).expect("plans");
    }
    simulation.run().expect("ends")
}

#[test]
fn formulas_agree_on_tori() {
    for (name, count) in [
        ("v5e:16x16", 1 << 12),
        ("v5e:16x16", 1 << 24),
        ("v5p:4x4x4", 1 << 12),
        ("v5p:4x4x4", 1 << 26),
        ("v5p:8x8x8", 1 << 26),
        ("v5p:4x8x16", 1 << 26),
        ("tpu7x:4x4x4", 1 << 26),
    ] {
        let fabric = Fabric::new(&name.parse::<MultiSlice>().expect("legal"));
        let bytes = count as f64 * 4.0;
        let played = play_bucket(&fabric, count);
        let (sides, chips) = chips(&fabric);
        let dims: Vec<_> = sides
            .iter()
            .filter(|&&s| s > 1)
            .map(|&side| Dimension::ici(side, 1, true, 1, fabric.links().bandwidth()))
            .collect();
        let formula = cost::Algorithm::Bucket
            .seconds(Collective::AllReduce, bytes, &dims)
            .expect("applies");
        println!(
            "{name} {count} bucket {:e} {:e} {:.4} util {}",
            played.seconds,
            formula,
            played.seconds / formula,
            played.utilisation()
        );
    }
}

#[test]
fn a_pod_is_played_in_seconds() {
    let fabric = Fabric::new(&"tpu7x:16x24x24".parse::<MultiSlice>().expect("legal"));
    println!("{}", fabric.ranks());
    let t = std::time::Instant::now();
    let played = play_bucket(&fabric, 1 << 26);
    println!("{:?} {:?} {}", t.elapsed(), played.seconds, played.messages);
}
