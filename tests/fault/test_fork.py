"""Processes forked after a group was made: they may live, but not use it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Ranks
from torch.utils.data import DataLoader, TensorDataset


def load(me, context):
    """A data loader with worker processes beside a group in use."""
    data = TensorDataset(torch.arange(64, dtype=torch.float32))
    loader = DataLoader(
        data,
        batch_size=8,
        num_workers=1,
        multiprocessing_context=context,
        persistent_workers=True,
    )
    total = torch.zeros(1)
    for _ in range(2):
        for (batch,) in loader:
            work = dist.all_reduce(batch, async_op=True)
            work.wait()
            total += batch.sum()
    del loader
    dist.barrier()
    return total.item()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_workers(context):
    """Batches arrive, collectives between them are right, and both end."""
    with Ranks(2, init={"timeout": 30}) as ranks:
        ranks.values(warm)
        expected = 2 * 2 * sum(range(64))
        assert ranks.values(load, context, deadline=60) == [expected] * 2


def warm(me):
    """Uses every path that may start a thread or map memory."""
    for count in (1, 1000, 1 << 20):
        dist.all_reduce(torch.ones(count))
    dist.all_reduce(torch.ones(1000), async_op=True).wait()


def in_child(me, call):
    """Forks, and lets the child do something with the group."""
    warm(me)
    me.sync()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            start = time.monotonic()
            try:
                CALLS[call]()
                text = "returned"
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(writer, f"{time.monotonic() - start:.3f} {text}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    text = b""
    while part := os.read(reader, 65536):
        text += part
    os.close(reader)
    _, status = os.waitpid(child, 0)
    # The parent is none the worse for it.
    tensor = torch.ones(7)
    dist.all_reduce(tensor)
    dist.all_reduce(torch.ones(1 << 20))
    return text.decode(), status, tensor[0].item()


CALLS = {
    "nothing": lambda: None,
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "asynchronous": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
    "send": lambda: dist.send(torch.ones(1), 1 - dist.get_rank()),
    "barrier": lambda: dist.barrier(),
    "destroy": lambda: dist.destroy_process_group(),
    "new_group": lambda: dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1])),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_forked_child(call):
    """A call there is an error at once that says why; the parent's group is unharmed."""
    with Ranks(2, init={"timeout": 10}) as ranks:
        for text, status, value in ranks.values(in_child, call, deadline=30):
            seconds, said = text.split(" ", 1)
            assert status == 0
            assert float(seconds) < 1, text
            assert value == 2.0
            if call in ("nothing", "destroy"):
                assert said == "returned", text
            else:
                assert said.startswith("DistBackendError"), text
                assert "fork" in said, text


LISTING = """
import os
for name in os.listdir("/proc/self/fd"):
    path = "/proc/self/fd/" + name
    if os.path.islink(path):
        print(os.readlink(path))
"""


def inherited():
    """Sockets and shared memory that a program started by this process inherits."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", LISTING],
        close_fds=False,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return {line for line in done.stdout.splitlines() if line.startswith(("socket", "/memfd"))}


def inherit(me, address):
    """What programs inherit before and after a group is in use."""
    # The store's own connection is torch's, which leaves it open on exec.
    store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
    before = inherited()
    dist.init_process_group(BACKEND, store=store, rank=me.rank, world_size=me.world)
    warm(me)
    return inherited() - before


def test_started_programs_inherit_nothing():
    """All descriptors are closed on exec: a child cannot keep a group's memory alive."""
    with Ranks(2, init=None) as ranks:
        assert ranks.values(inherit, ranks.host_store(), deadline=40) == [set(), set()]
