"""The single-process reference: one model, trained on the batches of all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

WIDTH = 12
CLASSES = 5
ROWS = 6
"""Rows of the batch of one rank. Nothing here divides by 4: shards are uneven."""
STEPS = 3


def make_model(dtype: torch.dtype = torch.float64, seed: int = 3) -> nn.Sequential:
    """A small classifier, with the same weights on every call."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 18),
        nn.Tanh(),
        nn.Sequential(nn.Linear(18, 10), nn.Tanh(), nn.Linear(10, 18), nn.Tanh()),
        nn.Linear(18, CLASSES),
    ).to(dtype)


def batch(
    step: int, rank: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rank` sees in `step`."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(CLASSES, (ROWS,), generator=generator)


def global_batch(
    step: int, world: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """What all ranks together see in `step`."""
    inputs, labels = zip(*(batch(step, rank, dtype) for rank in range(world)), strict=True)
    return torch.cat(inputs), torch.cat(labels)


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over the rows: ranks with equal batches average to the whole."""
    return nn.functional.cross_entropy(outputs, labels)


@dataclass
class Run:
    """What a training run produced."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    def check(self, other: Run, rtol: float = 1e-9, atol: float = 1e-11) -> None:
        """Raises where a loss, a gradient of any step or a parameter differs."""
        close = {"rtol": rtol, "atol": atol, "check_dtype": False}
        torch.testing.assert_close(self.losses, other.losses, **close)
        torch.testing.assert_close(self.gradients, other.gradients, **close)
        torch.testing.assert_close(self.parameters, other.parameters, **close)


Optimizer = Callable[..., torch.optim.Optimizer]


def sgd(parameters: object) -> torch.optim.Optimizer:
    """The optimizer of all runs that do not say otherwise."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)  # type: ignore[arg-type]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole of a tensor, which may be a DTensor."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def named_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients by the parameters' names in the unwrapped model."""
    return {
        name.removeprefix("module."): full(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def named_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by their names in the unwrapped model."""
    return {
        name.removeprefix("module."): full(parameter)
        for name, parameter in model.named_parameters()
    }


def reference(
    world: int,
    *,
    optimizer: Optimizer = sgd,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float64,
) -> Run:
    """Trains alone on the batches of `world` ranks."""
    model = make_model(dtype)
    updates = optimizer(model.parameters())
    run = Run()
    for step in range(steps):
        inputs, labels = global_batch(step, world, dtype)
        loss = loss_of(model(inputs), labels)
        updates.zero_grad()
        loss.backward()
        run.gradients.append(named_gradients(model))
        updates.step()
        run.losses.append(loss.item())
    run.parameters = named_parameters(model)
    return run
