"""What reductions must give: exact integers, or float64 and wider, in plain NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from harness.tensors import COMPLEX, DTYPES, OPAQUE, SMALL_FLOATS, bits, category

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

FACTORS = (0.5, 0.25, 1.0, 2.0, -0.5, 4.0, -1.0)
"""Factor of each rank for PREMUL_SUM; powers of two, so that products are exact."""

_BITWISE = ("BAND", "BOR", "BXOR")


def supported(op: str, dtype: str) -> bool:
    """Whether `op` has a meaning on `dtype`."""
    kind = category(dtype)
    if kind == "none":
        return False
    if kind == "bool":
        return op not in ("AVG", "PREMUL_SUM")
    if kind == "int":
        # A factor is cast to the type of the tensor: only whole ones keep their meaning.
        return True
    if kind == "complex":
        return op in ("SUM", "AVG", "PREMUL_SUM")
    return op not in _BITWISE


def factor(op: str, dtype: str, rank: int) -> float:
    """The factor rank `rank` gives with PREMUL_SUM."""
    whole = (1.0, 2.0, 3.0, 1.0, 2.0, 1.0, 3.0)
    return (whole if category(dtype) == "int" else FACTORS)[rank]


def _integers(op: str, parts: list[np.ndarray], factors: Sequence[float]) -> np.ndarray:
    width = parts[0].dtype
    wide = np.uint64 if width.kind == "u" else np.int64
    big = [part.astype(wide) for part in parts]
    with np.errstate(over="ignore"):
        if op == "PREMUL_SUM":
            big = [part * wide(f) for part, f in zip(big, factors, strict=True)]
        total = big[0].copy()
        for part in big[1:]:
            if op in ("SUM", "AVG", "PREMUL_SUM"):
                total += part
            elif op == "PRODUCT":
                total *= part
            elif op == "MIN":
                np.minimum(total, part, out=total)
            elif op == "MAX":
                np.maximum(total, part, out=total)
            elif op == "BAND":
                total &= part
            elif op == "BOR":
                total |= part
            elif op == "BXOR":
                total ^= part
    if op == "AVG":
        # Towards zero, as C divides.
        count = wide(len(parts))
        total = (
            np.sign(total) * (np.abs(total) // count) if width.kind == "i" else total // count
        )
    return total.astype(width)


def _booleans(op: str, parts: list[np.ndarray]) -> np.ndarray:
    if op in ("SUM", "MAX", "BOR"):
        total: np.ndarray = np.logical_or.reduce(parts)
    elif op in ("PRODUCT", "MIN", "BAND"):
        total = np.logical_and.reduce(parts)
    else:
        total = np.logical_xor.reduce(parts)
    return total


def _floats(
    op: str, parts: list[np.ndarray], factors: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """The result and the sum of magnitudes, which bounds rounding errors."""
    if op == "PREMUL_SUM":
        parts = [part * f for part, f in zip(parts, factors, strict=True)]
    size = sum(np.abs(part) for part in parts)
    if op in ("SUM", "AVG", "PREMUL_SUM"):
        total = np.add.reduce(parts)
        if op == "AVG":
            total, size = total / len(parts), size / len(parts)
    elif op == "PRODUCT":
        total = np.multiply.reduce(parts)
        size = np.abs(total)
    else:
        total = (np.minimum if op == "MIN" else np.maximum).reduce(parts)
        size = np.zeros_like(total)
    return total, size


def check(op: str, dtype: str, got: torch.Tensor, parts: Sequence[torch.Tensor]) -> str | None:
    """None when `got` is the reduction of `parts`, else what is wrong."""
    assert dtype not in OPAQUE
    world = len(parts)
    factors = [factor(op, dtype, rank) for rank in range(world)]
    got = got.detach().reshape(-1)
    if dtype in COMPLEX:
        real = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}[dtype]
        flat = torch.view_as_real(got).reshape(-1)
        return check(op, real, flat, [torch.view_as_real(p).reshape(-1) for p in parts])
    if category(dtype) == "int":
        return _same(got, torch.from_numpy(_integers(op, [p.numpy() for p in parts], factors)))
    if dtype == "bool":
        return _same(got, torch.from_numpy(_booleans(op, [p.numpy() for p in parts])))
    if dtype in SMALL_FLOATS:
        total, _ = _floats(op, [p.to(torch.float64).numpy() for p in parts], factors)
        if op == "AVG":
            # One float32 division of an exact sum, then the one rounding.
            exact = (total * world).astype(np.float32) / np.float32(world)
            return _same(got, torch.from_numpy(exact).to(DTYPES[dtype]))
        return _same(got, torch.from_numpy(total).to(torch.float32).to(DTYPES[dtype]))
    wide = np.float64 if dtype == "float32" else np.longdouble
    total, size = _floats(op, [p.numpy().astype(wide) for p in parts], factors)
    bound = (world + 1) * np.finfo(dtype).eps * size
    error = np.abs(got.numpy().astype(wide) - total)
    bad = ~(error <= bound)
    if not bad.any():
        return None
    first = int(np.argmax(bad))
    return (
        f"{int(bad.sum())} of {bad.size} elements wrong, first at {first}:"
        f" got {got[first].item()!r}, expected {float(total[first])!r}"
    )


def _same(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    if got.dtype != expected.dtype or got.numel() != expected.numel():
        return (
            f"got {got.dtype} x {got.numel()}, expected {expected.dtype} x {expected.numel()}"
        )
    # Zeros compare equal whatever their sign.
    wrong = (bits(got) != bits(expected)) & ~(_zero(got) & _zero(expected))
    if not wrong.any():
        return None
    first = int(wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements wrong, first at {first}:"
        f" got {got[first].item()!r}, expected {expected[first].item()!r}"
    )


def _zero(tensor: torch.Tensor) -> torch.Tensor:
    numbers = tensor.to(torch.float32) if tensor.dtype.itemsize == 1 else tensor
    return numbers == 0


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """None when two tensors hold the same bit patterns in the same logical order."""
    ours, theirs = bits(got), bits(expected)
    if torch.equal(ours, theirs):
        return None
    if ours.numel() != theirs.numel():
        return f"got {ours.numel()} elements, expected {theirs.numel()}"
    if ours.dtype == torch.complex128:
        # NaN parts differ from themselves; compare what they are made of.
        ours, theirs = (torch.view_as_real(t).view(torch.int64) for t in (ours, theirs))
        if torch.equal(ours, theirs):
            return None
    wrong = (ours != theirs).reshape(-1)
    first = int(wrong.nonzero()[0])
    return f"{int(wrong.sum())} of {wrong.numel()} words differ, first at {first}"
