"""Killed processes leave nothing behind; a small /dev/shm is enough."""

from __future__ import annotations

import signal
import time

import pytest
import torch
import torch.distributed as dist
from harness import Census, Host, Ranks, why_no_hosts

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
WORLD = 4


@pytest.fixture
def host():
    """A host with the /dev/shm of a container."""
    with Host("box", shm="64m") as machine:
        yield machine


def start(host):
    """A world on the host; it meets at a store there."""
    return Ranks(
        WORLD,
        hosts=[host] * WORLD,
        init={"init_method": "tcp://127.0.0.1:29500", "timeout": 30},
    )


def work(me, rounds):
    """Collectives of all sizes, in three groups, synchronous and not."""
    groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([1, 2, 3])]
    for number in range(rounds):
        for group in groups:
            if dist.get_rank(group) < 0:
                continue
            for count in (1, 1 << 10, 1 << 18, 1 << 20):
                tensor = torch.ones(count)
                dist.all_reduce(tensor, group=group)
                assert tensor[-1] == dist.get_world_size(group)
            dist.all_reduce(torch.ones(9), group=group, async_op=True).wait()
        if number == 1:
            me.say("busy")


def settle(host, before):
    """What is left once the kernel has cleaned up after the processes."""
    end = time.monotonic() + 3
    while (left := Census.of(host).since(before)) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def test_nothing_is_left_after_everybody_was_killed(host):
    """SIGKILL in the middle of collectives: no process, file, socket or name remains."""
    before = Census.of(host)
    with start(host) as ranks:
        said = set()

        def kill(rank, _):
            said.add(rank)
            if len(said) == WORLD:
                for victim in range(WORLD):
                    ranks.kill(victim, signal.SIGKILL)

        outcomes = ranks.run(work, 10_000, deadline=30, on_say=kill)
        assert all(o.died for o in outcomes)
        assert settle(host, before) == {}


def test_nothing_is_left_after_a_clean_end(host):
    """Nor when everybody leaves in order."""
    before = Census.of(host)
    with start(host) as ranks:
        ranks.values(work, 3, deadline=30)
        assert ranks.end() == [0] * WORLD
        assert settle(host, before) == {}


def test_nothing_is_left_after_one_was_killed(host):
    """The survivors clean up after the dead."""
    before = Census.of(host)
    with start(host) as ranks:
        said = set()

        def kill(rank, _):
            said.add(rank)
            if len(said) == WORLD:
                ranks.kill(2, signal.SIGKILL)

        outcomes = ranks.run(work, 10_000, deadline=30, on_say=kill)
        assert not any(o.hung for o in outcomes), "\n".join(map(str, outcomes))
        ranks.end()
        assert settle(host, before) == {}


def large(me):
    """Four times 64 MiB in flight on a /dev/shm of 64 MB."""
    tensor = torch.full((1 << 24,), float(me.rank))
    dist.all_reduce(tensor)
    assert tensor[0] == tensor[-1] == 6.0
    gathered = torch.empty(1 << 24)
    dist.all_gather_single(gathered, torch.full((1 << 22,), float(me.rank)))
    assert gathered[:: 1 << 22].tolist() == [0.0, 1.0, 2.0, 3.0]
    works = [dist.all_reduce(torch.ones(1 << 20), async_op=True) for _ in range(16)]
    for handle in works:
        handle.wait()


def test_a_small_dev_shm_is_enough(host):
    """As in a container, and nothing of it is used by name."""
    before = Census.of(host)
    with start(host) as ranks:
        ranks.values(large, deadline=60)
        assert not Census.of(host).shm - before.shm
        assert [ranks.said(rank) for rank in range(WORLD)] == [[]] * WORLD


def test_containers_that_share_only_a_network():
    """Two containers of a pod: own mounts, processes and /dev/shm, one network."""
    with (
        Host("pod", shm="64m") as one,
        Host("pod", shm="64m", network_of=one) as two,
        Ranks(
            WORLD,
            hosts=[one, one, two, two],
            init={"init_method": "tcp://127.0.0.1:29500", "timeout": 30},
        ) as ranks,
    ):
        ranks.values(large, deadline=60)
        for rank in range(WORLD):
            assert len(ranks.said(rank)) <= 1, ranks.said(rank)
