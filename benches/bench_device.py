"""The device beside its peers: eager operators, and a Llama block's training step.

Operators are compared with torch on the CPU, where the same values are computed without a
device in between. The step is compared with torch on the CPU, eager too, and with JAX, which
compiles the whole of it as one program: on the device's own plugin where JAX can load it, else
on the CPU that it brings along. What PJRT takes for a launch, and the executor on top of it,
is measured by ``cargo bench -p tpu-dist-runtime --bench executor``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from tpu_dist import tpu

WIDTH, HEADS, BATCH, LENGTH, VOCABULARY = 256, 8, 4, 128, 1000
RATE, BETAS, EPSILON, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01


def microseconds(call: Callable[[], object], finish: Callable[[], object], count: int) -> float:
    """The time of one call: the best of several rounds, as others use the machine too."""
    rounds = []
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter() - start) / count * 1e6)
        finish()
    return min(rounds)


def operators() -> None:
    """Time until an operator returns, which is before its program has run if that is long."""

    def calls(device: str) -> dict[str, Callable[[], object]]:
        a, b = torch.ones(4, device=device), torch.ones(4, device=device)
        many = [torch.ones(4, device=device) for _ in range(50)]
        matrix = torch.ones(8, 8, device=device)
        leaf = torch.ones(4, device=device, requires_grad=True)
        return {
            "a + b": lambda: a + b,
            "a.add_(b)": lambda: a.add_(b),
            "a * 1.5": lambda: a * 1.5,
            "a.sin()": lambda: a.sin(),
            "matrix @ matrix": lambda: matrix @ matrix,
            "a.view(2, 2)": lambda: a.view(2, 2),
            "a.clone()": lambda: a.clone(),
            "torch.empty(4)": lambda: torch.empty(4, device=device),
            "leaf * 2, with autograd": lambda: leaf * 2,
            "_foreach_add_ of 50": lambda: torch._foreach_add_(many, 1.5),
            "a.sum().item()": lambda: a.sum().item(),
        }

    here, there = calls("cpu"), calls("tpu")
    print(f"{'operator, microseconds':28}{'tpu':>8}{'cpu':>8}")
    for name in here:
        for call in (here[name], there[name]):
            call()
        times = [
            microseconds(call, tpu.synchronize, 1000) for call in (there[name], here[name])
        ]
        print(f"{name:28}{times[0]:8.2f}{times[1]:8.2f}")


class Block(nn.Module):
    """Embedding, one Llama block, and the head."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm_one, self.norm_two, self.norm = (
            nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(3)
        )
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(LENGTH), 1.0 / (10000 ** (torch.arange(half) / half)))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, -1)
        return torch.cat((one * self.cos - two * self.sin, two * self.cos + one * self.sin), -1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = (
            part.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm_one(x)).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(
            self.rotate(q), self.rotate(k), v, is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        y = self.norm_two(x)
        x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def torch_step(
    model: Block, tokens: torch.Tensor, targets: torch.Tensor, device: str
) -> Callable[[], float]:
    """A step of training with AdamW, its loss read."""
    model = model.to(device)
    tokens, targets = tokens.to(device), targets.to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, BETAS, EPSILON, weight_decay=DECAY, foreach=True
    )

    def step() -> float:
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def jax_step(
    model: Block, tokens: torch.Tensor, targets: torch.Tensor, plugin: str | None
) -> tuple[str, Callable[[], float]]:
    """The same step as one program, and on what it runs."""
    import jax
    import jax.numpy as jnp
    from jax._src import xla_bridge

    configure: Any = jax.config.update
    where = "jax's own CPU"
    if plugin:
        xla_bridge.register_plugin("tpu_dist_peer", library_path=plugin)
        configure("jax_platforms", "tpu_dist_peer")
        where = "the same plugin"
    configure("jax_default_matmul_precision", "highest")
    weights = {name: jnp.asarray(value.numpy()) for name, value in model.state_dict().items()}
    cos, sin = weights.pop("cos"), weights.pop("sin")

    def norm(x: Any, name: str) -> Any:
        scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
        return x * scale * weights_of[name + ".weight"]

    def rotate(x: Any) -> Any:
        one, two = jnp.split(x, 2, -1)
        return jnp.concatenate((one * cos - two * sin, two * cos + one * sin), -1)

    weights_of: dict[str, Any] = {}

    def loss_of(weights: Any, tokens: Any, targets: Any) -> Any:
        weights_of.update(weights)

        def linear(x: Any, name: str) -> Any:
            return x @ weights[name + ".weight"].T

        x = weights["embedding.weight"][tokens]
        q, k, v = (
            part.reshape(BATCH, LENGTH, HEADS, -1).transpose(0, 2, 1, 3)
            for part in jnp.split(linear(norm(x, "norm_one"), "qkv"), 3, -1)
        )
        scores = rotate(q) @ rotate(k).transpose(0, 1, 3, 2) / (WIDTH // HEADS) ** 0.5
        causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        y = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), -1) @ v
        x = x + linear(y.transpose(0, 2, 1, 3).reshape(BATCH, LENGTH, WIDTH), "out")
        y = norm(x, "norm_two")
        x = x + linear(jax.nn.silu(linear(y, "gate")) * linear(y, "up"), "down")
        logits = jax.nn.log_softmax(linear(norm(x, "norm"), "head"), -1)
        return -jnp.take_along_axis(logits, targets[..., None], -1).mean()

    @jax.jit
    def update(state: Any, tokens: Any, targets: Any) -> Any:
        weights, means, squares, count = state
        loss, gradients = jax.value_and_grad(loss_of)(weights, tokens, targets)
        one, two = BETAS
        count = count + 1
        means = jax.tree.map(lambda m, g: one * m + (1 - one) * g, means, gradients)
        squares = jax.tree.map(lambda v, g: two * v + (1 - two) * g * g, squares, gradients)

        def moved(w: Any, m: Any, v: Any) -> Any:
            size = jnp.sqrt(v / (1 - two**count)) + EPSILON
            return w * (1 - RATE * DECAY) - RATE * m / (1 - one**count) / size

        weights = jax.tree.map(moved, weights, means, squares)
        return (weights, means, squares, count), loss

    zeros = jax.tree.map(jnp.zeros_like, weights)
    state = (weights, zeros, zeros, jnp.float32(0))
    inputs = jnp.asarray(tokens.numpy()), jnp.asarray(targets.numpy())

    def step() -> float:
        nonlocal state
        state, loss = update(state, *inputs)
        return float(loss)

    return where, step


