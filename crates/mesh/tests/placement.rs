//! Placements: permutations, consistent scores, never worse than plain orders.

use std::time::Instant;

use proptest::prelude::*;
use tpu_dist_mesh::{
    Error, Generation, MultiSlice, Slice,
    assign::{self, Physical, Traffic},
    cost::{Collective, Wiring},
};

fn job(name: &str) -> MultiSlice {
    name.parse().unwrap()
}

fn check(job: &MultiSlice, shape: &[u32], traffic: &[Traffic]) -> assign::Placement {
    let placement = assign::place(job, shape, None, traffic).unwrap();
    let mut ranks = placement.ranks.clone();
    ranks.sort_unstable();
    assert!(
        ranks.into_iter().eq(0..job.device_count()),
        "{job} {shape:?}: not a permutation"
    );
    for (axis, &size) in placement.axes.iter().zip(shape) {
        assert_eq!(
            axis.components.iter().map(|c| c.size).product::<u32>(),
            size
        );
    }
    // The score of the search is the score of the order that it returns.
    let again = assign::evaluate(job, shape, &placement.ranks, traffic).unwrap();
    let difference = (again.seconds - placement.seconds).abs();
    assert!(
        difference <= 1e-9 * placement.seconds,
        "{job} {shape:?}: {} against {}",
        again.seconds,
        placement.seconds
    );
    // Plain row-major orders, by rank and by device id, are among what was searched.
    let plain: Vec<u32> = (0..job.device_count()).collect();
    let devices = job.devices();
    let mut by_id = plain.clone();
    by_id.sort_by_key(|&rank| devices[rank as usize].id);
    for order in [plain, by_id] {
        let other = assign::evaluate(job, shape, &order, traffic).unwrap();
        assert!(
            placement.seconds <= other.seconds * (1.0 + 1e-9),
            "{job} {shape:?}: {} is worse than {}",
            placement.seconds,
            other.seconds
        );
    }
    placement
}

/// All ordered factorings of `count` into `axes` factors.
fn factorings(count: u32, axes: usize) -> Vec<Vec<u32>> {
    if axes == 1 {
        return vec![vec![count]];
    }
    (1..=count)
        .filter(|size| count.is_multiple_of(*size))
        .flat_map(|size| {
            factorings(count / size, axes - 1)
                .into_iter()
                .map(move |mut rest| {
                    rest.insert(0, size);
                    rest
                })
        })
        .collect()
}

#[test]
fn every_mesh_of_every_small_slice() {
    for generation in Generation::ALL {
        for legal in generation
            .legal_slices()
            .into_iter()
            .filter(|s| s.shape.chips() <= 64)
        {
            let slice = Slice::new(generation, legal.shape).unwrap();
            let job = MultiSlice::from(slice);
            for shape in factorings(job.device_count(), 2) {
                check(&job, &shape, &assign::default_traffic(&["dp", "tp"]));
            }
        }
    }
}

#[test]
fn larger_slices_and_several() {
    for (name, shape, names) in [
        ("v5p:4x4x8_twisted", &[8, 16][..], &["fsdp", "tp"][..]),
        ("v5p:4x8x8_twisted", &[4, 64], &["dp", "tp"]),
        ("v6e:16x16", &[4, 8, 8], &["pp", "fsdp", "tp"]),
        ("v7x:4x4x8", &[2, 16, 8], &["dp", "ep", "tp"]),
        ("v5p:8x8x8", &[2, 4, 8, 8], &["pp", "dp", "cp", "tp"]),
        ("2*v5e:16x16", &[2, 16, 16], &["dp", "fsdp", "tp"]),
        ("4*v6e:4x4", &[8, 8], &["fsdp", "tp"]),
        ("3*v5p:4x4x4", &[12, 16], &["dp", "tp"]),
        ("16*v7x:2x2x1", &[2, 64], &["a", "b"]),
    ] {
        check(&job(name), shape, &assign::default_traffic(names));
    }
}

