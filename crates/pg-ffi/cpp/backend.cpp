#include "backend.hpp"

#include <algorithm>
#include <future>
#include <thread>
#include <utility>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/irange.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "arena.hpp"
#include "device/device.hpp"
#include "executor.hpp"

namespace tpu_dist {

namespace {

using Milliseconds = std::chrono::milliseconds;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

// Throws what c10d backends throw for a bad argument.
template <typename... Args>
[[noreturn]] void invalid(const char* operation, const Args&... args) {
  TORCH_CHECK(false, kName, "::", operation, ": ", args...);
}

// For the checks of c10d, which report through a function.
std::function<void(const std::string&)> reporter(const char* operation) {
  return [operation](const std::string& message) { invalid(operation, message); };
}

std::optional<ffi::DType> dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return ffi::DType::U8;
    case at::kChar:
      return ffi::DType::I8;
    case at::kUInt16:
      return ffi::DType::U16;
    case at::kShort:
      return ffi::DType::I16;
    case at::kUInt32:
      return ffi::DType::U32;
    case at::kInt:
      return ffi::DType::I32;
    case at::kUInt64:
      return ffi::DType::U64;
    case at::kLong:
      return ffi::DType::I64;
    case at::kBool:
      return ffi::DType::Bool;
    case at::kHalf:
      return ffi::DType::F16;
    case at::kBFloat16:
      return ffi::DType::BF16;
    case at::kFloat:
      return ffi::DType::F32;
    case at::kDouble:
      return ffi::DType::F64;
    case at::kComplexHalf:
      return ffi::DType::C32;
    case at::kComplexFloat:
      return ffi::DType::C64;
    case at::kComplexDouble:
      return ffi::DType::C128;
    case at::kFloat8_e4m3fn:
      return ffi::DType::F8E4M3FN;
    case at::kFloat8_e5m2:
      return ffi::DType::F8E5M2;
    case at::kFloat8_e4m3fnuz:
      return ffi::DType::F8E4M3FNUZ;
    case at::kFloat8_e5m2fnuz:
      return ffi::DType::F8E5M2FNUZ;
    case at::kFloat8_e8m0fnu:
      return ffi::DType::F8E8M0FNU;
    case at::kFloat4_e2m1fn_x2:
      return ffi::DType::F4E2M1FNX2;
    case at::kQInt8:
      return ffi::DType::QI8;
    case at::kQUInt8:
      return ffi::DType::QU8;
    case at::kQInt32:
      return ffi::DType::QI32;
    default:
      return std::nullopt;
  }
}

struct Reduction {
  ffi::ReduceKind kind = ffi::ReduceKind::None;
  double factor = 0;
};

Reduction reduction(const char* operation, const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return {ffi::ReduceKind::Sum};
    case c10d::ReduceOp::AVG:
      return {ffi::ReduceKind::Avg};
    case c10d::ReduceOp::PRODUCT:
      return {ffi::ReduceKind::Product};
    case c10d::ReduceOp::MIN:
      return {ffi::ReduceKind::Min};
    case c10d::ReduceOp::MAX:
      return {ffi::ReduceKind::Max};
    case c10d::ReduceOp::BAND:
      return {ffi::ReduceKind::BitAnd};
    case c10d::ReduceOp::BOR:
      return {ffi::ReduceKind::BitOr};
    case c10d::ReduceOp::BXOR:
      return {ffi::ReduceKind::BitXor};
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* supplement =
          dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
      if (supplement == nullptr) {
        invalid(operation, "ReduceOp.PREMUL_SUM has no factor");
      }
      return {
          ffi::ReduceKind::PremulSum,
          supplement->tensor_factor.defined()
              ? supplement->tensor_factor.item().toDouble()
              : supplement->double_factor};
    }
    default:
      invalid(operation, "unknown ReduceOp ", static_cast<int>(op.op_));
  }
}

// Whether the elements stand in memory as the runtime wants them.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// Where the tensors of a call are: addresses on the CPU; on the device, numbers that stand
// for places in storages, which the runtime looks up when programs have filled them.
class Places {
 public:
  uintptr_t of(const at::Tensor& tensor) {
    if (tensor.device().is_cpu()) {
      return reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    }
    const auto cell = reinterpret_cast<uintptr_t>(&device::cell_of(tensor));
    auto found = std::find(cells_.begin(), cells_.end(), cell);
    const size_t index = found - cells_.begin();
    if (found == cells_.end()) {
      cells_.push_back(cell);
      tensors_.push_back(tensor);
    }
    return ffi::deferred_address(index, tensor.storage_offset() * tensor.itemsize());
  }

  // The storages of the device, in the order of their numbers.
  rust::Slice<const size_t> cells() const {
    return {cells_.data(), cells_.size()};
  }

  at::TensorOptions options(at::ScalarType type) const {
    return tensors_.front().options().dtype(type).requires_grad(false);
  }

  // A segment of the device as a tensor: elements in a row.
  at::Tensor view(const ffi::Segment& segment, at::ScalarType type) const {
    const auto place = ffi::deferred_place(segment.address);
    const size_t width = c10::elementSize(type);
    return at::empty({0}, options(type))
        .set_(
            tensors_[place[0]].storage(), place[1] / width,
            {static_cast<int64_t>(segment.bytes / width)}, {1});
  }

  // From now on all is on the host.
  void clear() {
    cells_.clear();
    tensors_.clear();
  }

 private:
  c10::SmallVector<size_t, 4> cells_;
  // One on each storage.
  c10::SmallVector<at::Tensor, 4> tensors_;
};

// One side of a call: pieces of memory.
class Side {
 public:
  explicit Side(Places& places) : places_(places) {}

  void add(uintptr_t address, size_t bytes) {
    segments_.push_back({address, bytes});
  }

  void add(const at::Tensor& tensor) {
    add(places_.of(tensor), tensor.nbytes());
  }

  void end_piece() {
    ends_.push_back(static_cast<uint32_t>(segments_.size()));
  }

  // One piece: the whole tensor.
  void add_piece(const at::Tensor& tensor) {
    add(tensor);
    end_piece();
  }

  // `pieces` equal pieces.
  void add_pieces(const at::Tensor& tensor, int pieces) {
    const size_t bytes = tensor.nbytes() / pieces;
    const auto start = places_.of(tensor);
    for (const auto piece : c10::irange(pieces)) {
      add(start + piece * bytes, bytes);
      end_piece();
    }
  }

  bool overlaps(uintptr_t begin, size_t bytes) const {
    return std::any_of(
        segments_.begin(), segments_.end(), [&](const auto& segment) {
          return segment.address < begin + bytes &&
              begin < segment.address + segment.bytes;
        });
  }

  size_t bytes() const {
    size_t sum = 0;
    for (const auto& segment : segments_) {
      sum += segment.bytes;
    }
    return sum;
  }

  rust::Slice<const ffi::Segment> segments() const {
    return {segments_.data(), segments_.size()};
  }

  // The segments, one after the other, from `address` on.
  void move_to(uintptr_t address) {
    for (auto& segment : segments_) {
      segment.address = address;
      address += segment.bytes;
    }
  }