def plugin_for_jax() -> str | None:
    """The file of the device's plugin, if JAX can load it (in a process that can be lost)."""
    import subprocess
    import sys

    from tpu_dist._backend import load

    plugin = str(load().device.plugin())
    code = (
        "import sys, jax\n"
        "from jax._src import xla_bridge\n"
        "xla_bridge.register_plugin('peer', library_path=sys.argv[1])\n"
        "jax.config.update('jax_platforms', 'peer')\n"
        "assert float(jax.numpy.ones(2).sum()) == 2\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, plugin], capture_output=True, timeout=120, check=False
    )
    return plugin if done.returncode == 0 else None


def steps(count: int) -> None:
    """Times of a training step; all start from the same weights, and losses are compared."""
    torch.manual_seed(0)
    state = Block().state_dict()
    tokens, targets = (torch.randint(0, VOCABULARY, (BATCH, LENGTH)) for _ in range(2))

    def model() -> Block:
        made = Block()
        made.load_state_dict(state)
        return made

    peers = {
        "tpu, eager": torch_step(model(), tokens, targets, "tpu"),
        "torch on the CPU, eager": torch_step(model(), tokens, targets, "cpu"),
    }
    try:
        where, step = jax_step(model(), tokens, targets, plugin_for_jax())
        peers[f"jax.jit on {where}"] = step
    except ImportError:
        print("without JAX")
    print(f"{'Llama block, step, ms':36}{'first':>9}{'median':>9}{'loss':>9}")
    for name, step in peers.items():
        times = []
        for _ in range(count):
            start = time.perf_counter()
            loss = step()
            times.append((time.perf_counter() - start) * 1e3)
        print(f"{name:36}{times[0]:9.1f}{statistics.median(times[2:]):9.2f}{loss:9.4f}")
    print(f"fallbacks: {tpu.fallback_stats() or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="training steps of each peer")
    arguments = parser.parse_args()
    operators()
    print()
    steps(arguments.steps)


if __name__ == "__main__":
    main()
