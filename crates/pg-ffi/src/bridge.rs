//! What C++ and Rust call of each other.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use tpu_dist_collectives as collectives;
use tpu_dist_runtime::{self as runtime, Communicator, Completion, Error, Pieces, device};

use crate::{groups, store::C10dStore};

#[allow(clippy::too_many_arguments, reason = "what c10d's calls have")]
#[cxx::bridge(namespace = "tpu_dist::ffi")]
pub(crate) mod ffi {
    /// What kind of failure; chooses the exception type.
    #[derive(Debug)]
    #[repr(u8)]
    enum Code {
        Ok,
        Argument,
        Timeout,
        PeerLost,
        Backend,
        Interrupted,
        Store,
        Network,
    }

    /// A failure, or `Code::Ok` with no text.
    struct Failure {
        code: Code,
        message: String,
    }

    /// Mirrors `tpu_dist_collectives::Kind`.
    #[repr(u8)]
    enum Kind {
        Barrier = 0,
        Broadcast = 1,
        AllReduce = 2,
        Reduce = 3,
        AllGather = 4,
        ReduceScatter = 5,
        AllToAll = 6,
        Gather = 7,
        Scatter = 8,
    }

    /// Mirrors `tpu_dist_collectives::ReduceKind`.
    #[repr(u8)]
    enum ReduceKind {
        Sum = 0,
        Avg = 1,
        Product = 2,
        Min = 3,
        Max = 4,
        BitAnd = 5,
        BitOr = 6,
        BitXor = 7,
        PremulSum = 8,
        None = 255,
    }

    /// Mirrors `tpu_dist_collectives::DType`.
    #[repr(u8)]
    enum DType {
        U8 = 0,
        I8 = 1,
        U16 = 2,
        I16 = 3,
        U32 = 4,
        I32 = 5,
        U64 = 6,
        I64 = 7,
        Bool = 8,
        F16 = 9,
        BF16 = 10,
        F32 = 11,
        F64 = 12,
        C32 = 13,
        C64 = 14,
        C128 = 15,
        F8E4M3FN = 16,
        F8E5M2 = 17,
        F8E4M3FNUZ = 18,
        F8E5M2FNUZ = 19,
        F8E8M0FNU = 20,
        F4E2M1FNX2 = 21,
        QI8 = 22,
        QU8 = 23,
        QI32 = 24,
    }

    /// Memory of a tensor.
    #[derive(Clone, Copy)]
    struct Segment {
        address: usize,
        bytes: usize,
    }

    /// The sizes of a tensor of `dims` dimensions, as far as they fit.
    #[derive(Clone, Copy)]
    struct Shape {
        dims: u32,
        sizes: [i64; 6],
    }

    /// A collective, without its memory.
    struct Call {
        kind: Kind,
        op: ReduceKind,
        /// For `PremulSum`.
        factor: f64,
        dtype: DType,
        root: u32,
        tensors: u32,
        shape: Shape,
        /// Negative: the group's.
        timeout_ms: i64,
        asynchronous: bool,
    }

    /// Who a group is.
    struct GroupSpec {
        id: String,
        name: String,
        rank: u32,
        size: u32,
        global_ranks: Vec<u32>,
        is_default: bool,
        timeout_ms: i64,
    }

    /// A started operation.
    struct Launch {
        /// Not `Ok`: nothing was started.
        failure: Failure,
        /// Null, or to be given back to `release_operation`.
        operation: *const Operation,
        sequence: u64,
    }

    /// Bytes of a value in the store.
    struct Value {
        bytes: Vec<u8>,
    }

