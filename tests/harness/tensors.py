"""Tensors for the table: every dtype, drawn exactly, in every memory layout.

A value list is drawn from (seed, rank), so any rank can compute what any other rank
brought, and hence the expected result, without communicating.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

import numpy as np
import torch

_CARRIERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex32, torch.complex64, torch.complex128),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    )
}

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
OPAQUE = ("float8_e8m0fnu", "float4_e2m1fn_x2")
COMPLEX = ("complex32", "complex64", "complex128")
SMALL_FLOATS = ("float16", "bfloat16", *FLOAT8)


def category(dtype: str) -> str:
    """What arithmetic a dtype has: bool, int, float, complex or none."""
    if dtype in OPAQUE:
        return "none"
    if dtype == "bool":
        return "bool"
    if dtype in COMPLEX:
        return "complex"
    return "float" if "float" in dtype else "int"


def carrier(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same size on which every tensor operation works."""
    return _CARRIERS[dtype.itemsize]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The logical content of a tensor as one list of bit patterns."""
    tensor = tensor.detach().resolve_neg()
    return tensor.view(carrier(tensor.dtype)).reshape(-1)


def _generator(*seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed)))


def draw_bits(dtype: str, count: int, *seed: int) -> torch.Tensor:
    """`count` elements of any bit pattern, NaN payloads and subnormals included."""
    torch_dtype = DTYPES[dtype]
    if count == 0:
        return torch.empty(0, dtype=torch_dtype)
    if dtype == "bool":
        raw = _generator(*seed).integers(0, 2, count, dtype=np.uint8)
    else:
        raw = np.frombuffer(
            _generator(*seed).bytes(count * torch_dtype.itemsize), np.uint8
        ).copy()
    return torch.from_numpy(raw).view(torch_dtype)


def draw_numbers(dtype: str, op: str, count: int, *seed: int) -> torch.Tensor:
    """`count` elements to be reduced with `op`.

    Those of 16 bits and fewer are chosen so that any order of accumulation in float32 is
    exact; then there is one right result to the bit, and accumulating in the narrow type
    gives another.
    """
    generator = _generator(*seed)
    torch_dtype = DTYPES[dtype]
    kind = category(dtype)
    if dtype == "bool":
        return torch.from_numpy(generator.integers(0, 2, count, dtype=np.uint8)).view(
            torch.bool
        )
    if kind == "int":
        info = torch.iinfo(torch_dtype)
        low, high = info.min, info.max
        if op == "AVG":
            # The sum must not wrap, or the average would be of something else.
            low, high = max(low, -15), min(high, 15)
        numpy_dtype = np.dtype(dtype)
        values = generator.integers(low, high, count, dtype=numpy_dtype, endpoint=True)
        return torch.from_numpy(values)
    if kind == "complex":
        parts = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}[dtype]
        return torch.view_as_complex(draw_numbers(parts, op, 2 * count, *seed).reshape(-1, 2))
    if dtype in ("float32", "float64"):
        if op == "PRODUCT":
            values = generator.uniform(0.5, 2.0, count) * generator.choice([-1.0, 1.0], count)
        else:
            values = generator.standard_normal(count) * generator.choice(
                [1e-3, 1.0, 1e3], count
            )
        return torch.from_numpy(values).to(torch_dtype)
    if op == "PRODUCT":
        values = generator.choice([-1.5, -1.0, 0.5, 1.0, 1.5], count)
    elif dtype in FLOAT8:
        values = generator.integers(-7, 8, count) / 4.0
    else:
        # As many significant bits as the type has.
        limit = 2**8 if dtype == "bfloat16" else 2**11
        values = generator.integers(-limit + 1, limit, count) / 16.0
    return torch.from_numpy(values).to(torch.float32).to(torch_dtype)


@dataclass
class Laid:
    """A tensor in some layout, and the memory around it."""

    tensor: torch.Tensor
    base: torch.Tensor
    before: torch.Tensor | None = None

    def watch(self) -> Laid:
        """Remembers the memory outside the tensor, to be checked by `spilled`."""
        self.before = self._around()
        return self

    def _around(self) -> torch.Tensor:
        around = self.base.clone()
        view = self.tensor.detach()
        around.as_strided(view.size(), view.stride(), view.storage_offset()).zero_()
        return around

    def spilled(self) -> bool:
        """Whether memory outside the tensor changed."""
        return self.before is not None and not torch.equal(self.before, self._around())


LAYOUTS = (
    "contiguous",
    "transposed",
    "strided",
    "offset",
    "channels_last",
    "leaf",
    "mmap",
    "negated",
    "expanded",
    "zero_dim",
)


def fits(layout: str, dtype: str, count: int, *, output: bool) -> bool:
    """Whether there is such a tensor."""
    if layout == "leaf":
        return DTYPES[dtype] in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if layout == "negated":
        # An output that reads as the negative of its memory does not occur in practice.
        return dtype in ("float32", "float64") and not output
    if layout == "expanded":
        return not output and count > 1
    if layout == "zero_dim":
        return count == 1
    if layout == "channels_last":
        return count % 24 == 0 and count > 0
    if layout == "transposed":
        return count % 3 == 0 and count > 0
    if layout == "mmap":
        return count > 0
    return True


def lay(values: torch.Tensor, layout: str) -> Laid:
    """A tensor with the elements of the list `values`, in `layout`.

    `expanded` repeats the first element, so the caller must have made them all equal.
    """
    dtype, count = values.dtype, values.numel()
    raw = values.view(carrier(dtype))
    gap = 0x55
    if layout == "contiguous":
        base = raw.clone()
        return Laid(base.view(dtype), base)
    if layout == "transposed":
        base = raw.reshape(-1, 3).t().contiguous()
        return Laid(base.view(dtype).t(), base)
    if layout == "strided":
        base = torch.full((2 * count + 1,), gap, dtype=raw.dtype)
        base[1::2] = raw
        return Laid(base.view(dtype)[1::2], base)
    if layout == "offset":
        base = torch.full((count + 5,), gap, dtype=raw.dtype)
        base[3 : 3 + count] = raw
        return Laid(base.view(dtype)[3 : 3 + count], base)
    if layout == "channels_last":
        view = raw.reshape(2, 3, 4, -1).contiguous(memory_format=torch.channels_last)
        return Laid(view.view(dtype), view)
    if layout == "leaf":
        base = raw.clone()
        return Laid(base.view(dtype).requires_grad_(), base)
    if layout == "mmap":
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(raw.numpy().tobytes())
        base = torch.from_file(file.name, shared=True, size=count, dtype=raw.dtype)
        os.unlink(file.name)
        return Laid(base.view(dtype), base)
    if layout == "negated":
        base = -values
        return Laid(torch._neg_view(base), base)
    if layout == "expanded":
        base = raw[:1].clone()
        return Laid(base.view(dtype).expand(count), base)
    if layout == "zero_dim":
        base = raw.clone()
        return Laid(base.view(dtype).reshape(()), base)
    raise ValueError(layout)
