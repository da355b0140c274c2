#include "generator.hpp"

#include <array>
#include <cstring>

#include <ATen/EmptyTensor.h>

#include "device.hpp"

namespace tpu_dist::device {

namespace {

using State = std::array<uint64_t, 2>;

} // namespace

Generator::Generator() : GeneratorImpl(kDevice, kKeys) {}

void Generator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

void Generator::set_offset(uint64_t offset) {
  offset_ = offset;
}

uint64_t Generator::get_offset() const {
  return offset_;
}

uint64_t Generator::current_seed() const {
  return seed_;
}

uint64_t Generator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void Generator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK_TYPE(
      state.device_type() == c10::DeviceType::CPU && state.dtype() == at::kByte &&
          state.is_contiguous() && state.numel() == sizeof(State),
      "state: expected a contiguous ByteTensor of ", sizeof(State),
      " elements on the CPU, as get_state gives");
  State values{};
  std::memcpy(values.data(), state.data(), sizeof(State));
  seed_ = values[0];
  offset_ = values[1];
}

c10::intrusive_ptr<c10::TensorImpl> Generator::get_state() const {
  auto state = at::detail::empty_cpu({sizeof(State)}, at::kByte);
  const State values{seed_, offset_};
  std::memcpy(state.mutable_data_ptr(), values.data(), sizeof(State));
  return state.getIntrusivePtr();
}

Generator* Generator::clone_impl() const {
  auto* const copy = new Generator;
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

const at::Generator& default_generator() {
  static const auto* const generator = [] {
    auto* const made = new at::Generator(at::make_generator<Generator>());
    made->seed();
    return made;
  }();
  return *generator;
}

} // namespace tpu_dist::device
