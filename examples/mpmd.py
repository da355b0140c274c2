"""Four ranks, four programs: two stages of a model, an evaluator and a parameter server.

    torchrun --nproc-per-node=4 examples/mpmd.py

No rank follows another's control flow. The stages train a classifier of digits, stage 0 on
its halves of the batches, stage 1 on the rest, with as many steps as they like; every so
often the last stage pushes its accuracy and both push their weights to the parameter
server, which serves whoever asks, in the order in which they ask. The evaluator asks for
weights when it has time, rebuilds the whole model and tests it. Ranks print and call
`.item()` wherever they want.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

STAGE_0, STAGE_1, SERVER, EVALUATOR = range(4)
BATCH, HIDDEN = 64, 32
PUSH, PULL, STOP = range(3)


def first_stage() -> nn.Module:
    """Pixels to features."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, HIDDEN), nn.Tanh())


def second_stage() -> nn.Module:
    """Features to classes."""
    torch.manual_seed(2)
    return nn.Linear(HIDDEN, 10)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Images scaled to [0, 1], and labels, in a fixed random order."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]


def flat(module: nn.Module) -> torch.Tensor:
    """All weights of a stage as one vector."""
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def ask(request: int) -> None:
    """Tells the server what this rank wants next."""
    dist.send(torch.tensor([dist.get_rank(), request]), SERVER)


def push(module: nn.Module) -> None:
    """Gives the server this stage's weights."""
    ask(PUSH)
    dist.send(flat(module), SERVER)


def train_first(steps: int) -> None:
    """Stage 0: features forward, gradients back."""
    module = first_stage()
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    images, _ = data()
    for step in range(steps):
        start = step * BATCH % 1280
        features = module(images[start : start + BATCH])
        dist.send(features.detach(), STAGE_1)
        gradient = torch.empty_like(features)
        dist.recv(gradient, STAGE_1)
        optimizer.zero_grad()
        features.backward(gradient)
        optimizer.step()
        if step % 20 == 19:
            push(module)
            print(f"stage 0: step {step + 1}, weights {flat(module).norm().item():.2f}")
    ask(STOP)


def train_second(steps: int) -> None:
    """Stage 1: the loss, and an optimizer of its own."""
    module = second_stage()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    _, labels = data()
    for step in range(steps):
        start = step * BATCH % 1280
        features = torch.empty(BATCH, HIDDEN, requires_grad=True)
        dist.recv(features.data, STAGE_0)
        loss = nn.functional.cross_entropy(module(features), labels[start : start + BATCH])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert features.grad is not None
        dist.send(features.grad, STAGE_0)
        if step % 30 == 29:
            push(module)
            print(f"stage 1: step {step + 1}, loss {loss.item():.3f}")
    ask(STOP)


def serve() -> None:
    """The parameter server: keeps the newest weights of both stages."""
    weights = {STAGE_0: flat(first_stage()), STAGE_1: flat(second_stage())}
    versions = {STAGE_0: 0, STAGE_1: 0}
    clients = {STAGE_0, STAGE_1, EVALUATOR}
    while clients:
        message = torch.empty(2, dtype=torch.int64)
        dist.recv(message)  # From anybody.
        client, request = (int(value) for value in message.tolist())
        if request == PUSH:
            dist.recv(weights[client], client)
            versions[client] += 1
        elif request == PULL:
            # Whether the stages have stopped, then their weights.
            dist.send(torch.tensor([int(clients == {EVALUATOR})]), client)
            for stage in (STAGE_0, STAGE_1):
                dist.send(weights[stage], client)
        else:
            clients.remove(client)
    print(f"server: {versions[STAGE_0]} and {versions[STAGE_1]} versions")


def evaluate() -> None:
    """Tests the newest weights until the stages have stopped."""
    stages = (first_stage(), second_stage())
    images, labels = (part[1280:] for part in data())
    finished, tests = torch.zeros(1, dtype=torch.int64), 0
    accuracy = 0.0
    while not finished.item():
        ask(PULL)
        dist.recv(finished, SERVER)
        for module in stages:
            weights = flat(module)
            dist.recv(weights, SERVER)
            nn.utils.vector_to_parameters(weights, module.parameters())
        with torch.no_grad():
            guesses = stages[1](stages[0](images)).argmax(1)
        accuracy, tests = (guesses == labels).float().mean().item(), tests + 1
    ask(STOP)
    print(f"evaluator: accuracy {accuracy:.1%} of {len(labels)} images")
    if accuracy < 0.9:
        raise SystemExit("the accuracy is below 90 %")


def main() -> None:
    """Gives each rank its program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--backend", default="tpu_dist")
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    if dist.get_world_size() != 4:
        raise SystemExit(f"this takes 4 ranks, not {dist.get_world_size()}")
    rank = dist.get_rank()
    if rank == STAGE_0:
        train_first(arguments.steps)
    elif rank == STAGE_1:
        train_second(arguments.steps)
    elif rank == SERVER:
        serve()
    else:
        evaluate()
    # The only thing that all do together.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
