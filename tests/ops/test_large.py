"""Tensors of more than 2^31 elements: every offset is 64 bits wide."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Ranks

COUNT = 2**31 + 3
NEEDED = 3 * COUNT
"""Bytes: one tensor a rank, and room for staging."""


def memory_available():
    """Bytes this machine could give."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


def large(me):
    """All-reduces, and moves a slice that lies beyond the 2 GiB mark."""
    tensor = torch.ones(COUNT, dtype=torch.int8)
    tensor[-1] = tensor[2**31] = tensor[2**31 - 1] = 10 + me.rank
    dist.all_reduce(tensor)
    marks = [tensor[i].item() for i in (0, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, -1)]
    # Every element, without another tensor of that size.
    twos = sum(int((part == 2).sum()) for part in tensor.split(1 << 28))
    return marks, twos


@pytest.mark.large
@pytest.mark.skipif(memory_available() < NEEDED, reason=f"needs {NEEDED >> 30} GiB of memory")
@pytest.mark.skipif(
    os.environ.get("TPU_DIST_TEST_LARGE") == "0", reason="TPU_DIST_TEST_LARGE=0"
)
def test_more_than_two_to_the_31_elements():
    """Sums on both sides of the mark."""
    with Ranks(2, init={"timeout": 120}) as ranks:
        for marks, twos in ranks.values(large, deadline=180):
            assert marks == [2, 2, 21, 21, 2, 21]
            assert twos == COUNT - 3
