"""abort() from another thread frees blocked calls of a group and its children."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from harness import Ranks

LIMIT = 0.1
"""Seconds from abort() to the end of a blocked call, by requirement."""


def blocked(me, call):
    """Rank 0 is in a call that cannot end, and aborts it from another thread."""
    dist.barrier()
    if me.rank != 0:
        me.sync()
        return None
    group = dist.group.WORLD
    times = {}

    def abort():
        time.sleep(0.3)
        times["called"] = time.monotonic()
        group.abort()
        times["returned"] = time.monotonic()

    thread = threading.Thread(target=abort)
    thread.start()
    with pytest.raises(dist.DistBackendError) as caught:
        CALLS[call](group)
    ended = time.monotonic()
    thread.join()
    # Idempotent, and later calls fail at once.
    group.abort()
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="abort"):
        dist.all_reduce(torch.ones(1))
    again = time.monotonic() - start
    me.sync()
    return (
        ended - times["called"],
        times["returned"] - times["called"],
        again,
        str(caught.value),
    )


CALLS = {
    "all_reduce": lambda group: dist.all_reduce(torch.ones(1)),
    "large all_reduce": lambda group: dist.all_reduce(torch.ones(1 << 22)),
    "wait": lambda group: dist.all_reduce(torch.ones(1), async_op=True).wait(),
    "recv": lambda group: dist.recv(torch.ones(1), 1),
    "recv from anybody": lambda group: dist.recv(torch.ones(1)),
    "barrier": lambda group: dist.barrier(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_blocked_call_ends(call):
    """In a tenth of a second; abort() itself does not block."""
    attempts = []
    # Another process may have the processor at the wrong moment.
    for _ in range(3):
        with Ranks(2, init={"timeout": 30}) as ranks:
            freed, returned, again, message = ranks.values(blocked, call, deadline=10)[0]
        assert "abort" in message.lower(), message
        attempts.append((freed, returned, again))
        if max(attempts[-1]) < LIMIT:
            return
    pytest.fail(f"seconds until freed, returned, refused: {attempts}")


def family(me, kind):
    """Rank 0 blocks in a group and in two of its children, and aborts the parent."""
    dist.barrier()
    if kind == "split_group":
        children = [dist.split_group(split_ranks=[[0, 1]]) for _ in range(2)]
    else:
        children = [dist.new_group([0, 1]) for _ in range(2)]
    for child in children:
        dist.barrier(group=child)
    me.sync()
    if me.rank != 0:
        me.sync()
        return None
    ended = {}

    def call(index, group):
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except dist.DistBackendError:
            ended[index] = time.monotonic()

    threads = [
        threading.Thread(target=call, args=(index, group))
        for index, group in enumerate([dist.group.WORLD, *children])
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    dist.distributed_c10d._abort_process_group()
    for thread in threads:
        thread.join(5)
    me.sync()
    return {index: when - start for index, when in ended.items()}


@pytest.mark.parametrize("kind", ["split_group", "new_group"])
def test_children_are_aborted_too(kind):
    """All three blocked threads come back."""
    with Ranks(2, init={"timeout": 30}) as ranks:
        times = ranks.values(family, kind, deadline=15)[0]
        assert set(times) == {0, 1, 2}, times
        assert max(times.values()) < 0.5, times


def only_the_child(me):
    """Aborting a child leaves its parent usable."""
    child = dist.new_group([0, 1])
    dist.barrier(group=child)
    # Whoever aborts, aborts what the others are still in.
    me.sync()
    child.abort()
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(1), group=child)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return tensor.tolist()


def test_the_parent_of_an_aborted_child_lives():
    """Abort goes down the family, not up."""
    with Ranks(2, init={"timeout": 10}) as ranks:
        assert ranks.values(only_the_child, deadline=15) == [[2.0] * 3] * 2


def peer(me):
    """Rank 0 aborts while rank 1 waits for it."""
    dist.barrier()
    me.sync()
    if me.rank == 0:
        time.sleep(0.2)
        when = time.monotonic()
        dist.group.WORLD.abort()
        return when
    with pytest.raises(dist.DistBackendError, match="rank 0"):
        dist.all_reduce(torch.ones(1))
    return time.monotonic()


def test_peers_of_an_aborted_group_do_not_wait_for_the_timeout():
    """They learn who aborted."""
    with Ranks(2, init={"timeout": 20}) as ranks:
        aborted, learnt = ranks.values(peer, deadline=15)
        assert learnt - aborted < 1


def unblock_and_begin_anew(me):
    """The process goes on with a new default group."""
    dist.barrier()
    me.sync()
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()
    me.sync()


def test_a_new_group_after_abort():
    """init_process_group works again in the same processes."""
    from harness.worker import init_process_group

    with Ranks(2, init={"timeout": 10}) as ranks:
        ranks.values(unblock_and_begin_anew, deadline=15)
        ranks.values(begin, init_process_group, ranks.host_store(), deadline=15)


def begin(me, init_process_group, store):
    """Makes a default group and uses it."""
    from harness import BACKEND

    prefix = {"backend": BACKEND, "store": store, "timeout": 10}
    init_process_group(prefix, me.rank, me.world)
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
