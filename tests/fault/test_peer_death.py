"""A killed rank is an error on every other rank within a second that says who it was."""

from __future__ import annotations

import itertools
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist
from harness import Ranks

WORLD = 4
VICTIM = 2

OPERATIONS = {
    "all_reduce 8 B": lambda: dist.all_reduce(torch.ones(2)),
    "all_reduce 1 MiB": lambda: dist.all_reduce(torch.ones(1 << 18)),
    "all_reduce 16 MiB": lambda: dist.all_reduce(torch.ones(1 << 22)),
    "asynchronous all_reduce": lambda: dist.all_reduce(
        torch.ones(1 << 10), async_op=True
    ).wait(),
    "broadcast": lambda: dist.broadcast(torch.ones(1 << 16), src=VICTIM),
    "reduce": lambda: dist.reduce(torch.ones(1 << 16), dst=0),
    "all_gather": lambda: dist.all_gather(
        [torch.empty(500) for _ in range(WORLD)], torch.ones(500)
    ),
    "reduce_scatter": lambda: dist.reduce_scatter_single(
        torch.empty(500), torch.ones(500 * WORLD)
    ),
    "all_to_all": lambda: dist.all_to_all_single(torch.empty(4000), torch.ones(4000)),
    "barrier": dist.barrier,
}


def repeat(me, operation, phase):
    """Calls an operation until it fails; the victim does what the phase says."""
    call = OPERATIONS[operation]
    for _ in range(3):
        call()
    me.sync()
    if me.rank == VICTIM:
        me.say("ready")
        if phase != "during":
            time.sleep(60)
    if phase == "before":
        # The others are not in the backend when it happens.
        time.sleep(0.5)
    try:
        for _ in itertools.count():
            call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic()


def check_messages(outcomes, died, pid):
    """Every survivor says in time which rank, host and process is gone."""
    for outcome in outcomes:
        if outcome.rank == VICTIM:
            assert outcome.died
            continue
        assert outcome.ok, outcome
        kind, message, when = outcome.value
        assert kind == "DistBackendError", message
        assert when - died < 1, f"rank {outcome.rank} took {when - died:.2f} s: {message}"
        for part in (f"rank {VICTIM}", socket.gethostname(), str(pid)):
            assert part in message, f"rank {outcome.rank}: no {part!r} in {message!r}"


@pytest.mark.parametrize("phase", ["during", "waiting", "before"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_killed_rank_is_named(operation, phase):
    """Killed in the operation, while the others wait for it, or between operations."""
    died = []
    with Ranks(WORLD, init={"timeout": 30}) as ranks:

        def kill(rank, _):
            # During: some way into the loop. Waiting: when the others are blocked.
            time.sleep(0.05 if phase == "during" else 0.15)
            died.append(ranks.kill(rank))

        outcomes = ranks.run(repeat, operation, phase, deadline=15, on_say=kill)
        since = died[0] + (0.5 if phase == "before" else 0)
        check_messages(outcomes, since, ranks.pids[VICTIM])
        # The group has failed for good; the processes live and leave in peace.
        for outcome in ranks.run(call_again, ranks=[0, 1, 3], deadline=10):
            assert outcome.ok, outcome
            assert outcome.value[0] == "DistBackendError"
        assert ranks.end([0, 1, 3]) == [0, 0, 0]


def call_again(me):
    """One more collective, which must fail at once."""
    start = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        assert time.monotonic() - start < 1
        return type(error).__name__, str(error)


def receive(me, source):
    """Waits for a message that never comes."""
    me.sync()
    if me.rank == VICTIM:
        me.say("ready")
        time.sleep(60)
    try:
        dist.recv(torch.empty(3), src=source)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic()


@pytest.mark.parametrize("source", [VICTIM, None])
def test_a_receiver_learns_of_the_death_of_a_sender(source):
    """Also when it would take a message from anybody."""
    died = []
    with Ranks(WORLD, init={"timeout": 30}) as ranks:

        def kill(rank, _):
            time.sleep(0.15)
            died.append(ranks.kill(rank))

        outcomes = ranks.run(receive, source, deadline=15, on_say=kill)
        check_messages(outcomes, died[0], ranks.pids[VICTIM])


def two_groups(me):
    """Groups with and without the victim."""
    without = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1))
    if me.rank < 2:
        dist.all_reduce(torch.ones(1), group=without)
    me.sync()
    if me.rank == VICTIM:
        os.kill(os.getpid(), 9)
    if me.rank == 3:
        return None
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(1))
    tensor = torch.full((5,), float(me.rank + 1))
    dist.all_reduce(tensor, group=without)
    return tensor.tolist()


def test_other_groups_go_on():
    """A group that the dead rank was not in still works."""
    with Ranks(WORLD, init={"timeout": 10}) as ranks:
        outcomes = ranks.run(two_groups, deadline=20)
        for outcome in outcomes[:2]:
            assert outcome.ok, outcome
            assert outcome.value == [3.0] * 5


def first_use(me):
    """A group whose member died before it was first used."""
    dist.barrier()
    group = dist.new_group([0, 1, VICTIM])
    me.sync()
    if me.rank == VICTIM:
        os.kill(os.getpid(), 9)
    if me.rank == 3:
        return None
    time.sleep(0.2)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match=f"rank {VICTIM}"):
        dist.all_reduce(torch.ones(1), group=group)
    return time.monotonic() - start


def test_first_use_of_a_group_with_a_dead_member():
    """Found at once, not at the timeout."""
    with Ranks(WORLD, init={"timeout": 10}) as ranks:
        for outcome in ranks.run(first_use, deadline=20)[:2]:
            assert outcome.ok, outcome
            assert outcome.value < 1


def stop(me):
    """Stands still in the middle of a loop of collectives."""
    tensor = torch.ones(1000)
    for _ in range(5):
        dist.all_reduce(tensor)
    if me.rank == VICTIM:
        me.say("ready")
    try:
        while True:
            dist.all_reduce(tensor)
    except Exception as error:
        return str(error)


def test_a_stopped_rank_is_named_at_the_timeout():
    """SIGSTOP: the process is there and does not progress."""
    import signal

    with Ranks(WORLD, init={"timeout": 2}) as ranks:
        outcomes = ranks.run(
            stop,
            ranks=range(WORLD),
            deadline=8,
            on_say=lambda rank, _: ranks.kill(rank, signal.SIGSTOP),
        )
        for outcome in outcomes:
            if outcome.rank != VICTIM:
                assert outcome.ok, outcome
                assert str(VICTIM) in outcome.value
