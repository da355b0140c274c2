// Tensors in memory that the other ranks of the host reach in place.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace tpu_dist {

// Allocates from the arena of this process. Lives as long as the process.
std::shared_ptr<c10::Allocator> arena_allocator();

// A one-dimensional CPU tensor of `size` elements in the arena.
at::Tensor arena_tensor(int64_t size, const at::TensorOptions& options);

} // namespace tpu_dist
