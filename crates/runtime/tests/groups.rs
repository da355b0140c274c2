//! Groups of real processes: every collective against values computed in the test, over
//! shared memory and over TCP, and the ways in which operations fail.
//!
//! Each test starts this binary once for each rank; [`rank`] is what a rank runs.

use std::ops::{Deref, DerefMut};
use std::process::{Child, Command, Stdio};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use tpu_dist_collectives::{DType, Kind, ReduceOp};
use tpu_dist_runtime::{
    Call, Communicator, DirectoryStore, Error, GroupSpec, MessageCall, Operation, Pieces, Segment,
    Shape, arena,
};

struct Ranks {
    children: Vec<Child>,
    directory: std::path::PathBuf,
}

fn start(scenario: &str, ranks: usize, env: &[(&str, &str)]) -> Ranks {
    let unique = format!("{}-{scenario}-{ranks}-{}", std::process::id(), env.len());
    let directory = std::env::temp_dir().join(format!("tpu_dist-test-{unique}"));
    std::fs::create_dir_all(&directory).unwrap();
    let children = (0..ranks).map(|rank| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rank", "--nocapture", "--test-threads", "1"])
            .env("TPU_DIST_TEST_SCENARIO", scenario)
            .env("TPU_DIST_TEST_RANK", rank.to_string())
            .env("TPU_DIST_TEST_SIZE", ranks.to_string())
            .env("TPU_DIST_TEST_STORE", &directory)
            .envs(env.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    });
    Ranks {
        children: children.collect(),
        directory,
    }
}

impl Ranks {
    /// Waits for all; returns what each printed, and panics with it when one failed or hung.
    fn finish(mut self, expect_failure_of: &[usize]) -> Vec<String> {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut hung = false;
        for child in &mut self.children {
            while child.try_wait().unwrap().is_none() {
                if Instant::now() > deadline {
                    hung = true;
                    let _ = child.kill();
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let outputs: Vec<_> = self
            .children
            .drain(..)
            .map(|child| child.wait_with_output().unwrap())
            .collect();
        let _ = std::fs::remove_dir_all(&self.directory);
        let texts: Vec<String> = outputs
            .iter()
            .map(|output| {
                String::from_utf8_lossy(&output.stdout).into_owned()
                    + &String::from_utf8_lossy(&output.stderr)
            })
            .collect();
        assert!(!hung, "hung: {texts:#?}");
        for (rank, output) in outputs.iter().enumerate() {
            let failed = !output.status.success();
            assert_eq!(
                failed,
                expect_failure_of.contains(&rank),
                "rank {rank}: {texts:#?}"
            );
        }
        texts
    }
}

fn env(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// A rank of whatever scenario the environment names; nothing when run as a test.
#[test]
fn rank() {
    let Some(scenario) = env("TPU_DIST_TEST_SCENARIO") else {
        return;
    };
    let rank: u32 = env("TPU_DIST_TEST_RANK").unwrap().parse().unwrap();
    let size: u32 = env("TPU_DIST_TEST_SIZE").unwrap().parse().unwrap();
    let spec = GroupSpec {
        id: "0".into(),
        name: "world".into(),
        rank,
        size,
        global_ranks: (0..size).collect(),
        default: true,
        timeout: Duration::from_secs(20),
    };
    let store = Arc::new(DirectoryStore::new(env("TPU_DIST_TEST_STORE").unwrap()));
    let group = Communicator::create(spec, store).unwrap();
    match scenario.as_str() {
        "values" => values(&group),
        "messages" => messages(&group),
        "withdrawn" => withdrawn(&group),
        "unreadable" => unreadable(&group),
        "mismatch" => mismatch(&group),
        "timeout" => timeout(&group),
        "killed" => killed(&group),
        "monitored" => monitored(&group),
        "subgroups" => subgroups(&group),
        "abort" => abort(&group),
        "many" => many(&group),
        other => panic!("no scenario {other}"),
    }
    group.shutdown();
}

/// Data of a rank, which `TPU_DIST_TEST_MEMORY` places: `arena` in memory that peers
/// reach, `mixed` so on odd ranks only, else on the heap.
struct Memory {
    data: NonNull<f32>,
    count: usize,
    in_arena: bool,
}

impl Memory {
    fn of(value: f32, count: usize) -> Memory {
        std::iter::repeat_n(value, count).collect()
    }
}

impl FromIterator<f32> for Memory {
    fn from_iter<I: IntoIterator<Item = f32>>(values: I) -> Memory {
        let values: Box<[f32]> = values.into_iter().collect();
        let count = values.len();
        let odd = env("TPU_DIST_TEST_RANK")
            .unwrap()
            .ends_with(['1', '3', '5']);
        let in_arena = match env("TPU_DIST_TEST_MEMORY").as_deref() {
            Some("arena") => true,
            Some("mixed") => odd,
            _ => false,
        };
        let data = if in_arena {
            let data = arena::allocate(4 * count).unwrap().cast::<f32>();
            // SAFETY: just taken, aligned to a page, and of that length.
            unsafe { data.copy_from_nonoverlapping(NonNull::from(&*values).cast(), count) };
            data
        } else {
            NonNull::from(Box::leak(values)).cast()
        };
        Memory {
            data,
            count,
            in_arena,
        }
    }
}

impl Clone for Memory {
    fn clone(&self) -> Memory {
        self.iter().copied().collect()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: taken in `from_iter` in the same way, and not used after this.
        unsafe {
            if self.in_arena {
                arena::free(self.data.cast());
            } else {
                drop(Box::from_raw(&raw mut **self));
            }
        }
    }
}

impl Deref for Memory {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: as many values were written when it was made.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.count) }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and owned.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.count) }
    }
}

