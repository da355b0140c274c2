//! Every lowered collective, compiled by the installed libtpu for TPUs that are not there.
//!
//! libtpu reads its environment while it is loaded, and brings its process down over programs that
//! it does not expect, so children compile: this binary again, told which cases. By default a
//! selection, which takes two cores about a minute; with `TPU_DIST_TEST_ALL=1` all cases, up
//! to 4096 devices, and with `TPU_DIST_TEST_ALL=4-64` those of so many devices too. What libtpu
//! made of each stands in `testdata/libtpu-collectives.md`, which
//! `UPDATE_GOLDEN=1 cargo test -p tpu-dist-runtime --test lower_libtpu` writes anew.

mod pjrt_support;

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use tpu_dist_collectives::lower::{
    Accumulation, Collective, LowerError, Placement, Program, lower, permute, ragged_all_to_all,
};
use tpu_dist_collectives::{DType, Kind, ReduceKind};
use tpu_dist_mesh::cost::{self, Prediction};
use tpu_dist_mesh::{MultiSlice, assign};
use tpu_dist_runtime::pjrt::{CompileOptions, Plugin, Topology, Value};

const CHILD: &str = "TPU_DIST_TEST_LIBTPU_CHILD";
const ALL: &str = "TPU_DIST_TEST_ALL";
/// What a child says of itself begins with this.
const MARK: &str = "@@";
/// A case may take so long on a busy machine.
const PATIENCE: Duration = Duration::from_secs(400);

/// The version of libtpu that the page was written with.
const RECORDED: &str = "0.0.52";

/// Slices, whether they are in the selection, and whether only a nightly run has them.
const TOPOLOGIES: &[(&str, Extent)] = &[
    ("v4:2x2x1", Extent::Wide),
    ("v4:2x2x2", Extent::Selected),
    ("v4:4x4x4", Extent::Wide),
    ("v4:4x8x8", Extent::Wide),
    ("v4:8x8x8", Extent::Wide),
    ("v4:16x16x16", Extent::Largest),
    ("v5e:2x2", Extent::Wide),
    ("v5e:4x4", Extent::Selected),
    ("v5e:4x8", Extent::Selected),
    ("v5e:8x8", Extent::Wide),
    ("v5e:8x16", Extent::Wide),
    ("v5e:16x16", Extent::Wide),
    ("v5p:2x2x1", Extent::Wide),
    ("v5p:2x2x4", Extent::Selected),
    ("v5p:4x4x4", Extent::Wide),
    ("v5p:4x4x8", Extent::Wide),
    ("v5p:4x8x8", Extent::Wide),
    ("v5p:8x8x8", Extent::Wide),
    ("v5p:16x16x16", Extent::Largest),
    ("v6e:2x2", Extent::Wide),
    ("v6e:4x4", Extent::Selected),
    ("v6e:8x8", Extent::Wide),
    ("v6e:16x16", Extent::Wide),
    ("tpu7x:2x2x1", Extent::Selected),
    ("tpu7x:2x2x2", Extent::Wide),
    ("tpu7x:4x4x4", Extent::Wide),
    ("tpu7x:4x4x8", Extent::Wide),
    ("tpu7x:8x8x8", Extent::Wide),
    ("tpu7x:8x16x16", Extent::Largest),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// All cases, in the selection.
    Selected,
    /// In the selection an all-reduce of the world, if up to 256 devices.
    Wide,
    /// Never in the selection, and an all-reduce and an all-gather of the world and one axis.
    Largest,
}

/// What must not compile.
struct Failure {
    /// Topologies, groups and programs, separated by `|`; a star stands for any end.
    topologies: &'static str,
    groups: &'static str,
    programs: &'static str,
    /// A part of libtpu's message; `crash` for a child that died.
    message: &'static str,
    reason: &'static str,
}

/// v5e slices with limited connectivity: one transfer reaches chips at powers of two along one axis.
const LIMITED: &str = "v5e:4x8|v5e:8x8|v5e:8x16|v5e:16x16";

