"""Collectives on tensors of the device: as on the CPU, in the order of programs, without
making the host wait."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from harness import Ranks

OP = dist.ReduceOp


def data(shape, dtype, rank, layout="contiguous"):
    """A tensor on the CPU whose small whole numbers differ from rank to rank."""
    values = (torch.arange(torch.Size(shape).numel()) % 5 + rank + 1).to(dtype).view(shape)
    match layout:
        case "transposed":
            return values.t().contiguous().t()
        case "part":
            return torch.cat([values, values])[shape[0] :]
        case _:
            return values


def gathered(me, x):
    outputs = [torch.empty_like(x) for _ in range(me.world)]
    dist.all_gather(outputs, x)
    return torch.stack(outputs)


def into_one(me, x):
    output = x.new_empty(me.world * x.shape[0], *x.shape[1:])
    dist.all_gather_single(output, x.contiguous())
    return output


def own_part(me, x):
    """The input is the rank's part of the output."""
    output = x.new_zeros(me.world * x.numel())
    part = output[me.rank * x.numel() : (me.rank + 1) * x.numel()]
    part.copy_(x.flatten())
    dist.all_gather_single(output, part)
    return output


def scattered(me, x):
    wide = torch.cat([x + i for i in range(me.world)]).contiguous()
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.reduce_scatter_single(output, wide)
    return output


def reduced(op, async_op=False):
    def run(me, x):
        y = x * 1
        work = dist.all_reduce(y, op=op, async_op=async_op)
        if async_op:
            work.wait()
        return y + 1

    return run


def coalesced(me, x):
    tensors = [x * i for i in range(1, 4)]
    dist.all_reduce_coalesced(tensors)
    return torch.cat(tensors)


def broadcast(me, x):
    dist.broadcast(x, me.world - 1)
    return x


def reduce_to(me, x):
    dist.reduce(x, 1)
    return x if me.rank == 1 else x * 0


def gather_to(me, x):
    outputs = [torch.empty_like(x) for _ in range(me.world)] if me.rank == 0 else None
    dist.gather(x, outputs, dst=0)
    return torch.stack(outputs) if outputs else x


def scatter_from(me, x):
    inputs = [x + i for i in range(me.world)] if me.rank == 0 else None
    output = torch.empty_like(x)
    dist.scatter(output, inputs, src=0)
    return output


def exchanged(me, x):
    """Rank r sends r + s rows to rank s."""
    counts = [me.rank + other for other in range(me.world)]
    rows = torch.cat([x[:1]] * sum(counts)).contiguous()
    output = torch.empty_like(rows)
    dist.all_to_all_single(output, rows, counts, counts)
    return output