fn bytes(data: &[f32]) -> (*mut u8, usize) {
    (data.as_ptr().cast_mut().cast(), size_of_val(data))
}

fn call(kind: Kind, op: Option<ReduceOp>, input: Pieces, output: Pieces) -> Call {
    Call {
        kind,
        op,
        dtype: DType::F32,
        root: 0,
        tensors: 1,
        shape: Shape::default(),
        input,
        output,
        memory: None,
        timeout: None,
        asynchronous: false,
    }
}

fn whole(data: &[f32]) -> Pieces {
    let (ptr, bytes) = bytes(data);
    Pieces::one(ptr, bytes)
}

fn split(data: &[f32], pieces: usize) -> Pieces {
    let (ptr, bytes) = bytes(data);
    Pieces::split(ptr, bytes / pieces, pieces)
}

fn run(group: &Communicator, call: Call) -> Result<(), Error> {
    // SAFETY: synchronous calls, on memory that the caller holds until they return.
    let operation: Arc<Operation> = unsafe { group.collective(call, None) }?;
    operation.wait(None)
}

fn all_reduce(group: &Communicator, data: &mut [f32], op: ReduceOp) -> Result<(), Error> {
    run(
        group,
        call(Kind::AllReduce, Some(op), whole(data), whole(data)),
    )
}

