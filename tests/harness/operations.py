"""Every c10d operation as a function that brings inputs, calls, and checks outputs.

An operation function takes a `Call` and yields what to check after the call has ended;
`run_table` in this module executes a list of cases on one rank.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from harness.reference import OPS, check, factor, same_bits
from harness.tensors import DTYPES, Laid, bits, carrier, draw_bits, draw_numbers, fits, lay
from harness.worker import Failure, Me


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    operation: str
    dtype: str = "float32"
    count: int = 17
    layout: str = "contiguous"
    op: str = "SUM"
    asynchronous: bool = False
    root: int = 0

    def __str__(self) -> str:
        text = f"{self.operation}({self.dtype} x {self.count}, {self.layout}"
        if OPERATIONS[self.operation].reduces:
            text += f", {self.op}"
        if OPERATIONS[self.operation].rooted:
            text += f", root {self.root}"
        return text + (", async)" if self.asynchronous else ")")


@dataclass
class Result:
    """How a case ended on one rank."""

    wrong: str | None = None
    failure: Failure | None = None
    digest: str = ""
    """Of outputs that must be equal on all ranks."""


class Call:
    """A case on one rank: draws tensors, and finishes the operation that was called."""

    def __init__(self, case: Case, rank: int, world: int) -> None:
        self.case, self.rank, self.world = case, rank, world
        self.root = case.root % world
        self.made: list[Laid] = []

    @property
    def reduce_op(self) -> Any:
        """The reduce operator for c10d."""
        if self.case.op == "PREMUL_SUM":
            value = factor("PREMUL_SUM", self.case.dtype, self.rank)
            return dist._make_nccl_premul_sum(value)
        return getattr(dist.ReduceOp, self.case.op)

    def data(self, rank: int, piece: int = 0, count: int | None = None) -> torch.Tensor:
        """What `rank` brings as its `piece`, as a contiguous list."""
        case = self.case
        count = case.count if count is None else count
        seed = (len(case.operation), case.count, rank, piece)
        if OPERATIONS[case.operation].reduces:
            values = draw_numbers(case.dtype, case.op, count, *seed)
        else:
            values = draw_bits(case.dtype, count, *seed)
        if case.layout == "expanded":
            words = bits(values)
            words[:] = words[:1].clone()
        return values

    def _lay(self, values: torch.Tensor, output: bool) -> torch.Tensor:
        layout = self.case.layout
        if not fits(layout, self.case.dtype, values.numel(), output=output):
            layout = "contiguous"
        laid = lay(values, layout)
        self.made.append(laid.watch())
        return laid.tensor

    def bring(self, piece: int = 0, count: int | None = None) -> torch.Tensor:
        """This rank's own data, as an input that the operation must not change."""
        return self._lay(self.data(self.rank, piece, count), output=False)

    def inout(self, piece: int = 0) -> torch.Tensor:
        """This rank's own data, to be overwritten with the result."""
        return self._lay(self.data(self.rank, piece), output=True)

    def _blank(self, count: int) -> torch.Tensor:
        dtype = DTYPES[self.case.dtype]
        return torch.ones(count, dtype=carrier(dtype)).view(dtype)

    def room(self, count: int | None = None) -> torch.Tensor:
        """An output in the case's layout, filled with a pattern that is no result."""
        return self._lay(self._blank(self.case.count if count is None else count), output=True)

    def flat_room(self, count: int) -> torch.Tensor:
        """A contiguous output."""
        laid = lay(self._blank(count), "contiguous")
        self.made.append(laid.watch())
        return laid.tensor

    def end(self, work: Any) -> None:
        """Waits for an asynchronous operation."""
        if not self.case.asynchronous:
            assert work is None, f"a synchronous call returned {work!r}"
            return
        if isinstance(work, torch.Future):
            work.wait()
        else:
            assert work.wait() is True, f"{work!r}.wait() did not return True"
            assert work.is_completed(), f"{work!r} has been waited for and is not completed"

    def reduced(
        self, got: torch.Tensor, piece: int = 0, count: int | None = None
    ) -> str | None:
        """Checks a tensor that must be the reduction of all ranks' `piece`."""
        parts = [self.data(rank, piece, count) for rank in range(self.world)]
        return check(self.case.op, self.case.dtype, got, parts)

    def moved(
        self, got: torch.Tensor, rank: int, piece: int = 0, count: int | None = None
    ) -> str | None:
        """Checks a tensor that must be what `rank` brought as its `piece`."""
        return same_bits(got, self.data(rank, piece, count))


