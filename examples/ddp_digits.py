"""Trains a classifier of handwritten digits with DistributedDataParallel.

    torchrun --nproc-per-node=4 examples/ddp_digits.py --backend tpu_dist

The data are the 1797 images of 8 x 8 pixels that scikit-learn ships. The same model is
also trained by rank 0 alone on the same global batches: the two loss curves must agree
within the tolerance of float32. Runs with any backend of torch.distributed for CPU
tensors, and on several nodes; the number of ranks must divide the global batch.

Exit code 0: the accuracy is above 95 % and the curves agree.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

GLOBAL_BATCH = 96
SEED = 20


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test images, scaled to [0, 1], with their labels."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(
        images / 16, labels, test_size=0.2, random_state=SEED, stratify=labels
    )
    train_x, test_x = (torch.tensor(part, dtype=torch.float32) for part in split[:2])
    train_y, test_y = (torch.tensor(part) for part in split[2:])
    return TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)


def make_model() -> nn.Module:
    """The classifier, with the same initial weights on every call."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 10)
    )


def train(
    model: nn.Module,
    data: TensorDataset,
    rank: int,
    world: int,
    epochs: int,
    show: bool,
) -> list[float]:
    """Trains `model` on this rank's share of each global batch.

    Returns the loss of each step on this rank's share.
    """
    # The ranks' shares of a batch together are the batch that one rank alone would see.
    sampler: DistributedSampler[object] = DistributedSampler(
        data, num_replicas=world, rank=rank, shuffle=True, seed=SEED, drop_last=True
    )
    loader = DataLoader(data, GLOBAL_BATCH // world, sampler=sampler, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    progress = tqdm(range(epochs), "training", unit="epoch", disable=not show)
    for epoch in progress:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.4f}")
    return losses


@torch.no_grad()
def count_correct(model: nn.Module, data: TensorDataset, rank: int, world: int) -> int:
    """How many of this rank's share of `data` the model gets right."""
    images, labels = (tensor[rank::world] for tensor in data.tensors)
    return int((model(images).argmax(1) == labels).sum())


def main() -> None:
    """Trains, compares, reports."""
    parser = argparse.ArgumentParser(description="DDP on scikit-learn's digits")
    parser.add_argument(
        "--backend", default="tpu_dist", help="tpu_dist, gloo, cpu:tpu_dist, ..."
    )
    parser.add_argument("--epochs", type=int, default=30)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    if GLOBAL_BATCH % world:
        raise SystemExit(f"the number of ranks must divide {GLOBAL_BATCH}, but is {world}")
    first = rank == 0
    if first:
        nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        print(f"{world} ranks on {nodes} node(s), backend {arguments.backend}", flush=True)

    data, held_out = digits()
    model = DistributedDataParallel(make_model())
    start = time.perf_counter()
    losses = torch.tensor(train(model, data, rank, world, arguments.epochs, first))
    seconds = time.perf_counter() - start
    # Shares are equal, so the mean of the ranks' losses is the loss of the batch.
    dist.all_reduce(losses)
    losses /= world
    correct = torch.tensor(count_correct(model.module, held_out, rank, world))
    dist.all_reduce(correct)
    accuracy = correct.item() / len(held_out)

    # Rank 0 trains alone; its verdict is everyone's exit code.
    verdict = torch.zeros((), dtype=torch.int64)
    if first:
        alone = torch.tensor(train(make_model(), data, 0, 1, arguments.epochs, False))
        difference = (losses - alone).abs().max().item()
        agree = torch.allclose(losses, alone, rtol=1e-4, atol=1e-5)
        print(
            f"trained {len(losses)} steps in {seconds:.1f} s: "
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, "
            f"test accuracy {accuracy:.1%} of {len(held_out)} images\n"
            f"single process, same batches: loss {alone[0]:.4f} -> {alone[-1]:.4f}, "
            f"largest difference in {len(alone)} steps {difference:.1e} "
            f"({'within' if agree else 'NOT within'} tolerance)"
        )
        verdict.fill_(int(agree and accuracy > 0.95))
    dist.broadcast(verdict, src=0)

    if first:
        report()
    dist.destroy_process_group()
    if not verdict.item():
        raise SystemExit("the run did not reach 95 % accuracy or the loss curves differ")


def report() -> None:
    """Prints what the backend did on this rank, where the backend tells."""
    try:
        import tpu_dist
    except ImportError:
        return
    if tpu_dist.stats():
        print(f"\nwhat rank 0 did in the groups of tpu_dist:\n{tpu_dist.stats_table()}")


if __name__ == "__main__":
    main()
