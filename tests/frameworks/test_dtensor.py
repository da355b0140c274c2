"""DTensor, tensor, sequence, context and expert parallelism, against one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from single_process import full
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _templated_ring_attention_backward as context_ring_backward,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing import assert_close


def meshes(world):
    """One axis, and two where there are enough ranks."""
    yield init_device_mesh("cpu", (world,))
    if world == 4:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def with_placements(whole, mesh, placements, rank):
    """`whole` distributed as `placements` say; parts of a Partial are drawn unequal."""
    spread = distribute_tensor(
        whole, mesh, [Replicate() if p.is_partial() else p for p in placements]
    )
    local = spread.to_local().clone()
    coordinate = mesh.get_coordinate()
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            parts = mesh.size(axis)
            # Parts 1, 2, ... of 1 + 2 + ...
            local *= 2 * (coordinate[axis] + 1) / (parts * (parts + 1))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def redistributions(me, shape):
    """Every pair of placements on every mesh."""
    torch.manual_seed(1)
    whole = torch.randn(shape, dtype=torch.float64)
    count = 0
    for mesh in meshes(me.world):
        kinds = [Replicate(), Partial(), Shard(0), Shard(1), Shard(2)]
        layouts = list(itertools.product(kinds, repeat=mesh.ndim))
        for source, target in itertools.product(layouts, repeat=2):
            tensor = with_placements(whole, mesh, source, me.rank)
            if any(p.is_partial() for p in target) and source != target:
                continue
            result = tensor.redistribute(mesh, target)
            assert_close(result.full_tensor(), whole, msg=f"{source} -> {target}")
            if not any(p.is_partial() for p in target):
                expected = distribute_tensor(whole, mesh, target, src_data_rank=None)
                assert_close(result.to_local(), expected.to_local())
            count += 1
    return count


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 8, 4)], ids=str)
def test_redistribute(worlds, world, shape):
    """Any pair of placements keeps the value, with even, uneven and empty shards."""
    counts = worlds.values(world, redistributions, shape)
    # On one axis 4 * 5 pairs and Partial to itself; on two 16 * 25 and 9 to themselves.
    assert counts == [21 if world == 2 else 21 + 409] * world


def backward_of_redistribution(me):
    """The gradient goes the way back."""
    mesh = init_device_mesh("cpu", (me.world,))
    torch.manual_seed(2)
    whole = torch.randn(6, 7, dtype=torch.float64)
    weights = torch.randn(6, 7, dtype=torch.float64)
    for source, target in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2):
        leaf = distribute_tensor(whole, mesh, [source]).requires_grad_()
        weighted = leaf.redistribute(mesh, [target]) * distribute_tensor(
            weights, mesh, [target]
        )
        weighted.sum().backward()
        assert_close(full(leaf.grad), weights, msg=f"{source} -> {target}")


class Block(nn.Module):
    """Norm, attention and MLP, as in a transformer."""

    def __init__(self, width=8, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 20)
        self.down = nn.Linear(20, width)

    def forward(self, x):
        normed = self.norm(x)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, 2)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """Two blocks between an embedding and a projection."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)
        self.project = nn.Linear(8, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.project(self.norm(x))


def language():
    """The same weights on every call, and tokens with their successors."""
    torch.manual_seed(7)
    model = Language().double()
    tokens = torch.randint(32, (3, 9))
    return model, tokens[:, :-1], tokens[:, 1:]


def tensor_parallel(me, sequence):
    """Columns and rows of every layer; with `sequence`, the norms by sequence too."""
    expected, tokens, labels = language()
    alone = nn.functional.cross_entropy(expected(tokens).flatten(0, 1), labels.flatten())
    alone.backward()

    model, _, _ = language()
    mesh = init_device_mesh("cpu", (me.world,))
    between = Shard(1) if sequence else Replicate()
    norm = {"norm": SequenceParallel(), "norm2": SequenceParallel()} if sequence else {}
    for block in model.blocks:
        columns = {
            name: ColwiseParallel(input_layouts=between)
            for name in ("query", "key", "value", "up")
        }
        rows = {name: RowwiseParallel(output_layouts=between) for name in ("out", "down")}
        parallelize_module(block, mesh, {**norm, **columns, **rows})
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            **({"norm": SequenceParallel()} if sequence else {}),
            "project": ColwiseParallel(
                input_layouts=between, output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
    assert_close(full(loss), alone.detach())
    for (name, one), (_, other) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        gradient = one.grad
        if not isinstance(gradient, DTensor) and sequence and "norm" in name:
            dist.all_reduce(gradient)
        assert_close(full(gradient), other.grad, msg=name)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "tensor and sequence"])
def test_tensor_parallel(worlds, world, sequence):
    """A language model's loss, parallel cross-entropy included, and all its gradients."""
    worlds.values(world, tensor_parallel, sequence)


def tensor_and_data_parallel(me):
    """FSDP over one axis of a mesh, tensor parallelism over the other."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(5)
    rows = torch.randn(6, 8, dtype=torch.float64)
    torch.manual_seed(6)
    expected = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 7)).double()
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 7)).double()
    expected(rows).square().mean().backward()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    part = rows.chunk(2)[mesh["data"].get_local_rank()]
    model(part).square().mean().backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(full(one.grad), other.grad)


def attend(query, key, value, is_causal=False, **_):
    """The CPU's attention kernel, in the form that the ring wants."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal
    )