Check = tuple[str, str | None]
"""What was checked, and what is wrong with it."""


@dataclass(frozen=True)
class Operation:
    """A line's operation: how to run it and what varies."""

    run: Callable[[Call], Iterator[Check]]
    reduces: bool = False
    rooted: bool = False
    equal: bool = False
    """The first thing checked must be the same bits on all ranks."""


OPERATIONS: dict[str, Operation] = {}


def operation(**traits: bool) -> Callable[[Any], Any]:
    """Adds a function to the table under its own name."""

    def add(run: Callable[[Call], Iterator[Check]]) -> Callable[[Call], Iterator[Check]]:
        OPERATIONS[run.__name__] = Operation(run, **traits)
        return run

    return add


def uneven(rank: int, count: int) -> int:
    """Elements of `rank`'s piece where pieces differ; none for every third rank."""
    return 0 if rank % 3 == 2 else count + 5 * rank


@operation(rooted=True)
def broadcast(call: Call) -> Iterator[Check]:
    tensor = call.bring() if call.rank == call.root else call.room()
    call.end(dist.broadcast(tensor, call.root, async_op=call.case.asynchronous))
    yield "tensor", call.moved(tensor, call.root)


@operation(reduces=True, equal=True)
def all_reduce(call: Call) -> Iterator[Check]:
    tensor = call.inout()
    call.end(dist.all_reduce(tensor, call.reduce_op, async_op=call.case.asynchronous))
    yield "tensor", call.reduced(tensor)


@operation(reduces=True)
def all_reduce_coalesced(call: Call) -> Iterator[Check]:
    tensors = [call.inout(piece) for piece in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        work = dist.all_reduce_coalesced(
            tensors, call.reduce_op, async_op=call.case.asynchronous
        )
    call.end(work)
    for piece, tensor in enumerate(tensors):
        yield f"tensor {piece}", call.reduced(tensor, piece)


@operation(reduces=True)
def all_reduce_in_coalescing_manager(call: Call) -> Iterator[Check]:
    tensors = [call.inout(piece) for piece in range(3)]
    with dist._coalescing_manager(async_ops=call.case.asynchronous) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, call.reduce_op)
    manager.wait()
    for piece, tensor in enumerate(tensors):
        yield f"tensor {piece}", call.reduced(tensor, piece)


@operation(reduces=True, rooted=True)
def reduce(call: Call) -> Iterator[Check]:
    tensor = call.inout()
    call.end(dist.reduce(tensor, call.root, call.reduce_op, async_op=call.case.asynchronous))
    if call.rank == call.root:
        yield "tensor", call.reduced(tensor)


@operation()
def all_gather(call: Call) -> Iterator[Check]:
    outputs = [call.room() for _ in range(call.world)]
    call.end(dist.all_gather(outputs, call.bring(), async_op=call.case.asynchronous))
    for rank, output in enumerate(outputs):
        yield f"output {rank}", call.moved(output, rank)


@operation()
def all_gather_uneven(call: Call) -> Iterator[Check]:
    counts = [uneven(rank, call.case.count) for rank in range(call.world)]
    outputs = [call.room(count) for count in counts]
    mine = call.bring(count=counts[call.rank])
    call.end(dist.all_gather(outputs, mine, async_op=call.case.asynchronous))
    for rank, output in enumerate(outputs):
        yield f"output {rank}", call.moved(output, rank, count=counts[rank])


@operation()
def all_gather_single(call: Call) -> Iterator[Check]:
    output = call.flat_room(call.world * call.case.count)
    call.end(dist.all_gather_single(output, call.bring(), async_op=call.case.asynchronous))
    for rank, part in enumerate(output.view(call.world, -1) if output.numel() else ()):
        yield f"part {rank}", call.moved(part, rank)


@operation()
def all_gather_single_coalesced(call: Call) -> Iterator[Check]:
    outputs = [call.flat_room(call.world * call.case.count) for _ in range(2)]
    with dist._coalescing_manager(async_ops=call.case.asynchronous) as manager:
        for piece, output in enumerate(outputs):
            dist.all_gather_single(output, call.bring(piece))
    manager.wait()
    for piece, output in enumerate(outputs):
        for rank, part in enumerate(output.view(call.world, -1) if output.numel() else ()):
            yield f"output {piece} part {rank}", call.moved(part, rank, piece)


