"""TPU topologies: what libtpu would say about a slice, without a TPU.

>>> topology = Topology("v5p:4x4x8")
>>> topology.chips, topology.hosts, topology.wrap
(128, 32, (True, True, True))

:class:`Topology` reads every name in use: ``v5e:4x4``, ``v5p-128`` (cores), ``v6e-16``
(chips), ``tpu7x:4x4x8_twisted``, ``2*v5e:16x16`` (slices); :meth:`Topology.from_labels` reads
the labels of GKE and Ray. An error lists what is legal. A device's position in
:meth:`Topology.devices` is its rank in a job with one process a device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from tpu_dist._mesh import Placement, Topology, default_traffic, legal_topologies

__all__ = [
    "Placement",
    "Topology",
    "default_traffic",
    "environment_of_rank",
    "from_environment",
    "legal_topologies",
    "position_from_environment",
]


def from_environment(environ: Mapping[str, str] = os.environ) -> Topology | None:
    """The topology that the environment names; ``None`` where it names none.

    ``TPU_DIST_VIRTUAL_SLICE`` counts first. Otherwise ``TPU_ACCELERATOR_TYPE`` with, where
    they are set, ``TPU_TOPOLOGY``, ``TPU_CHIPS_PER_HOST_BOUNDS`` and
    ``MEGASCALE_NUM_SLICES``, as Cloud TPU, GKE and Ray set them.

    Raises:
        ValueError: a variable names no legal topology.
    """
    name = environ.get("TPU_DIST_VIRTUAL_SLICE")
    if name:
        return Topology(name)
    accelerator = environ.get("TPU_ACCELERATOR_TYPE")
    if not accelerator:
        return None
    slices = int(environ.get("MEGASCALE_NUM_SLICES") or 1)
    shape = environ.get("TPU_TOPOLOGY")
    if shape:
        generation = re.sub(r"-\d+$", "", accelerator)
        accelerator = Topology.from_labels(generation, shape).name
    bounds = environ.get("TPU_CHIPS_PER_HOST_BOUNDS")
    # Launchers of one process a chip write their own grid over the host's.
    if bounds and bounds != "1,1,1":
        x, y, z = (int(bound) for bound in bounds.split(","))
        return Topology(accelerator, num_slices=slices, chips_per_host=(x, y, z))
    return Topology(accelerator, num_slices=slices)


def position_from_environment(
    environ: Mapping[str, str] = os.environ,
) -> tuple[int, int] | None:
    """Where this host is: its slice and its number there; ``None`` where nothing says so.

    Read from ``MEGASCALE_SLICE_ID`` (0 without) and ``TPU_WORKER_ID``.
    """
    worker = environ.get("TPU_WORKER_ID", "").strip()
    slice_id = environ.get("MEGASCALE_SLICE_ID", "").strip() or "0"
    if not (worker.isdecimal() and slice_id.isdecimal()):
        return None
    return int(slice_id), int(worker)


def environment_of_rank(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What libtpu must find in a rank's environment so that it takes its own chip only.

    For a job of one rank a chip of the slice, that of ``TPU_ACCELERATOR_TYPE``, as torchrun
    starts it. Empty where ``TPU_PROCESS_BOUNDS`` says it already, and for other jobs, whose
    processes each see all chips of the host. Hosts are those of ``TPU_WORKER_HOSTNAMES``; of
    several slices, each has its own list, and ``MEGASCALE_*`` stay as they are.
    """
    if "TPU_PROCESS_BOUNDS" in environ or not environ.get("TPU_ACCELERATOR_TYPE"):
        return {}
    if not {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"} <= environ.keys():
        return {}
    slices = int(environ.get("MEGASCALE_NUM_SLICES") or 1)
    one = {name: value for name, value in environ.items() if name != "MEGASCALE_NUM_SLICES"}
    topology = from_environment(one)
    hosts = [host for host in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    if not hosts:
        hosts = ["localhost"]
    if (
        topology is None
        or topology.devices_per_chip != 1
        or int(environ["WORLD_SIZE"]) != slices * topology.chips
        or len(hosts) != topology.hosts
    ):
        return {}
    position = position_from_environment(environ)
    worker = position[1] if position is not None else 0
    index = worker * int(environ["LOCAL_WORLD_SIZE"]) + int(environ["LOCAL_RANK"])
    return topology.launch(hosts)[index]["environment"]
