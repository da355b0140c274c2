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
