// Storages of the device, and pinned memory.
#include "device.hpp"

#include <map>
#include <mutex>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/flat_hash_map.h>

namespace tpu_dist::device {

namespace {

// The cells that there are. Torch wraps a data pointer in a storage of its own here and there
// (to write one to a file, for DLPack), and this tells such from memory of others.
class LiveCells {
 public:
  void insert(const void* cell) {
    const std::lock_guard<std::mutex> lock(mutex_);
    cells_.insert(cell);
  }
  void erase(const void* cell) {
    const std::lock_guard<std::mutex> lock(mutex_);
    cells_.erase(cell);
  }
  bool contains(const void* cell) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return cells_.find(cell) != cells_.end();
  }

 private:
  std::mutex mutex_;
  ska::flat_hash_set<const void*> cells_;
};

LiveCells& live_cells() {
  // Tensors may outlive static objects.
  static auto* const cells = new LiveCells;
  return *cells;
}

void drop(void* cell) {
  live_cells().erase(cell);
  ffi::drop_cell(static_cast<ffi::Cell*>(cell));
}

c10::DataPtr data_ptr(ffi::Cell* cell) {
  live_cells().insert(cell);
  return {cell, cell, &drop, kDevice};
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    register_kernels();
    return data_ptr(ffi::new_cell(bytes));
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &drop;
  }

  void copy_data(void* destination, const void* source, size_t /*bytes*/) const override {
    call([&] {
      static_cast<ffi::Cell*>(destination)->share(*static_cast<const ffi::Cell*>(source));
    });
  }

  bool initialized() override {
    return ffi::is_opened();
  }

  // The plugin keeps no free memory that it could give back.
  void emptyCache(c10::MempoolId_t /*pool*/) override {}

  // There is one queue.
  void recordStream(const c10::DataPtr& /*data*/, c10::Stream /*stream*/) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex /*device*/) override {
    const auto now = ffi::memory_stats();
    const auto fill = [](auto& stats, uint64_t current, uint64_t peak, uint64_t total) {
      auto& stat = stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      stat.current = static_cast<int64_t>(current);
      stat.peak = static_cast<int64_t>(peak);
      stat.allocated = static_cast<int64_t>(total);
      stat.freed = static_cast<int64_t>(total - std::min(current, total));
    };
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes :
         {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes,
          &stats.requested_bytes}) {
      fill(*bytes, now.bytes, now.peak_bytes, now.allocated_bytes);
    }
    for (auto* count : {&stats.allocation, &stats.active, &stats.segment}) {
      fill(*count, now.buffers, now.peak_buffers, now.allocated_buffers);
    }
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {
    ffi::reset_accumulated_memory();
  }

  void resetPeakStats(c10::DeviceIndex /*device*/) override {
    ffi::reset_peak_memory();
  }
};

// Host memory by address. What "pinned" buys is up to the plugin; aligned as this is, XLA's
// CPU plugins need not copy it.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const start = c10::alloc_cpu(bytes);
    if (start != nullptr) {
      const std::lock_guard<std::mutex> lock(mutex_);
      blocks_[start] = bytes;
    }
    return {start, start, &free, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free;
  }

  void copy_data(void* destination, const void* source, size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

  bool contains(const void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto after = blocks_.upper_bound(address);
    if (after == blocks_.begin()) {
      return false;
    }
    const auto& [start, bytes] = *std::prev(after);
    return static_cast<const char*>(address) < static_cast<const char*>(start) + bytes;
  }

 private:
  static void free(void* start);

  std::mutex mutex_;
  std::map<const void*, size_t> blocks_;
};

PinnedAllocator& pinned() {
  // Tensors may outlive static objects.
  static auto* const allocator = new PinnedAllocator;
  return *allocator;
}

void PinnedAllocator::free(void* start) {
  if (start != nullptr) {
    {
      const std::lock_guard<std::mutex> lock(pinned().mutex_);
      pinned().blocks_.erase(start);
    }
    c10::free_cpu(start);
  }
}

} // namespace

void rethrow(const rust::Error& error) {
  switch (ffi::last_failure()) {
    case ffi::Failure::OutOfMemory:
      C10_THROW_ERROR(OutOfMemoryError, error.what());
    case ffi::Failure::NotImplemented:
      C10_THROW_ERROR(NotImplementedError, error.what());
    default:
      C10_THROW_ERROR(Error, error.what());
  }
}

c10::Allocator* allocator() {
  static auto* const allocator = new Allocator;
  return allocator;
}

void register_allocator() {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, allocator());
}

c10::Allocator* pinned_allocator() {
  return &pinned();
}

bool is_pinned(const void* address) {
  return pinned().contains(address);
}

ffi::Cell& cell_of(const c10::StorageImpl& storage) {
  const auto& data = storage.data_ptr();
  TORCH_CHECK(
      data.get_deleter() == &drop || live_cells().contains(data.get()),
      "a storage on \"tpu\" whose memory is not the device's: expected a tensor made by torch, "
      "got one of another library; exchange tensors through the CPU");
  return *static_cast<ffi::Cell*>(data.get());
}

at::Tensor wrap(
    ffi::Cell* cell,
    at::ScalarType type,
    at::IntArrayRef sizes,
    at::IntArrayRef strides) {
  const auto meta = c10::scalarTypeToTypeMeta(type);
  const auto bytes = at::detail::computeStorageNbytes(sizes, strides, meta.itemsize());
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, data_ptr(cell), allocator(),
      /*resizable=*/true);
  auto tensor =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kKeys, meta);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* const impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "Trying to resize storage that is not resizable");
  if (bytes != impl->nbytes()) {
    call([&] { cell_of(*impl).resize(bytes); });
    impl->set_nbytes(bytes);
  }
}

bool covers_storage(const at::TensorBase& tensor) {
  return tensor.is_non_overlapping_and_dense() &&
      tensor.numel() * tensor.itemsize() == tensor.storage().nbytes();
}

namespace {

// Element types by PJRT's numbers.
constexpr std::pair<at::ScalarType, uint8_t> kElements[] = {
    {at::kBool, 1},           {at::kChar, 2},           {at::kShort, 3},
    {at::kInt, 4},            {at::kLong, 5},           {at::kByte, 6},
    {at::kUInt16, 7},         {at::kUInt32, 8},         {at::kUInt64, 9},
    {at::kHalf, 10},          {at::kFloat, 11},         {at::kDouble, 12},
    {at::kBFloat16, 13},      {at::kComplexFloat, 14},  {at::kComplexDouble, 15},
    {at::kFloat8_e5m2, 16},   {at::kFloat8_e4m3fn, 17}, {at::kFloat8_e5m2fnuz, 19},
    {at::kFloat8_e4m3fnuz, 20}, {at::kFloat8_e8m0fnu, 28},
};

constexpr size_t kTypes = 64;

template <typename Table>
constexpr Table table(bool by_type) {
  Table result{};
  for (const auto& [type, element] : kElements) {
    const auto number = static_cast<uint8_t>(type);
    result[by_type ? number : element] = by_type ? element : number;
  }
  return result;
}

constexpr auto kByType = table<std::array<uint8_t, kTypes>>(true);
constexpr auto kByElement = table<std::array<uint8_t, kTypes>>(false);

} // namespace

uint8_t element_of(at::ScalarType type) {
  const auto number = static_cast<size_t>(type);
  return number < kTypes ? kByType[number] : 0;
}

at::ScalarType type_of(uint8_t element) {
  return static_cast<at::ScalarType>(kByElement[element % kTypes]);
}

} // namespace tpu_dist::device
