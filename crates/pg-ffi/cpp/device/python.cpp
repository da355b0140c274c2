// What Python needs of C++.
#include <mutex>

#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

#include "device.hpp"
#include "generator.hpp"

namespace tpu_dist::device {

void register_device() {
  static std::once_flag once;
  std::call_once(once, [] {
    register_allocator();
    register_guard();
    register_native();
    register_autocast();
  });
}

void register_functions(size_t address) {
  auto module = py::reinterpret_borrow<py::module_>(
      reinterpret_cast<PyObject*>(address)); // NOLINT(performance-no-int-to-ptr)
  module.def(
      "register_kernels", [] { register_kernels(); },
      "Registers the operators that are lowered with torch, once.");
  module.def(
      "default_generator",
      [] {
        return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator()));
      },
      "The generator of random numbers that operators use unless they are given one.");
}

} // namespace tpu_dist::device
