"""``tpu-dist bench``: times collectives, beside another backend if wanted."""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpu_dist.cli.units import format_size, parse_size

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
    "barrier",
)
DTYPES = ("float32", "bfloat16", "float16", "float64", "int32", "int64", "uint8", "int8")
MEMORY = ("torch", "group")
DEVICES = ("cpu", "tpu")
DEFAULT_SIZES = "8,1KiB,16KiB,64KiB,256KiB,1MiB,8MiB,64MiB"

BLOCKS = 7
"""Blocks of calls for each backend; those of the two backends alternate."""

BLOCK_SECONDS = 0.01
"""Aimed length of a block."""


@dataclass
class Row:
    """The figures of one operation, size and dtype.

    Times are medians over the blocks, in microseconds a call, on rank 0. Bandwidths are in
    GB/s (10^9 bytes): ``algbw`` is ``bytes`` over the time, ``busbw`` is that times what the
    busiest link must carry for each byte, as nccl-tests define it. ``predicted`` is the model's
    time in microseconds.
    """

    operation: str
    bytes: int
    dtype: str
    ranks: int
    time: float
    algbw: float
    busbw: float
    correct: bool
    other_time: float | None = None
    other_busbw: float | None = None
    ratio: float | None = None
    predicted: float | None = None


def add(commands: Any) -> None:
    """Adds the parser."""
    parser = commands.add_parser(
        "bench",
        help="time collectives, beside another backend if wanted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: tpu-dist bench --ops all_reduce,all_gather --ranks 4 --compare gloo",
    )
    parser.add_argument(
        "--ops", default="all_reduce", help=f"of {', '.join(OPERATIONS)}, or all"
    )
    parser.add_argument("--sizes", default=DEFAULT_SIZES, help="bytes, as 8,64KiB,1MiB")
    parser.add_argument("--dtypes", default="float32", help=f"of {', '.join(DTYPES)}")
    parser.add_argument(
        "--ranks", type=int, default=2, help="processes; ignored under torchrun"
    )
    parser.add_argument("--backend", default="tpu_dist", help="what is timed")
    parser.add_argument(
        "--memory",
        choices=MEMORY,
        default=MEMORY[0],
        help="whose tensors: torch's, or the process group's, which it works on in place",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default=DEVICES[0],
        help="where the tensors are; what is compared takes those of the CPU alone",
    )
    parser.add_argument(
        "--predict",
        action="store_true",
        help="add the time that the model expects: on the slice that TPU_DIST_VIRTUAL_SLICE "
        "names, else between these processes",
    )
    parser.add_argument("--compare", help="another backend, timed in turns, as gloo")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument("--plot", type=Path, help="draw bus bandwidth over size to this file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark; returns the exit status: 1 when a result was wrong."""
    operations = (
        OPERATIONS if options.ops == "all" else _choose(options.ops, OPERATIONS, "--ops")
    )
    dtypes = _choose(options.dtypes, DTYPES, "--dtypes")
    sizes = [parse_size(size) for size in options.sizes.split(",")]
    if options.ranks < 1:
        raise ValueError(f"--ranks: expected at least 1, got {options.ranks}")
    if options.device != "cpu" and (options.compare or options.memory != "torch"):
        raise ValueError("--device: expected cpu with --compare and --memory group, got tpu")
    job = (
        operations,
        sizes,
        dtypes,
        options.backend,
        options.compare,
        options.memory,
        options.device,
        options.predict,
    )
    if "RANK" in os.environ:
        # Started by torchrun, perhaps on several hosts.
        rows = _measure(None, *job)
        if os.environ["RANK"] != "0":
            return 0
    else:
        rows = _spawn(options.ranks, *job)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(_table(rows, options.compare, options.predict))
    if options.plot is not None:
        _plot(rows, options.backend, options.compare, options.plot)
    return 0 if all(row.correct for row in rows) else 1


def _choose(text: str, known: Sequence[str], option: str) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in known:
            raise ValueError(f"{option}: expected some of {', '.join(known)}, got {name!r}")
    return chosen


def _spawn(ranks: int, *job: Any) -> list[Row]:
    """Runs ``_measure`` on processes of this host; returns what rank 0 measured."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory(prefix="tpu_dist-bench-") as directory:
        answer = Path(directory) / "rows.json"
        spawn(_rank, args=(ranks, directory, job), nprocs=ranks)  # type: ignore[no-untyped-call]
        return [Row(**row) for row in json.loads(answer.read_text())]


def _rank(rank: int, ranks: int, directory: str, job: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1"
    )
    rows = _measure(f"file://{directory}/store", *job)
    if rank == 0:
        text = json.dumps([asdict(row) for row in rows])
        (Path(directory) / "rows.json").write_text(text)


def _measure(
    init_method: str | None,
    operations: Sequence[str],
    sizes: Sequence[int],
    dtypes: Sequence[str],
    backend: str,
    compare: str | None,
    memory: str,
    device: str,
    predict: bool,
) -> list[Row]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world)
    own = dist.group.WORLD
    other = dist.new_group(backend=compare) if compare else None
    plain = functools.partial(torch.empty, device=device)
    empty = _group_memory(own) if memory == "group" else plain
    rows = []
    try:
        for operation in operations:
            for dtype in dtypes:
                for size in sizes if operation != "barrier" else sizes[:1]:
                    row = _time(operation, size, getattr(torch, dtype), own, other, empty)
                    if predict:
                        row.predicted = _predict(row, own, empty)
                    rows.append(row)
                    if rank == 0 and sys.stderr.isatty():
                        print(f"{operation} {format_size(row.bytes)} {dtype}", file=sys.stderr)
    finally:
        dist.destroy_process_group()
    return rows


def _group_memory(group: Any) -> Callable[..., Any]:
    """``torch.empty`` in memory that the ranks of ``group`` reach in place."""
    import torch

    device = torch.device("cpu")
    backend = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        raise ValueError(
            "--memory: expected torch, as the ranks of the group share no memory, got group"
        )
    return lambda count, dtype: backend.allocate_tensor(count, dtype=dtype, device=device)


def _predict(row: Row, group: Any, empty: Callable[..., Any]) -> float:
    """What the model expects of a row, in microseconds."""
    import torch
    import torch.distributed as dist

    dtype = getattr(torch, row.dtype)
    count = row.bytes // dtype.itemsize
    case = _Case(row.operation, count, dtype, dist.get_rank(), row.ranks, empty)
    with dist._time_estimator(group, empty(0, dtype=dtype).device) as estimate:
        case.call(group)()
    time = estimate.estimated_time or 0.0
    return time / 2 if row.operation == "send_recv" else time


def _time(
    operation: str, size: int, dtype: Any, own: Any, other: Any, empty: Callable[..., Any]
) -> Row:
    import torch
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    unit = dtype.itemsize * world
    size = -(-size // unit) * unit if operation != "barrier" else 0
    case = _Case(operation, size // dtype.itemsize, dtype, rank, world, empty)
    correct = torch.tensor([int(case.is_right(own))])
    dist.all_reduce(correct, op=dist.ReduceOp.MIN, group=own)
    groups = [own] if other is None else [own, other]
    counts: list[int] = []
    times: list[list[float]] = []
    for group in groups:
        call = case.call(group)
        call()
        start = time.perf_counter()
        for _ in range(3):
            call()
        case.wait()
        once = (time.perf_counter() - start) / 3
        # All ranks must make the same number of calls: rank 0 says how many.
        count = torch.tensor([max(1, min(1000, int(BLOCK_SECONDS / once)))])
        dist.broadcast(count, 0, group=own)
        counts.append(int(count))
        times.append([])
    for _ in range(BLOCKS):
        for index, group in enumerate(groups):
            call = case.call(group)
            dist.barrier(group=own)
            start = time.perf_counter()
            for _ in range(counts[index]):
                call()
            case.wait()
            times[index].append((time.perf_counter() - start) / counts[index])
    half = 2 if operation == "send_recv" else 1
    medians = [statistics.median(blocks) / half for blocks in times]
    busbw = [size / seconds / 1e9 * _bus_factor(operation, world) for seconds in medians]
    row = Row(
        operation,
        size,
        str(dtype).removeprefix("torch."),
        world,
        medians[0] * 1e6,
        size / medians[0] / 1e9,
        busbw[0],
        bool(correct.item()),
    )
    if other is not None:
        row.other_time, row.other_busbw = medians[1] * 1e6, busbw[1]
        row.ratio = medians[1] / medians[0]
    return row


class _Case:
    """One operation on one size: ``count`` elements are the whole that a rank holds at most."""

    def __init__(
        self,
        operation: str,
        count: int,
        dtype: Any,
        rank: int,
        world: int,
        empty: Callable[..., Any],
    ) -> None:
        self.operation, self.rank, self.world = operation, rank, world
        self.input = empty(count, dtype=dtype).copy_(self._fill(rank, count, dtype))
        self.output = empty(count, dtype=dtype).zero_()
        self.part = empty(count // world, dtype=dtype).zero_()

    def _fill(self, rank: int, count: int, dtype: Any) -> Any:
        """Small whole numbers, so that every dtype holds every sum exactly."""
        import torch

        return (torch.arange(count) % 7 + rank % 3).to(dtype)

    def call(self, group: Any) -> Callable[[], Any]:
        """The operation, bound to its tensors."""
        import torch.distributed as dist

        size = self.part.numel()
        own = self.input[self.rank * size : (self.rank + 1) * size]
        match self.operation:
            case "all_reduce":
                return lambda: dist.all_reduce(self.output, group=group)
            case "all_gather":
                return lambda: dist.all_gather_single(self.output, own, group=group)
            case "reduce_scatter":
                return lambda: dist.reduce_scatter_single(self.part, self.input, group=group)
            case "all_to_all":
                return lambda: dist.all_to_all_single(self.output, self.input, group=group)
            case "broadcast":
                return lambda: dist.broadcast(self.output, 0, group=group)
            case "send_recv":
                return lambda: self._ping_pong(group)
            case _:
                return lambda: dist.barrier(group=group)

    def wait(self) -> None:
        """Waits for the device, where the tensors are on one."""
        if self.output.device.type == "tpu":
            from tpu_dist import tpu

            tpu.synchronize()

    def _ping_pong(self, group: Any) -> None:
        """A message from rank 0 to rank 1 and back."""
        import torch.distributed as dist

        if self.rank == 0:
            dist.send(self.input, 1, group=group)
            dist.recv(self.output, 1, group=group)
        elif self.rank == 1:
            dist.recv(self.output, 0, group=group)
            dist.send(self.output, 0, group=group)

    def is_right(self, group: Any) -> bool:
        """Runs it once; whether the result is what it should be."""
        import torch

        count, dtype = self.input.numel(), self.input.dtype
        inputs = [self._fill(rank, count, dtype) for rank in range(self.world)]
        total = torch.stack([data.double() for data in inputs]).sum(0).to(dtype)
        parts = [data.chunk(self.world) if count else [data] * self.world for data in inputs]
        self.output.copy_(inputs[self.rank] if self.operation == "all_reduce" else inputs[0])
        if self.operation == "broadcast" and self.rank != 0:
            self.output.zero_()
        self.call(group)()
        match self.operation:
            case "all_reduce":
                expected, got = total, self.output
            case "all_gather":
                expected = torch.cat([parts[rank][rank] for rank in range(self.world)])
                got = self.output
            case "reduce_scatter":
                size = self.part.numel()
                expected = total[self.rank * size : (self.rank + 1) * size]
                got = self.part
            case "all_to_all":
                expected = torch.cat([parts[rank][self.rank] for rank in range(self.world)])
                got = self.output
            case "broadcast" | "send_recv":
                expected, got = inputs[0], self.output
                if self.operation == "send_recv" and self.rank > 1:
                    return True
            case _:
                return True
        right = torch.equal(got.cpu(), expected)
        # Repeated sums in place stay finite and fast when they are sums of zeros.
        self.output.zero_()
        return right


def _bus_factor(operation: str, ranks: int) -> float:
    """Bytes on the busiest link for each byte of the whole (nccl-tests, PERFORMANCE.md)."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def _table(rows: Sequence[Row], compare: str | None, predict: bool) -> str:
    head = ["op", "size", "dtype", "ranks", "time us", "algbw GB/s", "busbw GB/s", "correct"]
    if compare:
        head += [f"{compare} us", f"{compare} busbw", "ratio"]
    if predict:
        head += ["model us"]
    lines = [head]
    for row in rows:
        line = [
            row.operation,
            format_size(row.bytes),
            row.dtype,
            str(row.ranks),
            f"{row.time:.1f}",
            f"{row.algbw:.2f}",
            f"{row.busbw:.2f}",
            "yes" if row.correct else "NO",
        ]
        if compare:
            line += [f"{row.other_time:.1f}", f"{row.other_busbw:.2f}", f"{row.ratio:.1f}x"]
        if predict:
            line += [f"{row.predicted:.1f}"]
        lines.append(line)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in (0, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _plot(rows: Sequence[Row], backend: str, compare: str | None, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install tpu-dist[bench]") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    operations = list(dict.fromkeys(row.operation for row in rows if row.bytes))
    figure, axes = pyplot.subplots(
        1, len(operations), figsize=(5 * len(operations), 4), squeeze=False
    )
    for axis, operation in zip(axes[0], operations, strict=True):
        chosen = [row for row in rows if row.operation == operation]
        for dtype in dict.fromkeys(row.dtype for row in chosen):
            line = [row for row in chosen if row.dtype == dtype]
            sizes = [row.bytes for row in line]
            axis.plot(sizes, [row.busbw for row in line], "o-", label=f"{backend}, {dtype}")
            if compare:
                other = [row.other_busbw for row in line]
                axis.plot(sizes, other, "s--", label=f"{compare}, {dtype}")
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="bytes",
            ylabel="bus bandwidth, GB/s",
            title=f"{operation}, {rows[0].ranks} ranks",
        )
        axis.grid(True, which="both", alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