def attend_backward(grad_out, query, key, value, out, logsumexp, is_causal, **_):
    """Its gradient."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, 0.0, is_causal
    )


def context_parallel_attention(me):
    """Attention over a sequence spread over the ranks: keys and values go round a ring.

    `context_parallel` itself knows no attention kernel of the CPU, so this takes its ring.
    """
    from torch.distributed.tensor.experimental import _attention as context

    group = dist.group.WORLD
    mesh = init_device_mesh("cpu", (me.world,))
    torch.manual_seed(4)
    whole = [torch.randn(2, 4, 16, 8) for _ in range(4)]
    for rotate, causal, balanced in itertools.product(
        ("allgather", "alltoall"), (False, True), (False, True)
    ):
        if balanced and not causal:
            continue
        expected = [t.clone().requires_grad_() for t in whole[:3]]
        alone = nn.functional.scaled_dot_product_attention(*expected, is_causal=causal)
        alone.backward(whole[3])

        context.set_rotate_method(rotate)
        context._cp_options.enable_load_balance = balanced
        balancer = context._HeadTailLoadBalancer(16, me.world, "cpu") if balanced else None
        query, key, value, grad_out = context._context_parallel_shard(
            mesh, whole, (2,) * 4, balancer
        )
        out, logsumexp, *_ = context._templated_ring_attention(
            group, 2, attend, query, key, value, is_causal=causal
        )
        gradients = context_ring_backward(
            group,
            2,
            attend_backward,
            grad_out,
            "grad_out",
            query,
            key,
            value,
            out,
            logsumexp,
            causal,
        )
        results = context.context_parallel_unshard(
            mesh, [out, *gradients[:3]], [2] * 4, balancer
        )
        for one, other in zip(
            results, [alone.detach(), *(t.grad for t in expected)], strict=True
        ):
            assert_close(one, other, msg=f"{rotate}, causal {causal}, balanced {balanced}")


def experts(me):
    """Tokens go to the rank of their expert and back; counts are uneven, some zero."""
    torch.manual_seed(9)
    width, group = 6, dist.group.WORLD
    weights = [torch.randn(width, width, dtype=torch.float64) for _ in range(me.world)]
    tokens = [torch.randn(5 + r, width, dtype=torch.float64) for r in range(me.world)]
    routes = [torch.randint(me.world, (5 + r,)) for r in range(me.world)]
    routes[0][:] = me.world - 1

    alone_weights = [w.clone().requires_grad_() for w in weights]
    alone_tokens = [t.clone().requires_grad_() for t in tokens]
    outs = [
        torch.stack([token @ alone_weights[e] for token, e in zip(t, r, strict=True)])
        for t, r in zip(alone_tokens, routes, strict=True)
    ]
    sum(out.square().sum() for out in outs).backward()

    expert = weights[me.rank].clone().requires_grad_()
    mine = tokens[me.rank].clone().requires_grad_()
    order = routes[me.rank].argsort(stable=True)
    send = routes[me.rank].bincount(minlength=me.world)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send)
    send, receive = send.tolist(), receive.tolist()
    arrived = all_to_all_single_autograd(mine[order], receive, send, group)
    back = all_to_all_single_autograd(arrived @ expert, send, receive, group)
    out = torch.empty_like(mine).index_copy(0, order, back)
    out.square().sum().backward()
    assert_close(out, outs[me.rank])
    assert_close(mine.grad, alone_tokens[me.rank].grad)
    assert_close(expert.grad, alone_weights[me.rank].grad)


def operators(me):
    """Matrix products and reductions on sharded operands, uneven where possible."""
    mesh = init_device_mesh("cpu", (me.world,))
    torch.manual_seed(3)
    left = torch.randn(7, 10, dtype=torch.float64)
    right = torch.randn(10, 5, dtype=torch.float64)
    layouts = [Replicate(), Shard(0), Shard(1)]
    for a, b in itertools.product(layouts, repeat=2):
        product = distribute_tensor(left, mesh, [a]) @ distribute_tensor(right, mesh, [b])
        assert_close(product.full_tensor(), left @ right)
    for layout in layouts:
        tensor = distribute_tensor(left, mesh, [layout])
        for function in (
            torch.sum,
            torch.mean,
            torch.amax,
            torch.amin,
            torch.linalg.vector_norm,
        ):
            assert_close(function(tensor).full_tensor(), function(left))
        assert_close(tensor.softmax(1).full_tensor(), left.softmax(1))
        assert_close(tensor.sort(1).values.full_tensor(), left.sort(1).values)


def whole_module(me):
    """`distribute_module` with a partition function."""
    mesh = init_device_mesh("cpu", (me.world,))
    torch.manual_seed(8)
    plain = nn.Linear(6, 9).double()

    def partition(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            spread = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
            module.register_parameter(key, spread)

    torch.manual_seed(8)
    model = distribute_module(nn.Linear(6, 9).double(), mesh, partition)
    rows = torch.randn(4, 6, dtype=torch.float64)
    out = model(distribute_tensor(rows, mesh, [Replicate()]))
    assert_close(out.full_tensor(), plain(rows))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "case",
    [
        backward_of_redistribution,
        context_parallel_attention,
        experts,
        operators,
        whole_module,
        tensor_and_data_parallel,
    ],
    ids=lambda case: case.__name__,
)
def test_dtensor(worlds, world, case):
    """Values and gradients are those of one process."""
    if case is tensor_and_data_parallel and world != 4:
        pytest.skip("a mesh of two axes needs four ranks")
    worlds.values(world, case)
