//! Programs for collectives over ICI. `UPDATE_GOLDEN=1 cargo test` writes those on record anew.

use std::path::Path;

use tpu_dist_collectives::lower::{
    Accumulation, Collective, Grid, LowerError, Program, lower, permute, ragged_all_to_all,
};
use tpu_dist_collectives::{DType, Kind, ReduceKind};

fn collective(kind: Kind, dtype: DType, counts: &[u64], groups: &[&[u32]]) -> Collective {
    let reduces = matches!(kind, Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter);
    Collective {
        kind,
        op: reduces.then_some(ReduceKind::Sum),
        dtype,
        counts: counts.to_vec(),
        groups: groups.iter().map(|group| group.to_vec()).collect(),
        grid: None,
        accumulation: Accumulation::Wide,
        gathered: false,
    }
}

const WORLD: &[&[u32]] = &[&[0, 1, 2, 3]];
const PAIRS: &[&[u32]] = &[&[0, 2], &[3, 1]];

fn cases() -> Vec<(&'static str, Result<Program, LowerError>)> {
    use Kind::{
        AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter, Scatter,
    };
    let of = |kind, dtype, counts: &[u64], groups| lower(&collective(kind, dtype, counts, groups));
    let with = |op, dtype, accumulation| {
        let op = Some(op);
        lower(&Collective {
            op,
            accumulation,
            ..collective(AllReduce, dtype, &[6], PAIRS)
        })
    };
    let (wide, native) = (Accumulation::Wide, Accumulation::Native);
    let grid = Collective {
        grid: Some(Grid::new([2, 2])),
        ..collective(ReduceScatter, DType::F32, &[3], WORLD)
    };
    let ordered = Collective {
        grid: Some(Grid::ordered([2, 2], [0, 2, 1, 3])),
        ..grid.clone()
    };
    let reduce = collective(Reduce, DType::F32, &[6], PAIRS);
    let broadcast = |dtype| collective(Broadcast, dtype, &[6], PAIRS);
    let scatter = collective(Scatter, DType::I8, &[2, 0, 3, 1], WORLD);
    vec![
        ("all_reduce_f32", of(AllReduce, DType::F32, &[6], WORLD)),
        (
            "all_reduce_bf16_wide",
            with(ReduceKind::Sum, DType::BF16, wide),
        ),
        (
            "all_reduce_bf16_native",
            with(ReduceKind::Sum, DType::BF16, native),
        ),
        ("all_reduce_avg_i8", with(ReduceKind::Avg, DType::I8, wide)),
        (
            "all_reduce_premul_f16",
            with(ReduceKind::PremulSum, DType::F16, wide),
        ),
        (
            "all_reduce_premul_c64",
            with(ReduceKind::PremulSum, DType::C64, wide),
        ),
        (
            "all_reduce_max_f64",
            with(ReduceKind::Max, DType::F64, wide),
        ),
        (
            "all_reduce_xor_bool",
            with(ReduceKind::BitXor, DType::Bool, wide),
        ),
        ("reduce_f32", lower(&reduce)),
        ("reduce_scatter_f32_grid", lower(&grid)),
        ("reduce_scatter_f32_ordered", lower(&ordered)),
        (
            "reduce_scatter_c64",
            of(ReduceScatter, DType::C64, &[3], PAIRS),
        ),
        (
            "reduce_scatter_f64",
            of(ReduceScatter, DType::F64, &[3], PAIRS),
        ),
        (
            "reduce_scatter_uneven",
            of(ReduceScatter, DType::F32, &[2, 0, 3, 1], WORLD),
        ),
        (
            "all_gather_uneven",
            of(AllGather, DType::BF16, &[2, 0, 3, 1], WORLD),
        ),
        ("gather_bool", of(Gather, DType::Bool, &[2], PAIRS)),
        ("all_to_all_u8", of(AllToAll, DType::U8, &[3], PAIRS)),
        ("broadcast_bf16", lower(&broadcast(DType::BF16))),
        ("broadcast_c64", lower(&broadcast(DType::C64))),
        ("broadcast_bool", lower(&broadcast(DType::Bool))),
        ("broadcast_f64", lower(&broadcast(DType::F64))),
        ("scatter_uneven", lower(&scatter)),
        ("barrier", of(Barrier, DType::I32, &[], WORLD)),
        ("permute", permute(DType::F32, 6, &[(0, 3), (2, 1)], 4)),
        ("ragged_all_to_all", {
            let groups: Vec<Vec<u32>> = PAIRS.iter().map(|group| group.to_vec()).collect();
            ragged_all_to_all(DType::F32, 8, 10, &groups)
        }),
    ]
}

