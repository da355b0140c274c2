// What Rust calls of C++. Included by the generated bridge: no torch headers here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rust/cxx.h"

namespace tpu_dist::ffi {
struct Failure;
struct Value;
} // namespace tpu_dist::ffi

namespace tpu_dist {

// A c10d store. Its functions throw std::exception.
class Store {
 public:
  Store() = default;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;
  virtual ~Store() = default;

  virtual void set(rust::Str key, rust::Slice<const uint8_t> value) const = 0;
  virtual rust::Vec<ffi::Value> multi_get(
      const rust::Vec<rust::String>& keys,
      int64_t timeout_ms) const = 0;
  virtual int64_t add(rust::Str key, int64_t amount) const = 0;
  virtual rust::Vec<uint8_t> present(
      const rust::Vec<rust::String>& keys) const = 0;
};

class Work;
void complete_work(Work* work, const ffi::Failure& failure) noexcept;
void release_work(Work* work) noexcept;

// Runs Python's signal handlers where this thread may; true when one raised, which
// leaves the Python error set.
bool check_signals() noexcept;

void register_classes(size_t module);

} // namespace tpu_dist
