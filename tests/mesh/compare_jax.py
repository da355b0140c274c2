"""Compares our placements with those of JAX's ``mesh_utils``.

``python tests/mesh/compare_jax.py`` prints a table: for each topology, mesh and traffic
the modelled time of JAX's placement, of ours, and their ratio. JAX is asked first without and
then with ``allow_split_physical_axes``; the better answer counts. Both placements
are scored by the same model (``Topology.evaluate``).
"""

import math
from types import SimpleNamespace

from tpu_dist.topology import Topology

MIB = 1 << 20

AR, AG, RS, A2A = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"


def rising(*mib):
    """All-reduce on every axis, MiB per axis."""
    return [(axis, AR, size * MIB) for axis, size in enumerate(mib)]


TP_FSDP = [(0, AG, 64 * MIB), (0, RS, 64 * MIB), (1, AR, 256 * MIB)]
DP_EP = [(0, AR, 64 * MIB), (1, A2A, 128 * MIB)]

# (topology, mesh shape, traffic, slices of each axis). Axes are in the order of rising
# traffic, as mesh_utils expects them.
CASES = [
    ("v2:4x4", [4, 8], rising(16, 64), None),
    ("v2:8x8", [8, 16], rising(16, 64), None),
    ("v3:4x8", [8, 8], rising(16, 64), None),
    ("v3:8x8", [4, 32], rising(16, 64), None),
    ("v3:32x32", [32, 64], rising(16, 64), None),
    ("v4:2x2x1", [2, 2], rising(16, 64), None),
    ("v4:2x2x4", [4, 4], rising(16, 64), None),
    ("v4:2x4x4", [2, 4, 4], rising(16, 32, 64), None),
    ("v4:4x4x4", [4, 16], rising(16, 64), None),
    ("v4:4x4x4", [16, 4], TP_FSDP, None),
    ("v4:4x4x4", [8, 8], rising(16, 64), None),
    ("v4:4x4x8", [8, 16], TP_FSDP, None),
    ("v4:4x4x8_twisted", [8, 16], TP_FSDP, None),
    ("v4:4x4x8_twisted", [4, 32], rising(16, 64), None),
    ("v4:4x8x8_twisted", [4, 64], rising(16, 64), None),
    ("v4:4x8x12", [12, 32], rising(16, 64), None),
    ("v5e:2x2", [4], rising(64), None),
    ("v5e:2x4", [2, 4], rising(16, 64), None),
    ("v5e:2x4", [8], rising(64), None),
    ("v5e:4x4", [4, 4], TP_FSDP, None),
    ("v5e:4x4", [2, 8], rising(16, 64), None),
    ("v5e:4x4", [16], rising(64), None),
    ("v5e:4x8", [4, 8], rising(16, 64), None),
    ("v5e:8x8", [8, 8], DP_EP, None),
    ("v5e:8x16", [8, 16], rising(16, 64), None),
    ("v5e:16x16", [16, 16], TP_FSDP, None),
    ("v5e:16x16", [8, 32], rising(16, 64), None),
    ("v5e:16x16", [2, 8, 16], rising(16, 32, 64), None),
    ("v5e:16x16", [16, 16], DP_EP, None),
    ("v6e:2x4", [4, 2], rising(16, 64), None),
    ("v6e:4x4", [2, 2, 4], rising(16, 32, 64), None),
    ("v6e:8x16", [16, 8], TP_FSDP, None),
    ("v6e:16x16", [64, 4], TP_FSDP, None),
    ("v6e:16x16", [4, 4, 16], rising(16, 32, 64), None),
    ("v6e:16x16", [4, 8, 8], [*DP_EP, (2, AR, 256 * MIB)], None),
    ("v5p:2x2x2", [2, 4], rising(16, 64), None),
    ("v5p:2x2x2", [4, 2], rising(16, 64), None),
    ("v5p:4x4x4", [4, 4, 4], rising(16, 32, 64), None),
    ("v5p:4x4x4", [2, 32], rising(16, 64), None),
    ("v5p:4x4x8", [16, 8], TP_FSDP, None),
    ("v5p:4x4x8", [4, 4, 8], rising(16, 32, 64), None),
    ("v5p:4x4x8_twisted", [16, 8], TP_FSDP, None),
    ("v5p:4x4x8_twisted", [8, 16], DP_EP, None),
    ("v5p:4x8x8_twisted", [16, 16], TP_FSDP, None),
    ("v5p:8x8x8", [64, 8], TP_FSDP, None),
    ("v5p:8x8x8", [8, 8, 8], [*DP_EP, (2, AR, 256 * MIB)], None),
    ("v5p:8x8x8", [2, 16, 16], rising(16, 32, 64), None),
    ("v5p:8x8x16", [4, 8, 32], rising(16, 32, 64), None),
    ("v7x:2x2x1", [4, 2], rising(16, 64), None),
    ("v7x:2x2x1", [2, 4], TP_FSDP, None),
    ("v7x:2x2x2", [4, 4], rising(16, 64), None),
    ("v7x:2x2x4", [8, 4], TP_FSDP, None),
    ("v7x:4x4x4", [16, 8], TP_FSDP, None),
    ("v7x:4x4x4", [8, 16], DP_EP, None),
    ("v7x:4x4x8", [4, 8, 8], rising(16, 32, 64), None),
    ("v7x:4x4x8_twisted", [32, 8], TP_FSDP, None),
    ("v7x:8x16x16", [16, 16, 16], rising(16, 32, 64), None),
    ("2*v5e:16x16", [2, 16, 16], rising(16, 32, 64), [2, 1, 1]),
    ("2*v5e:4x4", [8, 4], TP_FSDP, [2, 1]),
    ("4*v6e:16x16", [64, 16], TP_FSDP, [4, 1]),
    ("3*v5p:4x4x4", [12, 16], rising(16, 64), [3, 1]),
    ("2*v7x:4x4x4", [2, 16, 8], rising(16, 32, 64), [2, 1, 1]),
]


