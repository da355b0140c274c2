"""Ranks that call different things find out at once, on every rank, with both calls shown."""

from __future__ import annotations

import re
import time
import warnings
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from harness import Ranks

WORLD = 3
ODD = 1
FILL = 7


def ones(count, dtype=torch.float32):
    """A tensor with content that no result of these calls has."""
    return torch.full((count,), FILL, dtype=dtype)


def all_reduce(count=64, dtype=torch.float32, op=dist.ReduceOp.SUM):
    """Returns what the call may write to, and the call."""
    tensor = ones(count, dtype)
    return [tensor], lambda **kw: dist.all_reduce(tensor, op, **kw)


def broadcast(root=0, count=64, dtype=torch.float32):
    tensor = ones(count, dtype)
    return [tensor], lambda **kw: dist.broadcast(tensor, root, **kw)


def reduce(root=0):
    tensor = ones(64)
    return [tensor], lambda **kw: dist.reduce(tensor, root, **kw)


def all_gather(count=64):
    outputs = [ones(count) for _ in range(WORLD)]
    return outputs, lambda **kw: dist.all_gather(outputs, ones(count), **kw)


def gather(root=0):
    outputs = [ones(64) for _ in range(WORLD)]
    mine = outputs if dist.get_rank() == root else None
    return outputs, lambda **kw: dist.gather(torch.zeros(64), mine, root, **kw)


def scatter(root=0):
    output = ones(64)
    inputs = [torch.zeros(64) for _ in range(WORLD)] if dist.get_rank() == root else None
    return [output], lambda **kw: dist.scatter(output, inputs, root, **kw)


def reduce_scatter(count=64):
    output = ones(count)
    return [output], lambda **kw: dist.reduce_scatter_single(
        output, torch.zeros(count * WORLD), **kw
    )


def all_to_all(out=(4, 4, 4), back=(4, 4, 4)):
    output = ones(sum(back))
    source = torch.zeros(sum(out))
    return [output], lambda **kw: dist.all_to_all_single(
        output, source, list(back), list(out), **kw
    )


def coalesced(number=2):
    tensors = [ones(8) for _ in range(number)]

    def call(**kw):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return dist.all_reduce_coalesced(tensors, **kw)

    return tensors, call


def barrier():
    return [], lambda **kw: dist.barrier(**kw)


CALLS = {
    f.__name__: f
    for f in (
        all_reduce,
        broadcast,
        reduce,
        all_gather,
        gather,
        scatter,
        reduce_scatter,
        all_to_all,
        coalesced,
        barrier,
    )
}


@dataclass(frozen=True)
class Divergence:
    """What most ranks call, what one calls, and what an error must show of both."""

    name: str
    most: tuple
    odd: tuple
    show: tuple[str, ...] = field(default=())


DIVERGENCES = (
    Divergence("kind", ("all_reduce", {}), ("broadcast", {}), ("all_reduce", "broadcast")),
    Divergence("barrier", ("barrier", {}), ("all_reduce", {}), ("barrier", "all_reduce")),
    Divergence(
        "gather", ("all_gather", {}), ("reduce_scatter", {}), ("all_gather", "reduce_scatter")
    ),
    Divergence(
        "dtype",
        ("all_reduce", {"dtype": torch.float32}),
        ("all_reduce", {"dtype": torch.bfloat16}),
        ("float32", "bfloat16"),
    ),
    Divergence(
        "dtype of equal size",
        ("all_reduce", {"dtype": torch.float32}),
        ("all_reduce", {"dtype": torch.int32}),
        ("float32", "int32"),
    ),
    Divergence(
        "dtype and count of equal bytes",
        ("broadcast", {"dtype": torch.float32, "count": 64}),
        ("broadcast", {"dtype": torch.float64, "count": 32}),
        ("float32", "64", "float64", "32"),
    ),
    Divergence(
        "size",
        ("all_reduce", {"count": 1024}),
        ("all_reduce", {"count": 1025}),
        ("1024", "1025"),
    ),
    Divergence(
        "small size", ("all_reduce", {"count": 4}), ("all_reduce", {"count": 5}), (" 4 ", " 5 ")
    ),
    Divergence(
        "no elements",
        ("all_reduce", {"count": 8}),
        ("all_reduce", {"count": 0}),
        (" 8 ", " 0 "),
    ),
    Divergence(
        "size class",
        ("all_reduce", {"count": 2}),
        ("all_reduce", {"count": 1 << 20}),
        (" 2 ", "1048576"),
    ),
    Divergence(
        "large size",
        ("all_reduce", {"count": 1 << 20}),
        ("all_reduce", {"count": (1 << 20) + 1}),
        ("1048576", "1048577"),
    ),
    Divergence(
        "broadcast size",
        ("broadcast", {"count": 64}),
        ("broadcast", {"count": 63}),
        ("64", "63"),
    ),
    Divergence(
        "all_gather size",
        ("all_gather", {"count": 64}),
        ("all_gather", {"count": 65}),
        # In all pieces.
        ("192", "195"),
    ),
    Divergence(
        "reduce_scatter size",
        ("reduce_scatter", {"count": 64}),
        ("reduce_scatter", {"count": 65}),
        (),
    ),
    Divergence(
        "broadcast root",
        ("broadcast", {"root": 0}),
        ("broadcast", {"root": 1}),
        ("root 0", "root 1"),
    ),
    Divergence(
        "reduce root", ("reduce", {"root": 0}), ("reduce", {"root": 1}), ("root 0", "root 1")
    ),
    Divergence(
        "gather root", ("gather", {"root": 0}), ("gather", {"root": 1}), ("root 0", "root 1")
    ),
    Divergence(
        "scatter root", ("scatter", {"root": 2}), ("scatter", {"root": 1}), ("root 2", "root 1")
    ),
    Divergence(
        "operator",
        ("all_reduce", {"op": dist.ReduceOp.SUM}),
        ("all_reduce", {"op": dist.ReduceOp.MAX}),
        ("SUM", "MAX"),
    ),
    Divergence(
        "tensors",
        ("coalesced", {"number": 2}),
        ("coalesced", {"number": 3}),
        ("2 tensors", "3 tensors"),
    ),
    Divergence("splits", ("all_to_all", {}), ("all_to_all", {"out": (5, 4, 3)}), ()),
    Divergence("split to nobody", ("all_to_all", {}), ("all_to_all", {"out": (0, 4, 8)}), ()),
)


