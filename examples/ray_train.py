"""Ray Train with this backend: DDP, checkpoints, and a restart after a worker's death.

    python examples/ray_train.py --workers 4 --kill 3

`TpuDistConfig` is all that is new for a user of TorchTrainer. On a cluster with TPU slices
add `use_tpu=True, topology="2x2x2", accelerator_type="TPU-V5P"` to the ScalingConfig: the
ranks then follow the order of the chips in the slice.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from tpu_dist.ray import TpuDistConfig

GLOBAL_BATCH, WIDTH = 24, 16


def train(settings: dict[str, Any]) -> None:
    """What each worker runs."""
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = torch.load(Path(directory) / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"] + 1
    wrapped = prepare_model(model)

    for step in range(start, settings["steps"]):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(GLOBAL_BATCH, WIDTH, generator=generator)[rank::world]
        loss = nn.functional.mse_loss(wrapped(rows), rows.cumsum(1))
        optimizer.zero_grad()
        loss.backward()
        if checkpoint is None and rank == world - 1 and step == settings["kill"]:
            ray.train.get_all_reported_checkpoints()  # Waits until Ray has the last one.
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        metrics = {"step": step, "loss": loss.item(), "start": start, "world": world}
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if rank == 0:
                print(f"step {step}: loss {loss.item():.5f}", flush=True)
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                torch.save(state, Path(directory) / "state.pt")
                saved = Checkpoint.from_directory(directory)
            ray.train.report(metrics, checkpoint=saved)


def main() -> None:
    """Starts Ray here, trains, prints the result."""
    parser = argparse.ArgumentParser(description="Ray Train")
    parser.add_argument("--backend", help="default: tpu_dist for CPU tensors")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kill", type=int, help="step in which a worker dies")
    arguments = parser.parse_args()

    # Each worker asks Ray for a processor, however many there are.
    ray.init("local", num_cpus=arguments.workers + 1, include_dashboard=False)
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train,
            train_loop_config={"steps": arguments.steps, "kill": arguments.kill},
            torch_config=TpuDistConfig(backend=arguments.backend),
            scaling_config=ScalingConfig(num_workers=arguments.workers),
            run_config=RunConfig(
                storage_path=storage, failure_config=FailureConfig(max_failures=1)
            ),
        )
        result = trainer.fit()
    print(f"finished: {result.metrics}")
    ray.shutdown()


if __name__ == "__main__":
    main()