fn values(group: &Communicator) {
    let (me, n) = (group.rank() as usize, group.size() as usize);
    // Small whole numbers: every order of summation gives the exact result.
    let value = |rank: usize, index: usize| ((rank * 7 + index * 3) % 61) as f32;
    for count in [0, 1, 5, 27, 28, 29, 1024, 5000, 70_000, 300_000, 1_000_003] {
        let own: Memory = (0..count).map(|index| value(me, index)).collect();
        let sum = |index: usize| (0..n).map(|rank| value(rank, index)).sum::<f32>();
        let mut data = own.clone();
        all_reduce(group, &mut data, ReduceOp::Sum).unwrap();
        assert!(
            (0..count).all(|index| data[index] == sum(index)),
            "sum of {count}"
        );
        let mut data = own.clone();
        all_reduce(group, &mut data, ReduceOp::PremulSum(2.0)).unwrap();
        assert!(
            (0..count).all(|index| data[index] == 2.0 * sum(index)),
            "premul of {count}"
        );
        let mut data = own.clone();
        all_reduce(group, &mut data, ReduceOp::Avg).unwrap();
        assert!((0..count).all(|index| (data[index] - sum(index) / n as f32).abs() < 1e-4));
        for root in [0, n - 1] {
            let data = if me == root {
                own.clone()
            } else {
                Memory::of(-1.0, count)
            };
            let (input, output) = if me == root {
                (whole(&data), Pieces::new())
            } else {
                (Pieces::new(), whole(&data))
            };
            let broadcast = Call {
                root: root as u32,
                ..call(Kind::Broadcast, None, input, output)
            };
            run(group, broadcast).unwrap();
            assert!(
                (0..count).all(|index| data[index] == value(root, index)),
                "broadcast {count}"
            );
            let result = Memory::of(-1.0, count);
            let output = if me == root {
                whole(&result)
            } else {
                Pieces::new()
            };
            let reduce = call(Kind::Reduce, Some(ReduceOp::Sum), whole(&own), output);
            run(
                group,
                Call {
                    root: root as u32,
                    ..reduce
                },
            )
            .unwrap();
            if me == root {
                assert!(
                    (0..count).all(|index| result[index] == sum(index)),
                    "reduce {count}"
                );
            }
            let all = Memory::of(-1.0, count * n);
            let output = if me == root {
                split(&all, n)
            } else {
                Pieces::new()
            };
            let gather = call(Kind::Gather, None, whole(&own), output);
            run(
                group,
                Call {
                    root: root as u32,
                    ..gather
                },
            )
            .unwrap();
            if me == root {
                let right = |at: usize| all[at] == value(at / count, at % count);
                assert!((0..all.len()).all(right), "gather {count}");
            }
            let all: Memory = (0..n * count).map(|index| value(root, index)).collect();
            let part = Memory::of(-1.0, count);
            let input = if me == root {
                split(&all, n)
            } else {
                Pieces::new()
            };
            let scatter = call(Kind::Scatter, None, input, whole(&part));
            run(
                group,
                Call {
                    root: root as u32,
                    ..scatter
                },
            )
            .unwrap();
            let right = |index: usize| part[index] == value(root, me * count + index);
            assert!((0..count).all(right), "scatter {count}");
        }
        let all = Memory::of(-1.0, count * n);
        run(
            group,
            call(Kind::AllGather, None, whole(&own), split(&all, n)),
        )
        .unwrap();
        assert!(
            (0..all.len()).all(|at| all[at] == value(at / count, at % count)),
            "gather {count}"
        );
        let wide: Memory = (0..count * n).map(|index| value(me, index)).collect();
        let part = Memory::of(-1.0, count);
        let scatter = call(
            Kind::ReduceScatter,
            Some(ReduceOp::Sum),
            split(&wide, n),
            whole(&part),
        );
        run(group, scatter).unwrap();
        assert!(
            (0..count).all(|index| part[index] == sum(me * count + index)),
            "rs {count}"
        );
        let exchanged = Memory::of(-1.0, count * n);
        run(
            group,
            call(Kind::AllToAll, None, split(&wide, n), split(&exchanged, n)),
        )
        .unwrap();
        let right = |at: usize| exchanged[at] == value(at / count, me * count + at % count);
        assert!((0..exchanged.len()).all(right), "all_to_all {count}");
        run(
            group,
            call(Kind::Barrier, None, Pieces::new(), Pieces::new()),
        )
        .unwrap();
    }
    uneven(group);
    queued(group);
}

