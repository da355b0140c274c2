//! Every lowered collective, run on XLA's CPU devices, against what it should give.

mod pjrt_support;

use pjrt_support::{client, cpu_plugins};
use tpu_dist_collectives::lower::{
    Accumulation, Collective, Grid, Program, lower, permute, ragged_all_to_all,
};
use tpu_dist_collectives::{DType, Kind, ReduceKind};
use tpu_dist_runtime::pjrt::{Buffer, Client, CompileOptions, ElementType, LaunchOptions};

const DEVICES: u32 = 8;

/// A value of an argument or result: complex numbers are two.
type Values = Vec<f64>;

/// One argument of one partition.
struct Argument {
    dtype: DType,
    bytes: Vec<u8>,
    scalar: bool,
}

impl Argument {
    fn line(dtype: DType, values: &[f64]) -> Argument {
        Argument {
            dtype,
            bytes: encode(dtype, values),
            scalar: false,
        }
    }

    fn scalar(dtype: DType, value: f64) -> Argument {
        Argument {
            dtype,
            bytes: encode(dtype, &[value]),
            scalar: true,
        }
    }
}

fn element(dtype: DType) -> ElementType {
    match dtype {
        DType::U8 => ElementType::U8,
        DType::I32 => ElementType::S32,
        DType::I64 => ElementType::S64,
        DType::Bool => ElementType::Pred,
        DType::BF16 => ElementType::BF16,
        DType::F32 => ElementType::F32,
        DType::F64 => ElementType::F64,
        DType::C64 => ElementType::C64,
        other => panic!("no test of {other}"),
    }
}

fn encode(dtype: DType, values: &[f64]) -> Vec<u8> {
    let each =
        |bytes: &dyn Fn(f64) -> Vec<u8>| values.iter().flat_map(|&value| bytes(value)).collect();
    match dtype {
        DType::U8 | DType::Bool => each(&|value| vec![value as u8]),
        DType::I32 => each(&|value| (value as i32).to_ne_bytes().to_vec()),
        DType::I64 => each(&|value| (value as i64).to_ne_bytes().to_vec()),
        // Small integers have no more bits than these sixteen.
        DType::BF16 => each(&|value| ((value as f32).to_bits() >> 16).to_ne_bytes()[..2].to_vec()),
        DType::F32 | DType::C64 => each(&|value| (value as f32).to_ne_bytes().to_vec()),
        DType::F64 => each(&|value| value.to_ne_bytes().to_vec()),
        other => panic!("no test of {other}"),
    }
}

fn decode(dtype: DType, bytes: &[u8]) -> Values {
    fn each<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f64) -> Values {
        let (chunks, rest) = bytes.as_chunks::<N>();
        assert!(rest.is_empty());
        chunks.iter().map(|&chunk| value(chunk)).collect()
    }
    match dtype {
        DType::U8 | DType::Bool => each(bytes, |[byte]| f64::from(byte)),
        DType::I32 => each(bytes, |bytes| f64::from(i32::from_ne_bytes(bytes))),
        DType::I64 => each(bytes, |bytes| i64::from_ne_bytes(bytes) as f64),
        DType::BF16 => each(bytes, |bytes| {
            f64::from(f32::from_bits(u32::from(u16::from_ne_bytes(bytes)) << 16))
        }),
        DType::F32 | DType::C64 => each(bytes, |bytes| f64::from(f32::from_ne_bytes(bytes))),
        DType::F64 => each(bytes, f64::from_ne_bytes),
        other => panic!("no test of {other}"),
    }
}

/// Numbers of an element of a tensor.
const fn parts(dtype: DType) -> usize {
    match dtype {
        DType::C64 => 2,
        _ => 1,
    }
}

