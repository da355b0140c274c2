"""torch.distributed.checkpoint: what one world saves, another loads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from single_process import batch, loss_of, make_model, reference
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

BATCHES = 4
"""The global batch is that of four ranks, whatever the world."""


def adam(parameters):
    """An optimizer with state."""
    return torch.optim.AdamW(parameters, lr=0.05)


def sharded(me, layout):
    """The model and its optimizer: sharded over all ranks, over half of them, or whole."""
    model = make_model()
    if layout != "whole":
        mesh = None
        if layout == "hsdp":
            mesh = init_device_mesh("cpu", (2, me.world // 2), mesh_dim_names=("r", "s"))
        for block in (model[0], model[2], model):
            fully_shard(block, mesh=mesh)
    return model, adam(model.parameters())


def step(me, model, updates, number):
    """One training step on this rank's share of the batch; the loss of the whole batch."""
    inputs, labels = zip(
        *(batch(number, part) for part in range(me.rank, BATCHES, me.world)), strict=True
    )
    loss = loss_of(model(torch.cat(inputs)), torch.cat(labels))
    updates.zero_grad()
    loss.backward()
    updates.step()
    whole = loss.detach().clone()
    dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    return whole.item()


class Counter:
    """State that is no tensor."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        """What is saved."""
        return {"count": self.count}

    def load_state_dict(self, state):
        """What is loaded."""
        self.count = state["count"]


def save(me, path, how, layout):
    """Trains two steps and saves."""
    model, updates = sharded(me, layout)
    losses = [step(me, model, updates, number) for number in range(2)]
    states = dict(zip(("model", "optimizer"), get_state_dict(model, updates), strict=True))
    states["progress"] = Counter(2)
    if how == "sync":
        dcp.save(states, checkpoint_id=path)
    else:
        kind = AsyncCheckpointerType[how]
        # The process of an asynchronous save talks over Gloo, which torch insists on.
        saving = dist.new_group(backend="cpu:gloo" if how == "PROCESS" else None)
        future = dcp.async_save(
            states, checkpoint_id=path, async_checkpointer_type=kind, process_group=saving
        )
        # What comes after the call must not be saved.
        step(me, model, updates, 99)
        future.result()
    return losses


def load(me, path, layout):
    """Loads into a model with other weights and trains two more steps."""
    model, updates = sharded(me, layout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, updates), strict=True))
    progress = Counter(0)
    dcp.load({**states, "progress": progress}, checkpoint_id=path)
    set_state_dict(
        model,
        updates,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )
    assert progress.count == 2
    return [step(me, model, updates, number) for number in range(2, 4)]


@pytest.mark.parametrize(
    ("how", "saved", "loads"),
    [
        ("sync", (4, "fsdp"), [(2, "fsdp"), (4, "hsdp"), (1, "whole"), (4, "fsdp")]),
        ("sync", (2, "fsdp"), [(4, "fsdp")]),
        ("sync", (4, "hsdp"), [(2, "fsdp")]),
        ("THREAD", (4, "fsdp"), [(2, "fsdp")]),
        pytest.param("PROCESS", (2, "fsdp"), [(4, "fsdp")], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_resume_with_another_world(worlds, tmp_path, how, saved, loads):
    """The losses after loading are those of training alone without a stop."""
    expected = reference(BATCHES, optimizer=adam, steps=4).losses
    for losses in worlds.values(saved[0], save, str(tmp_path), how, saved[1]):
        assert_close(losses, expected[:2])
    for world, layout in loads:
        for losses in worlds.values(world, load, str(tmp_path), layout):
            assert_close(losses, expected[2:])


def gathered(me):
    """One rank gets the whole state, another gives it to all."""
    model, _ = sharded(me, "fsdp")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    expected = dict(make_model().named_parameters()) if me.rank == 0 else {}
    assert_close(state, {name: p.detach() for name, p in expected.items()})

    other, _ = sharded(me, "fsdp")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(other, state, options=options)
    for one, two in zip(other.parameters(), make_model().parameters(), strict=True):
        assert_close(one.full_tensor(), two.detach())


@pytest.mark.parametrize("world", [2, 4])
def test_whole_state(worlds, world):
    """Gathering to rank 0 and broadcasting from it."""
    worlds.values(world, gathered)
