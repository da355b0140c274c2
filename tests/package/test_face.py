"""The Python face of the compiled part: options, statistics, argument errors."""

from __future__ import annotations

import math
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import tpu_dist
from harness import Ranks
from torch._C import _distributed_c10d as c10d


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The backend of a default group of one rank, in this process."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    options = tpu_dist.Options(timeout=timedelta(seconds=50))
    dist.init_process_group(
        "tpu_dist",
        store=store,
        rank=0,
        world_size=1,
        pg_options=options,
        timeout=timedelta(minutes=2),
    )
    yield dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.destroy_process_group()


def test_options(alone):
    """Torch's timeout counts; the options say who the group is."""
    assert isinstance(alone, tpu_dist.ProcessGroupTpuDist)
    assert alone.name() == "tpu_dist"
    assert alone.supports_splitting
    assert alone.supports_coalescing
    assert alone.options._timeout == timedelta(minutes=2)
    assert alone.options.global_ranks_in_group == [0]
    assert alone.options.backend == "tpu_dist"


def test_statistics(alone):
    """Calls and bytes are counted by kind."""

    def reduced():
        rows = [row for row in tpu_dist.stats() if row.kind == "all_reduce"]
        return sum(row.calls for row in rows), sum(row.bytes for row in rows)

    calls, sent = reduced()
    for _ in range(3):
        dist.all_reduce(torch.ones(100))
    assert reduced() == (calls + 3, sent + 1200)


def test_table():
    """Columns line up, groups stand together, the longest time first."""
    rows = [
        tpu_dist.Stat("1", 2, "barrier", "tcp", 12, 0, 0, 0.5),
        tpu_dist.Stat("0", 4, "all_reduce", "shm", 3, 2**20, 2**21, 0.001),
        tpu_dist.Stat("0", 4, "send", "shm", 3, 2**19, 0, 0.25),
    ]
    assert tpu_dist.stats_table(rows).splitlines() == [
        "group  ranks  operation   transport  calls   MiB     ms",
        "0          4  send        shm            3  0.50  250.0",
        "0          4  all_reduce  shm            3  1.00    1.0",
        "1          2  barrier     tcp           12  0.00  500.0",
    ]


def options(kind, **values):
    """An options object of c10d with some values set."""
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


ONES = torch.ones(4)
BAD = {
    "no tensor": (lambda b: b.allreduce([], c10d.AllreduceOptions()), "non-empty tensor list"),
    "two tensors": (
        lambda b: b.allreduce([ONES, ONES], c10d.AllreduceOptions()),
        "single-element",
    ),
    "root too large": (
        lambda b: b.broadcast([ONES], options(c10d.BroadcastOptions, rootRank=5)),
        "invalid root rank: 5",
    ),
    "root negative": (
        lambda b: b.reduce([ONES], options(c10d.ReduceOptions, rootRank=-1)),
        "invalid root rank: -1",
    ),
    "sparse broadcast": (
        lambda b: b.broadcast([torch.eye(2).to_sparse()], c10d.BroadcastOptions()),
        "only supports dense tensors, got layout Sparse",
    ),
    "another device": (
        lambda b: b.broadcast([ONES.to("meta")], c10d.BroadcastOptions()),
        "argument 'tensors': unsupported device type meta: expected a tensor on cpu",
    ),
    "shared elements": (
        lambda b: b.allreduce([torch.ones(1).expand(4)], c10d.AllreduceOptions()),
        r"share memory \(shape \[4\], strides \[0\]\)",
    ),
    "sparse maximum": (
        lambda b: b.allreduce(
            [torch.eye(2).to_sparse()],
            options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.MAX),
        ),
        "sparse tensors only works with ReduceOp.SUM",
    ),
    "operator without meaning": (
        lambda b: b.allreduce(
            [ONES], options(c10d.AllreduceOptions, reduceOp=dist.ReduceOp.BXOR)
        ),
        "BXOR.*float32",
    ),
    "mixed types": (
        lambda b: b.allreduce_coalesced([ONES, ONES.int()], c10d.AllreduceCoalescedOptions()),
        "expected Float as the other tensors, got Int",
    ),
    "output too short": (
        lambda b: b.all_gather_single(torch.ones(3), ONES, c10d.AllgatherOptions()),
        "expected 4 elements .*, got 3",
    ),
    "output of another type": (
        lambda b: b.all_gather_single(ONES.int(), ONES, c10d.AllgatherOptions()),
        "argument 'output': invalid tensor type: expected Float",
    ),
    "list too long": (
        lambda b: b.allgather([[ONES, ONES]], [ONES], c10d.AllgatherOptions()),
        "expected length 1, got 2",
    ),
    "list entry too long": (
        lambda b: b.gather([[torch.ones(7)]], [ONES], c10d.GatherOptions()),
        r"argument 'outputs': invalid tensor size at index 0 \(expected \(4\), got \(7\)\)",
    ),
    "input too short": (
        lambda b: b.reduce_scatter_single(ONES, torch.ones(7), c10d.ReduceScatterOptions()),
        "argument 'input': invalid tensor size: expected 4 elements",
    ),
    "splits": (
        lambda b: b.all_to_all_single(ONES, ONES, [3], [4], c10d.AllToAllOptions()),
        "Split sizes doesn't match total dim 0 size",
    ),
    "receiver": (
        lambda b: b.send([ONES], 7, 0),
        "argument 'dst': expected a rank of the group, 0 to 0, got 7",
    ),
    "sender": (
        lambda b: b.recv([ONES], -1, 0),
        "argument 'src': expected a rank of the group, 0 to 0, got -1",
    ),
    "tag": (lambda b: b.send([ONES], 0, -3), "Tag must be nonnegative, got -3"),
    "several messages": (lambda b: b.send([ONES, ONES], 0, 0), "takes a single tensor, got 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(alone, case):
    """They are refused at once, and the group is as good as before."""
    call, message = BAD[case]
    with pytest.raises(RuntimeError, match=message):
        call(alone)
    after = ONES.clone()
    dist.all_reduce(after)
    assert torch.equal(after, ONES)


def test_work(alone):
    """What a finished work tells of itself."""
    tensor = torch.arange(6.0).reshape(2, 3).t()
    expected = tensor.clone()
    work = alone.allreduce([tensor], c10d.AllreduceOptions())
    future = work.get_future().then(lambda done: done.value()[0] + 1)
    assert work.wait(timedelta(seconds=30))
    assert work.is_completed()
    assert work.exception() is None
    assert math.isfinite(work._get_duration())
    assert torch.equal(tensor, expected)
    assert torch.equal(future.wait(), expected + 1)


def test_a_failed_callback_is_the_futures_failure(alone):
    """It does not touch the operation."""
    work = alone.barrier(c10d.BarrierOptions())
    future = work.get_future().then(lambda _: 1 / 0)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        future.wait()
    assert work.wait()


def extended(me):
    """Waits for rank 1, which does not come, with one second more than the group's."""
    if me.rank == 1:
        me.sync()
        return None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend._add_ephemeral_timeout(timedelta(seconds=0.75))
    backend._add_ephemeral_timeout(timedelta(seconds=0.25))
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(2))
    took = time.monotonic() - start
    me.sync()
    return took


def test_extended_timeouts_add_up():
    """`_add_ephemeral_timeout` adds to the timeout of what is started next."""
    with Ranks(2, init={"timeout": 1}) as ranks:
        took = ranks.values(extended, deadline=30)[0]
        assert 1.9 < took < 5
