// Calls of operators as words; their meaning is that of `device::words` in the runtime.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include "device.hpp"

namespace tpu_dist::device {

namespace word {

inline constexpr uint64_t kNone = 0;
inline constexpr uint64_t kTensor = 1;
inline constexpr uint64_t kTensors = 2;
inline constexpr uint64_t kConstant = 3;
inline constexpr uint64_t kRuntime = 4;
inline constexpr uint64_t kScalars = 5;
inline constexpr uint64_t kBool = 6;
inline constexpr uint64_t kInt = 7;
inline constexpr uint64_t kFloat = 8;
inline constexpr uint64_t kInts = 9;
inline constexpr uint64_t kFloats = 10;
inline constexpr uint64_t kBools = 11;
inline constexpr uint64_t kElement = 12;
inline constexpr uint64_t kText = 13;
inline constexpr uint64_t kOpaque = 14;
inline constexpr uint64_t kOut = 15;
inline constexpr uint64_t kNew = 16;
inline constexpr uint64_t kInto = 17;
inline constexpr uint64_t kList = 18;

} // namespace word

// What a schema says about an argument.
enum class ArgumentKind : uint8_t {
  Tensor,
  Tensors,
  Scalar,
  Scalars,
  Bool,
  Int,
  Float,
  Ints,
  Floats,
  Bools,
  Element,
  Text,
  Generator,
  Opaque,
};

struct ArgumentInfo {
  ArgumentKind kind;
  // A number that is part of the program.
  bool constant;
};

struct ReturnInfo {
  bool list;
  // The argument that is returned; negative for a new tensor.
  int argument;
};

// One overload that programs are made for.
struct Overload {
  c10::OperatorHandle handle;
  // Name and overload, without the namespace.
  std::string name;
  // Number of its row in the table, and its own.
  uint64_t row;
  uint64_t variant;
  bool random;
  // A CPU tensor in a list of tensors is an index, and copied to the device.
  bool indices_from_cpu;
  // Numbers decide how large its result is, which is then resized before every call.
  bool sized_by_numbers;
  std::vector<ArgumentInfo> arguments;
  // Arguments before those of `out=`.
  size_t inputs;
  std::vector<ReturnInfo> returns;
  // Arguments that are written and not returned.
  std::vector<int> writes;
  int generator = -1;
};

// Whether programs can be made for an overload: what it takes and returns is understood.
bool describe(const c10::FunctionSchema& schema, Overload& overload);

// A call as words, with the storages and numbers they speak of. Refers to the arguments.
class EncodedCall {
 public:
  // False when an argument is of a type that the device does not have. May replace
  // arguments by copies on the device.
  bool encode(const Overload& overload, torch::jit::Stack& stack);

  // The word and the place of a tensor that has been encoded.
  void tensor_words(
      c10::SmallVectorImpl<uint64_t>& words,
      uint64_t tag,
      const at::Tensor& tensor);

  rust::Slice<const uint64_t> words() const {
    return {words_.data(), words_.size()};
  }
  rust::Slice<const size_t> cells() const {
    return {cells_.data(), cells_.size()};
  }
  rust::Slice<const ffi::Scalar> scalars() const {
    return {scalars_.data(), scalars_.size()};
  }

 private:
  bool argument(const Overload& overload, size_t index, c10::IValue& value);
  bool tensor(const at::Tensor& tensor, bool constant);
  void scalar(const ffi::Scalar& scalar, bool constant, size_t known_from);
  size_t storage(const c10::StorageImpl* storage);

  c10::SmallVector<uint64_t, 96> words_;
  c10::SmallVector<size_t, 8> cells_;
  c10::SmallVector<ffi::Scalar, 4> scalars_;
};

} // namespace tpu_dist::device