#[test]
fn known_answers() {
    let sizes =
        |axis: &assign::LogicalAxis| axis.components.iter().map(|c| c.size).collect::<Vec<_>>();
    // The busy axis gets two closed axes of the torus.
    let placement = check(
        &job("v5p:4x4x8"),
        &[8, 16],
        &assign::default_traffic(&["dp", "tp"]),
    );
    assert_eq!(sizes(&placement.axes[1]), [4, 4]);
    assert!(
        placement.axes[1]
            .components
            .iter()
            .all(|c| c.wiring == Wiring::Ring)
    );
    assert!(placement.axes.iter().all(|axis| axis.is_ring));

    // The two chiplets of a v7x chip belong to the busiest axis.
    let placement = check(
        &job("v7x:2x2x1"),
        &[4, 2],
        &assign::default_traffic(&["dp", "tp"]),
    );
    assert_eq!(placement.axes[1].components[0].physical, Physical::Core);

    // Slices belong to the axis with the least traffic.
    let placement = check(
        &job("2*v5e:4x4"),
        &[8, 4],
        &assign::default_traffic(&["dp", "tp"]),
    );
    assert!(
        placement.axes[0]
            .components
            .iter()
            .any(|c| c.physical == Physical::Dcn)
    );

    // Neighbours of a rank along a 2x2 axis are neighbours on the chip grid.
    let whole = check(&job("v5e:2x2"), &[4], &assign::default_traffic(&["tp"]));
    assert_eq!(whole.device_ids(&job("v5e:2x2")), [0, 1, 3, 2]);

    // What a user says about traffic decides: the same mesh, the other axis busy.
    let busy = |axis| {
        vec![Traffic {
            axis,
            collective: Collective::AllReduce,
            bytes: 1e9,
        }]
    };
    for axis in [0, 1] {
        let placement = check(&job("v6e:8x16"), &[8, 16], &busy(axis));
        let other = check(&job("v6e:8x16"), &[16, 8], &busy(1 - axis));
        assert_eq!(placement.seconds, other.seconds);
    }
}

#[test]
fn dcn_shape_is_obeyed() {
    let job = job("4*v5e:4x4");
    let traffic = assign::default_traffic(&["dp", "tp"]);
    let placement = assign::place(&job, &[4, 16], Some(&[4, 1]), &traffic).unwrap();
    let devices = job.devices();
    for (at, &rank) in placement.ranks.iter().enumerate() {
        assert_eq!(devices[rank as usize].slice as usize, at / 16);
    }
    let placement = assign::place(&job, &[4, 16], Some(&[2, 2]), &traffic).unwrap();
    let dcn: Vec<_> = placement
        .axes
        .iter()
        .map(|axis| {
            axis.components
                .iter()
                .find(|c| c.physical == Physical::Dcn)
                .map(|c| c.size)
        })
        .collect();
    assert_eq!(dcn, [Some(2), Some(2)]);
}

