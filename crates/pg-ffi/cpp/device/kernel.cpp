// The kernel of every operator that is lowered, and the way to the CPU of all others.
#include "kernel.hpp"

#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "generator.hpp"

namespace tpu_dist::device {

namespace {

using torch::jit::Stack;

// Dispatches below everything that has been done by the time a kernel runs.
class BelowEverything {
 private:
  at::AutoDispatchBelowADInplaceOrView autograd_;
  c10::impl::ExcludeDispatchKeyGuard others_{
      c10::DispatchKeySet(
          {c10::DispatchKey::Python,
           c10::DispatchKey::PythonTLSSnapshot,
           c10::DispatchKey::PythonDispatcher,
           c10::DispatchKey::Functionalize}) |
      c10::autocast_dispatch_keyset};
};

std::string name_of(const c10::OperatorName& name) {
  constexpr std::string_view kNamespace = "aten::";
  std::string result = name.name.starts_with(kNamespace)
      ? name.name.substr(kNamespace.size())
      : name.name;
  if (!name.overload_name.empty()) {
    result += '.';
    result += name.overload_name;
  }
  return result;
}

at::Tensor meta_of(const at::Tensor& tensor) {
  // Numbers stay what they are.
  if (!tensor.defined() || tensor.is_cpu()) {
    return tensor;
  }
  return at::detail::empty_strided_meta(
      tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

c10::IValue meta_of(const c10::IValue& value) {
  if (value.isTensor()) {
    return meta_of(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& entry : value.toListRef()) {
      list.push_back(meta_of(entry.toTensor()));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& entry : value.toListRef()) {
      list.push_back(
          entry.isNone() ? std::optional<at::Tensor>() : meta_of(entry.toTensor()));
    }
    return list;
  }
  if (value.isDevice()) {
    return c10::Device(c10::DeviceType::Meta);
  }
  return value;
}

// The tensors that an argument is.
template <typename F>
void for_each_tensor(const c10::IValue& value, F&& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const auto& entry : value.toListRef()) {
      if (entry.isTensor()) {
        visit(entry.toTensor());
      }
    }
  }
}

using Words = c10::SmallVector<uint64_t, 32>;

void new_words(Words& words, const at::Tensor& meta) {
  if (!meta.defined()) {
    words.push_back(word::kNone);
    return;
  }
  const auto sizes = meta.sizes();
  auto strides = meta.strides();
  const bool dense = meta.is_non_overlapping_and_dense();
  const auto contiguous =
      dense ? c10::DimVector() : c10::contiguous_strides(sizes);
  if (!dense) {
    strides = contiguous;
  }
  words.push_back(
      word::kNew | uint64_t{element_of(meta.scalar_type())} << 8 | sizes.size() << 16);
  words.append(sizes.begin(), sizes.end());
  words.append(strides.begin(), strides.end());
}

// The general operator, which chooses among those of devices.
const c10::OperatorHandle& convolution() {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  return handle;
}

// Convolutions of a device that has its own have no kernel for tensors without data: their
// results are those of the general ones.
void infer_on_meta(const Overload& overload, Stack& metas) {
  if (overload.name == "convolution_overrideable") {
    convolution().callBoxed(&metas);
  } else if (overload.name == "convolution_backward_overrideable") {
    const auto gradient = metas[0].toTensor();
    const auto mask = metas.back().toBoolList();
    Stack results;
    results.emplace_back(mask[0] ? at::empty_like(metas[1].toTensor()) : at::Tensor());
    results.emplace_back(mask[1] ? at::empty_like(metas[2].toTensor()) : at::Tensor());
    results.emplace_back(
        mask[2] ? at::empty({gradient.size(1)}, gradient.options()) : at::Tensor());
    metas = std::move(results);
  } else {
    overload.handle.callBoxed(&metas);
  }
}

enum class Inference { Done, Resized, Impossible };

// Lets torch infer the results of a call, from tensors without data. Resizes those of
// `out=` as the operator wants them; the call must then be encoded anew.
Inference infer(
    const Overload& overload,
    const Stack& stack,
    EncodedCall& encoded,
    Words& words,
    std::string& reason) {
  const auto count = overload.arguments.size();
  const auto first = stack.size() - count;
  Stack metas;
  metas.reserve(count);
  for (const auto index : c10::irange(count)) {
    metas.push_back(meta_of(stack[first + index]));
  }
  const Stack outs(metas.begin() + static_cast<ptrdiff_t>(overload.inputs), metas.end());
  try {
    const BelowEverything guard;
    infer_on_meta(overload, metas);
  } catch (const c10::NotImplementedError&) {
    reason = "torch cannot tell the types of its results";
    return Inference::Impossible;
  }

  bool resized = false;
  for (const auto index : c10::irange(outs.size())) {
    if (!outs[index].isTensor()) {
      continue;
    }
    const auto& meta = outs[index].toTensor();
    const auto& out = stack[first + overload.inputs + index].toTensor();
    if (meta.defined() && out.sizes() != meta.sizes()) {
      at::native::resize_output(out, meta.sizes());
      if (out.strides() != meta.strides()) {
        out.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
      }
      resized = true;
    }
  }
  if (resized) {
    return Inference::Resized;
  }

  words.clear();
  const auto written = [&](int argument) {
    if (stack[first + argument].isNone()) {
      words.push_back(word::kNone);
    }
    for_each_tensor(stack[first + argument], [&](const at::Tensor& tensor) {
      if (tensor.defined()) {
        encoded.tensor_words(words, word::kInto, tensor);
      } else {
        words.push_back(word::kNone);
      }
    });
  };
  for (const auto index : c10::irange(overload.returns.size())) {
    const auto [list, argument] = overload.returns[index];
    if (argument >= 0) {
      written(argument);
      continue;
    }
    const auto& value = metas[metas.size() - overload.returns.size() + index];
    if (list) {
      words.push_back(word::kList | value.toListRef().size() << 32);
    }
    bool known = true;
    for_each_tensor(value, [&](const at::Tensor& meta) {
      known &= !meta.defined() || element_of(meta.scalar_type()) != 0;
      new_words(words, meta);
    });
    if (!known) {
      reason = "its result has a type that programs do not have";
      return Inference::Impossible;
    }
  }
  for (const auto argument : overload.writes) {
    written(argument);
  }
  return Inference::Done;
}

// Reads what a launch gave.
class Reader {
 public:
  explicit Reader(ffi::Results& results) : results_(results), words_(results.words()) {}