const SCATTERED: &str = "scattered|members: scattered*";

const FAILURES: &[Failure] = &[
    Failure {
        topologies: LIMITED,
        groups: "*",
        programs: "ragged_all_to_all_f32",
        message: "HasLimitedIciRouting",
        reason: "limited connectivity has no ragged all-to-all",
    },
    Failure {
        topologies: LIMITED,
        groups: SCATTERED,
        programs: "barrier",
        message: "limited ICI routing",
        reason: "small gathers become reductions, for which limited connectivity has no routes",
    },
    Failure {
        topologies: LIMITED,
        groups: SCATTERED,
        programs: "all_reduce_c64_premul",
        message: "crash",
        reason: "libtpu crashes on a gather of complex numbers",
    },
];

/// One program for one topology and placement.
struct Case {
    topology: &'static str,
    groups: String,
    program: &'static str,
    selected: bool,
    job: MultiSlice,
    /// Ranks of the first group.
    members: Vec<u32>,
    placement: Placement,
}

impl Case {
    fn key(&self) -> String {
        format!("| {} | {} | {} |", self.topology, self.groups, self.program)
    }

    /// Why it must fail.
    fn failure(&self) -> Option<&'static Failure> {
        let fits = |patterns: &str, text: &str| {
            patterns
                .split('|')
                .any(|pattern| match pattern.strip_suffix('*') {
                    Some(start) => text.starts_with(start),
                    None => text == pattern,
                })
        };
        FAILURES.iter().find(|failure| {
            fits(failure.topologies, self.topology)
                && fits(failure.groups, &self.groups)
                && fits(failure.programs, self.program)
        })
    }

    /// The program, the collective that it is to the cost model, and its bytes there.
    fn lowered(&self) -> Result<(Program, cost::Collective, u64), LowerError> {
        use cost::Collective as Cost;
        let groups = &self.placement.groups;
        let ranks = groups[0].len() as u64;
        let base = |kind, dtype: DType, counts: &[u64]| Collective {
            kind,
            op: Some(ReduceKind::Sum),
            dtype,
            counts: counts.to_vec(),
            groups: groups.clone(),
            grid: self.placement.grid.clone(),
            accumulation: Accumulation::Wide,
            gathered: self.placement.gathered,
        };
        let all = |collective: Collective, cost, bytes| Ok((lower(&collective)?, cost, bytes));
        match self.program {
            "all_reduce_f32_small" => all(
                base(Kind::AllReduce, DType::F32, &[1 << 10]),
                Cost::AllReduce,
                4 << 10,
            ),
            "all_reduce_f32_large" => all(
                base(Kind::AllReduce, DType::F32, &[4 << 20]),
                Cost::AllReduce,
                16 << 20,
            ),
            "all_reduce_bf16_native" => all(
                Collective {
                    accumulation: Accumulation::Native,
                    ..base(Kind::AllReduce, DType::BF16, &[1 << 20])
                },
                Cost::AllReduce,
                2 << 20,
            ),
            "all_reduce_c64_premul" => all(
                Collective {
                    op: Some(ReduceKind::PremulSum),
                    ..base(Kind::AllReduce, DType::C64, &[1 << 10])
                },
                Cost::AllReduce,
                8 << 10,
            ),
            "all_reduce_i64_max" => all(
                Collective {
                    op: Some(ReduceKind::Max),
                    ..base(Kind::AllReduce, DType::I64, &[256])
                },
                Cost::AllGather,
                ranks * 256 * 8,
            ),
            "reduce_f16_avg" => all(
                Collective {
                    op: Some(ReduceKind::Avg),
                    ..base(Kind::Reduce, DType::F16, &[1 << 10])
                },
                Cost::AllReduce,
                4 << 10,
            ),
            "reduce_scatter_f32" => all(
                base(Kind::ReduceScatter, DType::F32, &[1 << 10]),
                Cost::ReduceScatter,
                ranks * 4096,
            ),
            "reduce_scatter_flat" => all(
                Collective {
                    grid: None,
                    ..base(Kind::ReduceScatter, DType::F32, &[1 << 10])
                },
                Cost::ReduceScatter,
                ranks * 4096,
            ),
            "reduce_scatter_f64" => all(
                base(Kind::ReduceScatter, DType::F64, &[128]),
                Cost::AllToAll,
                ranks * 1024,
            ),
            "all_gather_bf16" => all(
                base(Kind::AllGather, DType::BF16, &[1 << 10]),
                Cost::AllGather,
                ranks * 2048,
            ),
            "gather_bool" => all(
                base(Kind::Gather, DType::Bool, &[1 << 10]),
                Cost::AllGather,
                ranks * 1024,
            ),
            "all_to_all_u8" => all(
                base(Kind::AllToAll, DType::U8, &[1 << 10]),
                Cost::AllToAll,
                ranks * 1024,
            ),
            "broadcast_bf16" => all(
                base(Kind::Broadcast, DType::BF16, &[1 << 10]),
                Cost::AllReduce,
                2048,
            ),
            "broadcast_f64" => all(
                base(Kind::Broadcast, DType::F64, &[128]),
                Cost::AllGather,
                ranks * 1024,
            ),
            "scatter_i8" => all(
                base(Kind::Scatter, DType::I8, &[1 << 10]),
                Cost::AllToAll,
                ranks * 1024,
            ),
            "barrier" => all(base(Kind::Barrier, DType::I32, &[]), Cost::AllReduce, 4),
            "permute_f32" => {
                let next = |group: &Vec<u32>| {
                    let ahead = group.iter().cycle().skip(1);
                    group
                        .iter()
                        .copied()
                        .zip(ahead.copied())
                        .collect::<Vec<_>>()
                };
                let pairs = groups.iter().flat_map(next).collect::<Vec<_>>();
                let partitions = self.placement.devices.len() as u32;
                let program = permute(DType::F32, 1 << 10, &pairs, partitions)?;
                Ok((program, Cost::Permute, 4096))
            }
            "ragged_all_to_all_f32" => {
                let elements = ranks * 256;
                let program = ragged_all_to_all(DType::F32, elements, elements, groups)?;
                Ok((program, Cost::AllToAll, elements * 4))
            }
            other => panic!("no program {other}"),
        }
    }

    /// What libtpu made of it, beside the model's prediction.
    fn line(&self, strategy: &str) -> String {
        let (_, collective, bytes) = self.lowered().expect("it was lowered");
        format!("{strategy} | {} |", self.predicted(collective, bytes))
    }

    /// What the model of the interconnect expects for the groups.
    fn predicted(&self, collective: cost::Collective, bytes: u64) -> String {
        let dimensions = assign::group(&self.job, &self.members).unwrap();
        let ranking = cost::ranking(collective, bytes as f64, &dimensions);
        let (algorithm, prediction) = ranking[0];
        let about = match prediction {
            Prediction::Formula(_) => "",
            Prediction::Estimate(_) => "about ",
        };
        format!("{algorithm}, {about}{:.1} us", prediction.seconds() * 1e6)
    }
}