/// Compiles and runs on all partitions, whose devices are `devices`; the results' bytes.
fn run(
    client: &Client,
    program: &Program,
    devices: &[i64],
    arguments: &[Vec<Argument>],
) -> Result<Vec<Vec<u8>>, String> {
    let options = CompileOptions {
        num_partitions: program.partitions,
        use_spmd_partitioning: true,
        device_assignment: vec![devices.to_vec()],
        ..CompileOptions::default()
    };
    let executable = client
        .compile(program.text.as_bytes(), &options)
        .map_err(|error| error.to_string())?;
    let buffers: Vec<Vec<Buffer>> = executable
        .devices()
        .iter()
        .zip(arguments)
        .map(|(device, arguments)| {
            let upload = |argument: &Argument| {
                let element = element(argument.dtype);
                let count = (argument.bytes.len() / element.size()) as i64;
                let dims: &[i64] = if argument.scalar { &[] } else { &[count] };
                client
                    .buffer_from_host(&argument.bytes, element, dims, device)
                    .unwrap()
            };
            arguments.iter().map(upload).collect()
        })
        .collect();
    let lists: Vec<Vec<&Buffer>> = buffers.iter().map(|list| list.iter().collect()).collect();
    let lists: Vec<&[&Buffer]> = lists.iter().map(Vec::as_slice).collect();
    let executions = executable
        .execute_all(&lists, LaunchOptions::default())
        .map_err(|error| error.to_string())?;
    executions
        .iter()
        .map(|execution| {
            let failed = |error: tpu_dist_runtime::pjrt::Error| error.to_string();
            execution.complete.wait().map_err(failed)?;
            let buffer = &execution.outputs[0];
            let mut bytes = vec![0; buffer.host_bytes().map_err(failed)?];
            buffer.to_host(&mut bytes).map_err(failed)?;
            Ok(bytes)
        })
        .collect()
}

/// What partition `partition` brings: small integers, so that sums and products are exact.
fn input(partition: u32, dtype: DType, elements: u64) -> Values {
    let count = elements as usize * parts(dtype);
    let value = |at: usize| match dtype {
        DType::Bool => f64::from((partition as usize + at).is_multiple_of(3)),
        _ => ((partition as usize * 5 + at * 3) % 4) as f64 + 1.0,
    };
    (0..count).map(value).collect()
}

fn reduce(op: ReduceKind, a: f64, b: f64) -> f64 {
    match op {
        ReduceKind::Sum | ReduceKind::Avg | ReduceKind::PremulSum => a + b,
        ReduceKind::Product => a * b,
        ReduceKind::Min => a.min(b),
        ReduceKind::Max => a.max(b),
        ReduceKind::BitAnd => (a as u32 & b as u32).into(),
        ReduceKind::BitOr => (a as u32 | b as u32).into(),
        ReduceKind::BitXor => (a as u32 ^ b as u32).into(),
    }
}

/// The factor of each rank's PREMUL_SUM.
const fn factor(partition: u32) -> f64 {
    (partition % 3) as f64 + 0.5
}

const ROOT: u32 = 1;

/// A collective of each group: arguments, and what has to come, by partition. Only as many
/// elements count as are expected.
fn reference(collective: &Collective) -> (Vec<Vec<Argument>>, Vec<Values>) {
    let Collective {
        kind,
        op,
        dtype,
        ref groups,
        ..
    } = *collective;
    let ranks = groups[0].len();
    let width = parts(dtype);
    let pieces: Vec<u64> = match collective.counts[..] {
        [] => vec![1],
        [count] => vec![count; ranks],
        _ => collective.counts.clone(),
    };
    let largest = pieces.iter().copied().max().unwrap_or(0);
    let range = |piece: usize| {
        let start = pieces[..piece].iter().sum::<u64>() as usize * width;
        start..start + pieces[piece] as usize * width
    };
    let brings = match kind {
        Kind::AllGather | Kind::Gather => largest,
        Kind::ReduceScatter | Kind::Scatter => pieces.iter().sum(),
        Kind::AllToAll => ranks as u64 * pieces[0],
        _ => pieces[0],
    };
    let partitions = groups.iter().map(Vec::len).sum::<usize>();
    let mut arguments: Vec<Vec<Argument>> = (0..partitions).map(|_| Vec::new()).collect();
    let mut expected = vec![Vec::new(); partitions];
    for group in groups {
        let inputs: Vec<Values> = group.iter().map(|&p| input(p, dtype, brings)).collect();
        let reduced = || {
            let op = op.expect("a reduction");
            let scaled = |rank: usize| {
                let scale = match op {
                    ReduceKind::PremulSum => factor(group[rank]),
                    _ => 1.0,
                };
                inputs[rank].iter().map(move |value| value * scale)
            };
            let mut total: Values = scaled(0).collect();
            for rank in 1..ranks {
                for (total, value) in total.iter_mut().zip(scaled(rank)) {
                    *total = reduce(op, *total, value);
                }
            }
            if op == ReduceKind::Avg {
                let mean = |value: &mut f64| *value /= ranks as f64;
                total.iter_mut().for_each(mean);
                if matches!(dtype, DType::U8 | DType::I32) {
                    total.iter_mut().for_each(|value| *value = value.trunc());
                }
            }
            if dtype == DType::Bool {
                // A sum of truth values says whether one is true.
                total.iter_mut().for_each(|value| *value = value.min(1.0));
            }
            total
        };
        let root = ROOT as usize % ranks;
        for (rank, &partition) in group.iter().enumerate() {
            let list = &mut arguments[partition as usize];
            list.push(Argument::line(dtype, &inputs[rank]));
            if op == Some(ReduceKind::PremulSum) {
                let accumulator = match dtype {
                    DType::F64 => DType::F64,
                    _ => DType::F32,
                };
                list.push(Argument::scalar(accumulator, factor(partition)));
            }
            if matches!(kind, Kind::Reduce | Kind::Broadcast | Kind::Scatter) {
                let scalars = [root, rank].map(|rank| Argument::scalar(DType::I32, rank as f64));
                list.extend(scalars);
            }
            expected[partition as usize] = match kind {
                Kind::AllReduce => reduced(),
                Kind::Reduce if rank == root => reduced(),
                Kind::Reduce => inputs[rank].clone(),
                Kind::ReduceScatter => reduced()[range(rank)].to_vec(),
                Kind::AllGather | Kind::Gather => (0..ranks)
                    .flat_map(|from| inputs[from][..pieces[from] as usize * width].to_vec())
                    .collect(),
                Kind::AllToAll => (0..ranks)
                    .flat_map(|from| inputs[from][range(rank)].to_vec())
                    .collect(),
                Kind::Broadcast => inputs[root].clone(),
                Kind::Scatter => inputs[root][range(rank)].to_vec(),
                _ => vec![inputs.iter().map(|values| values[0]).sum()],
            };
        }
    }
    (arguments, expected)
}