/// Pieces of different sizes.
fn uneven(group: &Communicator) {
    let (me, n) = (group.rank() as usize, group.size() as usize);
    for scale in [1, 40_000] {
        let counts: Vec<usize> = (0..n).map(|rank| rank * scale).collect();
        let pieces = |data: &[f32], counts: &[usize]| {
            let mut pieces = Pieces::new();
            let mut at = 0;
            for &count in counts {
                let (ptr, bytes) = bytes(&data[at..at + count]);
                pieces.push(ptr, bytes);
                pieces.end_piece();
                at += count;
            }
            pieces
        };
        let own = Memory::of(me as f32, counts[me]);
        let all = Memory::of(-1.0, counts.iter().sum());
        run(
            group,
            call(Kind::AllGather, None, whole(&own), pieces(&all, &counts)),
        )
        .unwrap();
        let expected: Memory = (0..n)
            .flat_map(|rank| vec![rank as f32; counts[rank]])
            .collect();
        assert_eq!(*all, *expected);
        let part = Memory::of(-1.0, counts[me]);
        let input = pieces(&expected, &counts);
        run(
            group,
            call(
                Kind::ReduceScatter,
                Some(ReduceOp::Sum),
                input,
                whole(&part),
            ),
        )
        .unwrap();
        assert_eq!(*part, vec![(me * n) as f32; counts[me]]);
        // Rank r sends r * s elements to rank s.
        let send: Vec<usize> = (0..n).map(|to| me * to * scale).collect();
        let receive: Vec<usize> = (0..n).map(|from| me * from * scale).collect();
        let data = Memory::of(me as f32, send.iter().sum());
        let got = Memory::of(-1.0, receive.iter().sum());
        let exchange = call(
            Kind::AllToAll,
            None,
            pieces(&data, &send),
            pieces(&got, &receive),
        );
        run(group, exchange).unwrap();
        let expected: Vec<f32> = (0..n)
            .flat_map(|from| vec![from as f32; receive[from]])
            .collect();
        assert_eq!(*got, expected);
    }
}

