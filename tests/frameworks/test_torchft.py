"""torchft: replicas leave and join, the others go on; all end with the same weights."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torchft") is None,
        reason="needs torchft: pip install tpu_dist[ft]",
    ),
]


def quorums(me, store):
    """The same process group object, reconfigured for one quorum after the other."""
    from tpu_dist.elastic import ProcessGroupTpuDist

    host, port = store
    group = ProcessGroupTpuDist(timeout=timedelta(seconds=30))
    seen = []
    for number, members in enumerate([[0, 1, 2], [0, 2], [2, 0, 1]]):
        if me.rank not in members:
            me.sync()
            continue
        rank, size = members.index(me.rank), len(members)
        address = f"{host}:{port}/quorum{number}"
        group._rank, group._uuid = rank, number
        group.abort(errored=False)
        from torchft.process_group import create_store_client

        client = create_store_client(address, timeout=timedelta(seconds=30))
        group._pg = group._create_pg(client, rank, size)
        part = torch.full((1000,), float(me.rank + 1))
        group.allreduce([part], dist.AllreduceOptions()).wait()
        seen.append(part.unique().tolist())
        me.sync()
    group.shutdown()
    return seen


def test_a_group_of_changing_size():
    """Three quorums: all, without rank 1, and all in another order."""
    with Ranks(3, init=None) as ranks:
        values = ranks.values(quorums, ranks.host_store(), deadline=90)
    assert values == [[[6.0], [4.0], [6.0]], [[6.0], [6.0]], [[6.0], [4.0], [6.0]]]


def replica(me, lighthouse, steps, dies, alone):
    """Trains one replica under torchft's manager; the loss and the weights at the end."""
    from torchft.manager import Manager
    from torchft.optim import OptimizerWrapper
    from tpu_dist.elastic import ProcessGroupTpuDist

    torch.manual_seed(me.rank)
    model = torch.nn.Linear(4, 1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def load(state):
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupTpuDist(timeout=timedelta(seconds=20)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=20),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica{me.rank}",
        hostname="127.0.0.1",
    )
    updates = OptimizerWrapper(manager, sgd)
    sizes = []
    while manager.current_step() < steps:
        updates.zero_grad()
        generator = torch.Generator().manual_seed(10 * manager.current_step() + me.rank)
        rows = torch.randn(8, 4, generator=generator)
        (model(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
        if dies and sizes[-3:] == [2, 2, 2]:
            os.kill(os.getpid(), signal.SIGKILL)
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        updates.step()
        sizes.append(manager.num_participants())
        if sizes[-1] == 1:
            if 2 in sizes:
                Path(alone).touch()
            # There are steps left when the next one joins.
            time.sleep(0.5)
    manager.shutdown(wait=False)
    return sizes, [p.detach().clone() for p in model.parameters()]


def wait_for(path, seconds=60):
    """Until the file is there."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name}: no step with one replica"
        time.sleep(0.05)


def test_replicas_leave_and_join(tmp_path):
    """One of two dies, a third joins later: survivor and newcomer end with equal weights."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=200,
        heartbeat_timeout_ms=1500,
    )
    try:
        with Ranks(3, init=None) as ranks:
            address = lighthouse.address()
            alone = tmp_path / "alone"
            ranks.start(replica, address, 50, False, str(alone), ranks=[0])
            ranks.start(replica, address, 50, True, str(alone), ranks=[1])
            (dead,) = ranks.finish(60, ranks=[1])
            assert dead.died, dead
            wait_for(alone)
            ranks.start(replica, address, 50, False, str(alone), ranks=[2])
            survivor, newcomer = ranks.finish(120, ranks=[0, 2])
            assert survivor.ok, survivor
            assert newcomer.ok, newcomer
    finally:
        lighthouse.shutdown()
    changes = [size for size, _ in itertools.groupby(survivor.value[0])]
    assert changes[-3:] == [2, 1, 2]
    assert 2 in newcomer.value[0]
    torch.testing.assert_close(survivor.value[1], newcomer.value[1])