/// What it is, groups, and a box that each fills.
type Shape = (&'static str, Vec<Vec<u32>>, Option<Grid>);

/// The shapes of groups on eight devices.
fn shapes() -> Vec<Shape> {
    vec![
        ("world", vec![(0..8).collect()], None),
        (
            "world as a box",
            vec![(0..8).collect()],
            Some(Grid::new([2, 2, 2])),
        ),
        (
            "world as a box in another order",
            vec![vec![7, 2, 0, 5, 1, 6, 4, 3]],
            Some(Grid::ordered([4, 2], [3, 0, 7, 1, 5, 2, 6, 4])),
        ),
        (
            "fours",
            vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]],
            Some(Grid::ordered([2, 2], [0, 2, 1, 3])),
        ),
        (
            "scattered fours",
            vec![vec![5, 0, 6, 3], vec![1, 7, 2, 4]],
            None,
        ),
        (
            "pairs",
            vec![vec![0, 7], vec![6, 1], vec![2, 5], vec![4, 3]],
            None,
        ),
        ("alone", (0..8).map(|rank| vec![rank]).collect(), None),
    ]
}

/// Collectives for groups of so many ranks.
fn collectives(ranks: usize) -> Vec<(Kind, Option<ReduceKind>, DType, Vec<u64>)> {
    use Kind::{
        AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, Reduce, ReduceScatter, Scatter,
    };
    use ReduceKind::{Avg, Max, Min, PremulSum, Product, Sum};
    let uneven: Vec<u64> = (0..ranks as u64).map(|rank| (rank * 3 + 2) % 5).collect();
    vec![
        (AllReduce, Some(Sum), DType::F32, vec![6]),
        (AllReduce, Some(Avg), DType::F32, vec![5]),
        (AllReduce, Some(PremulSum), DType::F32, vec![5]),
        (AllReduce, Some(Product), DType::F32, vec![6]),
        (AllReduce, Some(Min), DType::I32, vec![6]),
        (AllReduce, Some(Max), DType::BF16, vec![6]),
        (AllReduce, Some(Sum), DType::BF16, vec![6]),
        (AllReduce, Some(Avg), DType::U8, vec![6]),
        (AllReduce, Some(Sum), DType::C64, vec![3]),
        (AllReduce, Some(PremulSum), DType::C64, vec![3]),
        (AllReduce, Some(Max), DType::F64, vec![4]),
        (AllReduce, Some(Product), DType::I64, vec![4]),
        (AllReduce, Some(Max), DType::Bool, vec![4]),
        (Reduce, Some(Sum), DType::F32, vec![6]),
        (ReduceScatter, Some(Sum), DType::F32, vec![3]),
        (ReduceScatter, Some(Max), DType::I32, vec![3]),
        (ReduceScatter, Some(Avg), DType::F32, uneven.clone()),
        (ReduceScatter, Some(Sum), DType::C64, vec![2]),
        (ReduceScatter, Some(Sum), DType::F64, vec![3]),
        (AllGather, None, DType::F32, vec![3]),
        (AllGather, None, DType::BF16, uneven.clone()),
        (Gather, None, DType::Bool, vec![5]),
        (AllToAll, None, DType::U8, vec![3]),
        (AllToAll, None, DType::C64, vec![2]),
        (Broadcast, None, DType::F32, vec![6]),
        (Broadcast, None, DType::BF16, vec![6]),
        (Broadcast, None, DType::Bool, vec![6]),
        (Broadcast, None, DType::C64, vec![3]),
        (Broadcast, None, DType::F64, vec![6]),
        (Scatter, None, DType::U8, vec![3]),
        (Scatter, None, DType::F32, uneven),
        (Barrier, None, DType::I32, vec![]),
    ]
}

fn collective(
    (kind, op, dtype, counts): (Kind, Option<ReduceKind>, DType, Vec<u64>),
    groups: &[Vec<u32>],
    grid: Option<Grid>,
) -> Collective {
    Collective {
        kind,
        op,
        dtype,
        counts,
        groups: groups.to_vec(),
        grid,
        accumulation: Accumulation::Wide,
        gathered: false,
    }
}

fn check(what: &str, dtype: DType, results: Result<Vec<Vec<u8>>, String>, expected: &[Values]) {
    let results = results.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(results.len(), expected.len(), "{what}");
    for (partition, (result, expected)) in results.iter().zip(expected).enumerate() {
        let result = decode(dtype, result);
        assert!(
            result.len() >= expected.len(),
            "{what}, partition {partition}"
        );
        for (at, (result, expected)) in result.iter().zip(expected).enumerate() {
            let close = (result - expected).abs() <= 1e-6 * expected.abs();
            assert!(
                close,
                "{what}, partition {partition}, {at}: {result}, not {expected}"
            );
        }
    }
}

#[test]
fn collectives_give_what_they_should() {
    for plugin in cpu_plugins() {
        let client = client(plugin, DEVICES.into());
        let devices: Vec<i64> = (0..i64::from(DEVICES)).collect();
        let mut programs = 0;
        for (shape, groups, grid) in shapes() {
            let cases = collectives(groups[0].len()).into_iter();
            let cases = cases.map(|case| collective(case, &groups, grid.clone()));
            // The same where data is gathered, in one shape.
            let again = cases.clone().filter(|_| shape == "scattered fours");
            let gathered = again.map(|collective| Collective {
                gathered: true,
                ..collective
            });
            for collective in cases.chain(gathered) {
                let what = format!("{shape}: {collective:?}");
                let program = match lower(&collective) {
                    Ok(program) => program,
                    Err(error) => panic!("{what}: {error}"),
                };
                let (arguments, expected) = reference(&collective);
                let results = run(&client, &program, &devices, &arguments);
                check(&what, collective.dtype, results, &expected);
                programs += 1;
            }
        }
        assert!(programs > 200, "{programs}");
    }
}

#[test]
fn members_alone_give_what_they_should() {
    for plugin in cpu_plugins() {
        let client = client(plugin, DEVICES.into());
        for devices in [vec![5, 2, 7], vec![3, 0, 6, 1], vec![4]] {
            let group: Vec<u32> = (0..devices.len() as u32).collect();
            for case in collectives(devices.len()) {
                let collective = collective(case, std::slice::from_ref(&group), None);
                let what = format!("{devices:?}: {collective:?}");
                let program = lower(&collective).unwrap();
                let (arguments, expected) = reference(&collective);
                let results = run(&client, &program, &devices, &arguments);
                check(&what, collective.dtype, results, &expected);
            }
        }
    }
}

#[test]
fn messages_arrive() {
    for plugin in cpu_plugins() {
        let client = client(plugin, DEVICES.into());
        let devices: Vec<i64> = (0..i64::from(DEVICES)).collect();
        let ring: Vec<(u32, u32)> = (0..DEVICES)
            .map(|rank| (rank, (rank + 1) % DEVICES))
            .collect();
        for pairs in [&ring[..], &[(0, 5)], &[(1, 2), (2, 1), (6, 0)]] {
            for dtype in [DType::F32, DType::C64, DType::U8] {
                let program = permute(dtype, 4, pairs, DEVICES).unwrap();
                let argument = |partition| vec![Argument::line(dtype, &input(partition, dtype, 4))];
                let arguments: Vec<_> = (0..DEVICES).map(argument).collect();
                let mut expected = vec![vec![0.0; 4 * parts(dtype)]; DEVICES as usize];
                for &(from, to) in pairs {
                    expected[to as usize] = input(from, dtype, 4);
                }
                let results = run(&client, &program, &devices, &arguments);
                check(&format!("{pairs:?} of {dtype}"), dtype, results, &expected);
            }
        }
    }
}

