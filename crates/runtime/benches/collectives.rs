//! Time of each collective between real processes, without Python: microseconds a call
//! and algorithm bandwidth.
//!
//! `cargo bench -p tpu-dist-runtime --bench collectives -- [--ranks 2] [--ops all_reduce,barrier]
//! [--sizes 8,1K,1M] [--dtype float32] [--memory heap|arena]`. The figure is the median over
//! blocks of calls on rank 0; blocks are short enough that one takes a few milliseconds.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tpu_dist_collectives::{DType, Kind, ReduceOp};
use tpu_dist_runtime::{
    Call, Communicator, DirectoryStore, GroupSpec, MessageCall, Pieces, Segment, Shape, arena,
};

const BLOCKS: usize = 15;

struct Options {
    ranks: u32,
    ops: Vec<String>,
    sizes: Vec<usize>,
    dtype: DType,
    in_arena: bool,
}

fn options() -> Options {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str, default: &str| {
        let at = arguments.iter().position(|argument| argument == name);
        at.and_then(|at| arguments.get(at + 1))
            .map_or(default.to_owned(), Clone::clone)
    };
    let size = |text: &str| {
        let (digits, unit) = match text.trim_end_matches(char::is_alphabetic).len() {
            end if end == text.len() => (text, ""),
            end => text.split_at(end),
        };
        let factor = match unit {
            "K" => 1 << 10,
            "M" => 1 << 20,
            "" => 1,
            other => panic!("size unit {other}: expected K or M"),
        };
        digits.parse::<usize>().expect("sizes are numbers") * factor
    };
    let dtype = value("--dtype", "float32");
    Options {
        ranks: value("--ranks", "2").parse().expect("--ranks is a number"),
        ops: value("--ops", "all_reduce")
            .split(',')
            .map(str::to_owned)
            .collect(),
        sizes: value("--sizes", "8,1K,4K,16K,64K,256K,1M,8M,64M")
            .split(',')
            .map(size)
            .collect(),
        dtype: *DType::ALL
            .iter()
            .find(|known| known.name() == dtype)
            .expect("a dtype's name"),
        in_arena: value("--memory", "heap") == "arena",
    }
}