def diverge(me, divergence, odd, asynchronous):
    """Calls something else on one rank; returns the error, when, and what was written."""
    dist.all_reduce(torch.ones(3))
    name, arguments = divergence.odd if me.rank == odd else divergence.most
    outputs, call = CALLS[name](**arguments)
    before = [t.clone() for t in outputs]
    me.sync()
    start = time.monotonic()
    error = None
    try:
        work = call(async_op=True) if asynchronous else call()
        if work is not None:
            work.wait()
    except Exception as caught:
        error = type(caught).__name__, str(caught)
    took = time.monotonic() - start
    untouched = all(torch.equal(a, b) for a, b in zip(before, outputs, strict=True))
    return error, took, untouched


def use_again(me):
    """The same collective everywhere, after the error."""
    tensor = torch.ones(5)
    start = time.monotonic()
    try:
        dist.all_reduce(tensor)
    except dist.DistBackendError:
        return "failed", time.monotonic() - start
    return tensor.tolist(), time.monotonic() - start


@pytest.mark.parametrize("asynchronous", [False, True], ids=("sync", "async"))
@pytest.mark.parametrize("divergence", DIVERGENCES, ids=lambda d: d.name)
def test_every_rank_learns_at_once(divergence, asynchronous):
    """Both calls shown everywhere, no output written, and the group usable or failed."""
    with Ranks(WORLD, init={"timeout": 20}) as ranks:
        values = ranks.values(diverge, divergence, ODD, asynchronous, deadline=30)
        for rank, (error, took, untouched) in enumerate(values):
            assert error is not None, f"rank {rank} saw no error"
            kind, message = error
            assert kind == "DistBackendError", f"rank {rank}: {kind}: {message}"
            assert took < 1, f"rank {rank} learnt after {took:.2f} s: {message}"
            assert untouched, f"rank {rank}: an output was written: {message}"
            for part in (divergence.most[0], divergence.odd[0], *divergence.show):
                name = "all_reduce" if part == "coalesced" else part
                assert name in f"{message} ", f"rank {rank}: no {name!r} in {message!r}"
            assert f"rank {ODD}" in message, (
                f"rank {rank}: the odd one is not named: {message!r}"
            )
        after = ranks.values(use_again, deadline=30)
        assert all(took < 1 for _, took in after), after
        assert len({str(result) for result, _ in after}) == 1, after
        assert after[0][0] in ("failed", [3.0] * 5), after


def message_sizes(me):
    """A message longer than the receiver expects."""
    dist.barrier()
    tensor = torch.full((5 - me.rank,), 9.0)
    try:
        if me.rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
    except Exception as error:
        return type(error).__name__, str(error), tensor.tolist()


def test_a_message_of_another_size():
    """The receiver says both sizes, and does not get a part of it."""
    with Ranks(2, init={"timeout": 5}) as ranks:
        _, received = ranks.values(message_sizes, deadline=15)
        assert received is not None, "half a message was delivered"
        _, message, tensor = received
        assert {"4", "5"} <= set(re.findall(r"\d+", message)), message
        assert tensor == [9.0] * 4


def factors(me):
    """Different PREMUL_SUM factors on each rank."""
    tensor = torch.ones(4)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(float(me.rank + 1)))
    return tensor.tolist()


def test_factors_may_differ():
    """A factor is data, not part of the call that must agree."""
    with Ranks(WORLD, init={"timeout": 5}) as ranks:
        assert ranks.values(factors) == [[6.0] * 4] * WORLD
