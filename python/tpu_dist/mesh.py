"""Device meshes whose rank order fits the TPU's torus.

::

    from tpu_dist.mesh import init_device_mesh

    mesh = init_device_mesh((8, 16), ("dp", "tp"), topology="v5p:4x4x8")

The result is a stock :class:`torch.distributed.device_mesh.DeviceMesh`; FSDP2, DTensor and
pipelining take it like any other. Only the order of the ranks in it differs: the axes with
the most traffic lie on the links that carry it fastest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpu_dist.topology import Placement, Topology, default_traffic, from_environment

__all__ = ["Traffic", "init_device_mesh", "place"]

Traffic = Mapping[str, Mapping[str, float]]
"""Bytes per axis and collective, as ``{"tp": {"all_reduce": 2**28}}``.

Collectives are ``all_reduce`` and ``reduce_scatter`` (bytes that every rank brings),
``all_gather`` (bytes of the result), ``all_to_all`` (bytes that a rank brings for the
whole group) and ``permute`` (bytes to the next rank).
"""


def place(
    shape: Sequence[int],
    names: Sequence[str],
    topology: str | Topology,
    *,
    dcn_shape: Sequence[int] | None = None,
    traffic: Traffic | None = None,
) -> Placement:
    """Finds the fastest order of ranks for a mesh, without making it.

    Args:
        shape: Size of each axis. The product is the number of devices.
        names: Name of each axis, the last one varying fastest.
        topology: A name such as ``v5p:4x4x8`` or a :class:`Topology`.
        dcn_shape: How many slices each axis spans; without it the best is looked for.
        traffic: What the axes carry. Without it, what axes of such names (``tp``,
            ``fsdp``, ``ep``...) usually carry, and for other names an all-reduce that
            grows towards the last axis.

    Raises:
        ValueError: An argument does not fit; the message names it.
    """
    if isinstance(topology, str):
        topology = Topology(topology)
    if len(names) != len(shape):
        raise ValueError(f"names: expected {len(shape)}, one an axis, got {list(names)}")
    if len(set(names)) != len(names):
        raise ValueError(f"names: expected distinct names, got {list(names)}")
    for size in shape:
        if size < 1:
            raise ValueError(f"shape: expected positive sizes, got {list(shape)}")
    if traffic is None:
        entries = default_traffic(names)
    else:
        entries = []
        for name, per_collective in traffic.items():
            if name not in names:
                raise ValueError(f"traffic: {name!r} is not among the axes {list(names)}")
            axis = list(names).index(name)
            entries += [(axis, kind, float(count)) for kind, count in per_collective.items()]
    return topology.place(shape, entries, dcn_shape)


def init_device_mesh(
    shape: Sequence[int],
    names: Sequence[str],
    *,
    topology: str | Topology | None = None,
    dcn_shape: Sequence[int] | None = None,
    traffic: Traffic | None = None,
    device_type: str | None = None,
    ranks: Sequence[int] | None = None,
) -> DeviceMesh:
    """Makes a DeviceMesh whose rank order is that of :func:`place`.

    Every rank must call it with the same arguments.

    Args:
        shape: Size of each axis. The product is the number of devices and of ranks.
        names: Name of each axis, the last one varying fastest.
        topology: A name or a :class:`Topology`; by default what the environment names
            (see :func:`tpu_dist.topology.from_environment`).
        dcn_shape: How many slices each axis spans; without it the best is looked for.
        traffic: What the axes carry, see :func:`place`.
        device_type: By default ``tpu`` on a TPU and in a virtual slice, otherwise ``cpu``.
        ranks: The rank of each device of ``topology.devices()``, where they are not
            numbered in that order (Ray does not).

    Raises:
        ValueError: An argument does not fit; the message names it.
    """
    if topology is None:
        topology = from_environment()
        if topology is None:
            raise ValueError(
                "topology: not given, and neither TPU_DIST_VIRTUAL_SLICE nor "
                "TPU_ACCELERATOR_TYPE names one"
            )
    elif isinstance(topology, str):
        topology = Topology(topology)
    placement = place(shape, names, topology, dcn_shape=dcn_shape, traffic=traffic)
    if dist.is_initialized() and dist.get_world_size() != topology.device_count:
        raise ValueError(
            f"topology: {topology} has {topology.device_count} devices, the job has "
            f"{dist.get_world_size()} ranks"
        )
    order = torch.tensor(placement.ranks)
    if ranks is not None:
        if sorted(ranks) != list(range(topology.device_count)):
            raise ValueError(
                f"ranks: expected each of 0 to {topology.device_count - 1} once, got {ranks}"
            )
        order = torch.tensor(ranks)[order]
    if device_type is None:
        # Torch's choice where none is named, which is the CPU where the device is merely there.
        device_type = "tpu" if torch._C._get_accelerator().type == "tpu" else "cpu"
    return DeviceMesh(device_type, order.reshape(tuple(shape)), mesh_dim_names=tuple(names))
