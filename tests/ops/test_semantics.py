"""What callers may rely on besides values: order, matching, progress, futures, threads."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Ranks


def tags(me):
    """Many messages on a few tags, received in another order of tags than sent."""
    count = 50
    if me.rank == 0:
        works = [
            dist.isend(torch.tensor([tag, n]), 1, tag=tag)
            for n in range(count)
            for tag in (7, 3, 5)
        ]
        for work in works:
            work.wait()
        return None
    got = {}
    for tag in (5, 7, 3):
        got[tag] = []
        for _ in range(count):
            tensor = torch.empty(2, dtype=torch.int64)
            dist.recv(tensor, 0, tag=tag)
            got[tag].append(tensor.tolist())
    return got


def test_messages_match_in_order_by_source_and_tag(worlds):
    """A receiver may take tags in any order; within one tag, first in, first out."""
    _, got = worlds.values(2, tags)
    assert got == {tag: [[tag, n] for n in range(50)] for tag in (3, 5, 7)}


def sizes_in_flight(me):
    """Small and large messages to one peer overtake nothing."""
    counts = [1, 1 << 20, 3, 1 << 16, 0, 5]
    if me.rank == 0:
        for n, count in enumerate(counts):
            dist.send(torch.full((count,), float(n)), 1)
        return None
    sums = []
    for count in counts:
        tensor = torch.full((count,), -1.0)
        dist.recv(tensor, 0)
        sums.append(tensor.unique().tolist())
    return sums


def test_messages_of_all_sizes_keep_their_order(worlds):
    """Whatever path a size takes."""
    assert worlds.values(2, sizes_in_flight)[1] == [[0.0], [1.0], [2.0], [3.0], [], [5.0]]


def anybody(me):
    """Rank 0 receives from whoever comes."""
    if me.rank:
        time.sleep(0.05 * (4 - me.rank))
        for n in range(3):
            dist.send(torch.tensor([me.rank, n]), 0, tag=n)
        return None
    seen = []
    for n in range(3):
        for _ in range(3):
            tensor = torch.empty(2, dtype=torch.int64)
            source = dist.recv(tensor, tag=n)
            seen.append((source, tensor.tolist()))
    return seen


def test_receiving_from_anybody(worlds):
    """The sender's rank is returned, and the tag is respected."""
    seen = worlds.values(4, anybody)[0]
    assert all(value[0] == source for source, value in seen)
    for n in range(3):
        block = seen[3 * n : 3 * n + 3]
        assert sorted(block) == [(source, [source, n]) for source in (1, 2, 3)]