    extern "Rust" {
        type Group;
        type Operation;
        type Plan;

        unsafe fn create_group(
            spec: &GroupSpec,
            store: UniquePtr<Store>,
            failure: &mut Failure,
        ) -> *mut Group;
        unsafe fn release_group(group: *mut Group);
        unsafe fn split(self: &Group, spec: &GroupSpec, failure: &mut Failure) -> *mut Group;
        /// `work` is null for an operation that ends before the call returns;
        /// otherwise one reference to it passes to Rust. With `cells`, the addresses of
        /// storages of the device, the segments lie in those (`deferred_address`), and `work` is null.
        unsafe fn collective(
            self: &Group,
            call: &Call,
            input: &[Segment],
            input_ends: &[u32],
            output: &[Segment],
            output_ends: &[u32],
            cells: &[usize],
            work: *mut Work,
        ) -> Launch;
        /// To `peer`, or from it, or where that is negative from any rank. `cells` as
        /// above, at most one.
        unsafe fn message(
            self: &Group,
            sends: bool,
            peer: i32,
            tag: i32,
            data: Segment,
            dtype: DType,
            shape: Shape,
            cells: &[usize],
            work: *mut Work,
        ) -> Launch;
        /// Stands for the byte at `offset` of the storage number `cell` of a call.
        fn deferred_address(cell: usize, offset: usize) -> usize;
        /// What `deferred_address` was given.
        fn deferred_place(address: usize) -> [usize; 2];
        /// Whether collectives work in place on storages of the device.
        fn works_in_place() -> Result<bool>;
        /// How the device carries out a collective; what the segments' addresses are does not
        /// matter.
        fn plan(
            self: &Group,
            call: &Call,
            input: &[Segment],
            input_ends: &[u32],
            output: &[Segment],
            output_ends: &[u32],
            failure: &mut Failure,
        ) -> Box<Plan>;
        /// False: by way of the host.
        fn exists(self: &Plan) -> bool;
        /// Elements that the program takes.
        fn input(self: &Plan) -> u64;
        /// Elements of its result.
        fn output(self: &Plan) -> u64;
        /// Starts the program on the storages at two addresses, of so many elements.
        unsafe fn launch(self: &Plan, input: usize, output: usize) -> Result<()>;
        /// Whether the ranks of the group reach each other's memory.
        fn shares_memory(self: &Group) -> bool;
        /// Microseconds that a collective would take, or with a `peer` of 0 or more a
        /// message.
        fn estimate(self: &Group, kind: Kind, bytes: u64, peer: i32, failure: &mut Failure) -> f64;
        fn monitored_barrier(self: &Group, timeout_ms: i64, wait_all_ranks: bool) -> Failure;
        fn set_timeout(self: &Group, timeout_ms: i64);
        fn timeout_ms(self: &Group) -> i64;
        fn sequence(self: &Group) -> u64;
        fn error(self: &Group) -> Failure;
        fn abort(self: &Group, reason: &str);
        fn shutdown(self: &Group);

        fn is_completed(self: &Operation) -> bool;
        /// Negative timeout: until it ends.
        fn wait(self: &Operation, timeout_ms: i64) -> Failure;
        /// Of an operation that has ended.
        fn result(self: &Operation) -> Failure;
        /// Who sent what was received; -1 while that is not known.
        fn source_rank(self: &Operation) -> i32;
        unsafe fn release_operation(operation: *const Operation);

        /// The address of `bytes` of memory that the ranks of the host share; 0 with a
        /// failure.
        fn arena_allocate(bytes: usize, failure: &mut Failure) -> usize;
        unsafe fn arena_free(address: usize);
    }

    unsafe extern "C++" {
        include!("bridge.hpp");

        #[namespace = "tpu_dist"]
        type Work;
        /// Ends `work`: copies results back, runs hooks. Does not give up the reference.
        #[namespace = "tpu_dist"]
        unsafe fn complete_work(work: *mut Work, failure: &Failure);
        /// Gives up the reference.
        #[namespace = "tpu_dist"]
        unsafe fn release_work(work: *mut Work);

        #[namespace = "tpu_dist"]
        type Store;
        fn set(self: &Store, key: &str, value: &[u8]) -> Result<()>;
        fn multi_get(self: &Store, keys: &Vec<String>, timeout_ms: i64) -> Result<Vec<Value>>;
        fn add(self: &Store, key: &str, amount: i64) -> Result<i64>;
        fn present(self: &Store, keys: &Vec<String>) -> Result<Vec<u8>>;

        #[namespace = "tpu_dist"]
        fn check_signals() -> bool;
        /// Adds the classes that C++ defines to the Python module at `module`.
        #[namespace = "tpu_dist"]
        unsafe fn register_classes(module: usize) -> Result<()>;
    }
}