/// Asynchronous collectives run in order, whether or not someone waits.
fn queued(group: &Communicator) {
    let n = group.size() as f32;
    let buffers: Vec<Vec<f32>> = (0..50)
        .map(|index| vec![index as f32; 1 << (index % 16)])
        .collect();
    let start = |data: &Vec<f32>| {
        let mut call = call(
            Kind::AllReduce,
            Some(ReduceOp::Sum),
            whole(data),
            whole(data),
        );
        call.asynchronous = true;
        // SAFETY: the buffers live until all operations were waited for.
        unsafe { group.collective(call, None) }.unwrap()
    };
    let operations: Vec<_> = buffers.iter().map(start).collect();
    let mut sum = [1.0f32];
    all_reduce(group, &mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum, [n]);
    assert!(operations.iter().all(|operation| operation.is_completed()));
    for (index, buffer) in buffers.iter().enumerate() {
        assert!(buffer.iter().all(|&value| value == index as f32 * n));
    }
    let alone = start(&buffers[9]);
    let begin = Instant::now();
    while !alone.is_completed() {
        assert!(begin.elapsed() < Duration::from_secs(5), "nobody moved it");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn messages(group: &Communicator) {
    let (me, n) = (group.rank(), group.size());
    for count in [0usize, 1, 1000, 100_000, 1_000_000] {
        let data: Vec<f32> = (0..count)
            .map(|index| (me as usize * 1000 + index) as f32)
            .collect();
        let mut operations = Vec::new();
        let buffers: Vec<Vec<f32>> = (0..n).map(|_| vec![-1.0; count]).collect();
        for rank in (0..n).filter(|&rank| rank != me) {
            let segment = |data: &Vec<f32>| {
                let (ptr, bytes) = bytes(data);
                Segment { ptr, bytes }
            };
            // SAFETY: the buffers live until all operations were waited for.
            unsafe {
                let to = segment(&buffers[rank as usize]);
                operations.push(
                    group
                        .message(MessageCall::recv(Some(rank), 7, to, DType::F32), None)
                        .unwrap(),
                );
                let from = segment(&data);
                operations.push(
                    group
                        .message(MessageCall::send(rank, 7, from, DType::F32), None)
                        .unwrap(),
                );
            }
        }
        for operation in &operations {
            operation.wait(None).unwrap();
        }
        for rank in (0..n).filter(|&rank| rank != me) {
            let right = |index: usize| {
                buffers[rank as usize][index] == (rank as usize * 1000 + index) as f32
            };
            assert!((0..count).all(right), "{count} from {rank}");
        }
    }
    // Many messages in order, with tags interleaved, received from any source.
    if me == 0 {
        let mut next = vec![0.0; n as usize];
        for _ in 0..200 * (n - 1) {
            let mut value = [-1.0f32];
            let to = Segment {
                ptr: value.as_mut_ptr().cast(),
                bytes: 4,
            };
            // SAFETY: waited for at once.
            let operation =
                unsafe { group.message(MessageCall::recv(None, 3, to, DType::F32), None) }.unwrap();
            operation.wait(None).unwrap();
            let source = operation.source_rank().unwrap() as usize;
            assert_eq!(value[0], next[source], "from {source}, {next:?}");
            next[source] += 1.0;
        }
    } else {
        for index in 0..200 {
            let value = [index as f32];
            let (ptr, bytes) = bytes(&value);
            // SAFETY: waited for at once.
            let operation = unsafe {
                group.message(
                    MessageCall::send(0, 3, Segment { ptr, bytes }, DType::F32),
                    None,
                )
            }
            .unwrap();
            operation.wait(None).unwrap();
        }
    }
}

/// A send that has timed out is not received any more, whatever its memory holds by then.
fn withdrawn(group: &Communicator) {
    let mut data = vec![1.0f32; 50_000];
    let (ptr, bytes) = bytes(&data);
    let data_segment = Segment { ptr, bytes };
    // SAFETY: the data lives until the operation has ended.
    let message = |call| unsafe { group.message(call, None) }.unwrap().wait(None);
    if group.rank() == 0 {
        let mut send = MessageCall::send(1, 7, data_segment, DType::F32);
        send.timeout = Some(Duration::from_millis(300));
        let error = message(send).unwrap_err().to_string();
        assert!(error.contains("missing ranks [1]"), "{error}");
        data.fill(2.0);
        all_reduce(group, &mut [1.0], ReduceOp::Sum).unwrap();
    } else {
        all_reduce(group, &mut [1.0], ReduceOp::Sum).unwrap();
        let error = message(MessageCall::recv(Some(0), 7, data_segment, DType::F32))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("rank 0") && error.contains("gave up"),
            "{error}"
        );
    }
    all_reduce(group, &mut [1.0], ReduceOp::Sum).unwrap();
}

/// A root whose memory has gone is named by the others, and hears of it.
fn unreadable(group: &Communicator) {
    const BYTES: usize = 100_000;
    let broadcast = |input, output, asynchronous| {
        let call = Call {
            root: 1,
            asynchronous,
            ..call(Kind::Broadcast, None, input, output)
        };
        // SAFETY: rank 0's memory lives on; that of rank 1 is read by the kernel alone.
        unsafe { group.collective(call, None) }.unwrap()
    };
    let error = if group.rank() == 1 {
        let length = BYTES.try_into().unwrap();
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: fresh memory.
        let memory = unsafe { mmap_anonymous(None, length, protection, MapFlags::MAP_PRIVATE) };
        let memory = memory.unwrap();
        let input = Pieces::one(memory.as_ptr().cast(), BYTES);
        let operation = broadcast(input, Pieces::new(), true);
        // SAFETY: this process does not use it.
        unsafe { munmap(memory, BYTES) }.unwrap();
        operation.wait(None).unwrap_err().to_string()
    } else {
        std::thread::sleep(Duration::from_millis(300));
        let mut data = vec![0u8; BYTES];
        let output = Pieces::one(data.as_mut_ptr(), BYTES);
        let operation = broadcast(Pieces::new(), output, false);
        operation.wait(None).unwrap_err().to_string()
    };
    assert!(
        error.contains("rank 1 (host") && error.contains("cannot be read"),
        "{error}"
    );
}

fn mismatch(group: &Communicator) {
    let me = group.rank();
    let mut data = vec![1.0f32; if me == 1 { 9 } else { 8 }];
    let error = all_reduce(group, &mut data, ReduceOp::Sum)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("8 elements") && error.contains("9 elements"),
        "{error}"
    );
    assert!(data.iter().all(|&value| value == 1.0), "nothing is written");
    let op = if me == 1 {
        ReduceOp::Max
    } else {
        ReduceOp::Sum
    };
    let error = all_reduce(group, &mut [1.0], op).unwrap_err().to_string();
    assert!(error.contains("SUM") && error.contains("MAX"), "{error}");
    let mut sum = [1.0f32];
    all_reduce(group, &mut sum, ReduceOp::Sum).unwrap();
    assert_eq!(sum, [group.size() as f32], "the group is usable");
}

