"""The table's reference itself: it accepts right results and finds wrong ones."""

from __future__ import annotations

import pytest
import torch
from harness.reference import OPS, check, supported
from harness.tensors import DTYPES, LAYOUTS, bits, category, draw_numbers, fits, lay

COUNT = 500
WORLD = 4


def parts_of(dtype, op):
    """What four ranks bring."""
    return [draw_numbers(dtype, op, COUNT, 1, rank) for rank in range(WORLD)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_narrow_accumulation_is_found(dtype):
    """Adding in the narrow type is one rounding too many."""
    parts = parts_of(dtype, "SUM")
    wide = torch.stack(parts).to(torch.float64).sum(0).to(DTYPES[dtype])
    assert check("SUM", dtype, wide, parts) is None
    narrow = parts[0].to(torch.float16 if dtype == "float32" else DTYPES[dtype])
    for part in parts[1:]:
        narrow = narrow + part.to(narrow.dtype)
    assert check("SUM", dtype, narrow.to(DTYPES[dtype]), parts) is not None


@pytest.mark.parametrize("dtype", [d for d in DTYPES if category(d) in ("int", "bool")])
@pytest.mark.parametrize("op", OPS)
def test_one_wrong_element_is_found(dtype, op):
    """A result with one bit flipped is refused, whatever the operator."""
    if not supported(op, dtype):
        pytest.skip(f"{op} has no meaning on {dtype}")
    parts = [p[:1] for p in parts_of(dtype, op)]
    right = [
        value
        for raw in range(256 if dtype == "uint8" else 2)
        if check(
            op, dtype, value := torch.tensor([raw], dtype=torch.uint8).to(DTYPES[dtype]), parts
        )
        is None
    ]
    # At most one value can be right.
    assert len(right) <= 1
    if dtype in ("uint8", "bool"):
        assert len(right) == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_the_values(layout):
    """A laid-out tensor reads as its list, and writing beside it is noticed."""
    count = 1 if layout == "zero_dim" else 48
    values = torch.arange(1, count + 1, dtype=torch.float32)
    if layout == "expanded":
        values[:] = 1
    assert fits(layout, "float32", count, output=False)
    laid = lay(values, layout).watch()
    assert torch.equal(laid.tensor.detach().reshape(-1), values)
    assert not laid.spilled()
    if layout in ("strided", "offset"):
        bits(laid.base)[0] = 7
        assert laid.spilled()
