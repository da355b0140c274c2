"""Operations that cannot end time out, saying what was waited for and who did not come."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Ranks

WORLD = 4


def late(message):
    """The ranks that a timeout's message says were waited for."""
    found = re.search(r"(?i)timed out after [^:]*: missing ranks \[([\d, ]+)\]", message)
    assert found, f"no missing ranks in {message!r}"
    return {int(n) for n in found.group(1).split(",")}


def skip(me, absent):
    """Some ranks leave out the fourth collective."""
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    if me.rank in absent:
        me.sync()
        return None
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(3, 5, dtype=torch.float64))
    except Exception as error:
        took = time.monotonic() - start
        me.sync()
        return type(error).__name__, str(error), took


@pytest.mark.parametrize("absent", [{2}, {1, 3}, {0}])
def test_a_skipped_collective(absent):
    """Group, operation, sequence number, shape, dtype, and the ranks that did not arrive."""
    with Ranks(WORLD, init={"timeout": 2}) as ranks:
        values = ranks.values(skip, absent, deadline=15)
        sequences = set()
        for rank, value in enumerate(values):
            if rank in absent:
                continue
            kind, message, took = value
            assert kind == "DistBackendError", message
            assert 1.9 < took < 3.5, f"rank {rank} took {took:.2f} s"
            for part in ("all_reduce", "[3, 5]", "float64", "group '0'"):
                assert part in message, f"rank {rank}: no {part!r} in {message!r}"
            assert late(message) >= absent, f"{absent} not named in {message!r}"
            assert not late(message) & (set(range(WORLD)) - absent), message
            sequences.add(re.search(r"seq\w*[ #=:]*(?:number )?(\d+)", message).group(1))
        assert len(sequences) == 1, sequences


def patience(me):
    """Waits too short, then long enough."""
    tensor = torch.full((4,), float(me.rank))
    dist.barrier()
    if me.rank == 1:
        time.sleep(1.0)
    work = dist.all_reduce(tensor, async_op=True)
    if me.rank == 1:
        work.wait()
        return tensor.tolist()
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="all_reduce"):
        work.wait(timedelta(seconds=0.1))
    took = time.monotonic() - start
    assert 0.09 < took < 0.5, took
    assert not work.is_completed()
    assert work.wait(timedelta(seconds=10)) is True
    assert work.is_completed()
    assert work.exception() is None
    return tensor.tolist()


def test_a_short_wait_then_a_long_one():
    """wait(timeout) gives up waiting, not the operation."""
    with Ranks(3, init={"timeout": 20}) as ranks:
        assert ranks.values(patience) == [[3.0] * 4] * 3


def silence(me, call):
    """Rank 1 never calls; the others time how long a call holds them."""
    dist.barrier()
    if me.rank == 1:
        me.sync()
        return None
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        CALLS[call](me)
    took = time.monotonic() - start
    me.sync()
    return took, str(caught.value)


def _set_timeout(me):
    dist.set_timeout(timedelta(seconds=1))
    dist.all_reduce(torch.ones(1))


def _subgroup(me):
    group = dist.new_group(
        [0, 1, 2], timeout=timedelta(seconds=1), use_local_synchronization=True
    )
    dist.all_reduce(torch.ones(1), group=group)