const PROGRAMS: &[&str] = &[
    "all_reduce_f32_small",
    "all_reduce_f32_large",
    "all_reduce_bf16_native",
    "all_reduce_c64_premul",
    "all_reduce_i64_max",
    "reduce_f16_avg",
    "reduce_scatter_f32",
    "reduce_scatter_flat",
    "reduce_scatter_f64",
    "all_gather_bf16",
    "gather_bool",
    "all_to_all_u8",
    "broadcast_bf16",
    "broadcast_f64",
    "scatter_i8",
    "barrier",
    "permute_f32",
    "ragged_all_to_all_f32",
];

/// The groups of a job: name, and the ranks of each.
fn partitions(job: &MultiSlice) -> Vec<(String, Vec<Vec<u32>>)> {
    let devices = job.devices();
    let sides = job.slice().shape().extents();
    let ranks = 0..devices.len() as u32;
    let by = |key: &dyn Fn(u32) -> [u32; 4]| {
        let mut groups: BTreeMap<[u32; 4], Vec<u32>> = BTreeMap::new();
        for rank in ranks.clone() {
            groups.entry(key(rank)).or_default().push(rank);
        }
        groups.into_values().collect::<Vec<_>>()
    };
    let coords = |rank: u32| devices[rank as usize].coords.0;
    let mut all = vec![("world".to_owned(), vec![ranks.clone().collect::<Vec<_>>()])];
    for (axis, name) in ["x", "y", "z"].into_iter().enumerate() {
        if sides[axis] < 2 || sides[axis] as usize == devices.len() {
            continue;
        }
        let mut lines = by(&|rank| {
            let mut at = coords(rank);
            at[axis] = 0;
            [at[0], at[1], at[2], devices[rank as usize].core]
        });
        for line in &mut lines {
            line.sort_by_key(|&rank| coords(rank)[axis]);
        }
        all.push((format!("lines {name}"), lines));
    }
    let boxes = by(&|rank| {
        let at = coords(rank);
        [at[0] / 2, at[1] / 2, at[2] / 2, 0]
    });
    if boxes.len() > 1 {
        all.push(("boxes".to_owned(), boxes));
    }
    // A stride that has no factor in common with the number of ranks, which is a power of two.
    let count = devices.len() as u32;
    let shuffled: Vec<u32> = ranks.map(|rank| (rank * 5 + 3) % count).collect();
    if count > 4 {
        let scattered = shuffled.chunks(4).map(<[u32]>::to_vec).collect();
        all.push(("scattered".to_owned(), scattered));
    }
    all
}

/// Groups of which only the members take part, where libtpu takes that.
fn members(job: &MultiSlice) -> Vec<(String, Vec<u32>)> {
    let devices = job.devices();
    let sides = job.slice().shape().extents();
    let within = |low: [u32; 3], high: [u32; 3]| {
        let inside = |rank: &u32| {
            let at = devices[*rank as usize].coords.0;
            (0..3).all(|axis| (low[axis]..high[axis]).contains(&at[axis]))
        };
        (0..devices.len() as u32).filter(inside).collect::<Vec<_>>()
    };
    let [x, y, z] = sides;
    let mut all = vec![
        ("members: line x".to_owned(), within([0, 0, 0], [x, 1, 1])),
        (
            "members: line x inside".to_owned(),
            within([0, 1, 0], [x, 2, 1]),
        ),
        ("members: host".to_owned(), within([0, 0, 0], [2, 2, 1])),
    ];
    if x > 2 || y > 2 || z > 1 {
        let low = [x - 2, y - 2, z - 1];
        all.push(("members: host inside".to_owned(), within(low, sides)));
    }
    let last = devices.len() as u32 - 1;
    if last > 6 {
        all.push(("members: scattered".to_owned(), vec![last, 0, 5, 3]));
    }
    all.retain(|(_, ranks)| ranks.len() > 1 && ranks.len() < devices.len());
    all
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for &(topology, extent) in TOPOLOGIES {
        let job: MultiSlice = topology.parse().unwrap();
        let devices = job.device_count();
        let mut add = |groups: &str, members: &[u32], placement: &Placement| {
            for &program in PROGRAMS {
                let first = groups == "world" && program == "all_reduce_f32_large";
                let kept = match extent {
                    Extent::Largest => {
                        matches!(groups, "world" | "lines x")
                            && matches!(program, "all_reduce_f32_large" | "all_gather_bf16")
                    }
                    _ => devices <= 256 || !program.starts_with("ragged"),
                };
                if kept {
                    cases.push(Case {
                        topology,
                        groups: groups.to_owned(),
                        program,
                        selected: extent == Extent::Selected
                            || extent == Extent::Wide && first && devices <= 256,
                        job: job.clone(),
                        members: members.to_vec(),
                        placement: placement.clone(),
                    });
                }
            }
        };
        for (name, groups) in partitions(&job) {
            let placement = Placement::world(&job, &groups).unwrap();
            add(&name, &groups[0], &placement);
        }
        for (name, ranks) in members(&job) {
            if extent != Extent::Largest {
                let placement = Placement::new(&job, &ranks).unwrap();
                let name = match placement.is_partial(&job) {
                    true => format!("{name}, alone"),
                    false => format!("{name}, in the world"),
                };
                add(&name, &ranks, &placement);
            }
        }
    }
    cases
}