fn timeout(group: &Communicator) {
    let mut data = [1.0f32; 4];
    all_reduce(group, &mut data, ReduceOp::Sum).unwrap();
    group.set_timeout(Duration::from_secs(1));
    if group.rank() == 1 {
        std::thread::sleep(Duration::from_millis(3500));
        let error = all_reduce(group, &mut data, ReduceOp::Sum)
            .unwrap_err()
            .to_string();
        assert!(error.contains("failed earlier"), "{error}");
        return;
    }
    let begin = Instant::now();
    let error = all_reduce(group, &mut data, ReduceOp::Sum)
        .unwrap_err()
        .to_string();
    assert!(
        begin.elapsed() < Duration::from_millis(3000),
        "{:?}",
        begin.elapsed()
    );
    for part in [
        "rank 1 (host",
        "Timed out",
        "missing ranks [1]",
        "all_reduce(SUM, float32, 4 elements",
        "number 2",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

fn killed(group: &Communicator) {
    let mut data = vec![1.0f32; 100_000];
    all_reduce(group, &mut data, ReduceOp::Sum).unwrap();
    if group.rank() == 1 {
        // Others may still be in the first all-reduce, which would then fail instead.
        std::thread::sleep(Duration::from_millis(200));
        // SAFETY: plain system calls.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    let begin = Instant::now();
    let error = all_reduce(group, &mut data, ReduceOp::Sum)
        .unwrap_err()
        .to_string();
    assert!(
        begin.elapsed() < Duration::from_secs(1),
        "{:?}",
        begin.elapsed()
    );
    assert!(error.contains("rank 1 (host"), "{error}");
}

fn monitored(group: &Communicator) {
    group.monitored_barrier(None, false).unwrap();
    let short = Some(Duration::from_millis(300));
    if group.rank() == 0 {
        let error = group
            .monitored_barrier(short, true)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("Ranks 1, 2 failed to pass monitoredBarrier"),
            "{error}"
        );
    } else if group.rank() > 2 {
        let error = group
            .monitored_barrier(short, true)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("successfully reached monitoredBarrier"),
            "{error}"
        );
        assert!(error.contains("Ranks 1, 2"), "{error}");
    }
    let mut sum = [1.0f32];
    all_reduce(group, &mut sum, ReduceOp::Sum).unwrap();
    group.monitored_barrier(None, false).unwrap();
}

fn subgroups(group: &Communicator) {
    let (me, n) = (group.rank(), group.size());
    let mut slowest = Duration::ZERO;
    for round in 0..500u32 {
        let members: Vec<u32> = (0..n).filter(|rank| (rank + round) % n != 0).collect();
        let Some(rank) = members.iter().position(|&member| member == me) else {
            continue;
        };
        let begin = Instant::now();
        let child = group
            .split(GroupSpec {
                id: format!("round {round}"),
                name: "child".into(),
                rank: rank as u32,
                size: members.len() as u32,
                global_ranks: members.clone(),
                default: false,
                timeout: Duration::from_secs(10),
            })
            .unwrap();
        if round > 0 {
            slowest = slowest.max(begin.elapsed());
        }
        let mut sum = [1.0f32];
        all_reduce(&child, &mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [members.len() as f32]);
    }
    println!("slowest split {slowest:?}");
    let mut sum = [1.0f32];
    all_reduce(group, &mut sum, ReduceOp::Sum).unwrap();
    let files = std::fs::read_dir("/proc/self/fd").unwrap().count();
    assert!(files < 40 + n as usize, "{files} open files");
}

fn abort(group: &Arc<Communicator>) {
    if group.rank() == 0 {
        let other = group.clone();
        let begin = Instant::now();
        let aborter = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            other.abort("enough");
        });
        let error = all_reduce(group, &mut [1.0], ReduceOp::Sum)
            .unwrap_err()
            .to_string();
        assert!(
            begin.elapsed() < Duration::from_millis(300),
            "{:?}",
            begin.elapsed()
        );
        assert!(error.contains("enough"), "{error}");
        aborter.join().unwrap();
    } else {
        std::thread::sleep(Duration::from_millis(400));
        let error = all_reduce(group, &mut [1.0], ReduceOp::Sum)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("enough") && error.contains("rank 0"),
            "{error}"
        );
    }
}