CALLS = {
    "barrier(timeout)": lambda me: dist.barrier(timeout=timedelta(seconds=1)),
    "set_timeout": _set_timeout,
    "new_group(timeout)": _subgroup,
    "recv": lambda me: (dist.set_timeout(timedelta(seconds=1)), dist.recv(torch.ones(1), 1)),
    "irecv": lambda me: (
        dist.set_timeout(timedelta(seconds=1)),
        dist.irecv(torch.ones(1), 1).wait(),
    ),
    "async": lambda me: (
        dist.set_timeout(timedelta(seconds=1)),
        dist.all_reduce(torch.ones(1), async_op=True).wait(),
    ),
    "coalesced": lambda me: (
        dist.set_timeout(timedelta(seconds=1)),
        dist.batch_isend_irecv([dist.P2POp(dist.irecv, torch.ones(1), 1)])[0].wait(),
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_way_to_set_a_timeout(call):
    """The shorter timeout counts, and the silent rank is named."""
    with Ranks(3, init={"timeout": 30}) as ranks:
        values = ranks.values(silence, call, deadline=15)
        for rank in (0, 2):
            took, message = values[rank]
            assert 0.9 < took < 2.5, f"rank {rank} took {took:.2f} s"
            assert 1 in late(message), message


def join(me, path):
    """Two of four ranks come to the rendezvous."""
    start = time.monotonic()
    try:
        dist.init_process_group(
            BACKEND,
            init_method=f"file://{path}",
            rank=me.rank,
            world_size=4,
            timeout=timedelta(seconds=2),
        )
        # A lazy backend may look for its peers only now.
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        return (
            [base.__name__ for base in type(error).__mro__],
            str(error),
            time.monotonic() - start,
        )


def test_absent_ranks_at_the_start(tmp_path):
    """An error after the timeout that lists them."""
    with Ranks(2, init=None) as ranks:
        for bases, message, took in ranks.values(join, str(tmp_path / "store"), deadline=15):
            assert "RuntimeError" in bases, message
            assert bases[0].startswith("Dist"), message
            assert took < 4, took
            assert late(message) == {2, 3}, message


def monitored(me, everyone):
    """Ranks 1 and 3 are late for a monitored barrier."""
    dist.monitored_barrier(timeout=timedelta(seconds=10))
    if me.rank in (1, 3):
        me.sync()
        return None
    start = time.monotonic()
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=everyone)
    except Exception as error:
        took = time.monotonic() - start
        me.sync()
        return type(error).__name__, str(error), took


def test_a_monitored_barrier_names_all_that_are_late():
    """With wait_all_ranks every late rank; the other ranks fail too."""
    with Ranks(WORLD, init={"timeout": 20}) as ranks:
        values = ranks.values(monitored, True, deadline=20)
        _kind, message, took = values[0]
        assert took < 4
        found = re.search(r"[Rr]anks? ([\d, ]+) failed to pass", message)
        assert found, message
        numbers = {int(n) for n in found.group(1).split(",")}
        assert numbers == {1, 3}, message
        assert values[2] is not None, "rank 2 passed a barrier that others did not reach"


def straggle(me):
    """A rank is busy for longer than the others wait; afterwards it calls too."""
    dist.barrier()
    if me.rank == 1:
        # Holds the interpreter lock, as a long compilation does.
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            sum(range(1000))
    try:
        dist.all_reduce(torch.ones(3))
    except dist.DistBackendError as error:
        return str(error), time.monotonic()
    return None


def test_a_busy_rank_is_named_and_told():
    """Liveness is not progress: the others name it, and it does not hang when it comes."""
    with Ranks(3, init={"timeout": 1}) as ranks:
        start = time.monotonic()
        values = ranks.values(straggle, deadline=15)
        for rank in (0, 2):
            assert 1 in late(values[rank][0]), values[rank]
        assert values[1] is not None, "the late rank was told that all is well"
        assert values[1][1] - start < 5


def in_order(me):
    """After a timeout the group is not used again by mistake."""
    dist.barrier()
    if me.rank == 0:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(2))
    me.sync()
    tensor = torch.full((2,), float(me.rank))
    start = time.monotonic()
    try:
        dist.all_reduce(tensor)
    except dist.DistBackendError:
        return "failed", time.monotonic() - start
    return tensor.tolist(), time.monotonic() - start


def test_after_a_timeout_all_ranks_agree():
    """Either it fails everywhere or it is right everywhere; never one rank's old data."""
    with Ranks(2, init={"timeout": 1}) as ranks:
        values = ranks.values(in_order, deadline=15)
        results = {str(result) for result, _ in values}
        assert results in ({"failed"}, {"[1.0, 1.0]"}), values
        assert all(took < 3 for _, took in values)