// The mirrored enumerations carry the codes of the originals.
const _: () = {
    let mut at = 0;
    while at < collectives::DType::ALL.len() {
        assert!(collectives::DType::ALL[at] as usize == at);
        at += 1;
    }
    assert!(ffi::DType::QI32.repr as usize + 1 == collectives::DType::ALL.len());
    assert!(ffi::DType::F32.repr == collectives::DType::F32 as u8);
    assert!(ffi::DType::C128.repr == collectives::DType::C128 as u8);
    assert!(ffi::Kind::AllReduce.repr == collectives::Kind::AllReduce as u8);
    assert!(ffi::Kind::Scatter.repr == collectives::Kind::Scatter as u8);
    assert!(ffi::ReduceKind::PremulSum.repr == collectives::ReduceKind::PremulSum as u8);
};

/// A group, as C++ holds it.
pub(crate) struct Group(Arc<Communicator>);

/// An operation, as C++ holds it: the pointee of an `Arc<runtime::Operation>`.
#[repr(transparent)]
pub(crate) struct Operation(runtime::Operation);

fn failure(error: &Error) -> ffi::Failure {
    let code = match error {
        Error::InvalidArgument { .. } | Error::Unsupported { .. } => ffi::Code::Argument,
        Error::Timeout { .. } => ffi::Code::Timeout,
        Error::PeerLost { .. } => ffi::Code::PeerLost,
        Error::Interrupted { .. } => ffi::Code::Interrupted,
        Error::Store(_) => ffi::Code::Store,
        Error::Network(_) => ffi::Code::Network,
        _ => ffi::Code::Backend,
    };
    ffi::Failure {
        code,
        message: error.to_string(),
    }
}

fn success() -> ffi::Failure {
    ffi::Failure {
        code: ffi::Code::Ok,
        message: String::new(),
    }
}

fn outcome(result: &Result<(), Error>) -> ffi::Failure {
    result.as_ref().err().map_or_else(success, failure)
}

/// Runs `body`; a panic, which is a bug of ours, becomes an error and not the end of
/// the process.
fn guarded<T>(body: impl FnOnce() -> Result<T, Error>) -> Result<T, ffi::Failure> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result.map_err(|error| failure(&error)),
        Err(panic) => {
            let text = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            Err(ffi::Failure {
                code: ffi::Code::Backend,
                message: format!("internal error: {text}"),
            })
        }
    }
}

fn timeout(milliseconds: i64) -> Option<Duration> {
    u64::try_from(milliseconds).ok().map(Duration::from_millis)
}

fn milliseconds(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

impl From<&ffi::GroupSpec> for runtime::GroupSpec {
    fn from(spec: &ffi::GroupSpec) -> runtime::GroupSpec {
        runtime::GroupSpec {
            id: spec.id.clone(),
            name: spec.name.clone(),
            rank: spec.rank,
            size: spec.size,
            global_ranks: spec.global_ranks.clone(),
            default: spec.is_default,
            timeout: timeout(spec.timeout_ms).unwrap_or_default(),
        }
    }
}

fn deferred_address(cell: usize, offset: usize) -> usize {
    runtime::Segment::deferred(cell, offset, 0).ptr.addr()
}

/// The device, which is open where there are storages.
fn open_device() -> Result<&'static device::Device, Error> {
    device::get().map_err(|error| Error::Resource(error.to_string()))
}

fn deferred_place(address: usize) -> [usize; 2] {
    let segment = segment(ffi::Segment { address, bytes: 0 });
    let (cell, offset) = segment.place().expect("from `deferred_address`");
    [cell, offset]
}

