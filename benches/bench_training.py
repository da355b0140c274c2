"""Time of a training step with DDP and FSDP2, beside Gloo, for an MLP and a Transformer.

Two ranks, each with one thread. The backends take turns; the figures are medians over
the steps of rank 0.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
STEPS = 9
BACKENDS = ("tpu_dist", "gloo")


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """About 4 million parameters."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(16, 1024)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """About 3 million parameters."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4), torch.randn(2, 64, 256)


def ddp(model: nn.Module, group: dist.ProcessGroup, ranks: list[int]) -> nn.Module:
    """Replicated."""
    return DistributedDataParallel(model, process_group=group)


def fsdp(model: nn.Module, group: dist.ProcessGroup, ranks: list[int]) -> nn.Module:
    """Sharded, layer by layer."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh=ranks)
    blocks = (
        nn.TransformerEncoderLayer if isinstance(model, nn.TransformerEncoder) else nn.Linear
    )
    for module in model.modules():
        if isinstance(module, blocks):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp_in_place(model: nn.Module, group: dist.ProcessGroup, ranks: list[int]) -> nn.Module:
    """The same, with buffers that the process group allocates, where it can."""
    sharded = fsdp(model, group, ranks)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)
    return sharded


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """One step; its time in milliseconds."""
    start = time.perf_counter()
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    return (time.perf_counter() - start) * 1e3


def run(rank: int, directory: str) -> None:
    """What each rank does; rank 0 prints."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "tpu_dist", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS
    )
    ranks = list(range(RANKS))
    groups = {}
    for name in BACKENDS:
        group = dist.new_group(backend=name)
        assert isinstance(group, dist.ProcessGroup)
        groups[name] = group
    if rank == 0:
        print(f"{'model':12} {'method':14} {'tpu_dist ms':>12} {'gloo ms':>10} {'ratio':>7}")
    for make in (mlp, transformer):
        for method in (ddp, fsdp, fsdp_in_place):
            jobs = {}
            for name in BACKENDS:
                torch.manual_seed(0)
                model, batch = make()
                wrapped = method(model, groups[name], ranks)
                optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
                jobs[name] = (wrapped, optimizer, batch)
                step(*jobs[name])
            times: dict[str, list[float]] = {name: [] for name in BACKENDS}
            for _ in range(STEPS):
                for name in BACKENDS:
                    dist.barrier()
                    times[name].append(step(*jobs[name]))
            own, other = (statistics.median(times[name]) for name in BACKENDS)
            if rank == 0:
                print(
                    f"{make.__name__:12} {method.__name__:14} {own:12.1f} {other:10.1f} "
                    f"{other / own:6.2f}x"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="tpu_dist-bench-") as directory:
        spawn(run, args=(directory,), nprocs=RANKS)
