"""FSDP2 and FSDP1 with what they can be combined with, against training alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND
from single_process import (
    STEPS,
    Run,
    batch,
    loss_of,
    make_model,
    named_gradients,
    named_parameters,
    reference,
    sgd,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard


@dataclass
class Case:
    """One way to shard a model."""

    hsdp: bool = False
    options: dict[str, Any] | None = None
    divide: float | None = None
    """A gradient divisor of the user's, by which the reference is rescaled."""
    allocator: bool = False
    clip: bool = False
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-5


CASES = {
    "plain": Case(),
    "float64": Case(dtype=torch.float64, tolerance=1e-9),
    "keeps parameters after forward": Case(options={"reshard_after_forward": False}),
    "reshards to groups of two": Case(options={"reshard_after_forward": 2}),
    "bf16 compute, float32 reduction": Case(
        options={
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        },
        tolerance=0.05,
    ),
    "bf16 reduction": Case(
        options={
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
            )
        },
        tolerance=0.05,
    ),
    "shards dimension 1": Case(
        options={"shard_placement_fn": lambda p: Shard(1) if p.shape == (12, 18) else None}
    ),
    "offloads": Case(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "divides gradients by its own factor": Case(divide=8.0),
    "buffers of the group": Case(allocator=True),
    "replicates shards (HSDP)": Case(hsdp=True),
    "HSDP, own divisor": Case(hsdp=True, divide=8.0),
    "clips": Case(clip=True),
}


def shard(me: Any, case: Case) -> nn.Module:
    """The model, its blocks sharded, then what is left."""
    model = make_model(case.dtype)
    options = dict(case.options or {})
    if case.hsdp:
        shape = (2, me.world // 2)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
    for block in model:
        if any(True for _ in block.parameters()):
            fully_shard(block, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if case.divide:
                module.set_gradient_divide_factor(case.divide)
            if case.allocator:
                module.set_allocate_memory_from_process_group_for_comm(True)
    return model


def fsdp2(me, name):
    """One case of the table."""
    case = CASES[name]
    expected = make_model(case.dtype)
    alone = sgd(expected.parameters())
    model = shard(me, case)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    if case.allocator and BACKEND != "gloo":
        device = torch.device("cpu")
        assert dist.group.WORLD._get_backend(device).supports_tensor_alloc(device)
    updates = sgd(model.parameters())
    scale = me.world / case.divide if case.divide else 1.0
    close = {"rtol": case.tolerance, "atol": case.tolerance / 10, "check_dtype": False}
    for step in range(STEPS):
        alone.zero_grad()
        for rank in range(me.world):
            inputs, labels = batch(step, rank, case.dtype)
            loss = loss_of(expected(inputs), labels)
            (loss * scale / me.world).backward()
            if rank == me.rank:
                alone_loss = loss.item()
        inputs, labels = batch(step, me.rank, case.dtype)
        loss = loss_of(model(inputs).to(case.dtype), labels)
        updates.zero_grad()
        loss.backward()
        torch.testing.assert_close(loss.item(), alone_loss, **close)
        torch.testing.assert_close(named_gradients(model), named_gradients(expected), **close)
        if case.clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            expected_norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
            torch.testing.assert_close(norm.full_tensor(), expected_norm, **close)
        updates.step()
        alone.step()
    torch.testing.assert_close(named_parameters(model), named_parameters(expected), **close)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_fully_shard(worlds, world, name):
    """Losses and gradients of every step are those of training alone."""
    if world == 2 and name in ("reshards to groups of two", "HSDP, own divisor"):
        pytest.skip("two ranks make no two groups of more than one")
    worlds.values(world, fsdp2, name)


def accumulates(me):
    """Two batches without communication, then one with it."""
    expected = make_model()
    model = shard(me, CASES["float64"])
    for step in range(3):
        for rank in range(me.world):
            inputs, labels = batch(step, rank)
            (loss_of(expected(inputs), labels) / me.world).backward()
        model.set_requires_gradient_sync(step == 2)
        inputs, labels = batch(step, me.rank)
        loss_of(model(inputs), labels).backward()
    torch.testing.assert_close(named_gradients(model), named_gradients(expected))


def prefetches(me):
    """All-gathers of several blocks in flight at once."""
    expected = reference(me.world)
    model = shard(me, CASES["float64"])
    blocks = [module for module in model if isinstance(module, FSDPModule)]
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    model._set_unshard_async_op(True)
    updates = sgd(model.parameters())
    run = Run(losses=expected.losses)
    for step in range(STEPS):
        inputs, labels = batch(step, me.rank)
        updates.zero_grad()
        loss_of(model(inputs), labels).backward()
        run.gradients.append(named_gradients(model))
        updates.step()
    run.parameters = named_parameters(model)
    run.check(expected)


def fsdp1(me):
    """The older API, with every strategy of sharding."""
    expected = reference(me.world)
    strategies = [
        ShardingStrategy.FULL_SHARD,
        ShardingStrategy.SHARD_GRAD_OP,
        ShardingStrategy.NO_SHARD,
    ]
    meshes = [None] * 3
    if me.world == 4:
        strategies.append(ShardingStrategy.HYBRID_SHARD)
        meshes.append(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")))
    for strategy, mesh in zip(strategies, meshes, strict=True):
        model = FullyShardedDataParallel(
            make_model(),
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        updates = sgd(model.parameters())
        run = Run(gradients=expected.gradients)
        for step in range(STEPS):
            inputs, labels = batch(step, me.rank)
            # Not after the forward pass, whose unsharded views would lose their gradients.
            updates.zero_grad()
            loss = loss_of(model(inputs), labels)
            loss.backward()
            updates.step()
            whole = loss.detach().clone()
            dist.all_reduce(whole, op=dist.ReduceOp.AVG)
            run.losses.append(whole.item())
        with FullyShardedDataParallel.summon_full_params(model):
            run.parameters = {
                name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
                for name, parameter in model.named_parameters()
            }
        run.check(expected)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", [accumulates, prefetches, fsdp1], ids=lambda c: c.__name__)
def test_fsdp(worlds, world, case):
    """Values are those of training alone."""
    worlds.values(world, case)
