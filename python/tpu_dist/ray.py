"""Ray Train on this package's backend.

::

    from ray.train.torch import TorchTrainer
    from tpu_dist.ray import TpuDistConfig

    TorchTrainer(train, torch_config=TpuDistConfig(), scaling_config=...).fit()

On hosts of a TPU slice (``ScalingConfig(use_tpu=True, topology=..., accelerator_type=...)``)
the ranks follow the order of the chips in the slice, which Ray's do not, and every worker
finds the variables that :mod:`tpu_dist.mesh` and libtpu read. Elsewhere it is Ray's own
TorchConfig with another default for the backend.

Install it with ``pip install tpu_dist[ray]``.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

try:
    import ray
    from ray._private.accelerators.tpu import DEFAULT_MEGASCALE_PORT
    from ray.air._internal import device_manager
    from ray.air._internal.device_manager.cpu import CPUTorchDeviceManager
    from ray.train._internal.utils import get_address_and_port
    from ray.train.torch.config import TorchConfig, _TorchBackend
    from ray.train.v2._internal.execution.context import get_train_context
    from ray.util.tpu import get_tpu_coordinator_env_vars
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "ray":
        raise
    raise ModuleNotFoundError(
        "tpu_dist.ray needs Ray Train: pip install tpu_dist[ray]", name=error.name
    ) from error

from tpu_dist._backend import NAME
from tpu_dist.topology import Topology

__all__ = ["Place", "TpuDistConfig", "order_of_ranks"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a worker runs, from the labels of its Ray node."""

    slice: str
    """Name of the slice; empty on a host that is not of a TPU slice."""
    worker: int
    """Number of the host in its slice, as ``TPU_WORKER_ID``."""
    chips: tuple[int, ...]
    """The chips of the host that the worker holds."""
    pod_type: str
    """The accelerator type, such as ``v5p-16``."""
    topology: str
    """The shape of the slice, such as ``2x2x2``."""
    node: str
    """Id of the Ray node."""


def order_of_ranks(places: Sequence[Place]) -> list[int]:
    """Which worker becomes rank 0, 1, ...: by slice, host in the slice, chip on the host.

    That is the order of :meth:`tpu_dist.topology.Topology.devices`. Slices come in the order
    of the first of their workers. Workers that are on no slice keep their order.

    Args:
        places: Where each of Ray's workers is, by Ray's rank.

    Raises:
        ValueError: workers are on slices of different shapes, or only some are on one.
    """
    shapes = {(place.pod_type, place.topology) for place in places}
    if len(shapes) > 1:
        raise ValueError(f"places: expected slices of one shape, got {sorted(shapes)}")
    slices = list(dict.fromkeys(place.slice for place in places))
    return sorted(
        range(len(places)),
        key=lambda n: (slices.index(places[n].slice), places[n].worker, places[n].chips, n),
    )


def _place() -> Place:
    """Where this worker is."""
    context = ray.get_runtime_context()
    labels = context.get_node_labels()
    return Place(
        slice=labels.get("ray.io/tpu-slice-name", ""),
        worker=int(labels.get("ray.io/tpu-worker-id", "0")),
        chips=tuple(sorted(int(chip) for chip in context.get_accelerator_ids().get("TPU", []))),
        pod_type=labels.get("ray.io/tpu-pod-type", ""),
        topology=labels.get("ray.io/tpu-topology", ""),
        node=context.get_node_id(),
    )


class _HostOfChips(CPUTorchDeviceManager):  # type: ignore[misc]
    """The device of a worker that holds TPU chips: the chip where torch has it, else the CPU.

    Ray's own needs the package torch_tpu.
    """

    def get_devices(self) -> list[torch.device]:
        """The one device of this worker."""
        tpu = getattr(torch, "tpu", None)
        return [torch.device("tpu" if tpu is not None and tpu.is_available() else "cpu")]


