"""A job that survives the death of a rank: torchrun restarts it, DCP brings it back.

    torchrun --standalone --nproc-per-node=4 --max-restarts=1 \\
        examples/elastic.py --checkpoints /tmp/elastic --kill 7

Trains with FSDP2 and saves a checkpoint every few steps. `--kill STEP` lets rank 1 die in
that step of the first attempt; the second attempt goes on from the last checkpoint, also
with another number of ranks, since the checkpoint is resharded when it is loaded.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard

GLOBAL_BATCH, WIDTH = 24, 16


def batch(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of a step's batch; all ranks' rows do not depend on their number."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator)
    return inputs[rank::world], inputs.cumsum(1)[rank::world]


def newest(directory: Path) -> int:
    """The step of the last complete checkpoint, 0 without one."""
    # DCP writes the metadata last.
    return max((int(path.parent.name) for path in directory.glob("*/.metadata")), default=0)


def main() -> None:
    """Trains, from where the last attempt saved."""
    parser = argparse.ArgumentParser(description="FSDP2 with elastic restarts")
    parser.add_argument("--backend", default="tpu_dist")
    parser.add_argument("--checkpoints", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--kill", type=int, help="step in which rank 1 dies")
    arguments = parser.parse_args()

    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    if GLOBAL_BATCH % world:
        raise SystemExit(f"the number of ranks must divide {GLOBAL_BATCH}, but is {world}")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    start = newest(arguments.checkpoints)
    if start:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        load(state, checkpoint_id=arguments.checkpoints / str(start))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    if rank == 0:
        print(f"attempt {attempt}: {world} ranks, from step {start}", flush=True)

    for step in range(start, arguments.steps):
        inputs, targets = batch(step, rank, world)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if attempt == 0 and rank == 1 and step == arguments.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.5f}", flush=True)
        if (step + 1) % arguments.every == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments}
            save(state, checkpoint_id=arguments.checkpoints / str(step + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