def crossed(me):
    """Everybody receives before sending; 100 tags each way."""
    other = 1 - me.rank
    incoming = [torch.empty(3) for _ in range(100)]
    operations = [dist.P2POp(dist.irecv, t, other, tag=n) for n, t in enumerate(incoming)]
    operations += [
        dist.P2POp(dist.isend, torch.full((3,), float(n)), other, tag=n) for n in range(100)
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [t[0].item() for t in incoming]


def test_crossed_batches_do_not_deadlock(worlds):
    """Receives posted first, both ways."""
    assert worlds.values(2, crossed) == [[float(n) for n in range(100)]] * 2


def to_itself(me):
    """A rank sends to itself."""
    got = torch.empty(4)
    works = [dist.irecv(got, me.rank), dist.isend(torch.full((4,), 5.0), me.rank)]
    for work in works:
        work.wait()
    return got.tolist()


def test_a_message_to_oneself(worlds):
    """It is delivered, or refused at once as torch does for blocking calls; no hang."""
    for outcome in worlds.run(2, to_itself, deadline=20):
        assert not outcome.hung
        if outcome.ok:
            assert outcome.value == [5.0] * 4
        else:
            assert {"ValueError", "RuntimeError"} & set(outcome.failure.bases), outcome


def shapes_of_groups(me):
    """Overlapping groups in use in turn; some ranks join some only."""
    members = ([0, 1, 2], [1, 2, 3], [3, 0], [2], [3, 1, 0])
    groups = [dist.new_group(ranks) for ranks in members]
    results = []
    for _ in range(3):
        for ranks, group in zip(members, groups, strict=True):
            if me.rank in ranks:
                tensor = torch.full((10,), float(me.rank + 1))
                dist.all_reduce(tensor, group=group)
                results.append(tensor[0].item() == sum(r + 1 for r in ranks))
                gathered = [torch.empty(1) for _ in ranks]
                dist.all_gather(gathered, torch.tensor([float(me.rank)]), group=group)
                # Group ranks follow the order of global ranks.
                results.append(
                    [t.item() for t in gathered] == [float(r) for r in sorted(ranks)]
                )
                root = ranks[-1]
                dist.broadcast(tensor.fill_(me.rank), root, group=group)
                results.append(tensor[0].item() == root)
    return results


def test_groups_of_any_shape(worlds):
    """Overlapping, partial, of one rank, given in any order."""
    for results in worlds.values(4, shapes_of_groups):
        assert results
        assert all(results)


def independent(me):
    """A group that is blocked does not hold up another."""
    slow, quick = dist.new_group([0, 1]), dist.new_group([0, 1])
    dist.barrier()
    started = time.monotonic()
    blocked = None
    if me.rank == 0:
        blocked = dist.all_reduce(torch.ones(1 << 20), group=slow, async_op=True)
    for _ in range(20):
        dist.all_reduce(torch.ones(4), group=quick)
        dist.all_reduce(torch.ones(1 << 16), group=quick)
    took = time.monotonic() - started
    if me.rank == 1:
        time.sleep(0.5)
        blocked = dist.all_reduce(torch.ones(1 << 20), group=slow, async_op=True)
    assert blocked.wait()
    return took


def test_groups_progress_independently(worlds):
    """Rank 1 comes late to one group only."""
    assert max(worlds.values(2, independent)) < 0.45


def messages_beside_collectives(me):
    """A receive that waits does not hold up collectives, nor another peer's message."""
    waiting = dist.irecv(torch.empty(1), 1) if me.rank == 0 else None
    other = dist.irecv(torch.empty(1), 2) if me.rank == 0 else None
    if me.rank == 2:
        dist.send(torch.ones(1), 0)
    if other is not None:
        other.wait(timedelta(seconds=5))
    dist.all_reduce(torch.ones(100))
    if me.rank == 1:
        dist.send(torch.ones(1), 0)
    if waiting is not None:
        waiting.wait(timedelta(seconds=5))
    return True


def test_messages_do_not_hold_up_collectives(worlds):
    """Point-to-point traffic has its own order."""
    assert worlds.values(3, messages_beside_collectives, deadline=30) == [True] * 3


def in_threads(me, threads, rounds):
    """Each thread has its own group; all run at once."""
    groups = [dist.new_group() for _ in range(threads)]
    errors = []

    def work(index):
        try:
            for n in range(rounds):
                tensor = torch.full((1 + 997 * (n % 3),), float(index + n))
                dist.all_reduce(tensor, group=groups[index])
                if tensor[0] != me.world * (index + n) or tensor[-1] != tensor[0]:
                    errors.append((index, n, tensor[0].item()))
        except Exception as error:
            errors.append((index, str(error)))

    pool = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    return errors


def test_groups_in_threads(worlds):
    """Four threads a rank, the interpreter lock released while they wait."""
    assert worlds.values(3, in_threads, 4, 60, deadline=60) == [[], [], []]


def one_group_in_threads(me):
    """Threads take turns on one group; every collective is equal, so any order is right."""
    errors = []

    def work():
        for _ in range(50):
            tensor = torch.ones(33)
            dist.all_reduce(tensor)
            if tensor[0] != me.world:
                errors.append(tensor[0].item())

    pool = [threading.Thread(target=work) for _ in range(3)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    return errors


def test_one_group_from_several_threads(worlds):
    """Calls are serialised, not corrupted."""
    assert worlds.values(2, one_group_in_threads, deadline=60) == [[], []]


def lock_is_free(me):
    """Another thread runs Python while a collective waits."""
    dist.barrier()
    ticks = []
    if me.rank == 1:
        time.sleep(0.4)
    else:
        stop = threading.Event()

        def tick():
            while not stop.is_set():
                ticks.append(time.monotonic())
                time.sleep(0.01)

        thread = threading.Thread(target=tick)
        thread.start()
    dist.all_reduce(torch.ones(2))
    if me.rank == 0:
        stop.set()
        thread.join()
    return len(ticks)


def test_the_interpreter_lock_is_released(worlds):
    """Ten ticks at least in 0.4 s."""
    assert worlds.values(2, lock_is_free)[0] > 10


def asynchronous_order(me):
    """Many operations in flight on one group end in order, and with the right values."""
    tensors = [torch.full((1 + (n * 7919) % 30_000,), float(n + me.rank)) for n in range(60)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    # Waiting for the last is enough: operations of a group run in order.
    works[-1].wait()
    assert all(work.is_completed() for work in works)
    for work in works:
        work.wait()
    expected = [float(sum(n + r for r in range(me.world))) for n in range(60)]
    return [
        t[0].item() == e and t[-1].item() == e for t, e in zip(tensors, expected, strict=True)
    ]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_operations_in_flight(worlds, world):
    """Sixty at once, of all sizes."""
    for right in worlds.values(world, asynchronous_order, deadline=60):
        assert all(right)


def polled(me):
    """An operation ends although nobody waits for it."""
    tensor = torch.ones(1 << 12)
    work = dist.all_reduce(tensor, async_op=True)
    end = time.monotonic() + 5
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.005)
    assert work.is_completed()
    return tensor[0].item()


def test_an_operation_ends_without_wait(worlds):
    """is_completed() turns true by itself."""
    assert worlds.values(3, polled, deadline=20) == [3.0] * 3


def futures(me):
    """getFuture: value, callbacks, chains; before and after the operation ended."""
    called = []
    tensor = torch.full((6,), float(me.rank))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    chained = future.then(lambda f: f.value()[0] * 2)
    future.add_done_callback(lambda f: called.append(f.value()[0][0].item()))
    doubled = chained.wait()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    late = []
    work.get_future().add_done_callback(lambda f: late.append(True))
    assert work.get_future().done()
    end = time.monotonic() + 2
    while not (called and late) and time.monotonic() < end:
        time.sleep(0.01)
    return doubled.tolist(), called, late, [t.tolist() for t in work.result()]


def test_futures_and_callbacks(worlds):
    """DDP communication hooks are built on these."""
    for doubled, called, late, result in worlds.values(3, futures):
        assert doubled == [6.0] * 6
        assert called == [3.0]
        assert late == [True]
        assert result == [[3.0, 3.0]]


def failing_future(me):
    """The future of an operation that cannot end carries the error."""
    dist.barrier()
    if me.rank == 1:
        me.sync()
        return None
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    try:
        future.wait()
    except Exception as error:
        me.sync()
        return type(error).__name__, str(error)


def test_a_future_carries_the_error():
    """Not a value, and not for ever pending."""
    with Ranks(2, init={"timeout": 1}) as ranks:
        outcome = ranks.values(failing_future, deadline=10)[0]
        assert outcome is not None, "the future had a value"
        assert "all_reduce" in outcome[1], outcome


def hooked(me):
    """DDP with a communication hook that chains futures."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    )
    plain = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    plain.register_comm_hook(None, default_hooks.bf16_compress_hook)
    data = torch.randn(8, 32, generator=torch.Generator().manual_seed(me.rank))
    plain(data).square().sum().backward()
    return [p.grad.double().sum().item() for p in model.parameters()]


def test_ddp_with_a_communication_hook(worlds):
    """All ranks end with the same gradients."""
    gradients = worlds.values(3, hooked, deadline=30)
    assert gradients[0] == gradients[1] == gradients[2]


def split(me, bound):
    """split_group, and new_group on a group bound to a device."""
    parts = dist.split_group(split_ranks=[[0, 2], [1, 3]])
    tensor = torch.full((5,), float(me.rank))
    dist.all_reduce(tensor, group=parts)
    smaller = dist.split_group(split_ranks=[[2, 1]])
    if me.rank in (1, 2):
        # The order given is the order of ranks.
        assert dist.get_rank(smaller) == {2: 0, 1: 1}[me.rank]
        dist.barrier(group=smaller)
    else:
        assert smaller == dist.GroupMember.NON_GROUP_MEMBER
    some = dist.new_group([0, 3])
    if me.rank in (0, 3):
        dist.barrier(group=some)
    return tensor[0].item()


@pytest.mark.parametrize("bound", [False, True], ids=("plain", "bound"))
def test_split_group(bound):
    """Also when the default group is bound to a device, where new_group splits."""
    init = {"timeout": 15}
    if bound:
        init["device_id"] = torch.device("cpu:0")
    with Ranks(4, init=init) as ranks:
        assert ranks.values(split, bound, deadline=30) == [2.0, 4.0, 2.0, 4.0]


def debug_detail(me):
    """Collectives, a subgroup and DDP under full debugging."""
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    tensor = torch.full((100,), float(me.rank))
    dist.all_reduce(tensor)
    dist.all_gather([torch.empty(2) for _ in range(me.world)], torch.ones(2))
    group = dist.new_group([0, 1])
    if me.rank < 2:
        dist.all_reduce(tensor, group=group)
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=5))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.ones(3, 4)).sum().backward()
    return model.module.weight.grad.sum().item()


def test_under_debug_detail():
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the backend and asks for sequence numbers."""
    with Ranks(3, init={"timeout": 20}, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) as ranks:
        assert ranks.values(debug_detail, deadline=40) == [24.0] * 3


def detail_finds(me):
    """A mismatch under full debugging is still an error everywhere."""
    dist.barrier()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(4 + me.rank))


def test_debug_detail_finds_a_mismatch():
    """By the wrapper, which exchanges fingerprints first."""
    with Ranks(2, init={"timeout": 10}, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) as ranks:
        ranks.values(detail_finds, deadline=30)


def numbers(me):
    """Sequence numbers, error state, names and options of a group."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    before = dist.group.WORLD._get_sequence_number_for_group()
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    after = dist.group.WORLD._get_sequence_number_for_group()
    return after - before, backend.name(), backend.rank(), backend.size(), dist.get_backend()


def test_what_a_backend_says_of_itself(worlds):
    """Name, rank, size, and a sequence number that counts collectives."""
    for rank, (step, name, own, size, public) in enumerate(worlds.values(2, numbers)):
        assert (step, name, own, size, public) == (3, BACKEND, rank, 2, BACKEND)


def durations(me):
    """A work's own measurement of its time."""
    if me.rank == 1:
        time.sleep(0.2)
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    work.wait()
    return work._get_duration()


def test_durations_are_milliseconds(worlds):
    """The early rank waited for the late one."""
    early, late = worlds.values(2, durations)
    assert 100 < early < 2000
    assert 0 <= late < 150


def profiled(me):
    """The names of operations in a profile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(10))
        dist.broadcast(torch.ones(10), 0, async_op=True).wait()
        dist.all_gather_single(torch.empty(4), torch.ones(2))
        dist.barrier()
    return {event.name for event in profile.events() if event.name.startswith(f"{BACKEND}:")}


def test_profiler_titles(worlds):
    """As `backend:operation`, which tools look for."""
    for names in worlds.values(2, profiled):
        assert {f"{BACKEND}:all_reduce", f"{BACKEND}:broadcast"} <= names
        assert len(names) == 4, names


def sparse(me):
    """An all-reduce of sparse tensors."""
    tensor = torch.sparse_coo_tensor([[me.rank, 5]], [1.0, 2.0], (8,))
    dist.all_reduce(tensor)
    return tensor.to_dense().tolist()


def test_sparse_all_reduce(worlds):
    """Indices differ from rank to rank; the sum has them all."""
    expected = [1.0, 1.0, 1.0, 0, 0, 6.0, 0, 0]
    assert worlds.values(3, sparse) == [expected] * 3


def objects(me):
    """Collectives of Python objects ride on those of bytes."""
    gathered = [None] * me.world
    dist.all_gather_object(gathered, {"rank": me.rank, "text": "x" * (100 * me.rank)})
    box = [{"from": 1}] if me.rank == 1 else [None]
    dist.broadcast_object_list(box, src=1)
    return [g["rank"] for g in gathered], len(gathered[-1]["text"]), box[0]


def test_objects(worlds):
    """Lengths differ from rank to rank."""
    assert worlds.values(3, objects) == [([0, 1, 2], 200, {"from": 1})] * 3


def extremes(me):
    """NaN, infinities, subnormals and signed zeros through reductions."""
    nan, inf = float("nan"), float("inf")
    mine = [[nan, 1.0, inf, inf, 2.0], [1.0, nan, -inf, inf, 3.0]][me.rank]
    results = {}
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            tensor = torch.tensor(mine, dtype=dtype)
            dist.all_reduce(tensor, op)
            results[f"{dtype} {op}"] = [str(v) for v in tensor.tolist()]
    tiny = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        smallest = torch.tensor([1], dtype=torch.int32 if dtype.itemsize == 4 else torch.int16)
        tensor = smallest.view(dtype).repeat(40)
        dist.all_reduce(tensor)
        tiny[str(dtype)] = tensor.view(smallest.dtype).unique().tolist()
    return results, tiny


def test_extreme_floats(worlds):
    """NaN wins, infinities cancel to NaN, subnormals are not flushed."""
    for results, tiny in worlds.values(2, extremes):
        for name, values in results.items():
            if "SUM" in name:
                assert values == ["nan", "nan", "nan", "inf", "5.0"], name
            else:
                best = min if "MIN" in name else max
                expected = ["nan", "nan", str(best(float("inf"), float("-inf"))), "inf"]
                assert values == [*expected, str(best(2.0, 3.0))], name
        assert tiny == {"torch.float32": [2], "torch.float16": [2], "torch.bfloat16": [2]}


def in_place_of_shared_memory(me):
    """Overlapping memory is never silently wrong."""
    tensor = torch.ones(1).expand(6)
    try:
        dist.all_reduce(tensor)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return tensor.tolist()


def test_an_output_whose_elements_share_memory(worlds):
    """A clear error on every rank or the right values."""
    for outcome in worlds.run(2, in_place_of_shared_memory, deadline=20):
        assert outcome.ok, outcome
        if isinstance(outcome.value, str):
            assert "memory" in outcome.value or "overlap" in outcome.value, outcome.value
        else:
            assert outcome.value == [2.0] * 6


def bad_arguments(me):
    """Calls that cannot be right are refused on the spot, by name."""
    world = me.world
    calls = {
        "all_gather: too few outputs": lambda: dist.all_gather([torch.empty(2)], torch.ones(2)),
        "all_gather: output of another dtype": lambda: dist.all_gather(
            [torch.empty(2, dtype=torch.float64)] * world, torch.ones(2)
        ),
        "all_gather_single: wrong size": lambda: dist.all_gather_single(
            torch.empty(3), torch.ones(2)
        ),
        "reduce_scatter: too few inputs": lambda: dist.reduce_scatter(
            torch.empty(2), [torch.ones(2)]
        ),
        "reduce_scatter_single: wrong size": lambda: dist.reduce_scatter_single(
            torch.empty(2), torch.ones(5)
        ),
        "all_to_all_single: splits do not add up": lambda: dist.all_to_all_single(
            torch.empty(4), torch.ones(4), [1, 1], [2, 2]
        ),
        "all_to_all_single: not divisible": lambda: dist.all_to_all_single(
            torch.empty(3), torch.ones(3)
        ),
        "broadcast: no such root": lambda: dist.group.WORLD.broadcast(torch.ones(1), 9).wait(),
        "send: no such rank": lambda: dist.send(torch.ones(1), 9),
        "scatter: wrong number": lambda: (
            dist.scatter(torch.empty(1), [torch.ones(1)] if me.rank == 0 else None, 0)
            if me.rank == 0
            else dist.send(torch.ones(1), 9)
        ),
    }
    said = {}
    for name, call in calls.items():
        start = time.monotonic()
        try:
            call()
            said[name] = None
        except Exception as error:
            assert time.monotonic() - start < 1, name
            said[name] = f"{type(error).__name__}: {error}"
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == world
    return said


def test_bad_arguments(worlds):
    """An error that says something, nothing sent, the group unharmed."""
    for said in worlds.values(2, bad_arguments, deadline=30):
        for name, text in said.items():
            assert text is not None, f"{name}: accepted"
            assert text.split(":")[0] in (
                "ValueError",
                "RuntimeError",
                "TypeError",
                "IndexError",
                "NotImplementedError",
                "DistBackendError",
            ), f"{name}: {text}"
            assert len(text.split(": ", 1)[1]) > 10, f"{name}: {text}"


def mixed(me):
    """A group of ours beside one of Gloo, and both in one group by device."""
    gloo = dist.new_group(backend="gloo")
    ours = dist.new_group(backend=BACKEND)
    by_device = dist.new_group(backend=f"cpu:{BACKEND}")
    results = []
    for group in (gloo, ours, by_device):
        tensor = torch.full((9,), float(me.rank + 1))
        dist.all_reduce(tensor, group=group)
        results.append(tensor[0].item())
    return results


def test_beside_gloo(worlds):
    """new_group(backend=...) of either kind."""
    assert worlds.values(2, mixed) == [[3.0] * 3] * 2


def mesh(me):
    """A device mesh on CPU, whose groups are ours."""
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    row = grid["shard"].get_group()
    assert dist.get_backend(row) == BACKEND
    tensor = torch.full((4,), float(me.rank))
    dist.all_reduce(tensor, group=row)
    return tensor[0].item()


def test_device_mesh(worlds):
    """Rows {0, 1} and {2, 3}."""
    assert worlds.values(4, mesh) == [1.0, 1.0, 5.0, 5.0]


def functional(me):
    """Functional collectives, as torch.compile and DTensor call them."""
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    tensor = torch.arange(4.0) + me.rank
    return [
        funcol.all_reduce(tensor, "sum", group).tolist(),
        funcol.all_gather_tensor(tensor, 0, group).tolist(),
        funcol.reduce_scatter_tensor(tensor, "avg", 0, group).tolist(),
        funcol.all_to_all_single(tensor, None, None, group).tolist(),
    ]


def test_functional_collectives(worlds):
    """Values on two ranks."""
    first, second = worlds.values(2, functional)
    assert first[:2] == [[1, 3, 5, 7], [0, 1, 2, 3, 1, 2, 3, 4]]
    assert second[:2] == first[:2]
    assert first[2:] == [[0.5, 1.5], [0, 1, 1, 2]]
    assert second[2:] == [[2.5, 3.5], [2, 3, 3, 4]]