def score(case, order=None):
    """Seconds of our placement of a case or, given device ids in order, of that order."""
    name, shape, traffic, dcn_shape = case
    topology = Topology(name)
    if order is None:
        return topology.place(shape, traffic, dcn_shape).seconds
    rank_of = {device[0]: rank for rank, device in enumerate(topology.devices())}
    return topology.evaluate(shape, [rank_of[id] for id in order], traffic).seconds


def jax_orders(devices, shape, dcn_shape):
    """Device ids in mesh_utils' order: what it gives without and with splitting of axes,
    and the words with which it gives up."""
    from jax.experimental import mesh_utils

    orders, refusals = [], []
    for split in (False, True):
        try:
            if dcn_shape is None:
                mesh = mesh_utils.create_device_mesh(
                    shape, devices, allow_split_physical_axes=split
                )
            else:
                inner = [size // slices for size, slices in zip(shape, dcn_shape, strict=True)]
                mesh = mesh_utils.create_hybrid_device_mesh(
                    inner, dcn_shape, devices, allow_split_physical_axes=split
                )
            orders.append([device.id for device in mesh.flatten()])
        except (NotImplementedError, ValueError, AssertionError) as error:
            refusals.append(f"{type(error).__name__}: {str(error)[:60]}")
    return orders, refusals


def compare(cases=CASES):
    """One row a case: (topology, shape, JAX seconds or None, our seconds, JAX's refusals)."""
    rows = []
    for case in cases:
        name, shape, _, dcn_shape = case
        orders, refusals = jax_orders(jax_devices(name), shape, dcn_shape)
        theirs = min((score(case, order) for order in orders), default=None)
        rows.append((name, shape, theirs, score(case), refusals))
    return rows


def table(rows):
    """The rows as text."""
    lines = [f"{'topology':22} {'mesh':14} {'JAX us':>10} {'ours us':>10} {'gain':>6}"]
    for topology, shape, jax, ours, refusals in rows:
        mesh = "x".join(map(str, shape))
        theirs, gain = ("-", "") if jax is None else (f"{jax * 1e6:.1f}", f"{jax / ours:.2f}")
        note = "" if not refusals else ("gives up" if jax is None else "splits only if told")
        lines.append(
            f"{topology:22} {mesh:14} {theirs:>10} {ours * 1e6:>10.1f} {gain:>6} {note}"
        )
    gains = [jax / ours for _, _, jax, ours, _ in rows if jax is not None]
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    better = sum(gain > 1 + 1e-9 for gain in gains)
    lines.append(
        f"{len(rows)} cases: {better} faster, {len(gains) - better} equal,"
        f" {len(rows) - len(gains)} that JAX cannot do; geometric mean {mean:.2f}"
    )
    return "\n".join(lines)


def jax_devices(name):
    """Stand-ins for JAX's devices of a topology; mesh_utils reads these attributes."""
    topology = Topology(name)
    return [
        SimpleNamespace(
            id=id,
            coords=(x, y, z),
            core_on_chip=core,
            process_index=process,
            slice_index=slice,
            device_kind=topology.kind,
            platform="tpu",
        )
        for id, x, y, z, core, process, slice in topology.devices()
    ]


if __name__ == "__main__":
    print(table(compare()))
