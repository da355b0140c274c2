#include "arena.hpp"

#include <cstring>

#include <ATen/EmptyTensor.h>

#include "work.hpp"

namespace tpu_dist {

namespace {

void free_block(void* block) {
  ffi::arena_free(reinterpret_cast<size_t>(block));
}

class ArenaAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &free_block, at::kCPU};
    }
    ffi::Failure failure;
    void* block = reinterpret_cast<void*>(ffi::arena_allocate(bytes, failure));
    if (block == nullptr) {
      raise(failure);
    }
    return {block, block, &free_block, at::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

} // namespace

std::shared_ptr<c10::Allocator> arena_allocator() {
  // Tensors may outlive everything else: never destroyed.
  static const auto* const allocator =
      new std::shared_ptr<c10::Allocator>(std::make_shared<ArenaAllocator>());
  return *allocator;
}

at::Tensor arena_tensor(int64_t size, const at::TensorOptions& options) {
  const auto type = at::typeMetaToScalarType(options.dtype());
  return at::detail::empty_generic(
      {size},
      arena_allocator().get(),
      c10::DispatchKeySet(c10::DispatchKey::CPU),
      type,
      std::nullopt);
}

} // namespace tpu_dist
