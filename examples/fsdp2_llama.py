"""A small Llama, sharded with FSDP2, learns to write Python.

    torchrun --nproc-per-node=4 examples/fsdp2_llama.py

Parameters and optimizer state are sharded over the ranks, the computation is in bfloat16,
gradients are reduced in float32. The text is the source of Python's argparse, byte by byte.
"""

from __future__ import annotations

import argparse
import inspect
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

WIDTH, HEADS, KV_HEADS, LAYERS, LENGTH, BATCH = 128, 8, 4, 4, 64, 8
HEAD = WIDTH // HEADS


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of (batch, heads, length, head width) vectors."""
    frequencies = 10000.0 ** -torch.linspace(0, 1, HEAD // 2 + 1)[:-1]
    angles = torch.arange(x.shape[2])[:, None] * frequencies
    sine, cosine = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    even, odd = x.chunk(2, -1)
    return torch.cat([even * cosine - odd * sine, even * sine + odd * cosine], -1)


class Block(nn.Module):
    """Grouped-query attention and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 6 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        mixed = functional.scaled_dot_product_attention(
            rotate(query), rotate(key), value, is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) to (batch, length, 256)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(description="FSDP2 on a small Llama")
    parser.add_argument("--backend", default="tpu_dist")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    text = torch.tensor(list(inspect.getsource(argparse).encode()))

    torch.manual_seed(0)
    model = Llama()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if rank == 0:
        whole = sum(p.numel() for p in model.parameters())
        local = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
        print(f"{whole} parameters, {local} of them on rank 0 of {world}", flush=True)

    generator = torch.Generator().manual_seed(rank)
    start = time.perf_counter()
    for step in range(arguments.steps):
        begins = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([text[begin : begin + LENGTH + 1] for begin in begins])
        logits = model(rows[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0 or step == arguments.steps - 1:
            mean = loss.detach()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            whole_norm = norm.full_tensor()  # type: ignore[attr-defined]
            if rank == 0:
                print(f"step {step}: loss {mean:.3f}, gradient norm {whole_norm:.2f}")
    if rank == 0:
        speed = arguments.steps * BATCH * LENGTH * world / (time.perf_counter() - start)
        print(f"{speed:.0f} tokens a second")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
