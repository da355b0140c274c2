"""Operation x dtype x layout x size x world size, against an independent reference."""

from __future__ import annotations

import pytest
from harness.operations import OPERATIONS, OPS, Case, problems, run_table
from harness.reference import supported
from harness.tensors import DTYPES, LAYOUTS, OPAQUE, category, fits

WORLDS = (1, 2, 3, 4, 7)
MOVEMENT = tuple(name for name, operation in OPERATIONS.items() if not operation.reduces)
REDUCTIONS = tuple(name for name, operation in OPERATIONS.items() if operation.reduces)

# Bytes at which an engine may change its way of working, and one element around them.
KIB = 1024
BYTES = (112, 120, 2 * KIB, 4 * KIB, 64 * KIB, 128 * KIB, 300 * KIB, 3 * KIB * KIB)
SMALL = (0, 1, 3, 17)


def counts(itemsize: int, limit: int) -> list[int]:
    """Element counts on both sides of every size class, up to `limit` bytes."""
    steps = [size // itemsize + d for size in BYTES if size <= limit for d in (-1, 0, 1)]
    return sorted({*SMALL, 256, *steps})


def verify(worlds, world, cases):
    """Runs cases on a world; they must all be right, on all ranks."""
    cases = [case for case in cases if not _is_void(case, world)]
    if not cases:
        pytest.skip("no message to oneself")
    outcomes = worlds.run(world, run_table, cases, deadline=120)
    found = problems(cases, outcomes)
    if found:
        worlds.close()
    assert not found, f"{len(found)} problems\n" + "\n".join(found[:20])


def _is_void(case, world):
    """A message to oneself; an expanded input whose pieces ought to differ."""
    expanded_pieces = case.operation == "reduce_scatter_single" and case.layout == "expanded"
    return (case.operation == "send_recv" and world == 1) or (expanded_pieces and world > 1)


@pytest.mark.parametrize("name", MOVEMENT)
@pytest.mark.parametrize("world", WORLDS)
def test_every_dtype_moves(worlds, name, world):
    """Bit patterns arrive unchanged, whatever the dtype, NaN payloads and -0.0 included."""
    verify(
        worlds,
        world,
        [
            Case(name, dtype, count, asynchronous=bool(count % 2), root=count)
            for dtype in DTYPES
            for count in (0, 1, 17, 1500)
        ],
    )


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_dtype_reduces(worlds, name, world):
    """Sums of 16-bit and 8-bit floats are exact to the bit: float32, rounded once."""
    verify(
        worlds,
        world,
        [
            Case(name, dtype, count, op=op, asynchronous=bool(count % 2), root=count)
            for dtype in DTYPES
            for op in OPS
            if supported(op, dtype)
            for count in (1, 17, 1500)
        ],
    )


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_layout(worlds, name, world):
    """Strided, shared, mapped and autograd tensors; memory around them is untouched."""
    verify(
        worlds,
        world,
        [
            Case(name, dtype, count, layout, root=count, asynchronous=count == 24)
            for dtype in ("float32", "bfloat16", "uint8")
            for layout in LAYOUTS
            for count in (0, 1, 3, 24, 3072, 24 * 1500)
            if fits(layout, dtype, count, output=False)
        ],
    )


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_size(worlds, name, world):
    """Both sides of every size class."""
    cases = [
        Case(name, dtype, count, root=count, asynchronous=bool(count % 2))
        for dtype in ("float32", "int8")
        for count in counts(DTYPES[dtype].itemsize, limit=300 * KIB)
    ]
    # Megabytes cost time in the reference: fewer of them, and not with many ranks.
    if world <= 4:
        cases += [Case(name, "float32", 3 * KIB * KIB // 4 + d) for d in (-1, 0, 1)]
    verify(worlds, world, cases)


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "reduce_scatter_single"])
def test_operators_without_meaning(worlds, name):
    """A typed error on every rank that names the operator and the dtype; nothing hangs."""
    cases = [
        Case(name, dtype, 5, op=op)
        for dtype in DTYPES
        for op in OPS
        if not supported(op, dtype)
        # torch itself refuses these: it cannot even copy a tensor of the first.
        and dtype != "float4_e2m1fn_x2"
        and not (category(dtype) == "complex" and op not in ("SUM", "AVG", "PREMUL_SUM"))
    ]
    assert any(case.dtype in OPAQUE for case in cases)
    # Each alone: a table stops at its first failure.
    for outcome in worlds.run(2, _each_alone, cases, deadline=60):
        assert outcome.ok, outcome
        for case, result in zip(cases, outcome.value, strict=True):
            assert result.failure, f"{case} did not fail on rank {outcome.rank}"
            assert {"TypeError", "ValueError", "RuntimeError"} & set(result.failure.bases), case
            assert case.op in result.failure.message, f"{case}: {result.failure}"
            assert case.dtype in result.failure.message, f"{case}: {result.failure}"


def _each_alone(me, cases):
    return [run_table(me, [case])[0] for case in cases]
