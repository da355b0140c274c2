"""``tpu-dist explain``: which algorithm a collective would take, and why."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tpu_dist.cli.topo import COLLECTIVES
from tpu_dist.cli.units import format_size, format_time, parse_mesh, parse_size


def add(commands: Any) -> None:
    """Adds the parser."""
    parser = commands.add_parser(
        "explain",
        help="say which algorithm a collective would take on a group, and why",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: tpu-dist explain all_reduce 64MiB v5p:4x4x8 --ranks 0-15",
    )
    parser.add_argument("collective", choices=COLLECTIVES)
    parser.add_argument("size", help="bytes, as 64MiB")
    parser.add_argument("topology", help="as v5e:4x4, v5p-128, 2*v5e:16x16")
    parser.add_argument("--mesh", help="axes of the mesh, as dp=8,tp=16")
    parser.add_argument("--axis", help="the axis of the mesh along which the group lies")
    parser.add_argument("--ranks", help="the group as ranks, as 0,1,4-7; default: all")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the explanation; returns the exit status."""
    from tpu_dist.mesh import place
    from tpu_dist.topology import Topology

    topology = Topology(options.topology)
    size = parse_size(options.size)
    if (options.mesh is None) != (options.axis is None):
        raise ValueError("--mesh and --axis go together")
    if options.mesh is not None:
        if options.ranks is not None:
            raise ValueError("--ranks and --mesh exclude each other")
        names, shape = parse_mesh(options.mesh)
        if options.axis not in names:
            raise ValueError(f"--axis: {options.axis!r} is not among the axes {names}")
        placement = place(shape, names, topology)
        axis = names.index(options.axis)
        stride = 1
        for inner in shape[axis + 1 :]:
            stride *= inner
        group = [placement.ranks[at * stride] for at in range(shape[axis])]
    elif options.ranks is not None:
        group = parse_ranks(options.ranks)
    else:
        group = list(range(topology.device_count))

    dimensions = topology.group(group)
    ranking = topology.costs(group, options.collective, size)
    # Bytes times time is linear for each algorithm, so no bytes leave the latency.
    latency = dict(topology.costs(group, options.collective, 0))
    if options.json:
        candidates = [
            {"algorithm": name, "seconds": seconds, "latency": latency[name]}
            for name, seconds in ranking
        ]
        answer = {
            "topology": topology.name,
            "collective": options.collective,
            "bytes": size,
            "ranks": group,
            "dimensions": dimensions,
            "candidates": candidates,
        }
        print(json.dumps(answer, indent=2))
        return 0

    print(
        f"{options.collective} of {format_size(size)} over {len(group)} ranks of {topology}, "
        "like groups beside it busy"
    )
    for dimension in dimensions:
        print(
            f"  {dimension['size']} in a {dimension['wiring']}: "
            f"{dimension['bandwidth'] / 1e9:.3g} GB/s a wire and way, "
            f"{format_time(dimension['startup'] + dimension['hop'])} to the next"
        )
    if not dimensions:
        print("  one rank: nothing to send")
        return 0
    best_name, best = ranking[0]
    print(f"\n{'algorithm':20} {'time':>10} {'latency':>10} {'wires':>10}")
    for name, seconds in ranking:
        wires = seconds - latency[name]
        ratio = "" if name == best_name else f"  {seconds / best:.2f}x"
        print(
            f"{name:20} {format_time(seconds):>10} {format_time(latency[name]):>10} "
            f"{format_time(wires):>10}{ratio}"
        )
    print(f"\n{best_name}: {_why(ranking, latency)}")
    return 0


def _why(ranking: list[tuple[str, float]], latency: dict[str, float]) -> str:
    name, best = ranking[0]
    bound = "latency" if latency[name] > best / 2 else "the wires"
    share = max(latency[name], best - latency[name]) / best
    words = f"{share:.0%} of its time is {bound}"
    if len(ranking) == 1:
        return f"{words}; no other algorithm does this on the group"
    second, seconds = ranking[1]
    saved_latency = latency[second] - latency[name]
    saved_wires = (seconds - latency[second]) - (best - latency[name])
    parts = [
        f"{format_time(abs(saved))} {'less' if saved > 0 else 'more'} {what}"
        for saved, what in ((saved_latency, "latency"), (saved_wires, "on the wires"))
        if abs(saved) > 1e-9
    ]
    if not parts:
        return f"{words}; {second} is as fast"
    return f"{words}; against {second} {' and '.join(parts)}"


def parse_ranks(text: str) -> list[int]:
    """Ranks of ``0,1,4-7``.

    Raises:
        ValueError: the text lists no ranks.
    """
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--ranks: expected ranks as 0,1,4-7, got {text!r}")
        ranks += range(int(first), int(last or first) + 1)
    return ranks