/// What became of a case: the strategies, or why not.
type Outcome = Result<String, String>;

#[test]
fn every_collective_compiles_for_tpus() {
    let Some(path) = pjrt_support::libtpu() else {
        return;
    };
    let sizes = match env::var(ALL).ok().as_deref() {
        None => 0..=0,
        Some("1") => 0..=u32::MAX,
        Some(range) => range
            .split_once('-')
            .and_then(|(least, most)| Some(least.parse().ok()?..=most.parse().ok()?))
            .expect("TPU_DIST_TEST_ALL: 1, or a range of devices as 4-64"),
    };
    let cases = cases();
    let chosen: Vec<usize> = (0..cases.len())
        .filter(|&case| cases[case].selected || sizes.contains(&cases[case].job.device_count()))
        .collect();
    println!("{} of {} cases", chosen.len(), cases.len());
    // Cases of a topology together: the first of a process takes longest.
    let queue = Arc::new(Mutex::new(chosen.clone()));
    queue.lock().unwrap().reverse();
    let outcomes = Arc::new(Mutex::new(BTreeMap::new()));
    let workers: Vec<_> = (0..2)
        .map(|_| {
            let (path, queue, outcomes) = (path.clone(), queue.clone(), outcomes.clone());
            thread::spawn(move || work(&path, &queue, &outcomes))
        })
        .collect();
    for worker in workers {
        worker.join().unwrap();
    }
    let outcomes = outcomes.lock().unwrap();
    let mut wrong = String::new();
    let mut lines = BTreeMap::new();
    for &number in &chosen {
        let case = &cases[number];
        let outcome = outcomes
            .get(&number)
            .cloned()
            .unwrap_or(Err("lost".to_owned()));
        let key = case.key();
        match (&outcome, case.failure()) {
            (Ok(strategy), None) => {
                lines.insert(key, case.line(strategy));
            }
            (Err(message), Some(failure)) if message.contains(failure.message) => {
                lines.insert(key, format!("fails: {} | |", failure.reason));
            }
            (Ok(_), Some(failure)) => {
                writeln!(wrong, "{key} compiles, but is listed: {}", failure.reason).unwrap();
            }
            (Err(message), _) => writeln!(wrong, "{key} {message}").unwrap(),
        }
    }
    check_page(&path, &cases, lines);
    assert!(wrong.is_empty(), "{wrong}");
}

/// Compiles cases from the end of the queue in children, until it is empty.
fn work(path: &Path, queue: &Mutex<Vec<usize>>, outcomes: &Mutex<BTreeMap<usize, Outcome>>) {
    while !queue.lock().unwrap().is_empty() {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "in_the_child", "--ignored", "--nocapture"])
            .env(CHILD, path)
            .env("TPU_SKIP_MDS_QUERY", "1")
            .env("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
            .env("TPU_MIN_LOG_LEVEL", "4")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut asks = child.stdin.take().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap()).lines();
        let child = Arc::new(Mutex::new(child));
        loop {
            let Some(case) = queue.lock().unwrap().pop() else {
                break;
            };
            let outcome = match writeln!(asks, "{case}") {
                Ok(()) => {
                    let watch = Watch::over(&child);
                    let answer = answers
                        .by_ref()
                        .map_while(Result::ok)
                        .find_map(|line| line.strip_prefix(MARK).map(str::to_owned));
                    drop(watch);
                    answer
                }
                Err(_) => None,
            };
            let (outcome, alive) = match outcome {
                Some(answer) => match answer.split_once(' ') {
                    Some(("ok", strategy)) => (Ok(strategy.to_owned()), true),
                    _ => (Err(answer), true),
                },
                None => (Err("crash".to_owned()), false),
            };
            let done = {
                let mut outcomes = outcomes.lock().unwrap();
                outcomes.insert(case, outcome);
                outcomes.len()
            };
            if done % 100 == 0 {
                println!("{done} compiled");
            }
            if !alive {
                break;
            }
        }
        drop(asks);
        let mut child = child.lock().unwrap();
        let _ = child.kill();
        child.wait().unwrap();
    }
}