  // How long the list is that comes next.
  size_t list() {
    return words_[at_++] >> 32;
  }

  at::Tensor tensor() {
    const auto head = words_[at_++];
    if ((head & 0xff) == word::kNone) {
      return {};
    }
    const auto dims = head >> 16 & 0xffff;
    const auto* const sizes = reinterpret_cast<const int64_t*>(words_.data() + at_);
    at_ += 2 * dims;
    return wrap(
        results_.next_cell(), type_of(head >> 8 & 0xff), {sizes, dims}, {sizes + dims, dims});
  }

  // Passes over a result that was written into an argument.
  void skip(const c10::IValue& argument) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      at_ += 2 + 2 * static_cast<size_t>(tensor.dim());
    });
  }

 private:
  ffi::Results& results_;
  rust::Slice<const uint64_t> words_;
  size_t at_ = 0;
};

void give_back(const Overload& overload, Stack& stack, ffi::Results& results) {
  const auto count = overload.arguments.size();
  const auto first = stack.size() - count;
  Reader reader(results);
  c10::SmallVector<c10::IValue, 2> returns;
  for (const auto [list, argument] : overload.returns) {
    if (argument >= 0) {
      reader.skip(stack[first + argument]);
      returns.emplace_back(stack[first + argument]);
    } else if (list) {
      c10::List<at::Tensor> tensors;
      for (auto left = reader.list(); left > 0; --left) {
        tensors.push_back(reader.tensor());
      }
      returns.emplace_back(std::move(tensors));
    } else {
      returns.emplace_back(reader.tensor());
    }
  }
  torch::jit::drop(stack, count);
  for (auto& value : returns) {
    stack.push_back(std::move(value));
  }
}

