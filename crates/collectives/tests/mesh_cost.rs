//! The closed formulas of `tpu_dist_mesh::cost` against plans played on the links of a slice.
//!
//! At sizes where latency or bytes rule; between, the two overlap and the sum is an upper
//! bound.

use tpu_dist_collectives::Kind;
use tpu_dist_collectives::algorithm::{
    Algorithm, Bucket, Direct, DoubleBinaryTree, HalvingDoubling, Pat, Ring, Swing,
};
use tpu_dist_collectives::schedule::Request;
use tpu_dist_collectives::sim::{FabricNetwork, Network, Simulation, Unroutable};
use tpu_dist_mesh::cost::{self, Collective};
use tpu_dist_mesh::{Fabric, MultiSlice, assign};

/// Some ranks of a fabric.
struct Group<'a> {
    fabric: FabricNetwork<'a>,
    ranks: Vec<u32>,
}

impl Network for Group<'_> {
    fn ranks(&self) -> u32 {
        self.ranks.len() as u32
    }

    fn links(&self) -> usize {
        self.fabric.links()
    }

    fn bandwidth(&self, link: usize) -> f64 {
        self.fabric.bandwidth(link)
    }

    fn latency(&self, link: usize) -> f64 {
        self.fabric.latency(link)
    }

    fn startup(&self, from: u32, to: u32) -> f64 {
        let [from, to] = [from, to].map(|rank| self.ranks[rank as usize]);
        self.fabric.startup(from, to)
    }

    fn route(&self, from: u32, to: u32, links: &mut Vec<u32>) -> Result<(), Unroutable> {
        let [from, to] = [from, to].map(|rank| self.ranks[rank as usize]);
        self.fabric.route(from, to, links)
    }
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

#[test]
fn formulas_agree_with_plans_on_links() {
    let algorithms: [(&dyn Algorithm, cost::Algorithm, f64); 7] = [
        (&Ring::new(), cost::Algorithm::Ring, 0.02),
        (&Swing::new(), cost::Algorithm::Swing, 0.02),
        (&Pat, cost::Algorithm::Pat, 0.02),
        // On a line of 8 the first bytes cross the middle before the last have left.
        (&Direct, cost::Algorithm::Direct, 0.03),
        (&Bucket::new([16]), cost::Algorithm::Bucket, 0.02),
        // Rounds of these meet on the links, most of all on a short line; no closed formula
        // follows that.
        (&HalvingDoubling, cost::Algorithm::HalvingDoubling, 0.21),
        (&DoubleBinaryTree, cost::Algorithm::Tree, 0.11),
    ];
    let kinds = [
        (Kind::AllReduce, Collective::AllReduce),
        (Kind::AllGather, Collective::AllGather),
        (Kind::ReduceScatter, Collective::ReduceScatter),
        (Kind::AllToAll, Collective::AllToAll),
    ];
    let mut compared = 0;
    for (name, axis) in [
        ("v6e:16x16", 0),
        ("v5e:8x8", 1),
        ("v5p:4x4x12", 2),
        ("v5p:2x2x4", 2),
    ] {
        let job: MultiSlice = name.parse().expect("legal");
        let fabric = Fabric::new(&job);
        let ranks = line(&fabric, axis);
        let dimensions = assign::group(&job, &ranks).expect("distinct");
        for (plan, formula, tolerance) in algorithms {
            for (kind, collective) in kinds {
                for elements in [192u64, 48 << 20] {
                    let count = ranks.len() as u64;
                    let request = Request {
                        kind,
                        ranks: count as u32,
                        root: 0,
                        counts: vec![if kind == Kind::AllReduce {
                            elements
                        } else {
                            elements / count
                        }],
                        element_size: 4,
                        max_message: if formula == cost::Algorithm::Tree {
                            1 << 16
                        } else {
                            u64::MAX
                        },
                    };
                    let bytes = elements as f64 * 4.0;
                    let predicted = formula.seconds(collective, bytes, &dimensions);
                    let (Some(predicted), true) = (predicted, plan.supports(&request)) else {
                        continue;
                    };
                    let group = Group {
                        fabric: FabricNetwork::new(&fabric),
                        ranks: ranks.clone(),
                    };
                    let mut simulation = Simulation::new(&group);
                    if formula == cost::Algorithm::Bucket {
                        // Its colours run at once, each on its share.
                        let bucket = Bucket::new([count as u32]);
                        let colours = bucket.colours();
                        for &colour in colours {
                            let counts = vec![request.counts[0] / colours.len() as u64];
                            let part = Request {
                                counts,
                                ..request.clone()
                            };
                            let single = Bucket::with_colours([count as u32], [colour]);
                            simulation.add(&single, &part).expect("plans");
                        }
                    } else {
                        simulation.add(plan, &request).expect("plans");
                    }
                    let played = simulation.run().expect("ends").seconds;
                    let off = (predicted / played - 1.0).abs();
                    assert!(
                        off <= tolerance,
                        "{name} {formula} {collective} of {bytes} B: {predicted:e} s, played {played:e} s"
                    );
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 60, "{compared} comparisons");
}
