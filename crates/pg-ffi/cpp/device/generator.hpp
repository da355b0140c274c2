// Random numbers: a seed and how many were drawn.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

namespace tpu_dist::device {

// Programs draw from a counter-based generator (Philox), so that a seed and an offset are
// all its state.
class Generator final : public c10::GeneratorImpl {
 public:
  Generator();

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  // 16 bytes on the CPU: seed and offset.
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  static c10::DeviceType device_type() {
    return c10::DeviceType::PrivateUse1;
  }

 private:
  Generator* clone_impl() const override;

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator();

} // namespace tpu_dist::device