#[test]
fn errors_name_the_argument() {
    let slice = job("v5e:4x4");
    let several = job("4*v5e:4x4");
    let traffic = [Traffic {
        axis: 2,
        collective: Collective::AllReduce,
        bytes: 1.0,
    }];
    let endless = [Traffic {
        axis: 0,
        collective: Collective::AllReduce,
        bytes: f64::NAN,
    }];
    for (result, words) in [
        (
            assign::place(&slice, &[4, 8], None, &[]),
            "[4, 8] has 32 positions, v5e:4x4 has 16 devices",
        ),
        (
            assign::place(&slice, &[4, 4], None, &traffic),
            "traffic: axis 2 of a mesh with 2 axes",
        ),
        (
            assign::place(&slice, &[4, 4], None, &endless),
            "traffic: expected a number of bytes, got NaN",
        ),
        (
            assign::place(&several, &[4, 16], Some(&[4]), &[]),
            "dcn_shape: expected 2 entries",
        ),
        (
            assign::place(&several, &[4, 16], Some(&[2, 1]), &[]),
            "multiplies to 2, 4*v5e:4x4 has 4 slices",
        ),
        (
            assign::place(&several, &[2, 32], Some(&[4, 1]), &[]),
            "does not divide mesh shape [2, 32] in axis 0",
        ),
        (
            assign::evaluate(&slice, &[4, 4], &[0; 16], &[]),
            "ranks: expected each of 0 to 15 once",
        ),
    ] {
        let error: Error = result.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn groups_have_dimensions() {
    let one = job("v5p:4x4x8");
    let devices = one.devices();
    let ranks = |keep: &dyn Fn([u32; 3]) -> bool| -> Vec<u32> {
        (0..one.device_count())
            .filter(|&rank| keep(devices[rank as usize].coords.0))
            .collect()
    };
    let sizes = |ranks: &[u32]| -> Vec<_> {
        assign::group(&one, ranks)
            .unwrap()
            .iter()
            .map(|d| (d.size, d.wiring))
            .collect()
    };
    assert_eq!(
        sizes(&ranks(&|[_, y, z]| y == 1 && z == 2)),
        [(4, Wiring::Ring)]
    );
    assert_eq!(
        sizes(&ranks(&|[x, y, _]| x == 0 && y < 2)),
        [(2, Wiring::Line), (8, Wiring::Ring)]
    );
    // Three chips at a corner are no box: one ring through all.
    assert_eq!(
        sizes(&ranks(&|[x, y, z]| z == 0 && x + y < 2)),
        [(3, Wiring::Line)]
    );
    let several = job("2*v5e:2x2");
    let dimensions = assign::group(&several, &[1, 5]).unwrap();
    assert_eq!(
        (dimensions[0].size, dimensions[0].wiring),
        (2, Wiring::Switch)
    );
    // A host of four chips has half of the 200 Gbit/s of one with eight; a chip a quarter of it.
    assert_eq!(dimensions[0].bandwidth, 3.125e9);
    assert!(assign::group(&several, &[1, 1]).is_err());
    assert!(assign::group(&several, &[8]).is_err());
}

#[test]
fn a_pod_is_built_and_placed_quickly() {
    let start = Instant::now();
    let slice: Slice = "v7x:8x16x72".parse().unwrap();
    let links = tpu_dist_mesh::LinkGraph::new(&slice);
    let built = start.elapsed();
    assert_eq!(links.len(), 9216 * 6);

    let job = slice.into();
    for (shape, names) in [
        (&[8, 16, 72, 2][..], &["pp", "dp", "fsdp", "tp"][..]),
        (&[16, 16, 72], &["pp", "fsdp", "tp"]),
        (&[2, 8, 4, 4, 9, 8], &["pp", "dp", "ep", "cp", "fsdp", "tp"]),
    ] {
        let start = Instant::now();
        let placement = assign::place(&job, shape, None, &assign::default_traffic(names)).unwrap();
        let placed = start.elapsed();
        assert_eq!(placement.ranks.len(), 18432);
        println!("{shape:?} placed in {placed:?}");
        assert!(placed.as_millis() < 1000, "{shape:?} placed in {placed:?}");
    }
    println!("built in {built:?}");
    assert!(built.as_millis() < 50, "built in {built:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_shape_any_traffic(
        name in prop::sample::select(vec![
            "v5e:4x8", "v6e:8x16", "v5p:4x4x8", "v5p:4x4x8_twisted", "v7x:2x2x4", "v2:4x4", "2*v5p:2x2x4",
        ]),
        pick in any::<u32>(),
        bytes in prop::collection::vec((0usize..3, 0usize..5, 0u32..30), 1..5),
    ) {
        let job = job(name);
        let shapes = factorings(job.device_count(), 3);
        let shape = &shapes[pick as usize % shapes.len()];
        let traffic: Vec<_> = bytes
            .into_iter()
            .map(|(axis, kind, exponent)| Traffic {
                axis,
                collective: Collective::ALL[kind],
                bytes: f64::from(1u32 << exponent),
            })
            .collect();
        check(&job, shape, &traffic);
    }
}
