//! What timing cannot guard: how many bytes a collective writes, how often it allocates,
//! and which system calls it makes.
//!
//! Two ranks run the same calls; each counts for itself, its parent counts the system
//! calls.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tpu_dist_collectives::{DType, Kind, ReduceOp};
use tpu_dist_runtime::{Call, Communicator, DirectoryStore, GroupSpec, Pieces, Shape, arena};

/// Counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: passes everything on.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const CALLS: u64 = 200;
/// The operation itself, which the caller keeps.
const ALLOCATIONS_A_CALL: u64 = 1;

/// A case: kind, bytes of a rank's input, whether it lies in the arena, and what a rank
/// writes in a call, in bytes; and the same where ranks read each other's memory.
struct Case {
    kind: Kind,
    bytes: usize,
    in_arena: bool,
    written: usize,
    pulled: Option<usize>,
}

const fn case(kind: Kind, bytes: usize, in_arena: bool, written: usize) -> Case {
    Case {
        kind,
        bytes,
        in_arena,
        written,
        pulled: None,
    }
}

impl Case {
    const fn pulled(self, written: usize) -> Case {
        Case {
            pulled: Some(written),
            ..self
        }
    }
}

/// Whether the kernel lets ranks read each other's memory.
fn can_pull() -> bool {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    scope.map_or(true, |scope| scope.trim() == "0")
}

const CASES: &[Case] = &[
    // Out to the slot; the result.
    case(Kind::AllReduce, 8, false, 16),
    case(Kind::AllReduce, 4096, false, 8192),
    // The peer's half to staging, the own half's result here and there, the peer's back.
    case(Kind::AllReduce, 1 << 20, false, 2 << 20),
    // The own half's result here and there.
    case(Kind::AllReduce, 1 << 20, true, 1 << 20),
    // Out to staging, the own piece, the peer's piece.
    case(Kind::AllGather, 1 << 20, false, 3 << 20).pulled(2 << 20),
    case(Kind::AllGather, 1 << 20, true, 2 << 20),
    case(Kind::ReduceScatter, 1 << 20, false, 1 << 20),
    case(Kind::ReduceScatter, 1 << 20, true, 1 << 19),
    case(Kind::AllToAll, 1 << 20, false, 3 << 19).pulled(1 << 20),
    case(Kind::AllToAll, 1 << 20, true, 1 << 20),
    case(Kind::Barrier, 0, false, 0),
];

fn memory(bytes: usize, in_arena: bool) -> *mut u8 {
    let memory = if in_arena {
        arena::allocate(bytes).unwrap().as_ptr()
    } else {
        vec![0u8; bytes].leak().as_mut_ptr()
    };
    // SAFETY: just taken, of that length.
    unsafe { memory.write_bytes(0, bytes) };
    memory
}

fn call(case: &Case, input: *mut u8, output: *mut u8) -> Call {
    let bytes = case.bytes;
    let whole = |ptr, bytes| Pieces::one(ptr, bytes);
    let (from, to) = match case.kind {
        Kind::AllReduce => (whole(input, bytes), whole(output, bytes)),
        Kind::AllGather => (whole(input, bytes), Pieces::split(output, bytes, 2)),
        Kind::ReduceScatter => (Pieces::split(input, bytes / 2, 2), whole(output, bytes / 2)),
        Kind::AllToAll => (
            Pieces::split(input, bytes / 2, 2),
            Pieces::split(output, bytes / 2, 2),
        ),
        _ => (Pieces::new(), Pieces::new()),
    };
    Call {
        kind: case.kind,
        op: matches!(case.kind, Kind::AllReduce | Kind::ReduceScatter).then_some(ReduceOp::Sum),
        dtype: DType::F32,
        root: 0,
        tensors: 1,
        shape: Shape::default(),
        input: from,
        output: to,
        memory: None,
        timeout: None,
        asynchronous: false,
    }
}

/// The system call that marks the counted part.
fn mark() {
    // SAFETY: no effect.
    unsafe { libc::getppid() };
}

