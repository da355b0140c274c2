"""Which of PyTorch's operator tests concern the device, and what is known to differ there.

Names are those of the operator database, with the variant after a dot.
"""

import dataclasses
import functools
import os

import torch
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions
from torch.testing._internal.common_methods_invocations import op_db
from tpu_dist._backend import load

ALL = os.environ.get("TPU_DIST_TEST_ALL") == "1"
"""Whether all samples of all types are wanted."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
MORE_DTYPES = (
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)

# Not compared, and why.
SKIPPED = {
    "as_strided.partial_views": "reads what a copy of the view leaves out",
    "empty": "contents are not defined",
    "empty_like": "contents are not defined",
    "empty_permuted": "contents are not defined",
    "empty_strided": "contents are not defined",
    "new_empty": "contents are not defined",
    "new_empty_strided": "contents are not defined",
    "bernoulli": "random",
    "exponential": "random",
    "log_normal": "random",
    "multinomial": "random",
    "normal": "random",
    "normal.in_place": "random",
    "normal.number_mean": "random",
    "nn.functional.alpha_dropout": "random",
    "nn.functional.dropout": "random",
    "nn.functional.dropout2d": "random",
    "nn.functional.dropout3d": "random",
    "nn.functional.feature_alpha_dropout.with_train": "random",
    "nn.functional.fractional_max_pool2d": "random",
    "nn.functional.fractional_max_pool3d": "random",
    "nn.functional.multi_head_attention_forward": "random: dropout",
    "nn.functional.rrelu": "random",
    "nn.functional.scaled_dot_product_attention": "random: dropout",
    "uniform": "random",
}

# The same, of some types.
SKIPPED_TYPES = {
    ("arange", torch.uint8): "negative numbers, unsigned",
}

# Only the first result is compared, and why.
FIRST_ONLY = {
    "_native_batch_norm_legit": "statistics for the way back, in float32 as on CUDA",
    "native_batch_norm": "statistics for the way back, in float32 as on CUDA",
    "native_layer_norm": "statistics for the way back, in float32 as on CUDA",
    "sort": "which of equal elements comes first is not defined",
    "topk": "which of equal elements comes first is not defined",
}

# (name, dtype or None for all): relative and absolute tolerance, and why not the default.
TOLERANCES = {
    ("addbmm", torch.bfloat16): (0.1, 0.3, "the CPU rounds the sum after each product"),
    ("addbmm", torch.float16): (0.01, 0.04, "the CPU rounds the sum after each product"),
}

# Only when all samples are compared: what the first ones do not need.
if ALL:
    TOLERANCES |= {
        ("native_layer_norm", torch.float32): (1e-4, 1e-4, "of one element: noise about 0"),
        ("nn.functional.normalize", torch.bfloat16): (
            0.02,
            0.04,
            "differences of powers of -2",
        ),
    }

# Samples on which a lowered operator runs on the CPU after all: overload, and why.
FALLBACKS = {
    "convolution_overrideable": "integers",
    "linspace.out": "integers",
    "upsample_bilinear2d": "integers",
    "index.Tensor": "the number of elements that a mask selects is not known",
    "_index_put_impl_": "the number of elements that a mask selects is not known",
}

# Functions that have no formula for complex numbers.
COMPLEX_FALLBACKS = (
    {
        f"{base}{suffix}"
        for base in (
            *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh"),
            *("exp2", "log10", "log2", "nan_to_num"),
        )
        for suffix in ("", "_")
    }
    | {"logaddexp", "logsumexp"}
    | {f"{base}.correction" for base in ("std", "std_mean", "var", "var_mean")}
)

# Wholly so.
ON_THE_CPU = {
    ("complex", torch.float16): "XLA has no complex halves",
    ("polar", torch.float16): "XLA has no complex halves",
}


def name(op):
    """The name of an operator with its variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@functools.cache
def lowered():
    """The overloads that have a program, without the namespace."""
    load().device.register_kernels()
    return {
        overload.removeprefix("aten::")
        for overload in torch._C._dispatch_get_all_op_names()
        if overload.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(overload, "PrivateUse1")
    }


@functools.cache
def _bases():
    return {overload.split(".")[0].rstrip("_") for overload in lowered()}


def concerns_device(op):
    """Whether an operator has a program, or as a function of torch.nn is made of such."""
    is_lowered = op.aten_name is not None and op.aten_name.rstrip("_") in _bases()
    return is_lowered or op.name.startswith("nn.functional.")


def cases():
    """Operators with the types they are tested with."""
    for op in op_db:
        if concerns_device(op) and name(op) not in SKIPPED:
            supported = op.supported_dtypes("cpu")
            for dtype in (*DTYPES, *MORE_DTYPES) if ALL else DTYPES:
                if dtype in supported and (name(op), dtype) not in SKIPPED_TYPES:
                    yield op, dtype


def with_accumulation(keywords, policy, dtype):
    """Keywords of a sample in which torch does not choose by device how it accumulates."""
    options = keywords.get("options")
    if not isinstance(options, LinearCrossEntropyOptions) or options.acc_policy != "auto":
        return keywords
    fixed = dataclasses.replace(options, acc_policy=policy, acc_dtype=dtype)
    return keywords | {"options": fixed}


def may_fall_back(overload, dtype):
    """Whether a lowered operator is known to run on the CPU for some calls."""
    return overload in FALLBACKS or (dtype.is_complex and overload in COMPLEX_FALLBACKS)


def tolerance(op, dtype):
    """The relative and absolute error that results of a type may have."""
    for key in ((name(op), dtype), (name(op), None)):
        if key in TOLERANCES:
            rtol, atol, _ = TOLERANCES[key]
            return {"rtol": rtol, "atol": atol}
    return {
        torch.float32: {"rtol": 1e-4, "atol": 2e-5},
        torch.float64: {"rtol": 1e-7, "atol": 1e-9},
        torch.complex64: {"rtol": 1e-4, "atol": 2e-5},
        torch.complex128: {"rtol": 1e-7, "atol": 1e-9},
        torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
        torch.float16: {"rtol": 3e-3, "atol": 3e-3},
    }.get(dtype, {"rtol": 0, "atol": 0})
