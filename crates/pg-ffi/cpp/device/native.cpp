// Operators that make or change tensors without computing.
#include <array>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "device.hpp"

namespace tpu_dist::device {

namespace {

// What may be asked of a new tensor.
void check(
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(
      c10::layout_or_default(layout) == c10::Layout::Strided,
      "layout: expected torch.strided for a tensor on \"tpu\", got ",
      c10::layout_or_default(layout));
  TORCH_CHECK(
      !c10::pinned_memory_or_default(pin_memory),
      "pin_memory: only CPU tensors can be pinned");
  TORCH_CHECK(
      !device || device->index() <= 0,
      "device: expected index 0, as a process has one device, got ", device->str());
}

at::Tensor empty(
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> type,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> format) {
  check(layout, device, pin_memory);
  return at::detail::empty_generic(
      sizes, allocator(), kKeys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    std::optional<at::ScalarType> type,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  check(layout, device, pin_memory);
  return at::detail::empty_strided_generic(
      sizes, strides, allocator(), kKeys, c10::dtype_or_default(type));
}

// Makes a storage large enough for a tensor on it.
void grow_storage(const at::Tensor& self) {
  if (self.numel() == 0) {
    return;
  }
  const auto bytes = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) {
    resize_storage(self.storage(), bytes);
  }
}

const at::Tensor& resize_(
    const at::Tensor& self,
    at::IntArrayRef sizes,
    std::optional<c10::MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) {
    impl->set_sizes_contiguous(sizes);
    grow_storage(self);
  }
  if (format) {
    TORCH_CHECK(
        *format != c10::MemoryFormat::Preserve, "Unsupported memory format", *format);
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self,
    at::Storage source,
    int64_t offset,
    at::IntArrayRef sizes,
    at::IntArrayRef strides) {
  at::native::checkSetStorage<int64_t>(self, std::move(source), offset, sizes, strides);
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (strides.data() != nullptr) {
    impl->set_sizes_and_strides(sizes, strides);
  } else {
    impl->set_sizes_contiguous(sizes);
  }
  grow_storage(self);
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  const auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, allocator(), /*resizable=*/true);
  return set_storage(self, storage, 0, {0}, {});
}

at::Tensor& zero_(at::Tensor& self) {
  if (covers_storage(self)) {
    cell_of(self).clear();
    return self;
  }
  return self.fill_(0);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  TORCH_CHECK(
      self.numel() == 1, "a Tensor with ", self.numel(),
      " elements cannot be converted to Scalar");
  // A copy of a small storage is less than a program that picks the element.
  constexpr size_t kSmall = 4096;
  const auto bytes = self.storage().nbytes();
  if (bytes > kSmall) {
    return at::native::_local_scalar_dense_cpu(self.cpu());
  }
  alignas(16) std::array<uint8_t, kSmall> contents;
  call([&] { cell_of(self).download({contents.data(), bytes}); });
  const auto at = static_cast<size_t>(self.storage_offset()) * self.itemsize();
  const auto element = at::from_blob(
      contents.data() + at, {}, c10::TensorOptions(self.dtype()).device(at::kCPU));
  return at::native::_local_scalar_dense_cpu(element);
}

bool equal(const at::Tensor& self, const at::Tensor& other) {
  TORCH_CHECK(
      self.device() == other.device(),
      "Expected all tensors to be on the same device, but found at least two devices, ",
      self.device(), " and ", other.device(), "!");
  TORCH_CHECK(
      self.dtype() == other.dtype(), "Expected object of data type ", self.dtype(),
      " but got data type ", other.dtype(), " for argument 'other' in call to equal");
  return self.sizes() == other.sizes() &&
      (self.numel() == 0 || at::eq(self, other).all().item<bool>());
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  auto result = destination;
  copy_(result, self, non_blocking);
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  auto result = destination;
  result.resize_(self.sizes());
  copy_(result, self, false);
  return destination;
}

// Whether a tensor can become the other, as a parameter does that moves between devices.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto is_plain = [](const at::Tensor& tensor) {
    return tensor.layout() == c10::kStrided &&
        (tensor.is_cpu() || tensor.device().type() == kDevice.type());
  };
  return is_plain(self) && is_plain(from);
}

// There is one queue.
void record_stream(at::Tensor& /*self*/, at::Stream /*stream*/) {}

} // namespace

void register_native() {
  auto& m = *new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl(
      "set_.source_Storage",
      TORCH_FN(static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_)));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("zero_", TORCH_FN(zero_));
  m.impl("equal", TORCH_FN(equal));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl(
      "_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
  m.impl("record_stream", TORCH_FN(record_stream));
}

} // namespace tpu_dist::device
