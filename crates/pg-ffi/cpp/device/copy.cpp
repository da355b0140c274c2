// Copies between devices, and on the device.
#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>

#include "kernel.hpp"

namespace tpu_dist::device {

namespace {

bool on_device(const at::TensorBase& tensor) {
  return tensor.device().type() == kDevice.type();
}

// What a program would make of a new tensor with these strides: its sizes in the order of
// descending strides.
c10::SmallVector<int64_t, 8> memory_order(const at::TensorBase& tensor) {
  c10::SmallVector<int64_t, 8> order(tensor.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t one, int64_t other) {
    return tensor.stride(one) > tensor.stride(other);
  });
  c10::SmallVector<int64_t, 8> sizes;
  for (const auto dim : order) {
    sizes.push_back(tensor.size(dim));
  }
  return sizes;
}

rust::Slice<uint8_t> bytes_of(const at::Tensor& host) {
  return {static_cast<uint8_t*>(host.data_ptr()), host.nbytes()};
}

// A CPU tensor that lies in memory as `like` does.
at::Tensor host_like(const at::Tensor& like) {
  return at::empty_strided(
      like.sizes(), like.strides(), like.options().device(at::kCPU).pinned_memory(false));
}

void upload(const at::Tensor& self, const at::Tensor& src) {
  if (!covers_storage(self)) {
    auto whole = at::empty(self.sizes(), self.options());
    upload(whole, src);
    copy_(const_cast<at::Tensor&>(self), whole, false); // NOLINT
    return;
  }
  auto host = src;
  if (src.scalar_type() != self.scalar_type() || src.sizes() != self.sizes() ||
      src.strides() != self.strides() || src.is_conj() || src.is_neg()) {
    host = host_like(self);
    host.copy_(src);
  }
  const auto element = element_of(self.scalar_type());
  auto dims = memory_order(self);
  if (element == 0) {
    // Only copied: bytes will do.
    dims = {static_cast<int64_t>(host.nbytes())};
  }
  call([&] {
    cell_of(self).upload(
        {static_cast<const uint8_t*>(host.const_data_ptr()), host.nbytes()},
        element == 0 ? element_of(at::kByte) : element, {dims.data(), dims.size()});
  });
}

// All of a storage, or as much of it as is worth a program to take less.
constexpr size_t kWorthAProgram = size_t{64} << 10;

void download(at::Tensor& self, const at::Tensor& src) {
  if (covers_storage(src)) {
    const bool direct = self.scalar_type() == src.scalar_type() &&
        self.sizes() == src.sizes() && self.strides() == src.strides() && !self.is_conj() &&
        !self.is_neg();
    auto host = direct ? self : host_like(src);
    call([&] { cell_of(src).download(bytes_of(host)); });
    if (!direct) {
      self.copy_(host);
    }
    return;
  }
  const auto bytes = src.storage().nbytes();
  if (bytes <= std::max<size_t>(kWorthAProgram, 2 * src.nbytes()) ||
      element_of(src.scalar_type()) == 0) {
    auto host = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
    call([&] { cell_of(src).download(bytes_of(host)); });
    auto view = at::empty({0}, src.options().device(at::kCPU).pinned_memory(false));
    view.set_(host.storage(), src.storage_offset(), src.sizes(), src.strides());
    self.copy_(view);
    return;
  }
  auto whole = at::empty(src.sizes(), src.options());
  copy_(whole, src, false);
  download(self, whole);
}

// Sharing is all there is to do for a copy of all of a storage to all of another.
bool share(const at::Tensor& self, const at::Tensor& src) {
  if (self.scalar_type() != src.scalar_type() || self.sizes() != src.sizes() ||
      self.strides() != src.strides() || !covers_storage(self) || !covers_storage(src)) {
    return false;
  }
  call([&] { cell_of(self).share(cell_of(src)); });
  return true;
}

} // namespace

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (self.is_same(src) || self.numel() == 0) {
    // Sizes are still to be checked.
    (void)src.expand(self.sizes());
    return self;
  }
  if (src.is_conj() || src.is_neg() || self.is_conj() || self.is_neg()) {
    // Views that conjugate or negate are made plain first.
    auto plain_self = self.is_conj() ? at::_conj(self) : self;
    auto plain_src = src.is_conj() ? at::_conj(src) : src;
    const bool conjugate = self.is_conj() != src.is_conj();
    const bool negate = self.is_neg() != src.is_neg();
    plain_self = plain_self.is_neg() ? at::_neg_view(plain_self) : plain_self;
    plain_src = plain_src.is_neg() ? at::_neg_view(plain_src) : plain_src;
    if (conjugate) {
      plain_src = at::conj_physical(plain_src);
    }
    if (negate) {
      plain_src = at::neg(plain_src);
    }
    copy_(plain_self, plain_src, non_blocking);
    return self;
  }
  const auto source = src.sizes() == self.sizes() ? src : src.expand(self.sizes());
  if (!on_device(self)) {
    download(self, source);
  } else if (!on_device(source)) {
    upload(self, source);
  } else if (!share(self, source)) {
    static const auto* const overload = find_overload("copy_");
    TORCH_INTERNAL_ASSERT(overload != nullptr);
    torch::jit::Stack stack{self, source, non_blocking};
    run(*overload, &stack);
  }
  return self;
}

} // namespace tpu_dist::device