def _settle(rank: int, local: int, local_world: int, host: int, env: dict[str, str]) -> None:
    """Gives this worker its rank and environment, before Ray reads them."""
    device_manager.SUPPORTED_ACCELERATOR_TORCH_DEVICE_MANAGER["TPU"] = _HostOfChips
    os.environ.update(env)
    context = get_train_context()
    context.distributed_context = replace(
        context.distributed_context,
        world_rank=rank,
        local_rank=local,
        local_world_size=local_world,
        node_rank=host,
    )


def _environment(
    places: Sequence[Place], order: Sequence[int], coordinator: str
) -> list[dict[str, str]]:
    """What each rank finds in its environment; nothing where they have not the whole slice."""
    slices = list(dict.fromkeys(places[n].slice for n in order))
    generation = places[0].pod_type.rpartition("-")[0]
    topology = Topology.from_labels(generation, places[0].topology, len(slices))
    held = sum(len(place.chips) for place in places)
    chips = topology.chips * topology.num_slices
    if held != chips:
        logger.warning(
            "the workers hold %d of the %d chips of %s: their environment names no topology",
            *(held, chips, topology.name),
        )
        return [{} for _ in order]
    everything = []
    local: Counter[str] = Counter()
    for n in order:
        place = places[n]
        env = {
            "TPU_ACCELERATOR_TYPE": topology.accelerator_type,
            "TPU_TOPOLOGY": place.topology,
            "TPU_WORKER_ID": str(place.worker),
        }
        if len(slices) > 1:
            env |= get_tpu_coordinator_env_vars(
                coordinator_address=f"{coordinator}:{DEFAULT_MEGASCALE_PORT}",
                num_slices=len(slices),
                slice_id=slices.index(place.slice),
                # One a process of the host.
                coordinator_port=str(int(DEFAULT_MEGASCALE_PORT) + local[place.node]),
            )
            local[place.node] += 1
        everything.append(env)
    return everything


class _Reordered:
    """A worker group whose workers are counted in another order."""

    def __init__(self, group: Any, order: Sequence[int]) -> None:
        self._group = group
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def execute_single(
        self, rank: int, function: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        """Calls `function` on the worker that has this rank."""
        return self._group.execute_single(self._order[rank], function, *args, **kw)

    def execute_single_async(
        self, rank: int, function: Callable[..., Any], *args: Any, **kw: Any
    ) -> Any:
        """As `execute_single`, without waiting."""
        return self._group.execute_single_async(self._order[rank], function, *args, **kw)


class _Backend(_TorchBackend):  # type: ignore[misc]
    """Orders the ranks, then starts the process group as Ray does."""

    def on_start(self, worker_group: Any, backend_config: TpuDistConfig) -> None:
        """Called by Ray when the workers run and before they train."""
        places: list[Place] = worker_group.execute(_place)
        order = order_of_ranks(places)
        if places[0].slice:
            coordinator, _ = worker_group.execute_single(order[0], get_address_and_port)
            environments = _environment(places, order, coordinator)
            nodes = list(dict.fromkeys(places[n].node for n in order))
            settled = []
            for rank, n in enumerate(order):
                peers = [m for m in order if places[m].node == places[n].node]
                settled.append(
                    worker_group.execute_single_async(
                        n,
                        _settle,
                        rank,
                        peers.index(n),
                        len(peers),
                        nodes.index(places[n].node),
                        environments[rank],
                    )
                )
            ray.get(settled)
        super().on_start(_Reordered(worker_group, order), backend_config)


@dataclass
class TpuDistConfig(TorchConfig):  # type: ignore[misc]
    """Ray's TorchConfig with the backend ``tpu_dist`` and ranks in the order of the slice.

    Args:
        backend: By default tpu_dist for CPU tensors; any other of torch.distributed's works.
        init_method: As for TorchConfig: ``env`` or ``tcp``.
        timeout_s: Seconds after which an operation of the process group fails.
    """

    backend: str | None = None

    def __post_init__(self) -> None:
        # Ray imports torch_tpu for the plain name.
        if self.backend in (None, NAME):
            self.backend = f"cpu:{NAME}"

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        """What starts and stops the process group."""
        return _Backend