/// What a rank runs; nothing when run as a test.
#[test]
fn rank() {
    let Ok(rank) = std::env::var("TPU_DIST_TEST_RANK") else {
        return;
    };
    let directory = std::env::var("TPU_DIST_TEST_STORE").unwrap();
    let spec = GroupSpec {
        id: "0".into(),
        name: "world".into(),
        rank: rank.parse().unwrap(),
        size: 2,
        global_ranks: vec![0, 1],
        default: true,
        timeout: Duration::from_secs(60),
    };
    let group = Communicator::create(spec, Arc::new(DirectoryStore::new(directory))).unwrap();
    let run = |call| {
        // SAFETY: a synchronous call, on memory that is kept.
        let operation = unsafe { group.collective(call, None) }.unwrap();
        operation.wait(None).unwrap();
    };
    let written = |kind| {
        let stats = group.stats();
        let stat = stats.iter().find(|stat| stat.kind == kind);
        stat.map_or(0, |stat| stat.written)
    };
    for case in CASES {
        let (input, output) = (
            memory(case.bytes, case.in_arena),
            memory(2 * case.bytes, case.in_arena),
        );
        // The first calls touch new pages and find the peer's seat.
        for _ in 0..3 {
            run(call(case, input, output));
        }
        let name = format!("{} of {} bytes", case.kind.name(), case.bytes);
        let before = written(case.kind);
        let allocations = ALLOCATIONS.get();
        mark();
        for _ in 0..CALLS {
            run(call(case, input, output));
        }
        mark();
        assert_eq!(
            ALLOCATIONS.get() - allocations,
            CALLS * ALLOCATIONS_A_CALL,
            "allocations of {name}"
        );
        let expected = case.pulled.filter(|_| can_pull()).unwrap_or(case.written);
        assert_eq!(
            (written(case.kind) - before) / CALLS,
            expected as u64,
            "bytes written by {name}, arena: {}",
            case.in_arena
        );
    }
    group.shutdown();
}

/// A traced thread.
#[derive(Default)]
struct Traced {
    /// Between the entry and the exit of a system call.
    inside: bool,
    counting: bool,
}

/// Runs a rank's process, which this thread started, to its end; counts the system calls
/// between the marks of the thread that makes them, by number.
fn trace(process: Pid) -> BTreeMap<u64, u64> {
    let mut counts = BTreeMap::new();
    let mut marks = 0;
    let mut threads = BTreeMap::<Pid, Traced>::new();
    loop {
        // Of this thread's children alone: the other tracer has its own.
        let any = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
        let status = waitpid(None, Some(any)).unwrap();
        let thread = status.pid().unwrap();
        let mut pass = None;
        match status {
            WaitStatus::Exited(..) if thread == process => {
                assert_eq!(status, WaitStatus::Exited(process, 0), "the rank failed");
                assert_eq!(marks, 2 * CASES.len());
                return counts;
            }
            WaitStatus::Exited(..) => continue,
            WaitStatus::PtraceSyscall(_) => {
                let traced = threads.entry(thread).or_default();
                traced.inside = !traced.inside;
                if traced.inside {
                    let number = ptrace::getregs(thread).unwrap().orig_rax;
                    if number == libc::SYS_getppid as u64 {
                        traced.counting = !traced.counting;
                        marks += 1;
                    } else if traced.counting {
                        *counts.entry(number).or_insert(0) += 1;
                    }
                }
            }
            WaitStatus::Stopped(_, signal) => {
                // A thread begins with a stop of its own, and so does a program.
                let is_new = !threads.contains_key(&thread);
                threads.entry(thread).or_default();
                pass = (!is_new).then_some(signal);
                if thread == process && is_new {
                    let options = ptrace::Options::PTRACE_O_TRACESYSGOOD
                        | ptrace::Options::PTRACE_O_TRACECLONE;
                    ptrace::setoptions(thread, options).unwrap();
                }
            }
            WaitStatus::PtraceEvent(..) => {}
            other => panic!("the rank ended as {other:?}"),
        }
        // A thread may end at any time; its end is seen at the next look.
        let _ = ptrace::syscall(thread, pass);
    }
}

/// Synchronous collectives on shared memory allocate once, write what they must, and make
/// no system calls but those that wait, and one where a rank reads another's memory.
#[test]
#[cfg(target_arch = "x86_64")]
fn collectives_copy_allocate_and_call_the_system_no_more_than_needed() {
    let directory = std::env::temp_dir().join(format!("tpu_dist-guards-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let tracers: Vec<_> = (0..2)
        .map(|rank| {
            let directory = directory.clone();
            std::thread::spawn(move || {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command
                    .args(["--exact", "rank", "--nocapture", "--test-threads", "1"])
                    .env("TPU_DIST_TEST_RANK", rank.to_string())
                    .env("TPU_DIST_TEST_STORE", directory)
                    .stdout(Stdio::null());
                // SAFETY: one system call, allowed between fork and exec.
                unsafe { command.pre_exec(|| Ok(ptrace::traceme()?)) };
                // `trace` waits for its end.
                #[expect(clippy::zombie_processes)]
                let child = command.spawn().unwrap();
                trace(Pid::from_raw(child.id() as i32))
            })
        })
        .collect();
    for tracer in tracers {
        let mut counts = tracer.join().unwrap();
        counts.remove(&(libc::SYS_sched_yield as u64));
        counts.remove(&(libc::SYS_futex as u64));
        let reads = counts.remove(&(libc::SYS_process_vm_readv as u64));
        let pulls = CASES
            .iter()
            .filter(|case| case.pulled.is_some() && can_pull());
        assert_eq!(reads.unwrap_or(0), CALLS * pulls.count() as u64);
        assert!(counts.is_empty(), "system calls by number: {counts:?}");
    }
    let _ = std::fs::remove_dir_all(&directory);
}
