#include "call.hpp"

#include <bit>
#include <cstring>

#include <ATen/Context.h>
#include <ATen/core/jit_type.h>

namespace tpu_dist::device {

namespace {

uint64_t head(uint64_t tag, uint64_t byte, uint64_t count) {
  return tag | byte << 8 | count << 32;
}

uint64_t bits(double value) {
  return std::bit_cast<uint64_t>(value);
}

// Kinds of numbers.
constexpr uint8_t kBoolNumber = 0;
constexpr uint8_t kIntNumber = 1;
constexpr uint8_t kFloatNumber = 2;
constexpr uint8_t kComplexNumber = 3;

ffi::Scalar complex_number(c10::complex<double> value) {
  return {kComplexNumber, {bits(value.real()), bits(value.imag())}};
}

ffi::Scalar number(const at::Scalar& value) {
  if (value.isBoolean()) {
    return {kBoolNumber, {value.to<bool>() ? 1U : 0U, 0}};
  }
  if (value.isFloatingPoint()) {
    return {kFloatNumber, {bits(value.toDouble()), 0}};
  }
  if (value.isComplex()) {
    return complex_number(value.toComplexDouble());
  }
  return {kIntNumber, {static_cast<uint64_t>(value.toLong()), 0}};
}

ffi::Scalar number(const c10::IValue& value) {
  if (value.isDouble()) {
    return {kFloatNumber, {bits(value.toDouble()), 0}};
  }
  if (value.isInt()) {
    return {kIntNumber, {static_cast<uint64_t>(value.toInt()), 0}};
  }
  return number(value.toScalar());
}

template <typename T>
T read(const at::Tensor& tensor) {
  return *tensor.const_data_ptr<T>();
}

// The value of a 0-d tensor on the CPU.
std::optional<ffi::Scalar> number(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return ffi::Scalar{kFloatNumber, {bits(read<double>(tensor)), 0}};
    case at::kFloat:
      return ffi::Scalar{kFloatNumber, {bits(read<float>(tensor)), 0}};
    case at::kHalf:
      return ffi::Scalar{kFloatNumber, {bits(static_cast<float>(read<at::Half>(tensor))), 0}};
    case at::kBFloat16:
      return ffi::Scalar{
          kFloatNumber, {bits(static_cast<float>(read<at::BFloat16>(tensor))), 0}};
    case at::kLong:
      return ffi::Scalar{kIntNumber, {static_cast<uint64_t>(read<int64_t>(tensor)), 0}};
    case at::kInt:
      return ffi::Scalar{kIntNumber, {static_cast<uint64_t>(read<int32_t>(tensor)), 0}};
    case at::kShort:
      return ffi::Scalar{kIntNumber, {static_cast<uint64_t>(read<int16_t>(tensor)), 0}};
    case at::kChar:
      return ffi::Scalar{kIntNumber, {static_cast<uint64_t>(read<int8_t>(tensor)), 0}};
    case at::kByte:
      return ffi::Scalar{kIntNumber, {read<uint8_t>(tensor), 0}};
    case at::kBool:
      return ffi::Scalar{kBoolNumber, {read<bool>(tensor) ? 1U : 0U, 0}};
    case at::kComplexFloat:
      return complex_number(c10::complex<double>(read<c10::complex<float>>(tensor)));
    case at::kComplexDouble:
      return complex_number(read<c10::complex<double>>(tensor));
    default:
      return std::nullopt;
  }
}

// Numbers that programs are worth having for: they make them simpler.
bool is_plain(const ffi::Scalar& scalar) {
  switch (scalar.kind) {
    case kBoolNumber:
      return true;
    case kIntNumber: {
      const auto value = static_cast<int64_t>(scalar.bits[0]);
      return value >= -1 && value <= 2;
    }
    case kFloatNumber: {
      // Not the negative zero.
      const auto value = std::bit_cast<double>(scalar.bits[0]);
      return scalar.bits[0] == 0 || value == 1 || value == -1 || value == 2;
    }
    default:
      return false;
  }
}

std::optional<ArgumentKind> kind_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::OptionalType:
      return kind_of(*type.castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::ListType: {
      const auto element = kind_of(*type.castRaw<c10::ListType>()->getElementType());
      if (!element) {
        return std::nullopt;
      }
      switch (*element) {
        case ArgumentKind::Tensor:
          return ArgumentKind::Tensors;
        case ArgumentKind::Scalar:
          return ArgumentKind::Scalars;
        case ArgumentKind::Int:
          return ArgumentKind::Ints;
        case ArgumentKind::Float:
          return ArgumentKind::Floats;
        case ArgumentKind::Bool:
          return ArgumentKind::Bools;
        default:
          return std::nullopt;
      }
    }
    case c10::TypeKind::TensorType:
      return ArgumentKind::Tensor;
    case c10::TypeKind::NumberType:
      return ArgumentKind::Scalar;
    case c10::TypeKind::BoolType:
      return ArgumentKind::Bool;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::MemoryFormatType:
      return ArgumentKind::Int;
    case c10::TypeKind::FloatType:
      return ArgumentKind::Float;
    case c10::TypeKind::ScalarTypeType:
      return ArgumentKind::Element;
    case c10::TypeKind::StringType:
      return ArgumentKind::Text;
    case c10::TypeKind::GeneratorType:
      return ArgumentKind::Generator;
    case c10::TypeKind::DeviceObjType:
    case c10::TypeKind::LayoutType:
      return ArgumentKind::Opaque;
    default:
      return std::nullopt;
  }
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

} // namespace

