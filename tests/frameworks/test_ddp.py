"""DistributedDataParallel with what it can be combined with, against training alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def mean_loss(loss):
    """The loss of the batch of all ranks."""
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return whole.item() / dist.get_world_size()


def train(me, model, updates, *, steps=STEPS):
    """The loop of `reference` on this rank's batches."""
    run = Run()
    for step in range(steps):
        inputs, labels = batch(step, me.rank)
        loss = loss_of(model(inputs), labels)
        updates.zero_grad()
        loss.backward()
        run.gradients.append(named_gradients(model))
        updates.step()
        run.losses.append(mean_loss(loss))
    run.parameters = named_parameters(model)
    return run


OPTIONS = {
    "one bucket": {},
    "a bucket a parameter": {"bucket_cap_mb": 1e-4},
    "gradients are bucket views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-3},
    "static graph": {"static_graph": True},
    "looks for unused parameters": {"find_unused_parameters": True},
}


def with_options(me):
    """Every option set, one after the other."""
    expected = reference(me.world)
    for options in OPTIONS.values():
        model = DistributedDataParallel(make_model(), **options)
        train(me, model, sgd(model.parameters())).check(expected)


def power_sgd(model):
    """PowerSGD of a rank that loses nothing, once its two warm-up steps are over."""
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=18, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def in_python(model):
    """A hook that a user would write."""

    def hook(state, bucket):
        average = bucket.buffer().div_(dist.get_world_size())
        future = dist.all_reduce(average, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)


HOOKS = {
    "all-reduce": (lambda m: m.register_comm_hook(None, default_hooks.allreduce_hook), 1e-12),
    "fp16": (lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook), 2e-3),
    "bf16": (lambda m: m.register_comm_hook(None, default_hooks.bf16_compress_hook), 2e-2),
    "PowerSGD": (power_sgd, 1e-4),
    "in Python": (in_python, 1e-12),
    "built in": (
        lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE),
        1e-12,
    ),
    "fp16 built in": (
        lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
        2e-3,
    ),
}


def with_hooks(me):
    """Every hook, one after the other; lossy ones come as close as their dtype lets them."""
    expected = reference(me.world, steps=5)
    for register, tolerance in HOOKS.values():
        model = DistributedDataParallel(make_model())
        register(model)
        run = train(me, model, sgd(model.parameters()), steps=5)
        run.check(expected, rtol=tolerance, atol=tolerance)


def without_sync(me):
    """Gradients of three batches, reduced with the last."""
    expected = make_model()
    for step in range(3):
        for rank in range(me.world):
            inputs, labels = batch(step, rank)
            (loss_of(expected(inputs), labels) / me.world).backward()
    model = DistributedDataParallel(make_model())
    for step in range(3):
        inputs, labels = batch(step, me.rank)
        if step < 2:
            with model.no_sync():
                loss_of(model(inputs), labels).backward()
        else:
            loss_of(model(inputs), labels).backward()
    torch.testing.assert_close(named_gradients(model), named_gradients(expected))


def with_uneven_inputs(me):
    """Rank r has r + 1 batches; those that are done shadow the others' collectives."""
    expected = make_model()
    updates = sgd(expected.parameters())
    for step in range(me.world):
        updates.zero_grad()
        for rank in range(step, me.world):
            inputs, labels = batch(step, rank)
            (loss_of(expected(inputs), labels) / me.world).backward()
        updates.step()

    model = DistributedDataParallel(make_model())
    updates = sgd(model.parameters())
    with model.join():
        for step in range(me.rank + 1):
            inputs, labels = batch(step, me.rank)
            updates.zero_grad()
            loss_of(model(inputs), labels).backward()
            updates.step()
    torch.testing.assert_close(named_parameters(model), named_parameters(expected))


class Branches(nn.Module):
    """Uses one of two branches, by step."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([make_model(seed=4), make_model(seed=5)])

    def forward(self, inputs, step):
        return self.branches[step % 2](inputs)


def with_unused_parameters(me):
    """The unused branch keeps its gradient; the used one gets the mean."""
    expected, model = (
        Branches(),
        DistributedDataParallel(Branches(), find_unused_parameters=True),
    )
    for step in range(2):
        for rank in range(me.world):
            inputs, labels = batch(step, rank)
            (loss_of(expected(inputs, step), labels) / me.world).backward()
        inputs, labels = batch(step, me.rank)
        loss_of(model(inputs, step), labels).backward()
        torch.testing.assert_close(named_gradients(model), named_gradients(expected))


def adam(parameters):
    """What the sharded optimizer holds on each rank."""
    return torch.optim.Adam(parameters, lr=0.05)


def with_zero(me):
    """The optimizer's state is sharded; steps and the consolidated state are those of Adam."""
    expected = reference(me.world, optimizer=adam)
    for as_view in (False, True):
        model = DistributedDataParallel(make_model())
        updates = ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=torch.optim.Adam,
            lr=0.05,
            parameters_as_bucket_view=as_view,
        )
        train(me, model, updates).check(expected)
        updates.consolidate_state_dict(to=0)
        if me.rank == 0:
            states = updates.state_dict()["state"]
            assert len(states) == len(expected.parameters)
            assert all(state["step"] == STEPS for state in states.values())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        with_options,
        with_hooks,
        without_sync,
        with_uneven_inputs,
        with_unused_parameters,
        with_zero,
    ],
    ids=lambda case: case.__name__,
)
def test_ddp(worlds, world, case):
    """Losses, gradients and parameters are those of training alone on all batches."""
    worlds.values(world, case)
