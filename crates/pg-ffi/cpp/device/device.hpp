// What the files of the device share: storages, element types, failures.
#pragma once

#include <cstdint>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include "rust/cxx.h"
#include "tpu_dist/src/device/bridge.rs.h"

namespace tpu_dist::device {

inline const c10::Device kDevice{c10::DeviceType::PrivateUse1, 0};
inline constexpr c10::DispatchKeySet kKeys{c10::DispatchKey::PrivateUse1};

// Throws what torch throws for a failure of Rust's.
[[noreturn]] void rethrow(const rust::Error& error);

// Calls Rust.
template <typename F>
auto call(F&& function) -> decltype(function()) {
  try {
    return std::forward<F>(function)();
  } catch (const rust::Error& error) {
    rethrow(error);
  }
}

// The allocator of storages; its memory is a cell, whose address is the data pointer and
// never read.
c10::Allocator* allocator();
void register_allocator();

// The allocator of host memory that copies to a device can be made of.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

// The cell of a storage.
ffi::Cell& cell_of(const c10::StorageImpl& storage);
inline ffi::Cell& cell_of(const at::TensorBase& tensor) {
  return cell_of(*tensor.storage().unsafeGetStorageImpl());
}

// A tensor on a cell, which it takes over.
at::Tensor wrap(
    ffi::Cell* cell,
    at::ScalarType type,
    at::IntArrayRef sizes,
    at::IntArrayRef strides);

// Changes the size of a storage; keeps the contents.
void resize_storage(const c10::Storage& storage, size_t bytes);

// PJRT's number of an element type; 0 for those that it has none for.
uint8_t element_of(at::ScalarType type);
at::ScalarType type_of(uint8_t element);

// Whether the tensor is all of its storage, each element once.
bool covers_storage(const at::TensorBase& tensor);

void register_guard();
void register_autocast();

// Registers the operators that make or change tensors without computing.
void register_native();

// Registers the kernels that the runtime's table lists, once.
void register_kernels();

// Copies with everything that copying can mean: devices, types, broadcasting, strides.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking);

} // namespace tpu_dist::device
