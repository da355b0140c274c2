"""Memory and descriptors stay flat; a group costs next to nothing."""

from __future__ import annotations

import gc
import statistics
import time

import torch
import torch.distributed as dist
from harness import BACKEND, Ranks, open_files, resident_bytes

MIB = 1 << 20


def unwaited(me, number):
    """Starts operations and drops their handles."""
    tensor = torch.zeros(16)

    def burst(count):
        for _ in range(count):
            dist.all_reduce(tensor, async_op=True)
        # What was started before has ended when this ends.
        dist.barrier()
        gc.collect()
        return resident_bytes(), len(open_files())

    warm = burst(number // 5)
    return warm, burst(number)


def test_a_hundred_thousand_unwaited_operations():
    """Buffers go when operations end, not when somebody asks."""
    with Ranks(2, init={"timeout": 60}, env={"TORCH_FR_BUFFER_SIZE": "0"}) as ranks:
        for (memory, files), (later_memory, later_files) in ranks.values(
            unwaited, 100_000, deadline=120
        ):
            assert later_files == files
            assert later_memory - memory < 16 * MIB, (later_memory - memory) / MIB


def groups(me, number):
    """Makes, uses and destroys groups."""
    dist.barrier()

    def cycle():
        group = dist.new_group(list(range(me.world)))
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor[0] == me.world
        dist.barrier(group=group)
        dist.destroy_process_group(group)

    for _ in range(100):
        cycle()
    gc.collect()
    before = resident_bytes(), len(open_files())
    for _ in range(number):
        cycle()
    gc.collect()
    return before, (resident_bytes(), len(open_files()))


def test_five_hundred_groups():
    """Nothing of a destroyed group remains."""
    with Ranks(4, init={"timeout": 60}) as ranks:
        for (memory, files), (later_memory, later_files) in ranks.values(
            groups, 500, deadline=120
        ):
            assert later_files == files
            # torch keeps a little of its own for each group; 20 KiB is generous.
            assert later_memory - memory < 500 * 20 * 1024, (later_memory - memory) / MIB


def cost(me, number):
    """Seconds the backend takes to be created, by group."""
    dist.barrier()
    plugins = dist.distributed_c10d.Backend._plugins
    entry = plugins[BACKEND.upper()]
    spent = []

    def timed(*args):
        start = time.perf_counter()
        backend = entry.creator_fn(*args)
        spent.append(time.perf_counter() - start)
        return backend

    plugins[BACKEND.upper()] = entry._replace(creator_fn=timed)
    try:
        made = [dist.new_group(list(range(me.world))) for _ in range(number)]
        first = time.perf_counter()
        dist.all_reduce(torch.ones(1), group=made[-1])
        first = time.perf_counter() - first
    finally:
        plugins[BACKEND.upper()] = entry
    return spent, first


def test_a_group_of_four_costs_under_a_millisecond():
    """Creating the backend, after the first: no sockets, no round trips."""
    with Ranks(4, init={"timeout": 30}) as ranks:
        for spent, first in ranks.values(cost, 30, deadline=60):
            assert statistics.median(spent[1:]) < 1e-3, spent
            # And the cost has not been moved to the first use: four ranks meet on it.
            assert first < 0.1


def connections(me):
    """Descriptors before and after many groups are in use at once."""
    for count in (1, 1 << 18):
        dist.all_reduce(torch.ones(count))
    before = len(open_files())
    made = [dist.new_group(list(range(me.world))) for _ in range(50)]
    for group in made:
        for count in (1, 1 << 18):
            dist.all_reduce(torch.ones(count), group=group)
    return before, len(open_files())


def test_groups_share_one_fabric():
    """Fifty groups in use hold the descriptors of one."""
    with Ranks(4, init={"timeout": 30}) as ranks:
        for before, after in ranks.values(connections, deadline=60):
            assert after - before <= 4, (before, after)