// The state of an operator's random numbers, held until it is known how many it draws.
class Draw {
 public:
  Draw(const Overload& overload, const Stack& stack) {
    if (!overload.random) {
      return;
    }
    std::optional<at::Generator> given;
    if (overload.generator >= 0) {
      const auto& value = stack[stack.size() - overload.arguments.size() + overload.generator];
      if (value.isGenerator()) {
        given = value.toGenerator();
      }
    }
    generator_ = at::get_generator_or_default<Generator>(given, default_generator());
    lock_ = std::unique_lock<std::mutex>(generator_->mutex_);
  }

  uint64_t seed() const {
    return generator_ != nullptr ? generator_->current_seed() : 0;
  }
  uint64_t offset() const {
    return generator_ != nullptr ? generator_->get_offset() : 0;
  }
  void drawn(uint64_t count) {
    if (generator_ != nullptr) {
      generator_->set_offset(generator_->get_offset() + count);
    }
  }

 private:
  Generator* generator_ = nullptr;
  std::unique_lock<std::mutex> lock_;
};

ffi::Results& thread_results() {
  thread_local rust::Box<ffi::Results> results = ffi::new_results();
  return *results;
}

std::unordered_map<std::string, const Overload*>& overloads() {
  static auto* const overloads = new std::unordered_map<std::string, const Overload*>;
  return *overloads;
}

struct Kernel final : c10::OperatorKernel {
  explicit Kernel(const Overload* overload) : overload(overload) {}

  void operator()(
      const c10::OperatorHandle& /*op*/,
      c10::DispatchKeySet /*keys*/,
      Stack* stack) const {
    run(*overload, stack);
  }

  const Overload* overload;
};

void fall_back_boxed(const c10::OperatorHandle& op, Stack* stack) {
  fall_back(op, stack, "no lowering");
}

// Kernels of our own, which are not to be replaced.
bool is_native(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "copy_", "_copy_from", "clone", "zero_", "equal", "_local_scalar_dense",
      "empty.memory_format", "empty_strided", "resize_",
  };
  return names.contains(name);
}

bool takes_indices(const std::string& name) {
  return name.find("index") != std::string::npos;
}

// Whether `other` is `functional` with arguments for its results.
bool is_out_of(const c10::FunctionSchema& functional, const c10::FunctionSchema& other) {
  const auto& mine = functional.arguments();
  const auto& theirs = other.arguments();
  if (theirs.size() <= mine.size() || !theirs.back().is_out()) {
    return false;
  }
  for (const auto index : c10::irange(theirs.size())) {
    if (index >= mine.size()) {
      if (!theirs[index].is_out()) {
        return false;
      }
    } else if (
        theirs[index].name() != mine[index].name() ||
        *theirs[index].real_type() != *mine[index].real_type()) {
      return false;
    }
  }
  return true;
}