/// # Safety
/// `address` is that of a storage that outlives the call.
unsafe fn cell<'a>(address: usize) -> &'a device::Cell {
    // SAFETY: the caller's word.
    unsafe { &*(address as *const device::Cell) }
}

fn arena_allocate(bytes: usize, failure: &mut ffi::Failure) -> usize {
    match guarded(|| runtime::arena::allocate(bytes)) {
        Ok(memory) => memory.as_ptr() as usize,
        Err(said) => {
            *failure = said;
            0
        }
    }
}

/// # Safety
/// As [`runtime::arena::free`].
unsafe fn arena_free(address: usize) {
    if let Some(memory) = NonNull::new(address as *mut u8) {
        // SAFETY: passed on.
        unsafe { runtime::arena::free(memory) };
    }
}

fn hand_out(
    result: Result<Arc<Communicator>, ffi::Failure>,
    failure: &mut ffi::Failure,
) -> *mut Group {
    match result {
        Ok(communicator) => {
            groups::register(&communicator);
            Box::into_raw(Box::new(Group(communicator)))
        }
        Err(error) => {
            *failure = error;
            std::ptr::null_mut()
        }
    }
}

/// # Safety
/// None of its own; `unsafe` because it returns a pointer to be released once.
unsafe fn create_group(
    spec: &ffi::GroupSpec,
    store: cxx::UniquePtr<ffi::Store>,
    failure: &mut ffi::Failure,
) -> *mut Group {
    let store = Arc::new(C10dStore::new(store));
    hand_out(
        guarded(|| Communicator::create(spec.into(), store)),
        failure,
    )
}

/// # Safety
/// `group` came from `create_group` or `split` and is not used again.
unsafe fn release_group(group: *mut Group) {
    // SAFETY: both made it with `Box::into_raw`, and the caller gives it up.
    drop(unsafe { Box::from_raw(group) });
}

/// A reference to a C++ `Work` that ends with the operation.
struct WorkCompletion(*mut ffi::Work);

// SAFETY: `complete_work` and `release_work` may be called from any thread; the
// reference count of a work is atomic.
unsafe impl Send for WorkCompletion {}

impl Completion for WorkCompletion {
    fn complete(self: Box<Self>, result: &Result<(), Error>) {
        // SAFETY: this object holds a reference to the work until it is dropped.
        unsafe { ffi::complete_work(self.0, &outcome(result)) };
    }
}

impl Drop for WorkCompletion {
    fn drop(&mut self) {
        // SAFETY: the reference is this object's, and it is given up once.
        unsafe { ffi::release_work(self.0) };
    }
}

/// # Safety
/// Null, or a reference to a work that passes to the result.
unsafe fn completion(work: *mut ffi::Work) -> Option<Box<dyn Completion>> {
    (!work.is_null()).then(|| Box::new(WorkCompletion(work)) as Box<dyn Completion>)
}

fn launch(result: Result<Arc<runtime::Operation>, ffi::Failure>) -> ffi::Launch {
    match result {
        Ok(operation) => ffi::Launch {
            failure: success(),
            sequence: operation.sequence(),
            // `Operation` is a transparent wrapper of the runtime's.
            operation: Arc::into_raw(operation).cast(),
        },
        Err(failure) => ffi::Launch {
            failure,
            sequence: 0,
            operation: std::ptr::null(),
        },
    }
}

fn pieces(segments: &[ffi::Segment], ends: &[u32]) -> Pieces {
    let mut pieces = Pieces::new();
    let mut at = 0;
    for &end in ends {
        for segment in &segments[at..end as usize] {
            pieces.push(segment.address as *mut u8, segment.bytes);
        }
        pieces.end_piece();
        at = end as usize;
    }
    pieces
}