def around(me, x):
    """Receives are posted before sends."""
    got = torch.empty_like(x, memory_format=torch.contiguous_format)
    operations = [
        dist.P2POp(dist.irecv, got, (me.rank - 1) % me.world),
        dist.P2POp(dist.isend, x.contiguous(), (me.rank + 1) % me.world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return got


CASES = {
    "all_reduce": reduced(OP.SUM),
    "all_reduce, asynchronous": reduced(OP.MAX, async_op=True),
    "all_reduce_coalesced": coalesced,
    "broadcast": broadcast,
    "reduce": reduce_to,
    "all_gather": gathered,
    "all_gather_single": into_one,
    "all_gather_single in place": own_part,
    "reduce_scatter_single": scattered,
    "gather": gather_to,
    "scatter": scatter_from,
    "all_to_all_single": exchanged,
    "batch_isend_irecv": around,
}


TENSORS = [
    *itertools.product(
        [(3, 2)],
        (torch.float32, torch.bfloat16, torch.int64),
        ("contiguous", "transposed", "part"),
    ),
    ((300, 200), torch.float32, "contiguous"),
    ((300, 200), torch.bfloat16, "transposed"),
]


def same(me):
    """Every case, dtype and layout, beside the same on the CPU."""
    for name, case in CASES.items():
        for shape, dtype, layout in TENSORS:
            x = data(shape, dtype, me.rank, layout)
            expected = case(me, x.clone())
            got = case(me, x.to("tpu"))
            assert got.device.type == "tpu"
            assert torch.equal(got.cpu(), expected), (name, shape, dtype, layout)
    for op in (OP.AVG, OP.PRODUCT, OP.MIN):
        x = data((4, 4), torch.float32, me.rank)
        torch.testing.assert_close(reduced(op)(me, x.to("tpu")).cpu(), reduced(op)(me, x))
    flags = torch.arange(me.world) == me.rank
    on_device = flags.to("tpu")
    dist.all_reduce(on_device, op=OP.BOR)
    assert on_device.all()


@pytest.mark.parametrize(
    ("world", "collectives"), [(2, "auto"), (4, "auto"), (2, "copies"), (2, "programs")]
)
def test_values(world, collectives):
    """Results equal those on the CPU, for contiguous tensors and for views: in place, and by
    way of copies, as on a TPU where there is no program. (Several processes have none here.)
    """
    env = {"TPU_DIST_DEVICE_COLLECTIVES": collectives}
    with Ranks(world, init={"timeout": 60}, env=env) as ranks:
        outcomes = ranks.run(same, deadline=200)
        assert all(o.ok for o in outcomes), [str(o) for o in outcomes if not o.ok]


PROGRAMS = [
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "all_gather",
    "all_gather_single",
    "reduce_scatter_single",
    "gather",
    "scatter",
]


def run_programs(me):
    """The groups of one rank that a TPU runs as programs, beside the CPU; how many were
    compiled."""
    made = 0
    for name in PROGRAMS:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            for layout in ("contiguous", "transposed", "part"):
                x = data((3, 2), dtype, 0, layout)
                expected = CASES[name](me, x.clone())
                before = compiled()
                got = CASES[name](me, x.to("tpu"))
                made += compiled() - before
                assert torch.equal(got.cpu(), expected), (name, dtype, layout)
    x = torch.arange(6.0, device="tpu")
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
    assert torch.equal(x.cpu(), torch.arange(6.0) / 2)
    dist.reduce(x, 0, op=OP.AVG)
    output = torch.empty_like(x)
    dist.all_to_all_single(output, x)
    assert torch.equal(output.cpu(), torch.arange(6.0) / 2)
    flags = torch.tensor([True, False], device="tpu")
    dist.all_reduce(flags, op=OP.BAND)
    assert flags.tolist() == [True, False]
    empty = torch.ones(0, device="tpu")
    dist.all_reduce(empty)
    return made


def compiled():
    """Programs asked for so far that were not in memory."""
    stats = torch.tpu.compile_stats()
    return stats["disk_hits"] + stats["misses"]


def test_collectives_as_programs():
    """What a TPU would run, on one device; with copies there are fewer programs."""
    made = {}
    for collectives in ("programs", "copies"):
        env = {"TPU_DIST_DEVICE_COLLECTIVES": collectives}
        with Ranks(1, init={"timeout": 60}, env=env) as ranks:
            (outcome,) = ranks.run(run_programs, deadline=200)
            assert outcome.ok, str(outcome)
            made[collectives] = outcome.value
    # One at least for each operation and type, as the sizes are the same.
    assert made["programs"] >= made["copies"] + 4 * len(PROGRAMS)


def does_not_wait(me):
    x = torch.ones(1000, device="tpu")
    dist.all_reduce(x)
    # Compiled now, so that nothing takes long below.
    assert (x * 2 == 2 * me.world).all()
    me.sync()
    if me.rank == 0:
        time.sleep(0.7)
    start = time.monotonic()
    dist.all_reduce(x)
    y = x * 2
    took = time.monotonic() - start
    assert (y == 2 * me.world**2).all()
    return took, time.monotonic() - start


def test_the_host_does_not_wait():
    """A collective returns at once; what uses its result waits."""
    with Ranks(3, init={"timeout": 60}) as ranks:
        outcomes = ranks.run(does_not_wait)
        assert all(o.ok for o in outcomes), [str(o) for o in outcomes if not o.ok]
        for took, until_result in (o.value for o in outcomes[1:]):
            assert took < 0.3 < until_result


def failure(me, what):
    x = torch.ones(64, device="tpu")
    dist.all_reduce(x)
    torch.tpu.synchronize()
    me.sync()
    if me.rank == 1:
        if what == "dies":
            me.say("ready")
            time.sleep(30)
        if what == "diverges":
            x = torch.ones(65, device="tpu")
        if what == "is late":
            time.sleep(4)
    try:
        dist.all_reduce(x)
        torch.tpu.synchronize()
    except RuntimeError as error:
        text = str(error)
    else:
        return "no error"
    x = torch.ones(3, device="tpu")
    if what == "diverges":
        # As on the CPU, no rank has changed anything: the group goes on.
        dist.all_reduce(x)
        assert (x == me.world).all()
    else:
        # The group is of no use any more, and says so at once.
        with pytest.raises(RuntimeError, match="failed earlier"):
            dist.all_reduce(x)
    return text


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dies", ["all_reduce", "rank 1", "pid"]),
        ("diverges", ["all_reduce", "65 elements", "64 elements"]),
        ("is late", ["all_reduce", "Timed out", "missing ranks [1]"]),
    ],
)
def test_failures(what, said):
    """A peer's failure is an error where the result is used, on every other rank."""
    with Ranks(3, init={"timeout": 2 if what == "is late" else 60}) as ranks:
        ready = lambda rank, value: ranks.kill(rank) if value == "ready" else None  # noqa: E731
        outcomes = ranks.run(failure, what, deadline=60, on_say=ready)
        for outcome in outcomes:
            if outcome.rank == 1 and what != "diverges":
                continue
            assert outcome.ok, str(outcome)
            assert all(part in outcome.value for part in said), outcome.value


def wrong(me):
    with pytest.raises(RuntimeError, match="expected a tensor on tpu as the other tensors"):
        dist.all_gather_single(torch.empty(2 * me.world), torch.empty(2, device="tpu"))
    x = torch.ones(3, device="tpu")
    dist.all_reduce(x)
    assert (x == me.world).all()


def test_bad_arguments():
    """An error at once, which harms nothing."""
    with Ranks(2) as ranks:
        outcomes = ranks.run(wrong)
        assert all(o.ok for o in outcomes), [str(o) for o in outcomes if not o.ok]