#[test]
fn programs_are_those_on_record() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/programs");
    for (name, program) in cases() {
        let program = program.expect(name);
        assert_eq!(program.partitions, 4, "{name}");
        let path = directory.join(name).with_extension("mlir");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, &program.text).expect("writable");
        }
        let recorded = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(program.text, recorded, "{}", path.display());
    }
}

/// Every value is defined once, before its first use, with the type of its uses.
fn check(text: &str) {
    let mut types = std::collections::HashMap::new();
    let start = text.find("@main(").expect("a function") + "@main(".len();
    let arguments = &text[start..start + text[start..].find(") ->").expect("a result")];
    for argument in arguments
        .split(", ")
        .filter(|argument| !argument.is_empty())
    {
        let (name, ty) = argument.split_once(": ").expect("a type");
        types.insert(name.to_owned(), ty.to_owned());
    }
    for line in text.lines().map(str::trim_start) {
        let Some((name, operation)) = line
            .split_once(" = ")
            .filter(|(name, _)| name.starts_with('%'))
        else {
            continue;
        };
        for word in operation.split(|c: char| !(c.is_alphanumeric() || c == '%')) {
            let local = word.len() == 2 && word.as_bytes()[1].is_ascii_alphabetic();
            let value = word.starts_with('%') && !local;
            assert!(
                !value || types.contains_key(word),
                "{word} is used before it is made\n{text}"
            );
        }
        assert!(
            types.insert(name.to_owned(), String::new()).is_none(),
            "{name} twice\n{text}"
        );
    }
    assert_eq!(
        text.matches('{').count(),
        text.matches('}').count(),
        "{text}"
    );
}

#[test]
fn every_collective_of_every_type_has_a_program_or_an_error() {
    let (mut programs, mut errors) = (0, 0);
    for &kind in Kind::ALL {
        for &dtype in DType::ALL {
            for &op in ReduceKind::ALL {
                for accumulation in [Accumulation::Wide, Accumulation::Native] {
                    let counts: &[u64] = if kind == Kind::Barrier { &[] } else { &[8] };
                    let collective = Collective {
                        op: Some(op),
                        accumulation,
                        ..collective(kind, dtype, counts, PAIRS)
                    };
                    match lower(&collective) {
                        Ok(program) => {
                            check(&program.text);
                            programs += 1;
                        }
                        Err(LowerError::Op { .. }) => {
                            assert!(matches!(
                                kind,
                                Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter
                            ));
                            errors += 1;
                        }
                        Err(LowerError::Kind(_)) => assert!(matches!(
                            kind,
                            Kind::Send | Kind::Recv | Kind::MonitoredBarrier
                        )),
                        Err(error) => panic!("{collective:?}: {error}"),
                    }
                }
            }
        }
    }
    assert!(
        programs > 2000 && errors > 100,
        "{programs} programs, {errors} errors"
    );
}

#[test]
fn what_is_gathered_needs_no_reduction() {
    for kind in [
        Kind::AllReduce,
        Kind::Reduce,
        Kind::ReduceScatter,
        Kind::Broadcast,
        Kind::Barrier,
    ] {
        let counts: &[u64] = if kind == Kind::Barrier { &[] } else { &[4] };
        let program = lower(&Collective {
            gathered: true,
            ..collective(kind, DType::F32, counts, PAIRS)
        });
        let text = program.expect("fits").text;
        check(&text);
        assert!(!text.contains("stablehlo.all_reduce"), "{text}");
        assert!(!text.contains("stablehlo.reduce_scatter"), "{text}");
    }
}