class Registration {
 public:
  Registration() {
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.name.starts_with("aten::")) {
        by_name_[name.name].push_back(name.overload_name);
      }
    }
  }

  void add(const ffi::Operator& row, uint64_t number) {
    const std::string name(row.name);
    const auto dot = name.find('.');
    const auto base = "aten::" + name.substr(0, dot);
    const auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
    const auto handle = find(base, overload);
    if (!handle) {
      return;
    }
    add(*handle, row, number);
    if (base.ends_with('_')) {
      return;
    }
    if (const auto in_place = find(base + "_", overload)) {
      add(*in_place, row, number);
    }
    for (const auto& other : by_name_[base]) {
      const auto out = find(base, other);
      if (out && is_out_of(handle->schema(), out->schema())) {
        add(*out, row, number);
      }
    }
  }

 private:
  static std::optional<c10::OperatorHandle> find(
      const std::string& base,
      const std::string& overload) {
    return c10::Dispatcher::singleton().findSchema({base, overload});
  }

  void add(const c10::OperatorHandle& handle, const ffi::Operator& row, uint64_t number) {
    auto name = name_of(handle.operator_name());
    auto* const overload = new Overload{
        handle, name, number, variants_++, row.random, takes_indices(name),
        row.sized_by_numbers, {}, 0, {}, {}};
    if (!describe(handle.schema(), *overload)) {
      delete overload;
      return;
    }
    for (const auto position : row.writes) {
      overload->writes.push_back(static_cast<int>(position));
    }
    for (const auto position : row.constants) {
      if (position < overload->arguments.size()) {
        overload->arguments[position].constant = true;
      }
    }
    overloads().emplace(name, overload);
    // A kernel for it would hide its derivative.
    if (is_native(name) ||
        handle.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
      return;
    }
    library_.impl(
        name.c_str(),
        torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(overload)));
  }

  torch::Library& library_ = *new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  std::unordered_map<std::string, std::vector<std::string>> by_name_;
  uint64_t variants_ = 0;
};

} // namespace

void run(const Overload& overload, Stack* stack) {
  EncodedCall encoded;
  if (!encoded.encode(overload, *stack)) {
    fall_back(overload.handle, stack, "for a type that programs do not have");
    return;
  }
  if (overload.sized_by_numbers) {
    Words words;
    std::string reason;
    if (infer(overload, *stack, encoded, words, reason) == Inference::Resized) {
      encoded.encode(overload, *stack);
    }
  }
  auto& results = thread_results();
  std::optional<Draw> draw(std::in_place, overload, *stack);
  // A call is launched again once its program has been made.
  for (int attempt = 0;; ++attempt) {
    const auto outcome = call([&] {
      return ffi::launch(
          encoded.words(), encoded.cells(), encoded.scalars(), draw->seed(), draw->offset(),
          results);
    });
    if (C10_LIKELY(outcome == ffi::Outcome::Launched)) {
      draw->drawn(results.draws());
      give_back(overload, *stack, results);
      return;
    }
    if (outcome == ffi::Outcome::Unsupported) {
      break;
    }
    TORCH_INTERNAL_ASSERT(attempt < 3, overload.name, ": its program is not found again");
    Words words;
    std::string reason;
    switch (infer(overload, *stack, encoded, words, reason)) {
      case Inference::Done:
        call([&] {
          ffi::define(encoded.words(), encoded.cells(), {words.data(), words.size()});
        });
        break;
      case Inference::Resized:
        encoded.encode(overload, *stack);
        break;
      case Inference::Impossible:
        call([&] { ffi::define_unsupported(encoded.words(), encoded.cells(), reason); });
        break;
    }
  }
  draw.reset();
  const std::string reason(results.reason());
  fall_back(overload.handle, stack, reason);
}

const Overload* find_overload(const std::string& name) {
  register_kernels();
  const auto found = overloads().find(name);
  return found == overloads().end() ? nullptr : found->second;
}

void fall_back(
    const c10::OperatorHandle& op,
    Stack* stack,
    const std::string& reason) {
  const auto name = name_of(op.operator_name());
  call([&] { ffi::fall_back(name, reason); });
  const BelowEverything guard;
  // The CPU has this one under its general name only.
  const bool is_convolution = name == "convolution_overrideable";
  at::native::cpu_fallback(is_convolution ? convolution() : op, stack, /*error_on_views=*/true);
}

void register_kernels() {
  static std::once_flag once;
  std::call_once(once, [] {
    Registration registration;
    uint64_t number = 0;
    for (const auto& row : ffi::operators()) {
      registration.add(row, number++);
    }
    auto& everything = *new torch::Library(
        torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    everything.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back_boxed>());
  });
}

} // namespace tpu_dist::device