  rust::Slice<const uint32_t> ends() const {
    return {ends_.data(), ends_.size()};
  }

 private:
  Places& places_;
  c10::SmallVector<ffi::Segment, 8> segments_;
  c10::SmallVector<uint32_t, 8> ends_;
};

} // namespace

namespace {

bool works_in_place() {
  return device::call([] { return ffi::works_in_place(); });
}

} // namespace

// The memory and the tensors of one operation.
class Buffers {
  Places places_;

 public:
  explicit Buffers(const char* operation) : operation_(operation) {}
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  // Checks a tensor and notes its element type. Tensors of several types become
  // bytes where `mixed` allows it.
  void check(const char* argument, const at::Tensor& tensor, bool mixed = false) {
    if (!tensor.defined()) {
      invalid(operation_, "argument '", argument, "': expected a tensor, got none");
    }
    if (tensor.layout() != at::kStrided) {
      invalid(
          operation_, "argument '", argument, "': only supports dense tensors, got layout ",
          tensor.layout());
    }
    const auto device = tensor.device();
    if (!device.is_cpu() && device.type() != at::kPrivateUse1) {
      invalid(
          operation_, "argument '", argument, "': unsupported device type ", device.type(),
          ": expected a tensor on cpu or tpu, got one on ", device);
    }
    if (device_ && *device_ != device.type()) {
      invalid(
          operation_, "argument '", argument, "': expected a tensor on ", *device_,
          " as the other tensors, got one on ", device.type());
    }
    device_ = device.type();
    const auto type = dtype_of(tensor.scalar_type());
    if (!type) {
      invalid(
          operation_, "argument '", argument, "': unsupported dtype ",
          tensor.scalar_type());
    }
    if (!first_) {
      first_ = tensor.scalar_type();
      dtype = *type;
      shape.dims = static_cast<uint32_t>(tensor.dim());
      const auto kept = std::min<size_t>(tensor.dim(), shape.sizes.size());
      std::copy_n(tensor.sizes().begin(), kept, shape.sizes.begin());
    } else if (*first_ != tensor.scalar_type()) {
      if (!mixed) {
        invalid(
            operation_, "argument '", argument, "': invalid tensor type: expected ",
            *first_, " as the other tensors, got ", tensor.scalar_type(),
            "; tensors must all have the same type");
      }
      dtype = ffi::DType::U8;
    }
  }

  // Memory for `tensor`'s new content.
  at::Tensor write(const char* argument, const at::Tensor& tensor) {
    return stage(argument, tensor, /*read=*/false);
  }

  // Memory with `tensor`'s content, for its new content.
  at::Tensor update(const char* argument, const at::Tensor& tensor) {
    return stage(argument, tensor, /*read=*/true);
  }

  // Memory with `tensor`'s content. A copy where it overlaps the output, unless it
  // starts at the address `own`, where the operation lets output stand.
  at::Tensor read(const at::Tensor& tensor, uintptr_t own = 0) {
    at::Tensor plain = tensor;
    if (!is_plain(tensor)) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      plain = tensor.resolve_conj().resolve_neg().contiguous();
    } else if (
        own != address(tensor) && output.overlaps(address(tensor), tensor.nbytes())) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      plain = tensor.clone();
    }
    tensors.held.push_back(plain);
    return plain;
  }

  uintptr_t address(const at::Tensor& tensor) {
    return places_.of(tensor);
  }

  rust::Slice<const size_t> cells() const {
    return places_.cells();
  }

  // What the rank brings, in a row of `count` elements that is all of its storage.
  at::Tensor line(int64_t count) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto segments = input.segments();
    if (segments.size() == 1) {
      auto only = places_.view(segments[0], type());
      if (only.numel() == count && device::covers_storage(only)) {
        return only;
      }
    }
    auto line = empty_line(count);
    int64_t at = 0;
    for (const auto& segment : segments) {
      const auto part = places_.view(segment, type());
      line.narrow(0, at, part.numel()).copy_(part);
      at += part.numel();
    }
    return line;
  }

  at::Tensor empty_line(int64_t count) const {
    return at::empty({count}, places_.options(type()));
  }

  // Takes what the rank receives from the start of a row.
  void take(const at::Tensor& line) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    int64_t at = 0;
    for (const auto& segment : output.segments()) {
      const auto part = places_.view(segment, type());
      part.copy_(line.narrow(0, at, part.numel()));
      at += part.numel();
    }
  }

  // Replaces memory of the device by copies on the host, which are copied back at the end.
  void move_to_host() {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto sent = line(input.bytes() / c10::elementSize(type())).cpu();
    const auto received = at::empty(
        {static_cast<int64_t>(output.bytes() / c10::elementSize(type()))},
        sent.options());
    int64_t at = 0;
    for (const auto& segment : output.segments()) {
      const auto part = places_.view(segment, type());
      tensors.copies.emplace_back(part, received.narrow(0, at, part.numel()));
      at += part.numel();
    }
    // Parts of a tensor that is not plain are copied on to it: theirs come first.
    std::rotate(
        tensors.copies.begin(), tensors.copies.end() - output.segments().size(),
        tensors.copies.end());
    input.move_to(reinterpret_cast<uintptr_t>(sent.const_data_ptr()));
    output.move_to(reinterpret_cast<uintptr_t>(received.const_data_ptr()));
    tensors.held.push_back(sent);
    tensors.held.push_back(received);
    places_.clear();
  }

  // A copy on the host of a tensor of the device, or memory for its new content.
  at::Tensor on_host(const at::Tensor& tensor, bool read) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto plain = read
        ? tensor.resolve_conj().resolve_neg().cpu().contiguous()
        : at::empty(
              tensor.sizes(), tensor.options().device(at::kCPU).requires_grad(false));
    tensors.held.push_back(plain);
    if (!read) {
      // Before it is copied on to a tensor that is not plain.
      tensors.copies.insert(tensors.copies.begin(), {tensor, plain});
    }
    return plain;
  }

  // Notes what the profiler is to see, where it looks.
  void profile(at::ArrayRef<at::Tensor> inputs) {
    if (at::hasCallbacks()) {
      profiled = inputs.vec();
    }
  }

  Side input{places_};
  Side output{places_};
  Tensors tensors;
  ffi::DType dtype = ffi::DType::U8;
  // Of the first tensor, for messages.
  ffi::Shape shape{};
  std::optional<std::vector<at::Tensor>> profiled;

 private:
  at::Tensor stage(const char* argument, const at::Tensor& tensor, bool read) {
    if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
      invalid(
          operation_, "argument '", argument,
          "': several elements of the tensor share memory (shape ", tensor.sizes(),
          ", strides ", tensor.strides(), "), so it cannot receive a result; clone it");
    }
    if (is_plain(tensor)) {
      tensors.held.push_back(tensor);
      return tensor;
    }
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor plain = read
        ? tensor.resolve_conj().resolve_neg().clone(at::MemoryFormat::Contiguous)
        : at::empty(tensor.sizes(), tensor.options().requires_grad(false));
    tensors.held.push_back(plain);
    tensors.copies.emplace_back(tensor, plain);
    return plain;
  }

  // What elements are, bytes where they differ.
  at::ScalarType type() const {
    return dtype_of(*first_) == dtype ? *first_ : at::kByte;
  }

  const char* operation_;
  std::optional<at::ScalarType> first_;
  std::optional<at::DeviceType> device_;
};

