//! The closed formulas of `tpu_dist_mesh::cost` against plans played on the links of a slice.
//!
//! Every prediction of the tables is either a formula, and then within 2 % of what is played,
//! or says that it is an estimate, and then near enough to compare algorithms with.

use std::sync::Arc;

use tpu_dist_collectives::Kind;
use tpu_dist_collectives::algorithm::{
    Algorithm, Bucket, Direct, DoubleBinaryTree, HalvingDoubling, Pat, Prediction, Ring, Swing,
};
use tpu_dist_collectives::schedule::{Buffer, Chunk, Request, Schedule, Step};
use tpu_dist_collectives::sim::{FabricNetwork, Group, Simulation};
use tpu_dist_mesh::cost::{self, Collective};
use tpu_dist_mesh::{Fabric, MultiSlice, assign};

const KINDS: [(Kind, Collective); 4] = [
    (Kind::AllReduce, Collective::AllReduce),
    (Kind::AllGather, Collective::AllGather),
    (Kind::ReduceScatter, Collective::ReduceScatter),
    (Kind::AllToAll, Collective::AllToAll),
];

/// Elements of four bytes: a chip's latency alone, a bit of both, and wires alone.
const ELEMENTS: [u64; 7] = [192, 3 << 8, 3 << 12, 3 << 15, 3 << 18, 3 << 21, 48 << 20];

fn fabric(name: &str) -> Fabric {
    Fabric::new(&name.parse::<MultiSlice>().expect("legal"))
}

/// The chips along an axis from the origin.
fn line(fabric: &Fabric, axis: usize) -> Vec<u32> {
    let at = |rank: &u32| fabric.devices()[*rank as usize].coords.0;
    let mut ranks: Vec<u32> = (0..fabric.ranks())
        .filter(|rank| (0..3).all(|other| other == axis || at(rank)[other] == 0))
        .collect();
    ranks.sort_by_key(|rank| at(rank)[axis]);
    ranks
}

/// Compares, and says whether a formula applied.
fn agrees(what: &str, prediction: Prediction, played: f64) -> bool {
    let ratio = prediction.seconds() / played;
    match prediction {
        Prediction::Formula(_) => assert!((ratio - 1.0).abs() <= 0.02, "{what}: {ratio:.4}"),
        Prediction::Estimate(_) => assert!((0.6..1.7).contains(&ratio), "{what}: {ratio:.4}"),
    }
    prediction.formula().is_some()
}

/// What a formula's algorithm plays on `ranks` chips in a line or ring.
fn plans(algorithm: cost::Algorithm, request: &Request) -> Vec<(Arc<dyn Algorithm>, Request)> {
    let alone = |algorithm: Arc<dyn Algorithm>| vec![(algorithm, request.clone())];
    match algorithm {
        cost::Algorithm::Ring => alone(Arc::new(Ring::new())),
        cost::Algorithm::BidirectionalRing => alone(Arc::new(Ring::bidirectional())),
        cost::Algorithm::HalvingDoubling => alone(Arc::new(HalvingDoubling)),
        cost::Algorithm::Swing => alone(Arc::new(Swing::new())),
        cost::Algorithm::Tree => alone(Arc::new(DoubleBinaryTree)),
        cost::Algorithm::Pat => alone(Arc::new(Pat)),
        cost::Algorithm::Direct => alone(Arc::new(Direct)),
        cost::Algorithm::Bucket => {
            // Its colours run at once, each on its share.
            let sides = [request.ranks];
            let colours = Bucket::new(sides).colours().to_vec();
            let part = Request {
                counts: vec![request.counts[0] / colours.len() as u64],
                ..request.clone()
            };
            let single = |colour| Arc::new(Bucket::with_colours(sides, [colour]));
            let plan = |&colour| (single(colour) as Arc<dyn Algorithm>, part.clone());
            colours.iter().map(plan).collect()
        }
        cost::Algorithm::Hierarchical => Vec::new(),
    }
}

#[test]
fn formulas_agree_along_an_axis() {
    let (mut formulas, mut estimates) = (0, 0);
    for (name, axis) in [
        ("v6e:16x16", 0),
        ("v5e:8x8", 1),
        ("v6e:4x4", 0),
        ("v5p:4x4x12", 2),
        ("v5p:4x4x8", 2),
        ("v5p:4x4x4", 0),
        ("v5p:2x2x4", 2),
        ("v5p:2x2x4", 0),
    ] {
        let fabric = fabric(name);
        let ranks = line(&fabric, axis);
        let dimensions = assign::group(fabric.job(), &ranks).expect("distinct");
        let network = FabricNetwork::new(&fabric);
        let group = Group::new(&network, ranks.clone());
        for algorithm in cost::Algorithm::ALL {
            for (kind, collective) in KINDS {
                for elements in ELEMENTS {
                    let members = ranks.len() as u64;
                    let request = Request {
                        kind,
                        ranks: members as u32,
                        root: 0,
                        counts: vec![match kind {
                            Kind::AllReduce => elements,
                            _ => elements / members,
                        }],
                        element_size: 4,
                        max_message: match algorithm {
                            cost::Algorithm::Tree => 1 << 16,
                            _ => u64::MAX,
                        },
                    };
                    let bytes = elements as f64 * 4.0;
                    let Some(prediction) = algorithm.predict(collective, bytes, &dimensions) else {
                        continue;
                    };
                    let plans = plans(algorithm, &request);
                    if plans.iter().any(|(plan, request)| !plan.supports(request)) {
                        continue;
                    }
                    let mut simulation = Simulation::new(&group);
                    for (plan, request) in plans {
                        simulation.add(&*plan, &request).expect("plans");
                    }
                    let played = simulation.run().expect("ends").seconds;
                    let what = format!("{name} {axis} {algorithm} {collective} of {bytes} B");
                    match agrees(&what, prediction, played) {
                        true => formulas += 1,
                        false => estimates += 1,
                    }
                }
            }
        }
    }
    assert!(formulas > 500, "{formulas} formulas, {estimates} estimates");
}

