// The classes that Python sees, and what needs the interpreter.
#include <unistd.h>

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <c10/util/Exception.h>

#include "backend.hpp"
#include "executor.hpp"

namespace tpu_dist {

namespace {

// The holder that torch uses for its backends: the destructor of a backend may block,
// so it runs without the GIL.
template <typename T>
class NoGilHolder {
 public:
  NoGilHolder() = default;
  NoGilHolder(const NoGilHolder&) = default;
  NoGilHolder(NoGilHolder&&) noexcept = default;
  NoGilHolder& operator=(const NoGilHolder&) = default;
  NoGilHolder& operator=(NoGilHolder&&) noexcept = default;
  // pybind11 and torch construct it from these.
  NoGilHolder(c10::intrusive_ptr<T> pointer) : pointer_(std::move(pointer)) {}
  explicit NoGilHolder(T* pointer)
      : pointer_(c10::intrusive_ptr<T>::unsafe_steal_from_new(pointer)) {}
  ~NoGilHolder() {
    if (!pointer_) {
      return;
    }
    if (PyGILState_Check() != 0) {
      const py::gil_scoped_release release;
      pointer_.reset();
    } else {
      pointer_.reset();
    }
  }

  T& operator*() const noexcept {
    return *pointer_;
  }
  T* operator->() const noexcept {
    return pointer_.get();
  }
  T* get() const noexcept {
    return pointer_.get();
  }
  void reset() noexcept {
    pointer_.reset();
  }
  operator bool() const noexcept {
    return static_cast<bool>(pointer_);
  }

 private:
  c10::intrusive_ptr<T> pointer_;
};

} // namespace
} // namespace tpu_dist

PYBIND11_DECLARE_HOLDER_TYPE(T, tpu_dist::NoGilHolder<T>, true)

namespace tpu_dist {

namespace {

// What `torch.distributed` calls to make a group.
c10::intrusive_ptr<ProcessGroupTpuDist> create_backend(
    const c10d::DistributedBackendOptions& options,
    const std::optional<c10::intrusive_ptr<c10d::Backend::Options>>& pg_options) {
  // Options of another type are meant for another backend of the same group.
  auto given = pg_options && *pg_options
      ? c10::dynamic_intrusive_pointer_cast<ProcessGroupTpuDist::Options>(*pg_options)
      : nullptr;
  auto own = given
      ? c10::static_intrusive_pointer_cast<ProcessGroupTpuDist::Options>(given->clone())
      : c10::make_intrusive<ProcessGroupTpuDist::Options>();
  own->timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout);
  own->group_name = options.group_id;
  own->global_ranks_in_group.clear();
  // Torch names the ranks of every group but the default one, which is the world.
  const bool is_default = options.global_ranks_in_group.empty();
  if (is_default) {
    for (const auto rank : c10::irange(options.group_size)) {
      own->global_ranks_in_group.push_back(rank);
    }
  } else {
    for (const auto rank : options.global_ranks_in_group) {
      own->global_ranks_in_group.push_back(rank);
    }
  }
  const auto* parent =
      dynamic_cast<const ProcessGroupTpuDist*>(options.split_from.get());
  return ProcessGroupTpuDist::create(
      options.store, options.group_rank, options.group_size, std::move(own), is_default,
      parent);
}

} // namespace

void raise_pending_python_error() {
  if (Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() == nullptr) {
    return;
  }
  const py::gil_scoped_acquire gil;
  if (PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
}

bool check_signals() noexcept {
  // Python runs signal handlers in the main thread only.
  if (gettid() != getpid() || Py_IsInitialized() == 0 ||
      PyGILState_GetThisThreadState() == nullptr) {
    return false;
  }
  const py::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

void register_classes(size_t address) {
  auto module = py::reinterpret_borrow<py::module_>(
      reinterpret_cast<PyObject*>(address)); // NOLINT(performance-no-int-to-ptr)
  // The base classes must be known first.
  py::module_::import("torch._C._distributed_c10d");

  // What Backend.mem_allocator returns; torch makes it known only where it has a GPU.
  if (py::detail::get_type_info(typeid(c10::Allocator)) == nullptr) {
    py::class_<c10::Allocator, std::shared_ptr<c10::Allocator>>(
        module, "Allocator", "Allocates the memory of tensors.");
  }

  py::class_<
      ProcessGroupTpuDist,
      NoGilHolder<ProcessGroupTpuDist>,
      c10d::Backend>
      backend(module, "ProcessGroupTpuDist", "The process group backend tpu_dist.");
  backend.def(
      "perform_nocolor_split",
      [](ProcessGroupTpuDist& /*self*/, const at::Device& /*device*/) {},
      py::arg("device"),
      "Takes part in a split as a rank that is in no part: nothing to do, as a split "
      "concerns only the ranks of the new group.");

  py::class_<
      ProcessGroupTpuDist::Options,
      c10::intrusive_ptr<ProcessGroupTpuDist::Options>,
      c10d::Backend::Options>(
      backend, "Options", "Options of a tpu_dist process group.")
      .def(
          py::init([](std::chrono::milliseconds timeout) {
            return c10::make_intrusive<ProcessGroupTpuDist::Options>(timeout);
          }),
          py::arg("timeout") = kBackendDefaultTimeout);

  module.def(
      "create_backend",
      [](const c10d::DistributedBackendOptions& options,
         const std::optional<c10::intrusive_ptr<c10d::Backend::Options>>& pg_options) {
        return NoGilHolder<ProcessGroupTpuDist>(create_backend(options, pg_options));
      },
      py::arg("options"),
      py::arg("pg_options") = py::none(),
      py::call_guard<py::gil_scoped_release>(),
      "Makes the backend of a group; see Backend.register_backend(extended_api=True).");

  module.def(
      "_close",
      [] { Executor::get().close(std::chrono::seconds(20)); },
      py::call_guard<py::gil_scoped_release>(),
      "Stops the threads that run callbacks, before the interpreter ends.");
}

} // namespace tpu_dist