/// Ends a child that takes too long.
struct Watch(Arc<Mutex<bool>>);

impl Watch {
    fn over(child: &Arc<Mutex<Child>>) -> Watch {
        let done = Arc::new(Mutex::new(false));
        let (child, flag) = (child.clone(), done.clone());
        let deadline = Instant::now() + PATIENCE;
        thread::spawn(move || {
            while !*flag.lock().unwrap() {
                if Instant::now() > deadline {
                    let _ = child.lock().unwrap().kill();
                    return;
                }
                thread::sleep(Duration::from_millis(100));
            }
        });
        Watch(done)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        *self.0.lock().unwrap() = true;
    }
}

#[test]
#[ignore = "run by every_collective_compiles_for_tpus"]
fn in_the_child() {
    let Some(path) = env::var_os(CHILD) else {
        return;
    };
    let plugin = Plugin::load(path).unwrap();
    let cases = cases();
    let mut described: Option<(&str, Topology)> = None;
    for line in std::io::stdin().lines() {
        let case = &cases[line.unwrap().parse::<usize>().unwrap()];
        if described
            .as_ref()
            .is_none_or(|(name, _)| *name != case.topology)
        {
            described = Some((case.topology, describe(plugin, &case.job)));
        }
        let (_, topology) = described.as_ref().expect("described above");
        let answer = match compile(topology, case) {
            Ok(strategy) => format!("ok {strategy}"),
            Err(message) => message.replace('\n', " "),
        };
        println!("{MARK}{answer}");
    }
}

fn describe(plugin: Plugin, job: &MultiSlice) -> Topology {
    let slice = job.slice();
    let wrap: Vec<i64> = slice.wrap().into_iter().map(i64::from).collect();
    let mut options = vec![("wrap", Value::from(wrap))];
    // Without it libtpu has a device for each of the two cores of a chip.
    if slice.name().starts_with("v4:") && slice.devices_per_chip() == 1 {
        options.push(("chip_config_name", Value::from("megacore")));
    }
    let topology = Topology::create(plugin, &slice.libtpu_name(), &options).unwrap();
    let devices = topology.devices().unwrap();
    assert_eq!(devices.len(), job.device_count() as usize, "{job}");
    topology
}

fn compile(topology: &Topology, case: &Case) -> Outcome {
    let (program, ..) = case.lowered().map_err(|error| error.to_string())?;
    let devices = case.placement.devices.iter().map(|&id| i64::from(id));
    let options = CompileOptions {
        num_partitions: program.partitions,
        use_spmd_partitioning: true,
        device_assignment: vec![devices.collect()],
        ..CompileOptions::default()
    };
    let executable = topology
        .compile(program.text.as_bytes(), &options)
        .map_err(|error| error.to_string().chars().take(400).collect::<String>())?;
    let (_, code) = executable
        .optimized_program()
        .map_err(|error| error.to_string())?;
    Ok(strategies(&String::from_utf8_lossy(&code)))
}

