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
    parser.add_argument("--op", default="SUM", help="operator of a reduction (SUM)")
    parser.add_argument("--dtype", default="float32", help="element type (float32)")
    parser.add_argument(
        "--algorithm", help="demand an algorithm between hosts, as TPU_DIST_ALGO does"
    )
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
    chips = topology.explain_chips(group, options.collective, size)
    hosts = None
    # A permutation is sends and receives, for which there is nothing to choose.
    if options.collective != "permute":
        hosts = topology.explain_hosts(
            group,
            options.collective,
            size,
            op=options.op,
            dtype=options.dtype,
            algorithm=options.algorithm,
        )
    if options.json:
        answer = {
            "topology": topology.name,
            "collective": options.collective,
            "bytes": size,
            "ranks": group,
            "dimensions": dimensions,
            "chips": chips,
            "hosts": hosts,
        }
        print(json.dumps(answer, indent=2))
        return 0

    print(f"{options.collective} of {format_size(size)} over {len(group)} ranks of {topology}")
    if not dimensions:
        print("  one rank: nothing to send")
        return 0
    print(
        "\nOn the chips, like groups beside it busy; the compiler of the TPU has the last word:"
    )
    for dimension in dimensions:
        print(
            f"  {dimension['size']} in a {dimension['wiring']}: "
            f"{dimension['bandwidth'] / 1e9:.3g} GB/s a wire and way, "
            f"{format_time(dimension['startup'] + dimension['hop'])} to the next"
        )
    print(f"{'algorithm':20} {'time':>10} {'latency':>10} {'bytes':>10}")
    for candidate in chips["candidates"]:
        seconds, latency = candidate["seconds"], candidate["latency"]
        times = [format_time(time) for time in (seconds, latency, seconds - latency)]
        cells = " ".join(f"{time:>10}" for time in times)
        print(f"{candidate['algorithm']:20} {cells}" + _remarks(candidate, chips))
    print(f"{chips['chosen']}: {chips['why']}")
    if hosts is None:
        return 0
    where = "in the memory of one host" if hosts["shared_memory"] else "between hosts"
    print(f"\nOn tensors of the CPU and on virtual slices, {where}:")
    print(f"{'algorithm':20} {'time':>10}")
    for offered in hosts["candidates"]:
        if offered["seconds"] is None:
            print(f"{offered['algorithm']:20} {offered['excluded']}")
        else:
            cells = f"{format_time(offered['seconds']):>10}"
            print(f"{offered['algorithm']:20} {cells}" + _remarks(offered, hosts))
    demanded = "as demanded; " if hosts["forced"] else ""
    print(f"{hosts['chosen']}: {demanded}{hosts['why']}")
    return 0


def _remarks(candidate: Any, explanation: Any) -> str:
    """How much slower than the first, and whether the time is an estimate."""
    best = explanation["candidates"][0]["seconds"]
    words = ""
    if best > 0 and candidate["seconds"] > best:
        words += f"  {candidate['seconds'] / best:.2f}x"
    if not candidate["formula"]:
        words += "  estimated"
    return words


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