fn runtime_call(call: &ffi::Call, input: Pieces, output: Pieces) -> runtime::Call {
    runtime::Call {
        kind: collectives::Kind::from_code(call.kind.repr).expect("mirrored codes"),
        op: reduce_op(call.op, call.factor),
        dtype: dtype(call.dtype),
        root: call.root,
        tensors: call.tensors,
        shape: shape(call.shape),
        input,
        output,
        memory: None,
        timeout: timeout(call.timeout_ms),
        asynchronous: call.asynchronous,
    }
}

fn shape(shape: ffi::Shape) -> runtime::Shape {
    runtime::Shape::new(shape.dims as usize, shape.sizes)
}

fn segment(segment: ffi::Segment) -> runtime::Segment {
    runtime::Segment {
        ptr: segment.address as *mut u8,
        bytes: segment.bytes,
    }
}

fn dtype(dtype: ffi::DType) -> collectives::DType {
    collectives::DType::from_code(dtype.repr).expect("the mirror has the same codes")
}

fn reduce_op(kind: ffi::ReduceKind, factor: f64) -> Option<collectives::ReduceOp> {
    use collectives::ReduceOp;
    Some(match kind {
        ffi::ReduceKind::Sum => ReduceOp::Sum,
        ffi::ReduceKind::Avg => ReduceOp::Avg,
        ffi::ReduceKind::Product => ReduceOp::Product,
        ffi::ReduceKind::Min => ReduceOp::Min,
        ffi::ReduceKind::Max => ReduceOp::Max,
        ffi::ReduceKind::BitAnd => ReduceOp::BitAnd,
        ffi::ReduceKind::BitOr => ReduceOp::BitOr,
        ffi::ReduceKind::BitXor => ReduceOp::BitXor,
        ffi::ReduceKind::PremulSum => ReduceOp::PremulSum(factor),
        _ => return None,
    })
}

impl Group {
    fn shares_memory(&self) -> bool {
        self.0.shares_memory()
    }

    /// # Safety
    /// As [`create_group`].
    unsafe fn split(&self, spec: &ffi::GroupSpec, failure: &mut ffi::Failure) -> *mut Group {
        hand_out(guarded(|| self.0.split(spec.into())), failure)
    }

    /// # Safety
    /// The segments are memory of tensors that `work` (or, when it is null, the caller
    /// until the return) keeps alive. `work` is null or a reference to be given up.
    #[expect(clippy::too_many_arguments, reason = "what c10d's call has")]
    unsafe fn collective(
        &self,
        call: &ffi::Call,
        input: &[ffi::Segment],
        input_ends: &[u32],
        output: &[ffi::Segment],
        output_ends: &[u32],
        cells: &[usize],
        work: *mut ffi::Work,
    ) -> ffi::Launch {
        // SAFETY: passed on from the caller.
        let completion = unsafe { completion(work) };
        let call = runtime_call(call, pieces(input, input_ends), pieces(output, output_ends));
        launch(guarded(|| {
            if cells.is_empty() {
                // SAFETY: passed on from the caller.
                return unsafe { self.0.collective(call, completion) };
            }
            // SAFETY: the caller names live storages.
            let cells: Vec<&device::Cell> = cells.iter().map(|&at| unsafe { cell(at) }).collect();
            // SAFETY: with storages come deferred segments.
            unsafe { open_device()?.collective(&self.0, call, &cells) }
        }))
    }

    /// # Safety
    /// As [`Group::collective`].
    #[expect(clippy::too_many_arguments, reason = "what c10d's call has")]
    unsafe fn message(
        &self,
        sends: bool,
        peer: i32,
        tag: i32,
        data: ffi::Segment,
        dtype: ffi::DType,
        shape: ffi::Shape,
        cells: &[usize],
        work: *mut ffi::Work,
    ) -> ffi::Launch {
        // SAFETY: passed on from the caller.
        let completion = unsafe { completion(work) };
        let (data, dtype) = (segment(data), self::dtype(dtype));
        let mut call = match u32::try_from(peer) {
            Ok(to) if sends => runtime::MessageCall::send(to, tag, data, dtype),
            from => runtime::MessageCall::recv(from.ok(), tag, data, dtype),
        };
        call.shape = self::shape(shape);
        launch(guarded(|| match cells {
            // SAFETY: passed on from the caller.
            [] => unsafe { self.0.message(call, completion) },
            // SAFETY: the caller names a live storage, with which comes a deferred segment.
            [at, ..] => unsafe { open_device()?.message(&self.0, call, cell(*at)) },
        }))
    }

