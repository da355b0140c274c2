//! Plans of a few small cases, word for word. `UPDATE_GOLDEN=1 cargo test` writes them anew.

use std::path::Path;
use std::sync::Arc;

use tpu_dist_collectives::Kind;
use tpu_dist_collectives::algorithm::*;
use tpu_dist_collectives::schedule::verify::verify;
use tpu_dist_collectives::schedule::{IN_FLIGHT, Request};

/// Name, algorithm, collective, ranks, counts.
type Case<'a> = (&'a str, &'a dyn Algorithm, Kind, u32, &'a [u64]);

#[test]
fn plans_are_those_on_record() {
    let groups = vec![vec![0, 1], vec![2, 3]];
    let hierarchical = Hierarchical::new(groups, Arc::new(Direct), Arc::new(Ring::new()));
    let cases: [Case; 18] = [
        ("direct_all_reduce_3", &Direct, Kind::AllReduce, 3, &[7]),
        (
            "direct_all_gather_3_uneven",
            &Direct,
            Kind::AllGather,
            3,
            &[2, 0, 5],
        ),
        ("direct_reduce_3_root_1", &Direct, Kind::Reduce, 3, &[4]),
        ("direct_barrier_3", &Direct, Kind::Barrier, 3, &[]),
        ("one_shot_all_reduce_3", &OneShot, Kind::AllReduce, 3, &[2]),
        ("ring_all_reduce_3", &Ring::new(), Kind::AllReduce, 3, &[9]),
        (
            "ring_reduce_scatter_3_uneven",
            &Ring::new(),
            Kind::ReduceScatter,
            3,
            &[2, 0, 5],
        ),
        (
            "bidirectional_ring_all_gather_3",
            &Ring::bidirectional(),
            Kind::AllGather,
            3,
            &[4],
        ),
        (
            "bucket_all_reduce_2x2",
            &Bucket::new([2, 2]),
            Kind::AllReduce,
            4,
            &[8],
        ),
        (
            "halving_doubling_all_reduce_5",
            &HalvingDoubling,
            Kind::AllReduce,
            5,
            &[8],
        ),
        (
            "recursive_doubling_all_reduce_4",
            &RecursiveDoubling,
            Kind::AllReduce,
            4,
            &[2],
        ),
        (
            "swing_all_reduce_8",
            &Swing::new(),
            Kind::AllReduce,
            8,
            &[8],
        ),
        (
            "binomial_broadcast_5_root_1",
            &Binomial,
            Kind::Broadcast,
            5,
            &[4],
        ),
        (
            "double_binary_tree_all_reduce_4",
            &DoubleBinaryTree,
            Kind::AllReduce,
            4,
            &[8],
        ),
        ("pat_all_gather_5", &Pat, Kind::AllGather, 5, &[2]),
        ("pairwise_all_to_all_3", &Pairwise, Kind::AllToAll, 3, &[2]),
        (
            "dissemination_barrier_5",
            &Dissemination,
            Kind::Barrier,
            5,
            &[],
        ),
        (
            "hierarchical_all_reduce_2x2",
            &hierarchical,
            Kind::AllReduce,
            4,
            &[8],
        ),
    ];
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/schedules");
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    for (name, algorithm, kind, ranks, counts) in cases {
        let request = Request {
            kind,
            ranks,
            root: u32::from(name.ends_with("root_1")),
            counts: counts.to_vec(),
            element_size: 4,
            max_message: 2,
        };
        let schedule = plan(algorithm, &request).expect(name);
        verify(&request, &schedule, IN_FLIGHT).expect(name);
        let path = directory.join(name).with_extension("txt");
        if update {
            std::fs::write(&path, schedule.to_string()).expect("writable");
        }
        let recorded = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(schedule.to_string(), recorded, "{}", path.display());
    }
}
