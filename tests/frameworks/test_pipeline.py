"""torch.distributed.pipelining: ranks run different programs, against training alone."""

from __future__ import annotations

import pytest
import torch
from single_process import full
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing import assert_close

ROWS = 8
WIDTH = 6

SCHEDULES = {
    "GPipe": "one",
    "1F1B": "one",
    "Interleaved1F1B": "loop",
    "LoopedBFS": "loop",
    "InterleavedZeroBubble": "loop",
    "ZBVZeroBubble": "v",
    "DualPipeV": "v",
}
"""Every schedule, and how it lays stages on ranks."""


def stage_module(index):
    """Stages differ: in width, in depth and in what they compute."""
    torch.manual_seed(index)
    width, next_width = WIDTH + index, WIDTH + index + 1
    layers = [nn.Linear(width, next_width), nn.Tanh()]
    if index % 2:
        layers += [nn.Linear(next_width, next_width), nn.GELU()]
    return nn.Sequential(*layers).double()


def loss_of(outputs, targets):
    """Mean square error."""
    return (outputs - targets).square().mean()


def data(step, width):
    """The batch of all microbatches."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(ROWS, width, generator=generator, dtype=torch.float64)


def stages_of(rank, world, layout):
    """Indices of the stages on `rank`, and how many there are."""
    if layout == "one":
        return [rank], world
    if layout == "loop":
        return [rank, rank + world], 2 * world
    return [rank, 2 * world - 1 - rank], 2 * world


def alone(count, step):
    """The loss, and the gradients of each stage, of one process."""
    modules = [stage_module(index) for index in range(count)]
    inputs, targets = data(step, WIDTH + count)
    loss = loss_of(nn.Sequential(*modules)(inputs), targets)
    loss.backward()
    return loss.item(), [[p.grad for p in module.parameters()] for module in modules]


def pipeline(me, name, mesh=None):
    """Two steps of a schedule."""
    group = mesh["stage"].get_group() if mesh else None
    rank, world = (group.rank(), group.size()) if group else (me.rank, me.world)
    indices, count = stages_of(rank, world, SCHEDULES[name])
    modules = [stage_module(index) for index in indices]
    if mesh:
        for module in modules:
            fully_shard(module, mesh=mesh["data"])
    stages = [
        PipelineStage(module, index, count, torch.device("cpu"), group=group)
        for module, index in zip(modules, indices, strict=True)
    ]
    single = SCHEDULES[name] == "one"
    schedule = get_schedule_class(name)(
        stages[0] if single else stages,
        n_microbatches=ROWS // 2 if world == 2 else ROWS,
        loss_fn=loss_of,
    )
    for step in range(2):
        expected_loss, gradients = alone(count, step)
        inputs, targets = data(step, WIDTH + count)
        parts: list[torch.Tensor] = []
        for module in modules:
            module.zero_grad()
        first, last = 0 in indices, count - 1 in indices
        schedule.step(
            *([inputs] if first else []),
            **({"target": targets, "losses": parts} if last else {}),
        )
        if last:
            assert_close(torch.stack(parts).mean().item(), expected_loss)
        for module, index in zip(modules, indices, strict=True):
            for parameter, expected in zip(module.parameters(), gradients[index], strict=True):
                assert_close(full(parameter.grad), expected)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule(worlds, world, name):
    """The loss of each step and every stage's gradients are those of the whole model."""
    worlds.values(world, pipeline, name)


def with_fsdp(me, name):
    """Stages over one axis of a mesh; each stage sharded over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    pipeline(me, name, mesh)


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B"])
def test_schedule_with_fsdp(worlds, name):
    """Both data-parallel ranks see the same batch, so the mean gradient is the gradient."""
    worlds.values(4, with_fsdp, name)
