"""What the process groups of this process did."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Stat:
    """Operations of one kind that a group ran over one transport.

    ``seconds`` is the time from the call to the end, summed over the calls (of small
    synchronous collectives one in 16 is timed); ``bytes`` is what this rank's tensors held,
    ``written`` what this rank wrote for them over shared memory, results and copies: tensors
    that the group allocated are not copied.
    """

    group: str
    size: int
    kind: str
    transport: str
    calls: int
    bytes: int
    written: int
    seconds: float


def stats() -> list[Stat]:
    """What each live group has done so far, by kind of operation and transport."""
    # Without the compiled part there is no group.
    compiled = sys.modules.get("tpu_dist._C")
    if compiled is None:
        return []
    return [Stat(**row) for row in compiled.stats()]


def stats_table(rows: list[Stat] | None = None) -> str:
    """``rows``, by default those of :func:`stats`, as a table for a terminal."""
    rows = stats() if rows is None else rows
    header = ("group", "ranks", "operation", "transport", "calls", "MiB", "ms")
    cells = [header] + [
        (
            row.group,
            str(row.size),
            row.kind,
            row.transport,
            str(row.calls),
            f"{row.bytes / 2**20:.2f}",
            f"{row.seconds * 1e3:.1f}",
        )
        for row in sorted(rows, key=lambda row: (row.group, -row.seconds))
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    text = (0, 2, 3)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in text else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )
