"""DDP, FSDP2 and DTensor train a small Llama on the device; losses are the CPU's."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from test_training import Llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WORLD = 4
STEPS = 4


class MixedLlama(Llama):
    """Angles in float32 leave queries and keys in their own type."""

    def rotate(self, x):
        return super().rotate(x).to(x.dtype)


def batches(rank):
    """The batches of a rank: tokens and what follows each."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        tokens = torch.randint(0, 40, (2, 16), generator=generator)
        yield tokens, torch.randint(0, 40, (32,), generator=generator)


def ddp(model, mesh):
    return DistributedDataParallel(model)


def fsdp(model, mesh):
    return fully_shard(model, mesh=mesh)


def fsdp_mixed(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def tensor_parallel(model, mesh):
    """The MLP; every rank has the same batches."""
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


METHODS = {"ddp": ddp, "fsdp": fsdp, "fsdp, bf16": fsdp_mixed, "tensor": tensor_parallel}


def train(me, name):
    """Losses of this rank's batches on the device, and on the CPU without the method."""
    os.environ["TPU_DIST_FALLBACK"] = "error"
    torch.manual_seed(0)
    alone = MixedLlama()
    mesh = init_device_mesh("tpu", (me.world,))
    model = METHODS[name](copy.deepcopy(alone).to("tpu"), mesh)
    # Torch's foreach kernels do not take DTensors and plain tensors together.
    updates = torch.optim.AdamW(model.parameters(), 3e-3, foreach=name != "tensor")
    alone_updates = torch.optim.AdamW(alone.parameters(), 3e-3)
    source = (lambda rank: 0) if name == "tensor" else (lambda rank: rank)
    own = batches(source(me.rank))
    everyone = [batches(source(rank)) for rank in range(me.world)]
    losses = []
    for tokens, following in own:
        updates.zero_grad()
        loss = functional.cross_entropy(model(tokens.to("tpu")).float(), following.to("tpu"))
        loss.backward()
        updates.step()
        alone_updates.zero_grad()
        for rank, (tokens, following) in enumerate(next(b) for b in everyone):
            alone_loss = functional.cross_entropy(alone(tokens), following)
            (alone_loss / me.world).backward()
            if rank == me.rank:
                expected = alone_loss.item()
        alone_updates.step()
        losses.append((loss.item(), expected))
    assert torch.tpu.fallback_stats() == {}
    dist.barrier()
    return losses


@pytest.fixture(scope="module")
def ranks():
    """Four ranks for all methods."""
    with Ranks(WORLD, init={"timeout": 120}, start_deadline=120) as ranks:
        yield ranks


@pytest.mark.parametrize("name", METHODS)
def test_losses(ranks, name):
    """Step by step as on the CPU, and nothing falls back to it."""
    outcomes = ranks.run(train, name, deadline=280)
    assert all(o.ok for o in outcomes), [str(o) for o in outcomes if not o.ok]
    tolerance = 3e-2 if "bf16" in name else 1e-4
    for outcome in outcomes:
        for got, expected in outcome.value:
            assert got == pytest.approx(expected, rel=tolerance)