@operation()
def all_gather_coalesced(call: Call) -> Iterator[Check]:
    outputs = [[call.room() for _ in range(2)] for _ in range(call.world)]
    inputs = [call.bring(piece) for piece in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        work = dist.all_gather_coalesced(outputs, inputs, async_op=call.case.asynchronous)
    call.end(work)
    for rank, row in enumerate(outputs):
        for piece, output in enumerate(row):
            yield f"output {rank} {piece}", call.moved(output, rank, piece)


@operation(rooted=True)
def gather(call: Call) -> Iterator[Check]:
    outputs = [call.room() for _ in range(call.world)] if call.rank == call.root else None
    call.end(dist.gather(call.bring(), outputs, call.root, async_op=call.case.asynchronous))
    for rank, output in enumerate(outputs or ()):
        yield f"output {rank}", call.moved(output, rank)


@operation(rooted=True)
def gather_single(call: Call) -> Iterator[Check]:
    output = None
    if call.rank == call.root:
        output = call.flat_room(call.world * call.case.count)
    call.end(
        dist.gather_single(call.bring(), output, call.root, async_op=call.case.asynchronous)
    )
    if output is not None and output.numel():
        for rank, part in enumerate(output.view(call.world, -1)):
            yield f"part {rank}", call.moved(part, rank)


@operation(rooted=True)
def scatter(call: Call) -> Iterator[Check]:
    inputs = None
    if call.rank == call.root:
        inputs = [call.bring(piece) for piece in range(call.world)]
    output = call.room()
    call.end(dist.scatter(output, inputs, call.root, async_op=call.case.asynchronous))
    yield "output", call.moved(output, call.root, call.rank)


@operation(reduces=True)
def reduce_scatter(call: Call) -> Iterator[Check]:
    inputs = [call.bring(piece) for piece in range(call.world)]
    output = call.room()
    work = dist.reduce_scatter(output, inputs, call.reduce_op, async_op=call.case.asynchronous)
    call.end(work)
    yield "output", call.reduced(output, call.rank)


@operation(reduces=True)
def reduce_scatter_uneven(call: Call) -> Iterator[Check]:
    counts = [uneven(rank, call.case.count) for rank in range(call.world)]
    inputs = [call.bring(piece, count) for piece, count in enumerate(counts)]
    output = call.room(counts[call.rank])
    work = dist.reduce_scatter(output, inputs, call.reduce_op, async_op=call.case.asynchronous)
    call.end(work)
    yield "output", call.reduced(output, call.rank, counts[call.rank])


@operation(reduces=True)
def reduce_scatter_single(call: Call) -> Iterator[Check]:
    pieces = [call.data(call.rank, piece) for piece in range(call.world)]
    source = call._lay(
        torch.cat([bits(p) for p in pieces]).view(DTYPES[call.case.dtype]), False
    )
    output = call.room()
    work = dist.reduce_scatter_single(
        output, source, call.reduce_op, async_op=call.case.asynchronous
    )
    call.end(work)
    yield "output", call.reduced(output, call.rank)


@operation(reduces=True)
def reduce_scatter_single_coalesced(call: Call) -> Iterator[Check]:
    outputs = [call.flat_room(call.case.count) for _ in range(2)]
    with dist._coalescing_manager(async_ops=call.case.asynchronous) as manager:
        for number, output in enumerate(outputs):
            pieces = [call.data(call.rank, call.world * number + p) for p in range(call.world)]
            source = torch.cat([bits(p) for p in pieces]).view(DTYPES[call.case.dtype])
            dist.reduce_scatter_single(output, source, call.reduce_op)
    manager.wait()
    for number, output in enumerate(outputs):
        yield f"output {number}", call.reduced(output, call.world * number + call.rank)


@operation()
def all_to_all_single(call: Call) -> Iterator[Check]:
    pieces = [call.data(call.rank, piece) for piece in range(call.world)]
    source = torch.cat([bits(p) for p in pieces]).view(DTYPES[call.case.dtype])
    output = call.flat_room(source.numel())
    call.end(dist.all_to_all_single(output, source, async_op=call.case.asynchronous))
    for rank, part in enumerate(output.view(call.world, -1) if output.numel() else ()):
        yield f"from {rank}", call.moved(part, rank, call.rank)


def _split(source: int, destination: int, count: int) -> int:
    """Elements from one rank to another in an uneven all-to-all; some none."""
    return 0 if (source + destination) % 3 == 2 else count + 2 * source + destination


@operation()
def all_to_all_single_uneven(call: Call) -> Iterator[Check]:
    count = call.case.count
    out = [_split(call.rank, peer, count) for peer in range(call.world)]
    back = [_split(peer, call.rank, count) for peer in range(call.world)]
    pieces = [call.data(call.rank, peer, out[peer]) for peer in range(call.world)]
    source = torch.cat([bits(p) for p in pieces]).view(DTYPES[call.case.dtype])
    output = call.flat_room(sum(back))
    call.end(dist.all_to_all_single(output, source, back, out, async_op=call.case.asynchronous))
    for peer, part in enumerate(bits(output).split(back)):
        yield (
            f"from {peer}",
            call.moved(part.view(output.dtype), peer, call.rank, back[peer]),
        )


@operation()
def all_to_all(call: Call) -> Iterator[Check]:
    count = call.case.count
    inputs = [call.bring(peer, _split(call.rank, peer, count)) for peer in range(call.world)]
    outputs = [call.room(_split(peer, call.rank, count)) for peer in range(call.world)]
    call.end(dist.all_to_all(outputs, inputs, async_op=call.case.asynchronous))
    for peer, output in enumerate(outputs):
        size = _split(peer, call.rank, count)
        yield f"from {peer}", call.moved(output, peer, call.rank, size)


@operation()
def send_recv(call: Call) -> Iterator[Check]:
    right, left = (call.rank + 1) % call.world, (call.rank - 1) % call.world
    outgoing, incoming = call.bring(), call.room()
    if call.case.asynchronous or call.world == 1:
        works = [dist.isend(outgoing, right), dist.irecv(incoming, left)]
        for work in works:
            assert work is not None
            work.wait()
    elif call.rank % 2 == 0 and right != 0:
        dist.send(outgoing, right)
        dist.recv(incoming, left)
    else:
        dist.recv(incoming, left)
        dist.send(outgoing, right)
    yield "received", call.moved(incoming, left)


@operation()
def batch_isend_irecv(call: Call) -> Iterator[Check]:
    peers = [peer for peer in range(call.world) if peer != call.rank]
    incoming = [call.room() for _ in peers]
    works = (
        dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, tensor, peer)
                for tensor, peer in zip(incoming, peers, strict=True)
            ]
            + [dist.P2POp(dist.isend, call.bring(peer), peer) for peer in peers]
        )
        if peers
        else []
    )
    for work in works:
        work.wait()
    for tensor, peer in zip(incoming, peers, strict=True):
        yield f"from {peer}", call.moved(tensor, peer, call.rank)