bool describe(const c10::FunctionSchema& schema, Overload& overload) {
  const auto& arguments = schema.arguments();
  overload.inputs = arguments.size();
  for (const auto index : c10::irange(arguments.size())) {
    const auto& argument = arguments[index];
    const auto kind = kind_of(*argument.real_type());
    if (!kind) {
      return false;
    }
    if (argument.is_out()) {
      overload.inputs = std::min(overload.inputs, index);
    }
    if (kind == ArgumentKind::Generator) {
      overload.generator = static_cast<int>(index);
    }
    overload.arguments.push_back({*kind, false});
  }
  std::vector<bool> returned(arguments.size());
  for (const auto& result : schema.returns()) {
    const auto kind = kind_of(*result.real_type());
    if (kind != ArgumentKind::Tensor && kind != ArgumentKind::Tensors) {
      return false;
    }
    int source = -1;
    if (const auto* alias = result.alias_info()) {
      for (const auto index : c10::irange(arguments.size())) {
        const auto* other = arguments[index].alias_info();
        if (other != nullptr && *other == *alias) {
          source = static_cast<int>(index);
        }
      }
      // A view is not made by a program.
      if (source < 0 || !alias->isWrite()) {
        return false;
      }
      returned[source] = true;
    }
    overload.returns.push_back({kind == ArgumentKind::Tensors, source});
  }
  for (const auto index : c10::irange(arguments.size())) {
    if (is_written(arguments[index]) && !returned[index]) {
      overload.writes.push_back(static_cast<int>(index));
    }
  }
  return true;
}

size_t EncodedCall::storage(const c10::StorageImpl* storage) {
  const auto address = reinterpret_cast<size_t>(&cell_of(*storage));
  // Lists of hundreds of tensors mostly have as many storages: the last is the likeliest.
  for (size_t index = cells_.size(); index-- > 0;) {
    if (cells_[index] == address) {
      return index;
    }
  }
  cells_.push_back(address);
  return cells_.size() - 1;
}

void EncodedCall::tensor_words(
    c10::SmallVectorImpl<uint64_t>& words,
    uint64_t tag,
    const at::Tensor& tensor) {
  const auto* const impl = tensor.unsafeGetTensorImpl();
  const auto number = storage(impl->unsafe_storage().unsafeGetStorageImpl());
  const auto sizes = impl->sizes();
  const auto strides = impl->strides();
  words.push_back(
      head(tag, element_of(tensor.scalar_type()), number) | sizes.size() << 16);
  words.push_back(static_cast<uint64_t>(impl->storage_offset()));
  words.append(sizes.begin(), sizes.end());
  words.append(strides.begin(), strides.end());
}

void EncodedCall::scalar(const ffi::Scalar& scalar, bool constant, size_t known_from) {
  if (constant || is_plain(scalar)) {
    words_.push_back(head(word::kConstant, scalar.kind, 0));
    words_.push_back(scalar.bits[0]);
    if (scalar.kind == kComplexNumber) {
      words_.push_back(scalar.bits[1]);
    }
    return;
  }
  size_t index = known_from;
  while (index < scalars_.size() &&
         (scalars_[index].kind != scalar.kind || scalars_[index].bits != scalar.bits)) {
    ++index;
  }
  if (index == scalars_.size()) {
    scalars_.push_back(scalar);
  }
  words_.push_back(head(word::kRuntime, scalar.kind, index));
}

bool EncodedCall::tensor(const at::Tensor& tensor, bool constant) {
  if (!tensor.defined()) {
    words_.push_back(word::kNone);
    return true;
  }
  if (C10_LIKELY(tensor.device().type() == kDevice.type())) {
    if (element_of(tensor.scalar_type()) == 0 || tensor.layout() != at::kStrided) {
      return false;
    }
    tensor_words(words_, word::kTensor, tensor);
    return true;
  }
  TORCH_CHECK(
      tensor.is_cpu() && tensor.dim() == 0,
      "Expected all tensors to be on the same device, but found at least two devices, ",
      kDevice.str(), " and ", tensor.device(), "!");
  const auto value = number(tensor);
  if (!value) {
    return false;
  }
  scalar(*value, constant, scalars_.size());
  return true;
}