    fn plan(
        &self,
        call: &ffi::Call,
        input: &[ffi::Segment],
        input_ends: &[u32],
        output: &[ffi::Segment],
        output_ends: &[u32],
        failure: &mut ffi::Failure,
    ) -> Box<Plan> {
        let call = runtime_call(call, pieces(input, input_ends), pieces(output, output_ends));
        let plan = guarded(|| open_device()?.plan(&self.0, &call));
        Box::new(Plan(plan.unwrap_or_else(|said| {
            *failure = said;
            None
        })))
    }

    fn estimate(&self, kind: ffi::Kind, bytes: u64, peer: i32, failure: &mut ffi::Failure) -> f64 {
        let kind = collectives::Kind::from_code(kind.repr).expect("mirrored codes");
        let peer = u32::try_from(peer).ok();
        match guarded(|| self.0.estimate(kind, bytes, peer)) {
            Ok(time) => time.as_secs_f64() * 1e6,
            Err(said) => {
                *failure = said;
                0.0
            }
        }
    }

    fn monitored_barrier(&self, timeout_ms: i64, wait_all_ranks: bool) -> ffi::Failure {
        guarded(|| {
            self.0
                .monitored_barrier(timeout(timeout_ms), wait_all_ranks)
        })
        .map_or_else(|failure| failure, |()| success())
    }

    fn set_timeout(&self, timeout_ms: i64) {
        self.0
            .set_timeout(timeout(timeout_ms).unwrap_or(Duration::MAX));
    }

    fn timeout_ms(&self) -> i64 {
        milliseconds(self.0.timeout())
    }

    fn sequence(&self) -> u64 {
        self.0.sequence()
    }

    fn error(&self) -> ffi::Failure {
        self.0.error().as_ref().map_or_else(success, failure)
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }

    fn shutdown(&self) {
        self.0.shutdown();
    }
}

/// How the device carries out a collective, if it does.
struct Plan(Option<device::Plan>);

impl Plan {
    fn exists(&self) -> bool {
        self.0.is_some()
    }

    fn input(&self) -> u64 {
        self.0.as_ref().map_or(0, device::Plan::input)
    }

    fn output(&self) -> u64 {
        self.0.as_ref().map_or(0, device::Plan::output)
    }

    /// # Safety
    /// The addresses are those of storages that outlive the call.
    unsafe fn launch(&self, input: usize, output: usize) -> Result<(), device::Error> {
        let Some(plan) = &self.0 else { return Ok(()) };
        // SAFETY: the caller's word.
        let (input, output) = unsafe { (cell(input), cell(output)) };
        plan.launch(device::get()?, input, output)
    }
}

fn works_in_place() -> Result<bool, device::Error> {
    Ok(device::get()?.works_in_place())
}

impl Operation {
    fn is_completed(&self) -> bool {
        self.0.is_completed()
    }

    fn wait(&self, timeout_ms: i64) -> ffi::Failure {
        guarded(|| self.0.wait(timeout(timeout_ms))).map_or_else(|failure| failure, |()| success())
    }

    fn result(&self) -> ffi::Failure {
        self.0.result().as_ref().map_or_else(success, outcome)
    }

    fn source_rank(&self) -> i32 {
        self.0.source_rank().map_or(-1, |rank| rank as i32)
    }
}

/// # Safety
/// `operation` came in a `Launch` and is not used again.
unsafe fn release_operation(operation: *const Operation) {
    // SAFETY: `launch` made it with `Arc::into_raw` from an `Arc` of the wrapped type.
    drop(unsafe { Arc::from_raw(operation.cast::<runtime::Operation>()) });
}