def run_case(case: Case, rank: int, world: int) -> Result:
    """Executes one case on this rank."""
    call = Call(case, rank, world)
    try:
        checks = list(OPERATIONS[case.operation].run(call))
    except Exception as error:
        return Result(failure=Failure.of(error))
    for laid in call.made:
        if laid.spilled():
            checks.append(("memory around a tensor", "was written to"))
    wrong = "; ".join(f"{what}: {problem}" for what, problem in checks if problem)
    digest = ""
    if OPERATIONS[case.operation].equal:
        content = bits(call.made[0].tensor)
        if content.dtype == torch.complex128:
            content = torch.view_as_real(content)
        digest = hashlib.blake2b(content.numpy().tobytes(), digest_size=8).hexdigest()
    return Result(wrong or None, digest=digest)


def run_table(me: Me, cases: Sequence[Case]) -> list[Result]:
    """Executes cases in order. Stops at a failure, after which ranks may disagree."""
    results = []
    for case in cases:
        results.append(run_case(case, me.rank, me.world))
        if results[-1].failure:
            break
    return results


def problems(cases: Sequence[Case], outcomes: Sequence[Any]) -> list[str]:
    """What was wrong in a table that ranks have run, line by line."""
    found = [str(outcome) for outcome in outcomes if not outcome.ok]
    if found:
        return found
    for number, case in enumerate(cases):
        results = [o.value[number] if number < len(o.value) else None for o in outcomes]
        for rank, result in enumerate(results):
            if result and (result.wrong or result.failure):
                found.append(f"{case} rank {rank}: {result.wrong or result.failure}")
        if len({result.digest for result in results if result}) > 1:
            found.append(f"{case}: ranks have different bits")
        if any(result is None or result.failure for result in results):
            break
    return found


__all__ = ["OPERATIONS", "OPS", "Case", "Result", "problems", "run_case", "run_table"]