namespace {

void check_same_count(
    const char* operation,
    const char* argument,
    int64_t index,
    const at::Tensor& tensor,
    const at::Tensor& other) {
  if (tensor.numel() != other.numel()) {
    invalid(
        operation, "argument '", argument, "': invalid tensor size at index ", index,
        " (expected ", c10d::toString(other.sizes()), ", got ",
        c10d::toString(tensor.sizes()), ")");
  }
}

void check_multiple(
    const char* operation,
    const char* argument,
    const at::Tensor& whole,
    const at::Tensor& part,
    int size) {
  if (whole.numel() != part.numel() * size) {
    invalid(
        operation, "argument '", argument, "': invalid tensor size: expected ",
        part.numel() * size, " elements (", size, " ranks times ", part.numel(),
        "), got ", whole.numel());
  }
}

ffi::Call call_of(ffi::Kind kind, const Buffers& buffers, const Reduction& reduction = {}) {
  ffi::Call call{};
  call.kind = kind;
  call.op = reduction.kind;
  call.factor = reduction.factor;
  call.dtype = buffers.dtype;
  call.tensors = 1;
  call.shape = buffers.shape;
  return call;
}

// Equal or given rows of `tensor`, a piece for each rank.
void add_rows(
    Side& side,
    uintptr_t at,
    const at::Tensor& tensor,
    const std::vector<int64_t>& rows,
    int size) {
  if (rows.empty()) {
    side.add_pieces(tensor, size);
    return;
  }
  const size_t row_bytes = tensor.size(0) == 0 ? 0 : tensor.nbytes() / tensor.size(0);
  for (const auto count : rows) {
    side.add(at, count * row_bytes);
    side.end_piece();
    at += count * row_bytes;
  }
}

// c10d's store for Rust.
class C10dStore final : public Store {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(rust::Str key, rust::Slice<const uint8_t> value) const override {
    plainly([&] {
      store_->set(std::string(key), std::vector<uint8_t>(value.begin(), value.end()));
    });
  }

  rust::Vec<ffi::Value> multi_get(const rust::Vec<rust::String>& keys, int64_t timeout_ms)
      const override {
    rust::Vec<ffi::Value> values;
    plainly([&] {
      const auto names = strings(keys);
      wait(names, Milliseconds(timeout_ms));
      const auto append = [&](const std::vector<uint8_t>& bytes) {
        ffi::Value value;
        value.bytes.reserve(bytes.size());
        std::copy(bytes.begin(), bytes.end(), std::back_inserter(value.bytes));
        values.push_back(std::move(value));
      };
      if (store_->hasExtendedApi()) {
        for (const auto& bytes : store_->multiGet(names)) {
          append(bytes);
        }
      } else {
        for (const auto& name : names) {
          append(store_->get(name));
        }
      }
    });
    return values;
  }

  int64_t add(rust::Str key, int64_t amount) const override {
    int64_t sum = 0;
    plainly([&] { sum = store_->add(std::string(key), amount); });
    return sum;
  }

  rust::Vec<uint8_t> present(const rust::Vec<rust::String>& keys) const override {
    rust::Vec<uint8_t> present;
    plainly([&] {
      for (const auto& name : strings(keys)) {
        present.push_back(store_->check({name}) ? 1 : 0);
      }
    });
    return present;
  }

 private:
  static std::vector<std::string> strings(const rust::Vec<rust::String>& keys) {
    return {keys.begin(), keys.end()};
  }

  // Torch's exceptions carry a backtrace in their text.
  template <typename Body>
  static void plainly(const Body& body) {
    try {
      body();
    } catch (const c10::Error& error) {
      throw std::runtime_error(error.what_without_backtrace());
    }
  }

  // Waits for the keys. Where they are not there yet, another thread waits for them:
  // the store's own wait cannot be interrupted, and Ctrl-C must get through.
  void wait(const std::vector<std::string>& names, Milliseconds timeout) const {
    if (store_->check(names)) {
      return;
    }
    std::packaged_task<void()> task(
        [store = store_, names, timeout] { store->wait(names, timeout); });
    auto waited = task.get_future();
    std::thread(std::move(task)).detach();
    while (waited.wait_for(Milliseconds(100)) != std::future_status::ready) {
      if (check_signals()) {
        throw std::runtime_error("interrupted by a signal");
      }
    }
    waited.get();
  }

  const c10::intrusive_ptr<c10d::Store> store_;
};

} // namespace

// Lane

void Lane::submit(std::function<void()> task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (running_) {
      return;
    }
    running_ = true;
  }
  Executor::get().submit([self = shared_from_this()] { self->drain(); });
}

