"""PyTorch's database of operators and sample inputs: each lowered operator against the CPU.

A few samples of each operator and of five types by default; all samples of twelve with
TPU_DIST_TEST_ALL=1.
"""

import copy
import functools
import itertools
import warnings

import opinfo_cases
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map
from tpu_dist._backend import load

# float32 stands for the types that behave as it does.
LIMITS = {torch.float32: 4, torch.int64: 2, torch.bfloat16: 2, torch.float16: 1, torch.bool: 1}


def on_device(value):
    """A sample's argument on the device."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("tpu").requires_grad_(value.requires_grad)
    if isinstance(value, torch.device):
        return torch.device("tpu")
    return value


def moved(sample):
    """The input, arguments and keywords of a sample on the device."""
    keywords = {
        key: "tpu" if key == "device" else tree_map(on_device, value)
        for key, value in sample.kwargs.items()
    }
    if not tensors((sample.input, sample.args, sample.kwargs)):
        keywords["device"] = "tpu"
    return tree_map(on_device, sample.input), tree_map(on_device, sample.args), keywords


def tensors(values):
    """The tensors in nested results."""
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def backward(outputs, inputs):
    """The gradients of all outputs' sum by the inputs that want one."""
    wanting = [value for value in tensors(inputs) if value.requires_grad]
    sources = [value for value in tensors(outputs) if value.requires_grad]
    if not wanting or not sources:
        return []
    # Not all the same, so that each element counts.
    seeds = [
        torch.linspace(0.5, 1.5, value.numel(), dtype=torch.float64)
        .reshape(value.shape)
        .to(value.dtype)
        .to(value.device)
        for value in sources
    ]
    return torch.autograd.grad(sources, wanting, seeds, allow_unused=True)


def exact(value):
    """A sample's argument in float64."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return (
        torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
    )


def compare(op, got, expected, what, reference=None):
    """That results on the device are those of the CPU, with the same types and sizes; or that
    all in all they are as near to those in float64, which `reference` computes."""
    got, expected = tree_flatten(got)[0], tree_flatten(expected)[0]
    assert len(got) == len(expected), what
    for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if not isinstance(theirs, torch.Tensor):
            assert type(ours) is type(theirs), what
            assert ours == pytest.approx(theirs, nan_ok=True), what
            continue
        assert ours.device.type == "tpu", what
        tolerance = opinfo_cases.tolerance(op, theirs.dtype)
        ours, theirs = ours.detach().cpu(), theirs.detach()
        try:
            torch.testing.assert_close(
                ours, theirs, equal_nan=True, msg=lambda text: f"{what}: {text}", **tolerance
            )
        except AssertionError:
            if reference is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
                raise
            truth = tree_flatten(reference())[0][index].detach()
            error, allowed = ((it.double() - truth).abs().max() for it in (ours, theirs))
            if not error <= allowed:
                raise


def run_exactly(op, sample, *, gradients=False):
    """Results of a sample in float64, or their gradients."""
    inputs = tree_map(exact, (sample.input, sample.args, sample.kwargs))
    value, arguments, keywords = inputs
    outputs = op(value, *arguments, **keywords)
    return backward(outputs, inputs) if gradients else outputs


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        pytest.param(
            op, dtype, id=f"{opinfo_cases.name(op)}-{str(dtype).removeprefix('torch.')}"
        )
        for op, dtype in (opinfo_cases.cases() if load().device.is_available() else ())
    ],
)
def test_operator(op, dtype):
    """Results, gradients and the in-place form of an operator are those of the CPU, computed on
    the device."""
    # Among equal elements, of which 16 bits make many, gradients too go to any.
    first_only = opinfo_cases.name(op) in opinfo_cases.FIRST_ONLY
    differentiable = (
        op.supports_autograd
        and not (first_only and dtype.itemsize < 4)
        and dtype.is_floating_point
        and dtype in op.supported_backward_dtypes("cpu")
    )
    samples = op.sample_inputs("cpu", dtype, requires_grad=differentiable)
    limit = None if opinfo_cases.ALL else LIMITS[dtype]
    in_place = op.get_inplace()
    torch.tpu.reset_fallback_stats()
    for number, sample in enumerate(itertools.islice(samples, limit)):
        what = f"sample {number}: {sample.summary()}"
        in_float64 = None
        if dtype.is_floating_point and dtype.itemsize < 4:
            in_float64 = functools.partial(run_exactly, op, copy.copy(sample))
            sample.kwargs = opinfo_cases.with_accumulation(
                sample.kwargs, "accurate", torch.float32
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = op(sample.input, *sample.args, **sample.kwargs)
            value, arguments, keywords = moved(sample)
            got = op(value, *arguments, **keywords)
            if first_only:
                compare(op, got[0], expected[0], what, in_float64)
            else:
                compare(op, got, expected, what, in_float64)
            if differentiable:
                theirs = backward(expected, (sample.input, sample.args, sample.kwargs))
                ours = backward(got, (value, arguments, keywords))
                exactly = in_float64 and functools.partial(in_float64, gradients=True)
                compare(op, ours, theirs, f"gradients of {what}", exactly)
            if in_place is not None and number == 0 and isinstance(sample.input, torch.Tensor):
                changed = sample.input.detach().clone()
                try:
                    in_place(changed, *sample.args, **sample.kwargs)
                except RuntimeError:
                    continue
                ours = value.detach().clone()
                in_place(ours, *arguments, **keywords)
                compare(op, ours, changed, f"in place, {what}")
    if (opinfo_cases.name(op), dtype) not in opinfo_cases.ON_THE_CPU:
        fallbacks = opinfo_cases.lowered() & torch.tpu.fallback_stats().keys()
        assert not [it for it in fallbacks if not opinfo_cases.may_fall_back(it, dtype)]
