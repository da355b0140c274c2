"""PyTorch's flight recorder records us, and its analyser finds the culprit."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Ranks

WORLD = 4


def recorded(me):
    """What the recorder says of operations that have ended."""
    group = dist.new_group([0, 1], group_desc="pair")
    for count in (1, 1000, 1 << 18):
        dist.all_reduce(torch.ones(count))
    dist.all_gather_single(torch.empty(8), torch.ones(2))
    dist.broadcast(torch.ones(3, dtype=torch.float64), 1)
    dist.all_reduce(torch.ones(5), async_op=True).wait()
    if me.rank < 2:
        dist.barrier(group=group)
    if me.rank == 0:
        dist.send(torch.ones(2), 1)
    if me.rank == 1:
        dist.recv(torch.ones(2), 0)
    end = time.monotonic() + 2
    while True:
        # Completion is reported by a watchdog, a little later than to the caller.
        trace = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(backend=BACKEND))
        entries = trace["entries"]
        if all(e["state"] == "completed" for e in entries) or time.monotonic() > end:
            return entries
        time.sleep(0.02)


def test_operations_are_recorded_as_completed():
    """By name, with sizes and dtypes, in order."""
    with Ranks(WORLD, init={"timeout": 20}) as ranks:
        for rank, entries in enumerate(ranks.values(recorded, deadline=30)):
            assert [e["state"] for e in entries] == ["completed"] * len(entries), entries
            names = [e["profiling_name"] for e in entries]
            assert len(names) == 6 + (2 if rank < 2 else 0), names
            assert entries[0]["input_sizes"] == [[1]]
            assert entries[2]["input_sizes"] == [[1 << 18]]
            assert entries[4]["input_dtypes"] == ["Double"]
            assert all("all_reduce" in n or "allreduce" in n for n in names[:3]), names


def stall(me):
    """Rank 2 leaves out a collective of a certain size."""
    for _ in range(3):
        dist.all_reduce(torch.ones(6))
    if me.rank != 2:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(77))
    me.sync()
    if me.rank == 2:
        torch._C._distributed_c10d._dump_fr_trace_file(me.rank, backend=BACKEND)


def wrong(me):
    """Rank 1 calls another collective."""
    dist.all_reduce(torch.ones(6))
    call = dist.all_reduce if me.rank != 1 else functools.partial(dist.broadcast, src=0)
    with pytest.raises(dist.DistBackendError):
        call(torch.ones(4))
    me.sync()


@pytest.mark.parametrize("fault", [stall, wrong], ids=("skipped", "diverged"))
def test_the_analyser_reads_the_dumps_of_a_failure(fault, tmp_path):
    """A timeout or a mismatch writes a dump on each rank that sees it; no call is needed."""
    pytest.importorskip("tabulate", reason="torchfrtrace needs the package tabulate")
    prefix = str(tmp_path / "dump_")
    environment = {"TORCH_FR_DUMP_TEMP_FILE": prefix, "TORCH_FR_BUFFER_SIZE": "200"}
    with Ranks(WORLD, init={"timeout": 2}, env=environment) as ranks:
        ranks.values(fault, deadline=20)
        # The dump is written in the background: the caller has the error long before.
        expected = {f"dump_{rank}" for rank in range(WORLD)}
        end = time.monotonic() + 30
        while time.monotonic() < end:
            written = {path.name for path in tmp_path.iterdir() if path.stat().st_size}
            if written == expected:
                break
            time.sleep(0.1)
        assert written == expected
    analyser = Path(sys.executable).with_name("torchfrtrace")
    done = subprocess.run(
        [str(analyser), str(tmp_path), "-p", "dump_", "-j", "--allow-incomplete-ranks"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "77" in said if fault is stall else "broadcast" in said.lower(), said