void Lane::drain() {
  for (;;) {
    std::function<void()> task;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (tasks_.empty()) {
        running_ = false;
        return;
      }
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

// Life of a group

c10::intrusive_ptr<ProcessGroupTpuDist> ProcessGroupTpuDist::create(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    c10::intrusive_ptr<Options> options,
    bool is_default,
    const ProcessGroupTpuDist* parent) {
  ffi::GroupSpec spec;
  spec.id = rust::String::lossy(options->group_name);
  spec.name = rust::String::lossy(
      options->group_desc.empty() ? options->group_name : options->group_desc);
  spec.rank = rank;
  spec.size = size;
  for (const auto global : options->global_ranks_in_group) {
    spec.global_ranks.push_back(static_cast<uint32_t>(global));
  }
  spec.is_default = is_default;
  spec.timeout_ms = options->timeout.count();
  ffi::Failure failure{};
  auto* group = parent != nullptr
      ? parent->group_->split(spec, failure)
      : ffi::create_group(spec, std::make_unique<C10dStore>(store), failure);
  if (group == nullptr) {
    // Ctrl-C while waiting for the store comes back as a failure of the store.
    raise_pending_python_error();
    raise(failure);
  }
  return c10::make_intrusive<ProcessGroupTpuDist>(group, rank, size, std::move(options));
}

ProcessGroupTpuDist::ProcessGroupTpuDist(
    ffi::Group* group,
    int rank,
    int size,
    c10::intrusive_ptr<Options> options)
    : Backend(rank, size), group_(group), options_(std::move(options)) {
  init();
}

ProcessGroupTpuDist::~ProcessGroupTpuDist() {
  group_->shutdown();
  ffi::release_group(group_);
}

const std::string ProcessGroupTpuDist::getBackendName() const {
  return kName;
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupTpuDist::getBackendOptions() {
  return options_;
}

bool ProcessGroupTpuDist::supportsSplitting() const {
  return true;
}

bool ProcessGroupTpuDist::supportsCoalescing() const {
  return true;
}

bool ProcessGroupTpuDist::supportsTensorAlloc(c10::DeviceIndex /*device*/) {
  return group_->shares_memory();
}

at::Tensor ProcessGroupTpuDist::allocateTensor(long size, at::TensorOptions options) {
  constexpr auto name = "allocate_tensor";
  if (size < 0) {
    invalid(name, "argument 'size': expected a number of elements, got ", size);
  }
  if (options.device().is_cpu()) {
    return arena_tensor(size, options);
  }
  // What the device has is as good as any.
  return at::empty({size}, options);
}

std::shared_ptr<c10::Allocator> ProcessGroupTpuDist::getMemAllocator() {
  return arena_allocator();
}

bool ProcessGroupTpuDist::supportsTimeEstimation() const {
  return true;
}

void ProcessGroupTpuDist::startTimeEstimate() {
  estimated_us_ = 0;
  estimating_ = true;
}

float ProcessGroupTpuDist::endTimeEstimate() {
  estimating_ = false;
  return static_cast<float>(estimated_us_.load());
}

bool ProcessGroupTpuDist::estimate(const Buffers& buffers, ffi::Kind kind, int peer) {
  if (!estimating_.load(std::memory_order_relaxed)) {
    return false;
  }
  ffi::Failure failure{};
  const auto bytes = std::max(buffers.input.bytes(), buffers.output.bytes());
  const double time = group_->estimate(kind, bytes, peer, failure);
  if (failure.code != ffi::Code::Ok) {
    raise(failure);
  }
  estimated_us_ = estimated_us_ + time;
  return true;
}

bool ProcessGroupTpuDist::supportsAbortHooks() const {
  return true;
}

bool ProcessGroupTpuDist::supportsCompletionHooks() const {
  return true;
}

void ProcessGroupTpuDist::registerAbortHook(int64_t id, c10d::AbortHook hook) {
  state_->add_abort_hook(id, std::move(hook));
}

void ProcessGroupTpuDist::unregisterAbortHook(int64_t id) {
  state_->remove_abort_hook(id);
}

void ProcessGroupTpuDist::registerCompletionHook(int64_t id, c10d::CompletionHook hook) {
  state_->add_completion_hook(id, std::move(hook));
}

void ProcessGroupTpuDist::unregisterCompletionHook(int64_t id) {
  state_->remove_completion_hook(id);
}

void ProcessGroupTpuDist::setTimeout(Milliseconds timeout) {
  options_->timeout = timeout;
  group_->set_timeout(timeout.count());
}

void ProcessGroupTpuDist::addEphemeralTimeout(const Milliseconds& timeout) {
  state_->extend_timeout(timeout);
}

uint64_t ProcessGroupTpuDist::getSequenceNumberForGroup() {
  return group_->sequence();
}

c10d::ErrorType ProcessGroupTpuDist::getError() {
  switch (group_->error().code) {
    case ffi::Code::Ok:
      return c10d::ErrorType::SUCCESS;
    case ffi::Code::Timeout:
      return c10d::ErrorType::TIMEOUT;
    case ffi::Code::PeerLost:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void ProcessGroupTpuDist::abort() {
  group_->abort("abort() was called");
}

void ProcessGroupTpuDist::shutdown() {
  group_->shutdown();
}

void ProcessGroupTpuDist::enableCollectivesTiming() {
  // Works always know their duration.
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupTpuDist::split(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank_);
  if (own == ranks.end()) {
    return nullptr;
  }
  // Options of another backend of the parent carry only what all have.
  auto copy = c10::dynamic_intrusive_pointer_cast<Options>(options)
      ? c10::static_intrusive_pointer_cast<Options>(options->clone())
      : c10::make_intrusive<Options>(options->timeout);
  copy->timeout = options->timeout;
  copy->group_name = options->group_name;
  copy->group_desc = options->group_desc;
  copy->global_ranks_in_group.clear();
  for (const auto rank : ranks) {
    TORCH_CHECK(
        rank >= 0 && rank < size_, kName, "::split: argument 'ranks': expected ranks of the "
        "parent group, 0 to ", size_ - 1, ", got ", rank);
    copy->global_ranks_in_group.push_back(
        options_->global_ranks_in_group.at(rank));
  }
  return create(
      store,
      static_cast<int>(own - ranks.begin()),
      static_cast<int>(ranks.size()),
      std::move(copy),
      /*is_default=*/false,
      this);
}

// Running operations

Milliseconds ProcessGroupTpuDist::resolve(Milliseconds timeout) const {
  const auto extension = state_->extension();
  if (timeout == c10d::kUnsetTimeout) {
    return extension.count() == 0 ? c10d::kUnsetTimeout : options_->timeout + extension;
  }
  return timeout + extension;
}

void ProcessGroupTpuDist::collect(const WorkPointer& work) {
  if (coalescing_.load(std::memory_order_relaxed)) {
    const std::lock_guard<std::mutex> lock(coalesced_mutex_);
    coalesced_.push_back(work);
  }
}

void ProcessGroupTpuDist::startCoalescing() {
  const std::lock_guard<std::mutex> lock(coalesced_mutex_);
  coalesced_.clear();
  coalescing_.store(true, std::memory_order_relaxed);
}

WorkPointer ProcessGroupTpuDist::endCoalescing() {
  const std::lock_guard<std::mutex> lock(coalesced_mutex_);
  coalescing_.store(false, std::memory_order_relaxed);
  return c10::make_intrusive<CoalescedWork>(std::exchange(coalesced_, {}));
}

bool ProcessGroupTpuDist::run_program(Buffers& buffers, const ffi::Call& call) {
  ffi::Failure failure{};
  const auto plan = group_->plan(
      call,
      buffers.input.segments(),
      buffers.input.ends(),
      buffers.output.segments(),
      buffers.output.ends(),
      failure);
  if (failure.code != ffi::Code::Ok) {
    raise(failure);
  }
  if (!plan->exists()) {
    return false;
  }
  const auto input = buffers.line(plan->input());
  const auto output = buffers.empty_line(plan->output());
  const auto cell = [](const at::Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(&device::cell_of(tensor));
  };
  device::call([&] { plan->launch(cell(input), cell(output)); });
  buffers.take(output);
  return true;
}

WorkPointer ProcessGroupTpuDist::run(
    Buffers& buffers,
    ffi::Call call,
    c10d::OpType type,
    const char* title,
    Milliseconds timeout,
    bool asynchronous) {
  timeout = resolve(timeout);
  call.timeout_ms = timeout.count();
  bool is_program = false;
  if (!buffers.cells().empty() && !works_in_place() &&
      !estimating_.load(std::memory_order_relaxed)) {
    is_program = run_program(buffers, call);
    if (!is_program) {
      buffers.move_to_host();
    }
  }
  // What follows on the device waits for the operation by itself.
  const bool on_device = !buffers.cells().empty();
  call.asynchronous = !on_device &&
      (asynchronous || coalescing_.load(std::memory_order_relaxed));
  auto work = c10::make_intrusive<Work>(
      state_,
      type,
      title,
      buffers.profiled,
      std::move(buffers.tensors),
      timeout == c10d::kUnsetTimeout ? options_->timeout : timeout);
  if (is_program) {
    // The order of programs does the rest.
    work->complete(ffi::Failure{ffi::Code::Ok, {}});
    collect(work);
    return work;
  }
  if (estimate(buffers, call.kind, -1)) {
    work->complete(ffi::Failure{ffi::Code::Ok, {}});
    return work;
  }
  const auto launch = group_->collective(
      call,
      buffers.input.segments(),
      buffers.input.ends(),
      buffers.output.segments(),
      buffers.output.ends(),
      buffers.cells(),
      call.asynchronous ? c10::intrusive_ptr<Work>(work).release() : nullptr);
  if (launch.failure.code != ffi::Code::Ok) {
    raise(launch.failure);
  }
  work->attach(launch, -2);
  if (on_device) {
    work->complete(ffi::Failure{ffi::Code::Ok, {}});
  } else if (!call.asynchronous) {
    const auto failure = launch.operation->result();
    if (failure.code == ffi::Code::Interrupted) {
      // The Python error is set now, and must not wait for `wait`.
      raise(failure);
    }
    work->complete(failure);
  }
  collect(work);
  return work;
}

WorkPointer ProcessGroupTpuDist::broadcast(
    std::vector<at::Tensor>& tensors,
    const c10d::BroadcastOptions& options) {
  constexpr auto name = "broadcast";
  c10d::assertRootRank(reporter(name), options.rootRank, size_);
  c10d::assertRootTensor(
      reporter(name), options.rootTensor, static_cast<int64_t>(tensors.size()));
  c10d::assertSingleElement(reporter(name), tensors);
  Buffers buffers(name);
  buffers.check("tensors", tensors[0]);
  buffers.profile(tensors);
  if (options.rootRank == rank_) {
    buffers.input.add_piece(buffers.read(tensors[0]));
  } else {
    buffers.output.add_piece(buffers.write("tensors", tensors[0]));
  }
  buffers.tensors.results.push_back(tensors[0]);
  auto call = call_of(ffi::Kind::Broadcast, buffers);
  call.root = static_cast<uint32_t>(options.rootRank);
  return run(
      buffers, call, c10d::OpType::BROADCAST, "tpu_dist:broadcast", options.timeout,
      options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::allreduce(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceOptions& options) {
  constexpr auto name = "allreduce";
  c10d::assertNonEmpty(reporter(name), tensors);
  c10d::assertSingleElement(reporter(name), tensors);
  if (tensors[0].layout() == at::kSparse) {
    return run_sparse(tensors[0], options);
  }
  Buffers buffers(name);
  buffers.check("tensors", tensors[0]);
  buffers.profile(tensors);
  const auto memory = buffers.update("tensors", tensors[0]);
  buffers.input.add_piece(memory);
  buffers.output.add_piece(memory);
  buffers.tensors.results.push_back(tensors[0]);
  return run(
      buffers, call_of(ffi::Kind::AllReduce, buffers, reduction(name, options.reduceOp)),
      c10d::OpType::ALLREDUCE, "tpu_dist:all_reduce", options.timeout, options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::allreduce_sparse(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceOptions& options) {
  c10d::assertNonEmpty(reporter("allreduce_sparse"), tensors);
  c10d::assertSingleElement(reporter("allreduce_sparse"), tensors);
  return run_sparse(tensors[0], options);
}

WorkPointer ProcessGroupTpuDist::allreduce_coalesced(
    std::vector<at::Tensor>& tensors,
    const c10d::AllreduceCoalescedOptions& options) {
  constexpr auto name = "allreduce_coalesced";
  c10d::assertNonEmpty(reporter(name), tensors);
  Buffers buffers(name);
  buffers.profile(tensors);
  for (const auto& tensor : tensors) {
    buffers.check("tensors", tensor);
    const auto memory = buffers.update("tensors", tensor);
    buffers.input.add(memory);
    buffers.output.add(memory);
    buffers.tensors.results.push_back(tensor);
  }
  buffers.input.end_piece();
  buffers.output.end_piece();
  auto call = call_of(ffi::Kind::AllReduce, buffers, reduction(name, options.reduceOp));
  call.tensors = static_cast<uint32_t>(tensors.size());
  return run(
      buffers, call, c10d::OpType::ALLREDUCE_COALESCED, "tpu_dist:all_reduce", options.timeout,
      options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::reduce(
    std::vector<at::Tensor>& tensors,
    const c10d::ReduceOptions& options) {
  constexpr auto name = "reduce";
  c10d::assertRootRank(reporter(name), options.rootRank, size_);
  c10d::assertRootTensor(
      reporter(name), options.rootTensor, static_cast<int64_t>(tensors.size()));
  c10d::assertSingleElement(reporter(name), tensors);
  Buffers buffers(name);
  buffers.check("tensors", tensors[0]);
  buffers.profile(tensors);
  if (options.rootRank == rank_) {
    const auto memory = buffers.update("tensors", tensors[0]);
    buffers.input.add_piece(memory);
    buffers.output.add_piece(memory);
  } else {
    buffers.input.add_piece(buffers.read(tensors[0]));
  }
  buffers.tensors.results.push_back(tensors[0]);
  auto call = call_of(ffi::Kind::Reduce, buffers, reduction(name, options.reduceOp));
  call.root = static_cast<uint32_t>(options.rootRank);
  return run(
      buffers, call, c10d::OpType::REDUCE, "tpu_dist:reduce", options.timeout, options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::allgather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  constexpr auto name = "allgather";
  c10d::assertNonEmptyInputTensorList(reporter(name), inputs.size());
  c10d::assertInputOutputTensorListsSameSize(reporter(name), outputs.size(), inputs.size());
  c10d::assertSingleElementInput(reporter(name), inputs);
  if (outputs[0].size() != static_cast<size_t>(size_)) {
    invalid(
        name, "invalid output tensor list at index 0 (expected length ", size_, ", got ",
        outputs[0].size(), ")");
  }
  Buffers buffers(name);
  buffers.check("inputs", inputs[0]);
  buffers.profile(inputs);
  check_same_count(name, "outputs", rank_, outputs[0][rank_], inputs[0]);
  uintptr_t own = 0;
  for (const auto rank : c10::irange(size_)) {
    buffers.check("outputs", outputs[0][rank]);
    const auto memory = buffers.write("outputs", outputs[0][rank]);
    if (rank == rank_) {
      own = buffers.address(memory);
    }
    buffers.output.add_piece(memory);
    buffers.tensors.results.push_back(outputs[0][rank]);
  }
  buffers.input.add_piece(buffers.read(inputs[0], own));
  return run(
      buffers, call_of(ffi::Kind::AllGather, buffers), c10d::OpType::ALLGATHER,
      "tpu_dist:all_gather", options.timeout, options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::all_gather_single(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::AllgatherOptions& options) {
  constexpr auto name = "all_gather_single";
  Buffers buffers(name);
  buffers.check("input", input);
  buffers.check("output", output);
  check_multiple(name, "output", output, input, size_);
  buffers.profile(input);
  const auto memory = buffers.write("output", output);
  buffers.output.add_pieces(memory, size_);
  buffers.input.add_piece(
      buffers.read(input, buffers.address(memory) + rank_ * input.nbytes()));
  buffers.tensors.results.push_back(output);
  return run(
      buffers, call_of(ffi::Kind::AllGather, buffers), c10d::OpType::_ALLGATHER_BASE,
      "tpu_dist:_all_gather_base", options.timeout, options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::allgather_coalesced(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  constexpr auto name = "allgather_coalesced";
  c10d::assertNonEmptyInputTensorList(reporter(name), inputs.size());
  c10d::assertAllgatherCoalescedOutputTensorLists(
      reporter(name), outputs, inputs.size(), size_);
  Buffers buffers(name);
  buffers.profile(inputs);
  for (const auto rank : c10::irange(size_)) {
    for (const auto index : c10::irange(inputs.size())) {
      const auto& output = outputs[rank][index];
      buffers.check("outputs", output, /*mixed=*/true);
      if (rank == rank_) {
        check_same_count(name, "outputs", static_cast<int64_t>(index), output, inputs[index]);
      }
      buffers.output.add(buffers.write("outputs", output));
    }
    buffers.output.end_piece();
  }
  for (const auto& input : inputs) {
    buffers.check("inputs", input, /*mixed=*/true);
    buffers.input.add(buffers.read(input));
  }
  buffers.input.end_piece();
  buffers.tensors.nested = outputs;
  auto call = call_of(ffi::Kind::AllGather, buffers);
  call.tensors = static_cast<uint32_t>(inputs.size());
  return run(
      buffers, call, c10d::OpType::ALLGATHER_COALESCED, "tpu_dist:all_gather",
      options.timeout, options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::all_gather_single_coalesced(
    std::vector<at::Tensor>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  constexpr auto name = "all_gather_single_coalesced";
  c10d::assertNonEmptyInputTensorList(reporter(name), inputs.size());
  c10d::assertInputOutputTensorListsSameSize(reporter(name), outputs.size(), inputs.size());
  Buffers buffers(name);
  buffers.profile(inputs);
  std::vector<at::Tensor> memory;
  memory.reserve(outputs.size());
  for (const auto index : c10::irange(inputs.size())) {
    buffers.check("inputs", inputs[index], /*mixed=*/true);
    buffers.check("outputs", outputs[index], /*mixed=*/true);
    if (inputs[index].scalar_type() != outputs[index].scalar_type()) {
      invalid(
          name, "argument 'outputs': invalid tensor type at index ", index, " (expected ",
          inputs[index].scalar_type(), ", got ", outputs[index].scalar_type(), ")");
    }
    check_multiple(name, "outputs", outputs[index], inputs[index], size_);
    memory.push_back(buffers.write("outputs", outputs[index]));
    buffers.tensors.results.push_back(outputs[index]);
  }
  for (const auto rank : c10::irange(size_)) {
    for (const auto& tensor : memory) {
      const size_t bytes = tensor.nbytes() / size_;
      buffers.output.add(buffers.address(tensor) + rank * bytes, bytes);
    }
    buffers.output.end_piece();
  }
  for (const auto index : c10::irange(inputs.size())) {
    buffers.input.add(buffers.read(
        inputs[index], buffers.address(memory[index]) + rank_ * inputs[index].nbytes()));
  }
  buffers.input.end_piece();
  auto call = call_of(ffi::Kind::AllGather, buffers);
  call.tensors = static_cast<uint32_t>(inputs.size());
  return run(
      buffers, call, c10d::OpType::ALLGATHER_INTO_TENSOR_COALESCED,
      "tpu_dist:all_gather_into_tensor_coalesced", options.timeout, options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::gather(
    std::vector<std::vector<at::Tensor>>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::GatherOptions& options) {
  constexpr auto name = "gather";
  c10d::assertRootRank(reporter(name), options.rootRank, size_);
  c10d::assertSingleElementInput(reporter(name), inputs);
  Buffers buffers(name);
  buffers.check("inputs", inputs[0]);
  buffers.profile(inputs);
  uintptr_t own = 0;
  if (options.rootRank == rank_) {
    c10d::assertGatherOutputTensorList(reporter(name), outputs, size_);
    for (const auto rank : c10::irange(size_)) {
      const auto& output = outputs[0][rank];
      buffers.check("outputs", output);
      check_same_count(name, "outputs", rank, output, inputs[0]);
      const auto memory = buffers.write("outputs", output);
      if (rank == rank_) {
        own = buffers.address(memory);
      }
      buffers.output.add_piece(memory);
      buffers.tensors.results.push_back(output);
    }
  } else {
    c10d::assertEmptyOutputTensorList(reporter(name), outputs);
  }
  buffers.input.add_piece(buffers.read(inputs[0], own));
  auto call = call_of(ffi::Kind::Gather, buffers);
  call.root = static_cast<uint32_t>(options.rootRank);
  return run(
      buffers, call, c10d::OpType::GATHER, "tpu_dist:gather", options.timeout, options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::gather_single(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::GatherOptions& options) {
  constexpr auto name = "gather_single";
  c10d::assertRootRank(reporter(name), options.rootRank, size_);
  Buffers buffers(name);
  buffers.check("input", input);
  buffers.profile(input);
  uintptr_t own = 0;
  if (options.rootRank == rank_) {
    buffers.check("output", output);
    check_multiple(name, "output", output, input, size_);
    const auto memory = buffers.write("output", output);
    own = buffers.address(memory) + rank_ * input.nbytes();
    buffers.output.add_pieces(memory, size_);
    buffers.tensors.results.push_back(output);
  }
  buffers.input.add_piece(buffers.read(input, own));
  auto call = call_of(ffi::Kind::Gather, buffers);
  call.root = static_cast<uint32_t>(options.rootRank);
  return run(
      buffers, call, c10d::OpType::GATHER, "tpu_dist:gather", options.timeout, options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ScatterOptions& options) {
  constexpr auto name = "scatter";
  c10d::assertRootRank(reporter(name), options.rootRank, size_);
  c10d::assertSingleElementOutput(reporter(name), outputs);
  Buffers buffers(name);
  buffers.check("outputs", outputs[0]);
  const auto memory = buffers.write("outputs", outputs[0]);
  buffers.output.add_piece(memory);
  buffers.tensors.results.push_back(outputs[0]);
  if (options.rootRank == rank_) {
    c10d::assertScatterInputTensorList(reporter(name), inputs, size_);
    buffers.profile(inputs[0]);
    for (const auto rank : c10::irange(size_)) {
      const auto& input = inputs[0][rank];
      buffers.check("inputs", input);
      check_same_count(name, "inputs", rank, input, outputs[0]);
      const auto own = rank == rank_ ? buffers.address(memory) : 0;
      buffers.input.add_piece(buffers.read(input, own));
    }
  } else {
    c10d::assertEmptyInputTensorList(reporter(name), inputs);
    buffers.profile(outputs);
  }
  auto call = call_of(ffi::Kind::Scatter, buffers);
  call.root = static_cast<uint32_t>(options.rootRank);
  return run(
      buffers, call, c10d::OpType::SCATTER, "tpu_dist:scatter", options.timeout,
      options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::reduce_scatter(
    std::vector<at::Tensor>& outputs,
    std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& options) {
  constexpr auto name = "reduce_scatter";
  c10d::assertSingleElementOutput(reporter(name), outputs);
  c10d::assertInputOutputTensorListsSameSize(reporter(name), outputs.size(), inputs.size());
  c10d::assertInputTensorListSizeEqualsWorldSize(reporter(name), inputs[0].size(), size_);
  Buffers buffers(name);
  buffers.check("outputs", outputs[0]);
  buffers.profile(inputs[0]);
  check_same_count(name, "inputs", rank_, inputs[0][rank_], outputs[0]);
  const auto memory = buffers.write("outputs", outputs[0]);
  buffers.output.add_piece(memory);
  buffers.tensors.results.push_back(outputs[0]);
  for (const auto rank : c10::irange(size_)) {
    buffers.check("inputs", inputs[0][rank]);
    const auto own = rank == rank_ ? buffers.address(memory) : 0;
    buffers.input.add_piece(buffers.read(inputs[0][rank], own));
  }
  return run(
      buffers, call_of(ffi::Kind::ReduceScatter, buffers, reduction(name, options.reduceOp)),
      c10d::OpType::REDUCE_SCATTER, "tpu_dist:reduce_scatter", options.timeout,
      options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::reduce_scatter_single(
    at::Tensor& output,
    at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  constexpr auto name = "reduce_scatter_single";
  Buffers buffers(name);
  buffers.check("output", output);
  buffers.check("input", input);
  check_multiple(name, "input", input, output, size_);
  buffers.profile(input);
  const auto memory = buffers.write("output", output);
  buffers.output.add_piece(memory);
  // The output may be the rank's own part of the input.
  const bool own_part = is_plain(input) && is_plain(output) &&
      buffers.address(output) == buffers.address(input) + rank_ * output.nbytes();
  buffers.input.add_pieces(
      buffers.read(input, own_part ? buffers.address(input) : 0), size_);
  buffers.tensors.results.push_back(output);
  return run(
      buffers, call_of(ffi::Kind::ReduceScatter, buffers, reduction(name, options.reduceOp)),
      c10d::OpType::_REDUCE_SCATTER_BASE, "tpu_dist:_reduce_scatter_base", options.timeout,
      options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::reduce_scatter_single_coalesced(
    std::vector<at::Tensor>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& options) {
  constexpr auto name = "reduce_scatter_single_coalesced";
  c10d::assertNonEmptyInputTensorList(reporter(name), inputs.size());
  c10d::assertInputOutputTensorListsSameSize(reporter(name), outputs.size(), inputs.size());
  Buffers buffers(name);
  buffers.profile(inputs);
  for (const auto index : c10::irange(outputs.size())) {
    buffers.check("outputs", outputs[index]);
    buffers.check("inputs", inputs[index]);
    check_multiple(name, "inputs", inputs[index], outputs[index], size_);
    buffers.output.add(buffers.write("outputs", outputs[index]));
    buffers.tensors.results.push_back(outputs[index]);
  }
  buffers.output.end_piece();
  std::vector<at::Tensor> memory;
  memory.reserve(inputs.size());
  for (const auto index : c10::irange(inputs.size())) {
    const bool own_part = is_plain(inputs[index]) && is_plain(outputs[index]) &&
        buffers.address(outputs[index]) ==
            buffers.address(inputs[index]) + rank_ * outputs[index].nbytes();
    memory.push_back(buffers.read(
        inputs[index], own_part ? buffers.address(inputs[index]) : 0));
  }
  for (const auto rank : c10::irange(size_)) {
    for (const auto& tensor : memory) {
      const size_t bytes = tensor.nbytes() / size_;
      buffers.input.add(buffers.address(tensor) + rank * bytes, bytes);
    }
    buffers.input.end_piece();
  }
  auto call = call_of(ffi::Kind::ReduceScatter, buffers, reduction(name, options.reduceOp));
  call.tensors = static_cast<uint32_t>(inputs.size());
  return run(
      buffers, call, c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED,
      "tpu_dist:reduce_scatter_tensor_coalesced", options.timeout, options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::all_to_all_single(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  constexpr auto name = "all_to_all_single";
  Buffers buffers(name);
  buffers.check("input", input);
  buffers.check("output", output);
  c10d::checkSplitSizes(input_splits, input, size_);
  c10d::checkSplitSizes(output_splits, output, size_);
  buffers.profile(input);
  const auto to = buffers.write("output", output);
  add_rows(buffers.output, buffers.address(to), to, output_splits, size_);
  const auto from = buffers.read(input);
  add_rows(buffers.input, buffers.address(from), from, input_splits, size_);
  buffers.tensors.results.push_back(output);
  return run(
      buffers, call_of(ffi::Kind::AllToAll, buffers), c10d::OpType::ALLTOALL_BASE,
      "tpu_dist:all_to_all", options.timeout, options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::alltoall(
    std::vector<at::Tensor>& outputs,
    std::vector<at::Tensor>& inputs,
    const c10d::AllToAllOptions& options) {
  constexpr auto name = "alltoall";
  c10d::assertAllToAllTensorListSizes(reporter(name), outputs.size(), inputs.size(), size_);
  Buffers buffers(name);
  buffers.profile(inputs);
  check_same_count(name, "outputs", rank_, outputs[rank_], inputs[rank_]);
  for (const auto& output : outputs) {
    buffers.check("outputs", output);
    buffers.output.add_piece(buffers.write("outputs", output));
    buffers.tensors.results.push_back(output);
  }
  for (const auto& input : inputs) {
    buffers.check("inputs", input);
    buffers.input.add_piece(buffers.read(input));
  }
  return run(
      buffers, call_of(ffi::Kind::AllToAll, buffers), c10d::OpType::ALLTOALL,
      "tpu_dist:all_to_all", options.timeout, options.asyncOp);
}

WorkPointer ProcessGroupTpuDist::barrier(const c10d::BarrierOptions& options) {
  Buffers buffers("barrier");
  buffers.profile({});
  return run(
      buffers, call_of(ffi::Kind::Barrier, buffers), c10d::OpType::BARRIER,
      "tpu_dist:barrier", options.timeout, options.asyncOp);
}

void ProcessGroupTpuDist::monitoredBarrier(
    const c10d::BarrierOptions& options,
    bool wait_all_ranks) {
  const auto failure =
      group_->monitored_barrier(resolve(options.timeout).count(), wait_all_ranks);
  if (failure.code != ffi::Code::Ok) {
    raise(failure);
  }
}

// Point to point

WorkPointer ProcessGroupTpuDist::run_point_to_point(
    std::vector<at::Tensor>& tensors,
    int peer,
    int tag,
    c10d::OpType type,
    const char* title) {
  const bool sends = type == c10d::OpType::SEND;
  const char* const name = sends ? "send"
      : type == c10d::OpType::RECV ? "recv"
                                   : "recvAnysource";
  if (tensors.size() != 1) {
    invalid(name, "takes a single tensor, got ", tensors.size());
  }
  if (type != c10d::OpType::RECVANYSOURCE && (peer < 0 || peer >= size_)) {
    invalid(
        name, "argument '", sends ? "dst" : "src", "': expected a rank of the group, 0 to ",
        size_ - 1, ", got ", peer);
  }
  TORCH_CHECK(tag >= 0, "Tag must be nonnegative, got ", tag);
  Buffers buffers(name);
  buffers.check("tensors", tensors[0]);
  buffers.profile(tensors);
  const bool copied = !tensors[0].is_cpu() && !works_in_place();
  auto memory = !sends ? buffers.write("tensors", tensors[0])
      : copied         ? tensors[0]
                       : buffers.read(tensors[0]);
  if (copied) {
    memory = buffers.on_host(memory, sends);
  }
  buffers.tensors.results.push_back(tensors[0]);
  auto work = c10::make_intrusive<Work>(
      state_, type, title, buffers.profiled, std::move(buffers.tensors), options_->timeout);
  const ffi::Segment segment{buffers.address(memory), memory.nbytes()};
  (sends ? buffers.input : buffers.output).add_piece(memory);
  if (estimate(buffers, ffi::Kind::Barrier, std::max(peer, 0))) {
    work->complete(ffi::Failure{ffi::Code::Ok, {}});
    return work;
  }
  const bool on_device = !buffers.cells().empty();
  const auto launch = group_->message(
      sends,
      peer,
      tag,
      segment,
      buffers.dtype,
      buffers.shape,
      buffers.cells(),
      on_device ? nullptr : c10::intrusive_ptr<Work>(work).release());
  if (launch.failure.code != ffi::Code::Ok) {
    raise(launch.failure);
  }
  work->attach(launch, sends ? -2 : peer);
  if (on_device) {
    work->complete(ffi::Failure{ffi::Code::Ok, {}});
  }
  collect(work);
  return work;
}

WorkPointer ProcessGroupTpuDist::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  return run_point_to_point(tensors, to, tag, c10d::OpType::SEND, "tpu_dist:send");
}

WorkPointer ProcessGroupTpuDist::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  return run_point_to_point(tensors, from, tag, c10d::OpType::RECV, "tpu_dist:recv");
}

WorkPointer ProcessGroupTpuDist::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return run_point_to_point(
      tensors, -1, tag, c10d::OpType::RECVANYSOURCE, "tpu_dist:recvAnySource");
}

// Sparse tensors

namespace {

// What ranks tell each other about their sparse tensors first: sparse dimensions,
// dense dimensions, non-zero elements, shape.
constexpr int64_t kSparseHeader = 3;
constexpr int64_t kSparseMaxDims = 16;

at::Tensor describe_sparse(const at::Tensor& tensor) {
  auto description = at::zeros({kSparseHeader + kSparseMaxDims}, at::kLong);
  auto* values = description.mutable_data_ptr<int64_t>();
  values[0] = tensor.sparse_dim();
  values[1] = tensor.dense_dim();
  values[2] = tensor._nnz();
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), values + kSparseHeader);
  return description;
}

// Sums the ranks' sparse tensors. `descriptions` is one row for each rank.
at::Tensor sum_sparse(
    ProcessGroupTpuDist& group,
    const at::Tensor& tensor,
    const at::Tensor& descriptions,
    Milliseconds timeout) {
  const auto own = descriptions[group.getRank()];
  std::vector<at::Tensor> indices;
  std::vector<at::Tensor> values;
  for (const auto rank : c10::irange(group.getSize())) {
    const auto theirs = descriptions[rank];
    const int64_t count = theirs[2].item<int64_t>();
    auto expected = own.clone();
    expected[2] = count;
    if (!at::equal(expected, theirs)) {
      invalid(
          "allreduce", "sparse tensors must have the same shape and sparse dimensions on "
          "all ranks, but rank ", rank, " has ", theirs.slice(0, 0, kSparseHeader),
          " and rank ", group.getRank(), " has ", own.slice(0, 0, kSparseHeader));
    }
    indices.push_back(at::empty({tensor.sparse_dim(), count}, at::kLong));
    auto shape = tensor._values().sizes().vec();
    shape[0] = count;
    values.push_back(at::empty(shape, tensor._values().options()));
  }
  c10d::AllgatherOptions options;
  options.timeout = timeout;
  options.asyncOp = false;
  std::vector<at::Tensor> own_indices{tensor._indices()};
  std::vector<at::Tensor> own_values{tensor._values()};
  std::vector<std::vector<at::Tensor>> all_indices{indices};
  std::vector<std::vector<at::Tensor>> all_values{values};
  group.allgather(all_indices, own_indices, options)->wait();
  group.allgather(all_values, own_values, options)->wait();
  return at::_sparse_coo_tensor_unsafe(
             at::cat(indices, 1), at::cat(values, 0), tensor.sizes(), tensor.options())
      .coalesce();
}

} // namespace

WorkPointer ProcessGroupTpuDist::run_sparse(
    at::Tensor& tensor,
    const c10d::AllreduceOptions& options) {
  constexpr auto name = "allreduce";
  if (tensor.layout() != at::kSparse) {
    invalid(name, "argument 'tensors': expected layout sparse_coo, got ", tensor.layout());
  }
  if (!tensor.device().is_cpu()) {
    invalid(name, "argument 'tensors': unsupported device type ", tensor.device().type());
  }
  if (options.reduceOp.op_ != c10d::ReduceOp::SUM) {
    invalid(
        name,
        "unsupported reduction operation "
        "(allreduce of sparse tensors only works with ReduceOp.SUM)");
  }
  if (tensor.dim() > kSparseMaxDims) {
    invalid(
        name, "argument 'tensors': expected at most ", kSparseMaxDims, " dimensions, got ",
        tensor.dim());
  }
  const at::NoGradGuard no_grad;
  auto mine = tensor.detach().coalesce();
  auto description = describe_sparse(mine);
  auto descriptions = at::empty({size_, description.numel()}, at::kLong);

  // The first exchange takes the operation's place in the group's order. What follows
  // depends on its result and runs later, so it has a group of its own in which
  // nothing else runs.
  {
    const std::lock_guard<std::mutex> lock(sparse_mutex_);
    if (!sparse_group_) {
      auto child = c10::static_intrusive_pointer_cast<Options>(options_->clone());
      child->group_name += "/sparse";
      sparse_group_ = create(nullptr, rank_, size_, std::move(child), /*is_default=*/false, this);
    }
  }
  const auto sequence = getSequenceNumberForGroup();
  std::optional<std::vector<at::Tensor>> profiled;
  if (at::hasCallbacks()) {
    profiled = {tensor};
  }
  auto work = c10::make_intrusive<TaskWork>(
      state_, c10d::OpType::ALLREDUCE, "tpu_dist:sparse_all_reduce", profiled,
      std::vector<at::Tensor>{tensor}, sequence);
  c10d::AllgatherOptions first;
  first.timeout = options.timeout;
  first.asyncOp = true;
  const bool coalescing = coalescing_.exchange(false);
  auto exchange = all_gather_single(descriptions, description, first);
  coalescing_.store(coalescing);
  sparse_lane_->submit([work, exchange, mine, tensor, descriptions, group = sparse_group_,
                        timeout = options.timeout] {
    work->run([&] {
      exchange->wait();
      const at::NoGradGuard no_grad;
      tensor.copy_(sum_sparse(*group, mine, descriptions, timeout));
    });
  });
  collect(work);
  return work;
}

} // namespace tpu_dist
