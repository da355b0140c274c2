"""``tpu-dist topo``: a slice, a mesh on it, its rings and predicted times."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tpu_dist.cli.units import format_size, format_time, parse_mesh, parse_size

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")
SIZES = "4KiB,256KiB,16MiB,1GiB"


def add(commands: Any) -> None:
    """Adds the parser."""
    parser = commands.add_parser(
        "topo",
        help="show a TPU slice, the placement of a mesh on it and predicted times",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: tpu-dist topo v5p:4x4x8 --mesh dp=8,tp=16 --svg mesh.svg",
    )
    parser.add_argument("topology", help="as v5e:4x4, v5p-128, tpu7x:4x4x8, 2*v5e:16x16")
    parser.add_argument("--mesh", help="axes of the mesh, as dp=8,tp=16")
    parser.add_argument("--num-slices", type=int, help="number of slices")
    parser.add_argument("--dcn", help="slices that each axis spans, as dp=2,tp=1")
    parser.add_argument(
        "--traffic",
        action="append",
        metavar="AXIS:COLLECTIVE=SIZE",
        help="what an axis carries, as tp:all_reduce=256MiB; may be repeated",
    )
    parser.add_argument("--sizes", default=SIZES, help=f"sizes to predict ({SIZES})")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the torus")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the topology; returns the exit status."""
    from tpu_dist.mesh import place
    from tpu_dist.topology import Topology

    topology = Topology(options.topology, num_slices=options.num_slices)
    sizes = [parse_size(size) for size in options.sizes.split(",")]
    if options.mesh is None:
        if options.dcn or options.traffic:
            raise ValueError("--dcn and --traffic need --mesh")
        names, shape = ["world"], [topology.device_count]
    else:
        names, shape = parse_mesh(options.mesh)
    placement = place(
        shape,
        names,
        topology,
        dcn_shape=_dcn(options.dcn, names),
        traffic=_traffic(options.traffic),
    )
    times = [
        {
            "axis": name,
            "collective": kind,
            "bytes": size,
            "algorithm": algorithm,
            "seconds": seconds,
        }
        for axis, name in enumerate(names)
        for kind in COLLECTIVES
        for size in sizes
        for algorithm, seconds in placement.costs(axis, kind, size)[:1]
    ]
    if options.svg:
        drawn = topology.svg() if options.mesh is None else placement.svg(names)
        options.svg.write_text(drawn)
    if options.json:
        print(json.dumps(_as_json(topology, names, placement, times), indent=2))
        return 0
    print(topology.text() if options.mesh is None else placement.text(names))
    print(_table(names, times, sizes))
    if options.svg:
        print(f"\nwrote {options.svg}")
    return 0


def _dcn(text: str | None, names: list[str]) -> list[int] | None:
    if text is None:
        return None
    given, sizes = parse_mesh(text)
    unknown = set(given) - set(names)
    if unknown:
        raise ValueError(f"--dcn: {sorted(unknown)} are not among the axes {names}")
    slices = dict(zip(given, sizes, strict=True))
    return [slices.get(name, 1) for name in names]


def _traffic(entries: list[str] | None) -> dict[str, dict[str, float]] | None:
    if entries is None:
        return None
    traffic: dict[str, dict[str, float]] = {}
    for entry in entries:
        what, equals, size = entry.partition("=")
        axis, colon, kind = what.partition(":")
        if not (equals and colon and kind in COLLECTIVES):
            raise ValueError(
                "--traffic: expected AXIS:COLLECTIVE=SIZE with a collective among "
                f"{', '.join(COLLECTIVES)}, got {entry!r}"
            )
        per_axis = traffic.setdefault(axis, {})
        per_axis[kind] = per_axis.get(kind, 0.0) + parse_size(size)
    return traffic


def _as_json(topology: Any, names: list[str], placement: Any, times: list[Any]) -> Any:
    fields = ("id", "x", "y", "z", "core", "process", "slice")
    return {
        "topology": topology.name,
        "libtpu_name": topology.libtpu_name,
        "accelerator_type": topology.accelerator_type,
        "kind": topology.kind,
        "shape": topology.shape,
        "wrap": topology.wrap,
        "twisted": topology.twisted,
        "num_slices": topology.num_slices,
        "hosts": topology.hosts,
        "chips_per_host": topology.chips_per_host,
        "link_bytes_per_second": topology.link_bandwidth,
        "dcn_bytes_per_second_and_host": topology.dcn_bandwidth_per_host,
        "bisection_bytes_per_second": topology.bisection_bandwidth(),
        "devices": [dict(zip(fields, row, strict=True)) for row in topology.devices()],
        "mesh": {
            "names": names,
            "shape": placement.shape,
            "ranks": placement.ranks,
            "device_ids": placement.device_ids,
            "axes": placement.axes,
            "traffic": [
                {"axis": names[axis], "collective": kind, "bytes": count, "seconds": seconds}
                for axis, kind, count, seconds in placement.times
            ],
            "seconds": placement.seconds,
        },
        "predictions": times,
    }


def _table(names: list[str], times: list[Any], sizes: list[int]) -> str:
    """One line an axis and collective, one column a size."""
    rows = [["axis", "collective", *(format_size(size) for size in sizes), "algorithm"]]
    for name in names:
        for kind in COLLECTIVES:
            entries = [t for t in times if (t["axis"], t["collective"]) == (name, kind)]
            if not any(entry["seconds"] for entry in entries):
                continue
            algorithms = list(dict.fromkeys(entry["algorithm"] for entry in entries))
            cells = [format_time(entry["seconds"]) for entry in entries]
            rows.append([name, kind, *cells, ", ".join(algorithms)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 2 <= column < len(row) - 1 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