/// Signs of zeros and what NaNs carry included.
#[test]
fn what_is_moved_keeps_all_bits() {
    for plugin in cpu_plugins() {
        let client = client(plugin, DEVICES.into());
        let devices: Vec<i64> = (0..i64::from(DEVICES)).collect();
        let groups = vec![vec![5, 0, 6, 3], vec![1, 7, 2, 4]];
        for kind in [Kind::Broadcast, Kind::AllGather, Kind::AllToAll] {
            for (dtype, pattern) in [
                (
                    DType::F32,
                    vec![0x8000_0000u32, 0x7fc0_1234, 0xffa5_5aff, 1],
                ),
                // XLA's CPU moves these as f32, which changes what NaNs carry.
                (DType::BF16, vec![0x8000_7fc0, 0xffc0_0001]),
                (DType::F64, vec![0, 0x8000_0000, 0xdead_beef, 0xfff8_0001]),
                (DType::C64, vec![0x8000_0000, 0x7fc0_1234, 0xffc5_5aff, 1]),
            ] {
                let count = (pattern.len() * 4 / dtype.size()) as u64;
                let counts = match kind {
                    Kind::AllToAll => vec![count / 2],
                    _ => vec![count],
                };
                if kind == Kind::AllToAll && count < 2 {
                    continue;
                }
                let collective = collective((kind, None, dtype, counts), &groups, None);
                let program = lower(&collective).unwrap();
                let ranks = groups[0].len();
                // Each rank has other bits: the pattern, turned.
                let brings = |rank: usize| -> Vec<u8> {
                    let times = if kind == Kind::AllToAll { ranks / 2 } else { 1 };
                    let words = pattern.iter().cycle().skip(rank % 2 * pattern.len() / 2);
                    let words = words.take(pattern.len() * times);
                    words.flat_map(|word| word.to_ne_bytes()).collect()
                };
                let mut arguments: Vec<Vec<Argument>> = (0..DEVICES).map(|_| vec![]).collect();
                let mut expected = vec![vec![]; DEVICES as usize];
                for group in &groups {
                    for (rank, &partition) in group.iter().enumerate() {
                        let list = &mut arguments[partition as usize];
                        list.push(Argument {
                            dtype,
                            bytes: brings(rank),
                            scalar: false,
                        });
                        if kind == Kind::Broadcast {
                            let scalars = [ROOT as usize, rank];
                            list.extend(
                                scalars.map(|rank| Argument::scalar(DType::I32, rank as f64)),
                            );
                        }
                        let piece = brings(0).len() / ranks;
                        expected[partition as usize] = match kind {
                            Kind::Broadcast => brings(ROOT as usize),
                            Kind::AllGather => (0..ranks).flat_map(brings).collect(),
                            _ => (0..ranks)
                                .flat_map(|from| brings(from)[rank * piece..][..piece].to_vec())
                                .collect(),
                        };
                    }
                }
                let results = run(&client, &program, &devices, &arguments);
                assert_eq!(results, Ok(expected), "{kind} of {dtype}");
            }
        }
    }
}

/// What the CPU plugins lack: when one learns it, its values are to be tested.
#[test]
fn what_the_cpu_does_not_have_is_an_error() {
    for plugin in cpu_plugins() {
        let client = client(plugin, DEVICES.into());
        let devices: Vec<i64> = (0..i64::from(DEVICES)).collect();
        let groups = vec![(0..DEVICES).collect::<Vec<_>>()];
        for op in [ReduceKind::BitAnd, ReduceKind::BitOr, ReduceKind::BitXor] {
            let case = (Kind::AllReduce, Some(op), DType::I32, vec![4]);
            let collective = collective(case, &groups, None);
            let program = lower(&collective).unwrap();
            let (arguments, _) = reference(&collective);
            let error = run(&client, &program, &devices, &arguments);
            println!("{op}: {}", error.expect_err("not supported"));
        }
        let program = ragged_all_to_all(DType::F32, 8, 8, &groups).unwrap();
        let options = CompileOptions {
            num_partitions: program.partitions,
            use_spmd_partitioning: true,
            device_assignment: vec![devices],
            ..CompileOptions::default()
        };
        let error = client.compile(program.text.as_bytes(), &options);
        println!("ragged: {}", error.map(|_| ()).expect_err("not supported"));
    }
}
