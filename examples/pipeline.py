"""A pipeline: every rank holds other layers and runs a program of its own.

    torchrun --nproc-per-node=4 examples/pipeline.py --schedule Interleaved1F1B

`--schedule` takes any of torch.distributed.pipelining: GPipe, 1F1B, Interleaved1F1B,
LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

WIDTH, ROWS = 16, 64


class Stage(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) to the same."""
        return x + self.layers(x)  # type: ignore[no-any-return]


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean square error."""
    return nn.functional.mse_loss(outputs, targets)


def main() -> None:
    """Trains the pipeline."""
    parser = argparse.ArgumentParser(description="pipeline schedules")
    parser.add_argument("--backend", default="tpu_dist")
    parser.add_argument("--schedule", default="1F1B")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    schedule_class = get_schedule_class(arguments.schedule)
    if issubclass(schedule_class, PipelineScheduleSingle):
        indices, count = [rank], world
    elif arguments.schedule in ("ZBVZeroBubble", "DualPipeV"):  # Down the ranks and back.
        indices, count = [rank, 2 * world - 1 - rank], 2 * world
    else:
        indices, count = [rank, rank + world], 2 * world
    torch.manual_seed(rank)
    modules = [Stage() for _ in indices]
    stages = [
        PipelineStage(module, index, count, torch.device("cpu"))
        for module, index in zip(modules, indices, strict=True)
    ]
    single = issubclass(schedule_class, PipelineScheduleSingle)
    schedule = schedule_class(
        stages[0] if single else stages, n_microbatches=2 * world, loss_fn=loss_of
    )
    optimizer = torch.optim.AdamW(
        [parameter for module in modules for parameter in module.parameters()], lr=3e-3
    )
    print(f"rank {rank} has stages {indices} of {count}", flush=True)

    generator = torch.Generator().manual_seed(0)
    for step in range(arguments.steps):
        inputs = torch.randn(ROWS, WIDTH, generator=generator)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if 0 in indices and count - 1 in indices:
            schedule.step(inputs, target=inputs.flip(1), losses=losses)
        elif 0 in indices:
            schedule.step(inputs)
        elif count - 1 in indices:
            schedule.step(target=inputs.flip(1), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        if losses and (step % 10 == 0 or step == arguments.steps - 1):
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