bool EncodedCall::argument(const Overload& overload, size_t index, c10::IValue& value) {
  const auto [kind, constant] = overload.arguments[index];
  if (value.isNone()) {
    words_.push_back(word::kNone);
    return true;
  }
  switch (kind) {
    case ArgumentKind::Tensor:
      return tensor(value.toTensor(), constant);
    case ArgumentKind::Tensors: {
      if (overload.indices_from_cpu && value.isOptionalTensorList()) {
        auto list = value.toOptionalTensorList();
        for (const auto position : c10::irange(list.size())) {
          const std::optional<at::Tensor> entry = list[position];
          if (entry && entry->defined() && entry->is_cpu()) {
            list = list.copy();
            list.set(position, entry->to(kDevice));
          }
        }
        value = list;
      }
      const auto list = value.toListRef();
      words_.push_back(head(word::kTensors, 0, list.size()));
      for (const auto& entry : list) {
        if (entry.isNone()) {
          words_.push_back(word::kNone);
        } else if (!tensor(entry.toTensor(), constant)) {
          return false;
        }
      }
      return true;
    }
    case ArgumentKind::Scalar:
      scalar(number(value), constant, scalars_.size());
      return true;
    case ArgumentKind::Scalars: {
      const auto list = value.toListRef();
      const auto known_from = scalars_.size();
      words_.push_back(head(word::kScalars, 0, list.size()));
      for (const auto& entry : list) {
        scalar(number(entry), constant, known_from);
      }
      return true;
    }
    case ArgumentKind::Bool:
      words_.push_back(head(word::kBool, 0, value.toBool() ? 1 : 0));
      return true;
    case ArgumentKind::Int:
      words_.push_back(word::kInt);
      words_.push_back(static_cast<uint64_t>(value.toInt()));
      return true;
    case ArgumentKind::Float:
      words_.push_back(word::kFloat);
      words_.push_back(bits(value.toDouble()));
      return true;
    case ArgumentKind::Ints: {
      // A single number stands for a list of any length.
      if (value.isInt()) {
        words_.push_back(head(word::kInts, 0, 1));
        words_.push_back(static_cast<uint64_t>(value.toInt()));
        return true;
      }
      const auto list = value.toListRef();
      words_.push_back(head(word::kInts, 0, list.size()));
      for (const auto& entry : list) {
        words_.push_back(static_cast<uint64_t>(entry.toInt()));
      }
      return true;
    }
    case ArgumentKind::Floats: {
      const auto list = value.toListRef();
      words_.push_back(head(word::kFloats, 0, list.size()));
      for (const auto& entry : list) {
        words_.push_back(bits(entry.toDouble()));
      }
      return true;
    }
    case ArgumentKind::Bools: {
      const auto list = value.toListRef();
      words_.push_back(head(word::kBools, 0, list.size()));
      for (const auto& entry : list) {
        words_.push_back(entry.toBool() ? 1 : 0);
      }
      return true;
    }
    case ArgumentKind::Element: {
      const auto element = element_of(value.toScalarType());
      words_.push_back(head(word::kElement, element, 0));
      return element != 0;
    }
    case ArgumentKind::Text: {
      const auto& text = value.toStringRef();
      words_.push_back(head(word::kText, 0, text.size()));
      for (size_t at = 0; at < text.size(); at += sizeof(uint64_t)) {
        uint64_t piece = 0;
        std::memcpy(&piece, text.data() + at, std::min(sizeof(piece), text.size() - at));
        words_.push_back(piece);
      }
      return true;
    }
    case ArgumentKind::Generator:
    case ArgumentKind::Opaque:
      words_.push_back(word::kOpaque);
      return true;
  }
  return false;
}

bool EncodedCall::encode(const Overload& overload, torch::jit::Stack& stack) {
  words_.clear();
  cells_.clear();
  scalars_.clear();
  words_.push_back(overload.row);
  const auto precision = at::globalContext().float32MatmulPrecision();
  words_.push_back(overload.variant | static_cast<uint64_t>(precision) << 32);
  const auto count = overload.arguments.size();
  const auto first = stack.size() - count;
  for (const auto index : c10::irange(count)) {
    if (index >= overload.inputs) {
      words_.push_back(word::kOut);
    }
    if (!argument(overload, index, stack[first + index])) {
      return false;
    }
  }
  return true;
}

} // namespace tpu_dist::device
