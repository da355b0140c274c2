"""Tensor and data parallelism on a mesh that lies well on the torus.

    torchrun --nproc-per-node=4 examples/tensor_parallel.py

`tpu_dist.mesh.init_device_mesh` makes a stock DeviceMesh whose rank order puts the axis
with the most traffic on the fastest links of the slice. One axis splits every layer, the
other the batch. The result is compared with the same model on one rank.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from tpu_dist.mesh import init_device_mesh

WIDTH, HIDDEN, ROWS = 32, 128, 16


class Mlp(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) to the same."""
        return x + self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


def make_model() -> nn.Sequential:
    """The same weights on every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(Mlp() for _ in range(3)))


def train(model: nn.Module, rows: torch.Tensor) -> list[float]:
    """Five steps towards sorting each row; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        loss = nn.functional.mse_loss(model(rows), rows.sort(1).values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Trains on the mesh and alone."""
    parser = argparse.ArgumentParser(description="tensor and data parallelism")
    parser.add_argument("--backend", default="tpu_dist")
    parser.add_argument("--topology", default="v5e:2x2", help="a slice of as many chips")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    world = dist.get_world_size()
    mesh = init_device_mesh((world // 2, 2), ("data", "tensor"), topology=arguments.topology)
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))

    model = make_model()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model:
        parallelize_module(block, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    share = rows.chunk(world // 2)[mesh["data"].get_local_rank()]
    losses = torch.tensor(train(model, share))
    dist.all_reduce(losses, op=dist.ReduceOp.AVG)

    alone = torch.tensor(train(make_model(), rows))
    if dist.get_rank() == 0:
        print(f"mesh of ranks {mesh.mesh.tolist()} on {arguments.topology}")
        print(f"losses {[f'{loss:.5f}' for loss in losses.tolist()]}")
        print(f"largest difference from one rank: {(losses - alone).abs().max():.1e}")
    dist.destroy_process_group()
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    main()