fn main() {
    let options = options();
    if let Ok(rank) = std::env::var("TPU_DIST_TEST_RANK") {
        run(&options, rank.parse().expect("set by the parent"));
        return;
    }
    let directory = std::env::temp_dir().join(format!("tpu_dist-bench-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory for the store");
    let start = |rank: u32| {
        Command::new(std::env::current_exe().expect("own path"))
            .args(std::env::args().skip(1))
            .env("TPU_DIST_TEST_RANK", rank.to_string())
            .env("TPU_DIST_TEST_STORE", &directory)
            .spawn()
            .expect("a rank starts")
    };
    let ranks: Vec<_> = (0..options.ranks).map(start).collect();
    for mut rank in ranks {
        assert!(rank.wait().expect("a rank ends").success());
    }
    let _ = std::fs::remove_dir_all(&directory);
}

fn run(options: &Options, rank: u32) {
    let spec = GroupSpec {
        id: "0".into(),
        name: "bench".into(),
        rank,
        size: options.ranks,
        global_ranks: (0..options.ranks).collect(),
        default: true,
        timeout: Duration::from_secs(60),
    };
    let directory = std::env::var("TPU_DIST_TEST_STORE").expect("set by the parent");
    let group = Communicator::create(spec, Arc::new(DirectoryStore::new(directory)))
        .expect("the group is made");
    if rank == 0 {
        println!("{:>16} {:>10} {:>12} {:>10}", "op", "bytes", "us", "GB/s");
    }
    for op in &options.ops {
        for &size in &options.sizes {
            let micros = measure(&group, op, size, options);
            if rank == 0 {
                let rate = size as f64 / micros / 1e3;
                println!("{op:>16} {size:>10} {micros:>12.3} {rate:>10.2}");
            }
            if op == "barrier" {
                break;
            }
        }
    }
    group.shutdown();
}

/// `size` is the whole: what a rank holds after an all_gather, before a reduce_scatter.
fn measure(group: &Communicator, op: &str, size: usize, options: &Options) -> f64 {
    let dtype = options.dtype;
    let n = group.size() as usize;
    let unit = dtype.size() * n;
    let size = size.div_ceil(unit) * unit;
    // Kept to the end of the process, which is soon.
    let memory = || {
        let memory = if options.in_arena {
            arena::allocate(size).expect("room in the arena").as_ptr()
        } else {
            vec![0u8; size].leak().as_mut_ptr()
        };
        // SAFETY: just taken, of that length. A first touch costs more than a collective.
        unsafe { memory.write_bytes(0, size) };
        memory
    };
    let (input, output) = (memory(), memory());
    let call = |kind, op: Option<ReduceOp>, input: Pieces, output: Pieces| Call {
        kind,
        op,
        dtype,
        root: 0,
        tensors: 1,
        shape: Shape::default(),
        input,
        output,
        memory: None,
        timeout: None,
        asynchronous: false,
    };
    let sum = Some(ReduceOp::Sum);
    let make = || match op {
        "all_reduce" => call(
            Kind::AllReduce,
            sum,
            Pieces::one(input, size),
            Pieces::one(input, size),
        ),
        "barrier" => call(Kind::Barrier, None, Pieces::new(), Pieces::new()),
        "broadcast" if group.rank() == 0 => call(
            Kind::Broadcast,
            None,
            Pieces::one(input, size),
            Pieces::new(),
        ),
        "broadcast" => call(
            Kind::Broadcast,
            None,
            Pieces::new(),
            Pieces::one(output, size),
        ),
        "all_gather" => call(
            Kind::AllGather,
            None,
            Pieces::one(input, size / n),
            Pieces::split(output, size / n, n),
        ),
        "reduce_scatter" => call(
            Kind::ReduceScatter,
            sum,
            Pieces::split(input, size / n, n),
            Pieces::one(output, size / n),
        ),
        "all_to_all" => call(
            Kind::AllToAll,
            None,
            Pieces::split(input, size / n, n),
            Pieces::split(output, size / n, n),
        ),
        other => panic!("no operation {other}"),
    };
    let one = || {
        if op == "send_recv" {
            ping_pong(group, input, output, size);
            return;
        }
        // SAFETY: the memory lives until the end of this function.
        unsafe { group.run(make()) }.expect("the collective succeeds");
    };
    one();
    let begin = Instant::now();
    for _ in 0..3 {
        one();
    }
    // All ranks must run the same number of calls: rank 0 decides.
    let mut count = [(3e-3 / (begin.elapsed().as_secs_f64() / 3.0)).clamp(1.0, 2000.0) as u64];
    let at = count.as_mut_ptr().cast();
    let (from, to) = match group.rank() {
        0 => (Pieces::one(at, 8), Pieces::new()),
        _ => (Pieces::new(), Pieces::one(at, 8)),
    };
    let share = Call {
        dtype: DType::U64,
        ..call(Kind::Broadcast, None, from, to)
    };
    // SAFETY: as above.
    unsafe { group.run(share) }.expect("the count is shared");
    let count = std::hint::black_box(&count)[0];
    let mut blocks: Vec<f64> = (0..BLOCKS)
        .map(|_| {
            let begin = Instant::now();
            for _ in 0..count {
                one();
            }
            begin.elapsed().as_secs_f64() * 1e6 / count as f64
        })
        .collect();
    blocks.sort_by(f64::total_cmp);
    let half = if op == "send_recv" { 2.0 } else { 1.0 };
    blocks[BLOCKS / 2] / half
}

/// A message there and back between ranks 0 and 1.
fn ping_pong(group: &Communicator, input: *mut u8, output: *mut u8, bytes: usize) {
    let me = group.rank();
    if me > 1 {
        return;
    }
    let wait = |operation: Result<Arc<tpu_dist_runtime::Operation>, _>| {
        operation
            .and_then(|operation| operation.wait(None))
            .expect("the message arrives");
    };
    let (from, to) = (
        Segment { ptr: input, bytes },
        Segment { ptr: output, bytes },
    );
    // SAFETY: the caller's memory, and every message is waited for.
    unsafe {
        if me == 0 {
            wait(group.message(MessageCall::send(1, 0, from, DType::U8), None));
            wait(group.message(MessageCall::recv(Some(1), 0, to, DType::U8), None));
        } else {
            wait(group.message(MessageCall::recv(Some(0), 0, to, DType::U8), None));
            wait(group.message(MessageCall::send(0, 0, from, DType::U8), None));
        }
    }
}