/// An all-to-all whose tables are larger than what goes out unasked.
fn many(group: &Communicator) {
    let (me, ranks) = (group.rank(), group.size());
    let value = |from: u32, to: u32| (from * 1000 + to) as f32;
    let mut input: Vec<f32> = (0..ranks).map(|to| value(me, to)).collect();
    let mut output = vec![0f32; ranks as usize];
    let pieces = |data: &mut [f32]| Pieces::split(data.as_mut_ptr().cast(), 4, ranks as usize);
    let (from, to) = (pieces(&mut input), pieces(&mut output));
    run(group, call(Kind::AllToAll, None, from, to)).unwrap();
    let expected: Vec<f32> = (0..ranks).map(|from| value(from, me)).collect();
    assert_eq!(output, expected);
}

const TCP: &[(&str, &str)] = &[("TPU_DIST_TRANSPORT", "tcp")];
/// Ranks do not read each other's memory.
const COPIES: &[(&str, &str)] = &[("TPU_DIST_CMA", "0")];

#[test]
fn right_values_over_shared_memory() {
    for ranks in [1, 2, 3, 4, 7] {
        start("values", ranks, &[]).finish(&[]);
    }
    for ranks in [2, 3] {
        start("values", ranks, COPIES).finish(&[]);
    }
}

#[test]
fn right_values_in_place() {
    for ranks in [2, 3, 4] {
        start("values", ranks, &[("TPU_DIST_TEST_MEMORY", "arena")]).finish(&[]);
    }
    start("values", 3, &[("TPU_DIST_TEST_MEMORY", "mixed")]).finish(&[]);
}

#[test]
fn right_values_over_tcp() {
    for ranks in [2, 3, 4] {
        start("values", ranks, TCP).finish(&[]);
    }
}

#[test]
fn all_to_all_of_many_ranks_over_tcp() {
    start("many", 112, TCP).finish(&[]);
}

#[test]
fn messages_match_in_order() {
    for env in [&[], COPIES, TCP] {
        eprintln!("{env:?}");
        start("messages", 3, env).finish(&[]);
    }
}

#[test]
fn a_send_that_was_given_up_is_not_received() {
    for env in [&[], COPIES, TCP] {
        start("withdrawn", 2, env).finish(&[]);
    }
}

#[test]
fn memory_that_cannot_be_read_is_an_error_of_all() {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    if scope.is_ok_and(|scope| scope.trim() != "0") {
        // Ranks do not read each other's memory on such a system.
        return;
    }
    start("unreadable", 2, &[]).finish(&[]);
}

#[test]
fn disagreement_is_said_by_all_ranks() {
    for env in [&[], TCP] {
        start("mismatch", 3, env).finish(&[]);
    }
}

#[test]
fn a_timeout_names_the_late_rank() {
    for env in [&[], TCP] {
        start("timeout", 3, env).finish(&[]);
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    for env in [&[], TCP] {
        start("killed", 4, env).finish(&[1]);
    }
}

#[test]
fn a_monitored_barrier_names_late_ranks() {
    for env in [&[], TCP] {
        start("monitored", 4, env).finish(&[]);
    }
}

#[test]
fn five_hundred_groups_leave_nothing_behind() {
    for env in [&[], TCP] {
        start("subgroups", 3, env).finish(&[]);
    }
}

#[test]
fn abort_frees_a_blocked_call() {
    for env in [&[], TCP] {
        start("abort", 3, env).finish(&[]);
    }
}