/// What libtpu wrote about each collective into its program: emitter, strategy, colours, phases.
fn strategies(code: &str) -> String {
    let mut all: Vec<String> = Vec::new();
    for config in code.split("collective_algorithm_config\":{").skip(1) {
        // What follows is about the next one.
        let config = &config[..config.find("used_scoped").unwrap_or(config.len())];
        let text = |name: &str| {
            let start = config.find(&format!("\"{name}\":\""))? + name.len() + 4;
            Some(&config[start..start + config[start..].find('"')?])
        };
        let number = |name: &str| {
            let start = config.find(&format!("{name}:"))? + name.len() + 1;
            let digits = config[start..].chars().take_while(char::is_ascii_digit);
            digits.collect::<String>().parse::<u32>().ok()
        };
        let Some(emitter) = text("emitter") else {
            continue;
        };
        let mut words = emitter.to_owned();
        if let Some(strategy) = text("strategy") {
            write!(words, " {strategy}").unwrap();
        }
        for name in ["colors", "phases"] {
            if let Some(count) = number(name) {
                write!(words, " {name} {count}").unwrap();
            }
        }
        if all.last() != Some(&words) {
            all.push(words);
        }
    }
    match all.is_empty() {
        true => "not said".to_owned(),
        false => all.join(", "),
    }
}

/// Compares with the page on record, or writes it.
fn check_page(libtpu: &Path, cases: &[Case], lines: BTreeMap<String, String>) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/libtpu-collectives.md");
    let version = version(libtpu);
    let recorded = fs::read_to_string(&page).unwrap_or_default();
    let mut rows: BTreeMap<String, String> = BTreeMap::new();
    for line in recorded.lines().filter(|line| line.starts_with("| ")) {
        let end = line.match_indices(" |").nth(2).map(|(at, _)| at + 2);
        if let Some(end) = end {
            rows.insert(line[..end].to_owned(), line[end + 1..].to_owned());
        }
    }
    if env::var_os("UPDATE_GOLDEN").is_none() {
        if version != RECORDED {
            println!("not compared: libtpu is {version}, the page is of {RECORDED}");
            return;
        }
        for (key, line) in lines {
            assert_eq!(
                rows.get(&key),
                Some(&line),
                "{key} differs from {}; UPDATE_GOLDEN=1 writes it anew",
                page.display()
            );
        }
        return;
    }
    rows.extend(lines);
    let mut text = format!(
        "# What libtpu makes of collectives\n\n\
         Written by `UPDATE_GOLDEN=1 TPU_DIST_TEST_ALL=1 cargo test -p tpu-dist-runtime --test \
         lower_libtpu` with libtpu {version}; without `TPU_DIST_TEST_ALL` only the cases of the \
         default selection are written anew. Each program was compiled, none was run: this \
         needs no TPU.\n\n\
         Groups: `world` is all ranks, `lines x` all lines along an axis, `boxes` the boxes of two chips \
         along each axis, `scattered` fours from everywhere, `members` one group, alone or with the \
         rest of the world. The strategy is what libtpu writes into its program as \
         `collective_algorithm_config`, one for each collective in it; the model's is the \
         algorithm that `tpu_dist_mesh::cost` predicts to be fastest on the first group while all groups \
         are busy.\n\n\
         | slice | groups | program | libtpu | model |\n|---|---|---|---|---|\n"
    );
    for case in cases {
        let key = case.key();
        let Some(line) = rows.get(&key) else { continue };
        // Predictions need no compiler: all are those of today.
        let line = match line.split_once(" | ") {
            Some((strategy, _)) if !strategy.starts_with("fails:") => case.line(strategy),
            _ => line.clone(),
        };
        writeln!(text, "{key} {line}").unwrap();
    }
    fs::create_dir_all(page.parent().unwrap()).unwrap();
    fs::write(&page, text).unwrap();
}

/// The installed version, by the name of its metadata.
fn version(libtpu: &Path) -> String {
    let packages: PathBuf = libtpu.ancestors().skip(2).take(1).collect();
    let names = fs::read_dir(packages).unwrap().flatten();
    names
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            Some(
                name.strip_prefix("libtpu-")?
                    .strip_suffix(".dist-info")?
                    .to_owned(),
            )
        })
        .next()
        .unwrap_or_default()
}
