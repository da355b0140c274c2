"""Leaving is silent, with exit code 0, whatever the order and with or without destroy."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Ranks, open_files
from harness.hosts import end_session

PROGRAM = Path(__file__).with_name("leaving.py")
WORLD = 3

# What torch itself says when a program leaves without destroy_process_group.
TORCH_SAYS = "destroy_process_group() was not called"


def free_port():
    """A port for the store of a program; torchrun would do the same."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("how", ["first", "last", "unwaited", "exit"])
def test_programs_leave_in_silence(how):
    """Real interpreters, ended by their own exit: rank 0 first, last, or in any order."""
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(WORLD),
        "OMP_NUM_THREADS": "1",
    }
    children = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), how, BACKEND],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(WORLD)
    ]
    end = time.monotonic() + 60
    try:
        for rank, child in enumerate(children):
            output, _ = child.communicate(timeout=max(1, end - time.monotonic()))
            said = [line for line in output.splitlines() if line and TORCH_SAYS not in line]
            assert said == [], f"rank {rank} said: {output}"
            assert child.returncode == 0, f"rank {rank}"
    finally:
        for child in children:
            end_session(child)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_ranks_destroy_in_any_order(order):
    """One after the other, each while the rest still hold the group."""
    with Ranks(4, init={"timeout": 10}) as ranks:
        ranks.values(use)
        for rank in order:
            assert ranks.end([rank], deadline=5) == [0]
            assert ranks.log(rank) == ""


def use(me):
    """Uses the group in a few sizes."""
    for count in (1, 1000, 1 << 18):
        dist.all_reduce(torch.ones(count))


def leave_early(me):
    """Rank 1 leaves in order; what the others then call cannot end."""
    dist.barrier()
    if me.rank == 1:
        dist.destroy_process_group()
        me.sync()
        return None
    me.sync()
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 1"):
        dist.all_reduce(torch.ones(1))
    return time.monotonic() - start


def test_a_collective_after_a_rank_left():
    """An error at once that names it, not a wait for the timeout."""
    with Ranks(3, init={"timeout": 20}) as ranks:
        values = ranks.values(leave_early, deadline=15)
        assert values[0] < 1
        assert values[2] < 1


def test_many_lives_of_the_default_group():
    """Each works, and none leaves a descriptor behind."""
    from harness.worker import init_process_group

    with Ranks(3, init=None) as ranks:
        init = {
            "backend": BACKEND,
            "timeout": 10,
            "init_method": f"file://{ranks.directory}/store",
        }
        for held in ranks.values(lives, init_process_group, init, 8, deadline=60):
            assert max(held[2:]) <= held[1], held


def test_many_lives_on_one_store():
    """As under torchrun, whose agent keeps one store for all of them."""
    from harness.worker import init_process_group

    with Ranks(3, init=None) as ranks:
        init = {"backend": BACKEND, "timeout": 10, "store": ranks.host_store()}
        ranks.values(lives, init_process_group, init, 4, deadline=60)


def lives(me, init_process_group, init, number):
    """init, use, destroy, over and over; a file store cannot be used twice."""
    held = []
    for cycle in range(number):
        fresh = dict(init)
        if "init_method" in init:
            fresh["init_method"] += f"_{cycle}"
        init_process_group(fresh, me.rank, me.world)
        tensor = torch.full((100,), float(cycle))
        dist.all_reduce(tensor)
        assert tensor[0] == cycle * me.world
        dist.all_reduce(torch.ones(1 << 18))
        me.sync()
        dist.destroy_process_group()
        held.append(len(open_files()))
    return held