#[test]
fn a_grid_is_scattered_line_by_line() {
    // Six ranks of each group on a grid of 3 by 2: first pairs three apart, then threes.
    let groups: &[&[u32]] = &[&[0, 1, 2, 3, 4, 5], &[11, 10, 9, 8, 7, 6]];
    let base = collective(Kind::ReduceScatter, DType::F32, &[4], groups);
    let program = lower(&Collective {
        grid: Some(Grid::new([3, 1, 2])),
        ..base.clone()
    })
    .expect("fits");
    let first = "dense<[[0, 3], [1, 4], [2, 5], [11, 8], [10, 7], [9, 6]]> : tensor<6x2xi64>";
    let then = "dense<[[0, 1, 2], [3, 4, 5], [11, 10, 9], [8, 7, 6]]> : tensor<4x3xi64>";
    let at = |part: &str| {
        program
            .text
            .find(part)
            .unwrap_or_else(|| panic!("{}", program.text))
    };
    assert!(at(first) < at(then));
    assert!(program.text.contains("(tensor<24xf32>) -> tensor<12xf32>"));
    assert!(program.text.contains("(tensor<12xf32>) -> tensor<4xf32>"));
    let flat = lower(&base).expect("fits").text;
    assert_eq!(flat.matches("stablehlo.reduce_scatter").count(), 1);
}

#[test]
fn what_libtpu_would_crash_on_is_refused() {
    let world = collective(Kind::AllReduce, DType::F32, &[4], WORLD);
    let groups = |groups: &[&[u32]]| collective(Kind::AllReduce, DType::F32, &[4], groups);
    let cases = [
        (groups(&[]), "groups: expected at least one rank"),
        (groups(&[&[]]), "groups: expected at least one rank"),
        (
            groups(&[&[0, 1], &[2]]),
            "groups: expected groups of equal size, got 2 and 1 ranks",
        ),
        (
            groups(&[&[0, 1], &[1, 2]]),
            "groups: partition 1 is named twice",
        ),
        (
            groups(&[&[0, 4], &[1, 2]]),
            "groups: expected partitions below 4, got 4",
        ),
        (
            Collective {
                grid: Some(Grid::new([2, 3])),
                ..world.clone()
            },
            "grid: [2, 3] does not have each of 4 ranks once",
        ),
        (
            Collective {
                op: None,
                ..world.clone()
            },
            "op: all_reduce needs one",
        ),
        (
            Collective {
                op: Some(ReduceKind::BitAnd),
                ..world.clone()
            },
            "op: BAND is not defined on float32",
        ),
        (
            Collective {
                counts: vec![1, 2],
                ..world.clone()
            },
            "expects one entry, got 2",
        ),
        (
            Collective {
                counts: vec![0],
                ..world.clone()
            },
            "counts: all_reduce of no elements",
        ),
        (
            Collective {
                kind: Kind::AllGather,
                counts: vec![1, 2],
                ..world.clone()
            },
            "got 2 entries",
        ),
        (
            Collective {
                kind: Kind::Send,
                ..world
            },
            "kind: send has no program of its own",
        ),
    ];
    for (collective, message) in cases {
        let error = lower(&collective).expect_err(message).to_string();
        assert!(error.contains(message), "{error:?} lacks {message:?}");
    }
    for (pairs, message) in [
        (&[(0, 1), (0, 2)], "pairs: partition 0 sends twice"),
        (&[(0, 1), (2, 1)], "pairs: partition 1 receives twice"),
        (
            &[(0, 1), (2, 4)],
            "pairs: expected partitions below 4, got 4",
        ),
    ] {
        let error = permute(DType::F32, 1, pairs, 4)
            .expect_err(message)
            .to_string();
        assert_eq!(error, message);
    }
}
