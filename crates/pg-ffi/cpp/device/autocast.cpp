// Automatic mixed precision: torch's own lists, for this device.
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "device.hpp"

// Torch's lists of signatures are written for this namespace.
namespace at::autocast {
namespace {

Tensor refuse_binary_cross_entropy(
    const Tensor& /*self*/,
    const Tensor& /*target*/,
    const std::optional<Tensor>& /*weight*/,
    int64_t /*reduction*/) {
  TORCH_CHECK(
      false,
      "binary_cross_entropy and BCELoss are unsafe to autocast: expected logits and "
      "binary_cross_entropy_with_logits or BCEWithLogitsLoss");
}

torch::Library& library(const char* name) {
  return *new torch::Library(
      torch::Library::IMPL, name, c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
}

} // namespace

static void register_lists() {
  library("_").fallback(torch::CppFunction::makeFallthrough());
  auto& m = library("aten");

#define TPU_DIST_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(TPU_DIST_LOWER_PRECISION)
#undef TPU_DIST_LOWER_PRECISION

#define TPU_DIST_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(TPU_DIST_FP32)
#undef TPU_DIST_FP32

#define TPU_DIST_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(TPU_DIST_FP32_SET_OPT_DTYPE)
#undef TPU_DIST_FP32_SET_OPT_DTYPE

  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(
      KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)

#define TPU_DIST_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(TPU_DIST_PROMOTE)
#undef TPU_DIST_PROMOTE

  m.impl("binary_cross_entropy", TORCH_FN(refuse_binary_cross_entropy));
}

} // namespace at::autocast

namespace tpu_dist::device {

void register_autocast() {
  at::autocast::register_lists();
}

} // namespace tpu_dist::device