#[test]
fn formulas_agree_on_whole_slices() {
    let mut formulas = 0;
    for (name, every) in [
        ("v5e:2x2", true),
        ("v5e:16x16", true),
        ("v5p:2x2x1", true),
        ("v5p:4x4x4", true),
        ("v5p:8x8x8", true),
        ("v5p:4x4x8", true),
        ("v5p:4x4x12", true),
        ("v5p:8x8x12", true),
        ("v5p:4x8x16", true),
        // Colours that are not in step meet on the links.
        ("v5e:4x4", false),
        ("v5e:4x8", false),
        ("v5e:8x16", false),
        ("v5p:2x2x4", false),
        ("tpu7x:4x4x4", false),
        ("tpu7x:8x8x8", false),
        ("2*v5e:4x4", false),
        ("4*v5p:4x4x4", false),
        ("16*v5e:16x16", false),
        ("16*v5p:4x4x4", false),
    ] {
        let fabric = fabric(name);
        let all: Vec<u32> = (0..fabric.ranks()).collect();
        let dimensions = assign::group(fabric.job(), &all).expect("distinct");
        let algorithm = match fabric.job().slices() {
            1 => cost::Algorithm::Bucket,
            _ => cost::Algorithm::Hierarchical,
        };
        for count in [1 << 8, 1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26] {
            let network = FabricNetwork::new(&fabric);
            let mut simulation = Simulation::new(&network);
            for (plan, request) in network.all_reduce(count, 4) {
                simulation.add(&*plan, &request).expect("plans");
            }
            let played = simulation.run().expect("ends").seconds;
            let bytes = count as f64 * 4.0;
            let prediction = algorithm
                .predict(Collective::AllReduce, bytes, &dimensions)
                .expect("applies");
            let what = format!("{name}, {count} elements");
            let formula = agrees(&what, prediction, played);
            assert!(formula || !every, "{what}: no formula");
            formulas += u32::from(formula);
        }
    }
    assert!(formulas > 70, "{formulas}");
}

/// Exchanges with all others and permutations over whole slices.
#[test]
fn formulas_agree_on_exchanges() {
    let mut formulas = 0;
    for name in ["v5e:4x4", "v5e:16x16", "v5p:4x4x4", "v5p:2x2x4", "v6e:2x4"] {
        let fabric = fabric(name);
        let all: Vec<u32> = (0..fabric.ranks()).collect();
        let dimensions = assign::group(fabric.job(), &all).expect("distinct");
        let network = FabricNetwork::new(&fabric);
        let ring: Vec<u32> = tpu_dist_mesh::ring::ring(fabric.job().slice())
            .iter()
            .map(|chip| chip.0)
            .collect();
        let shape = fabric.job().slice().shape();
        let mut rank_of = vec![0; ring.len()];
        for (rank, device) in fabric.devices().iter().enumerate() {
            rank_of[shape.chip(device.coords).index()] = rank as u32;
        }
        let members = ring.iter().map(|&chip| rank_of[chip as usize]);
        let along = Group::new(&network, members.collect::<Vec<_>>());
        let ranks = fabric.ranks();
        for elements in [1u64, 1 << 10, 1 << 20] {
            let request = Request {
                kind: Kind::AllToAll,
                ranks,
                root: 0,
                counts: vec![elements],
                element_size: 4,
                max_message: u64::MAX,
            };
            let mut simulation = Simulation::new(&network);
            simulation.add(&Direct, &request).expect("plans");
            let played = simulation.run().expect("ends").seconds;
            let bytes = f64::from(ranks) * elements as f64 * 4.0;
            let direct = cost::Algorithm::Direct;
            let prediction = direct
                .predict(Collective::AllToAll, bytes, &dimensions)
                .expect("applies");
            let what = format!("{name}: all-to-all of {bytes} B");
            formulas += u32::from(agrees(&what, prediction, played));

            // To the next of the ring.
            let chunk = Chunk::new(Buffer::Output, 0..elements);
            let steps = (0..ranks).map(|rank| {
                let (to, from) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
                vec![Step::Send { to, chunk }, Step::Recv { from, chunk }]
            });
            let schedule = Schedule {
                algorithm: "permute",
                steps: steps.collect(),
                scratch: vec![0; ranks as usize],
            };
            let mut simulation = Simulation::new(&along);
            simulation.add_schedule(&request, &schedule).expect("fits");
            let played = simulation.run().expect("ends").seconds;
            let prediction = direct
                .predict(Collective::Permute, elements as f64 * 4.0, &dimensions)
                .expect("applies");
            let what = format!("{name}: permute of {elements} elements");
            assert!(agrees(&what, prediction, played), "{what}: no formula");
        }
    }
    assert!(formulas >= 4, "{formulas}");
}
