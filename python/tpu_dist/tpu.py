"""``torch.tpu``: the device "tpu" as ``torch.cuda`` is the device "cuda".

The device is opened by the first tensor on it. A process has one, number 0; work on it
runs in the order in which it was started, whatever stream it is started on. On a host without a
TPU it is the CPU, by way of an XLA plugin (``pip install lammps-jax-pjrt-cpu``).

Operators run as programs that XLA compiles once for each signature. What has no
program runs on the CPU: :func:`fallback_stats` counts it, ``TPU_DIST_FALLBACK=error`` forbids
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from tpu_dist._backend import load

if TYPE_CHECKING:
    from tpu_dist.topology import Topology

_native = load().device

Device = torch.device | int | str | None

__all__ = [
    "DeviceProperties",
    "Event",
    "Stream",
    "StreamContext",
    "compile_stats",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "fallback_stats",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_available",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_fallback_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
]


def _index(device: Device) -> int:
    """The index that ``device`` means, which is 0."""
    if device is None:
        return 0
    if isinstance(device, int):
        index = device
    else:
        found = torch.device(device)
        if found.type != "tpu":
            raise ValueError(f"device: expected a tpu device, got {found}")
        index = found.index or 0
    if index != 0:
        raise ValueError(f"device: expected index 0, as a process has one device, got {index}")
    return 0


def is_available() -> bool:
    """Whether this process is meant to run on the device. Does not open it.

    So it is on a host with a TPU, in a virtual slice (``TPU_DIST_VIRTUAL_SLICE``), and with a
    plugin named in ``TPU_DIST_PJRT_PLUGIN``; torch then chooses the device where none is named.
    Elsewhere tensors can be put on the device all the same where a plugin for the CPU is
    installed; with the first one it is available.
    """
    return bool(_native.is_preferred() or _native.is_opened())


def is_initialized() -> bool:
    """Whether the device has been opened."""
    return bool(_native.is_opened())


def init() -> None:
    """Opens the device, which its first use does otherwise.

    Raises:
        RuntimeError: there is none, or this process was forked from one that used it.
    """
    _lazy_init()
    _native.open()


def _lazy_init() -> None:
    # Called by torch before it makes the first tensor.
    if _native.has_tpu() and not _native.is_opened():
        from tpu_dist.topology import environment_of_rank

        os.environ.update(environment_of_rank())
    _native.register_kernels()


def _is_in_bad_fork() -> bool:
    return bool(_native.is_forked())


def device_count() -> int:
    """1, or 0 where there is nothing to run on."""
    return int(_native.is_available())


def current_device() -> int:
    """0: a process has one device."""
    return 0


def set_device(device: Device) -> None:
    """Checks that ``device`` is the one there is.

    Raises:
        ValueError: it is another.
    """
    _index(device)


class device:
    """A context in which ``device`` is current: as there is one, nothing changes."""

    def __init__(self, device: Device) -> None:
        self.idx = _index(device)
        self.prev_idx = 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def synchronize(device: Device = None) -> None:
    """Waits for all work on the device.

    Raises:
        RuntimeError: an operation has failed that nobody was told of before; the error
            names it. With ``TPU_LAUNCH_BLOCKING=1`` operations fail by themselves.
    """
    _index(device)
    _native.synchronize()


@dataclass(frozen=True)
class DeviceProperties:
    """What the device is.

    ``total_memory`` is in bytes, 0 where the plugin does not tell. ``virtual`` says that the
    TPU is only modelled, and programs run on this host's CPU; memory is then what the TPU
    has, and ``attributes`` say where the rank of the environment (``RANK``) is:
    ``coords`` of its chip (x, y, z), ``core_on_chip``, ``slice_index`` and ``process_index``
    (its host), under the names that libtpu gives them.
    """

    name: str
    platform: str
    platform_version: str
    total_memory: int
    virtual: bool
    launch_blocking: bool
    attributes: dict[str, Any] = field(default_factory=dict)


def get_device_properties(device: Device = None) -> DeviceProperties:
    """What the device is. Opens it.

    Raises:
        ValueError: the environment names no legal slice, or one with too few devices.
    """
    _index(device)
    found = _native.properties()
    on_tpu = found["platform"] == "tpu"
    name = found["kind"] if on_tpu else f"XLA {found['platform'].upper()}"
    memory = _native.memory_stats().get("device.bytes_limit", 0)
    attributes = dict(found["attributes"])
    virtual = not on_tpu and bool(os.environ.get("TPU_DIST_VIRTUAL_SLICE"))
    if virtual:
        from tpu_dist.topology import Topology

        topology = Topology(os.environ["TPU_DIST_VIRTUAL_SLICE"])
        name, memory = f"TPU {topology.generation}", topology.memory_per_device
        attributes |= _place(topology)
    return DeviceProperties(
        name=name,
        platform=found["platform"],
        platform_version=found["platform_version"],
        total_memory=memory,
        virtual=virtual,
        launch_blocking=found["launch_blocking"],
        attributes=attributes,
    )


def _place(topology: Topology) -> dict[str, Any]:
    """Where the rank of the environment is in ``topology``; nothing where it names no rank."""
    rank = os.environ.get("RANK")
    if rank is None:
        return {}
    if int(rank) >= topology.device_count:
        raise ValueError(
            f"TPU_DIST_VIRTUAL_SLICE: {topology.name} has {topology.device_count} devices, "
            f"this is rank {rank}"
        )
    _, x, y, z, core, process, slice_index = topology.devices()[int(rank)]
    return {
        "coords": [x, y, z],
        "core_on_chip": core,
        "process_index": process,
        "slice_index": slice_index,
    }


def get_device_name(device: Device = None) -> str:
    """``TPU v5p`` for example: the TPU's, or that of the virtual slice; else ``XLA CPU``."""
    return get_device_properties(device).name


def get_device_capability(device: Device = None) -> dict[str, Any]:
    """The element types that tensors on the device can have, as ``supported_dtypes``."""
    _index(device)
    return dict(torch.accelerator.get_device_capability())


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: TPUs compute in bfloat16, and XLA's CPU by way of float32."""
    return including_emulation or get_device_properties().platform == "tpu"


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types that ``torch.autocast("tpu")`` takes."""
    return [torch.bfloat16, torch.float16]


# Memory


def memory_stats(device: Device = None) -> dict[str, int]:
    """What tensors hold, in bytes and buffers; what the plugin counts starts with ``device.``.

    Names are those of :func:`torch.cuda.memory_stats`. Storages that were never written take
    no memory, and copies of whole tensors share theirs until one is written.
    """
    _index(device)
    return dict(_native.memory_stats())


def memory_allocated(device: Device = None) -> int:
    """Bytes that tensors hold."""
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: Device = None) -> int:
    """Most bytes that tensors held since :func:`reset_peak_memory_stats`."""
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: Device = None) -> int:
    """Bytes that the plugin holds, or where it does not tell, tensors."""
    stats = memory_stats(device)
    return stats.get("device.bytes_in_use", stats["allocated_bytes.all.current"])


def max_memory_reserved(device: Device = None) -> int:
    """Most bytes that the plugin held, or where it does not tell, tensors."""
    stats = memory_stats(device)
    return stats.get("device.peak_bytes_in_use", stats["allocated_bytes.all.peak"])


def reset_peak_memory_stats(device: Device = None) -> None:
    """Makes the present the peak."""
    _index(device)
    _native.reset_peak_memory_stats()


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Counts what was allocated and freed from zero again."""
    _index(device)
    _native.reset_accumulated_memory_stats()


def empty_cache() -> None:
    """Nothing: plugins keep no memory that they could give back."""


# Random numbers


def _generator(device: Device = None) -> torch.Generator:
    _index(device)
    generator: torch.Generator = _native.default_generator()
    return generator


def manual_seed(seed: int) -> None:
    """Seeds the random numbers of the device."""
    _generator().manual_seed(int(seed))


manual_seed_all = manual_seed


def seed() -> None:
    """Seeds the random numbers of the device with what cannot be foretold."""
    _generator().seed()


seed_all = seed


def initial_seed() -> int:
    """The seed of the random numbers."""
    return _generator().initial_seed()


def get_rng_state(device: Device = "tpu") -> torch.Tensor:
    """The state of the random numbers: a ``ByteTensor`` on the CPU."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = "tpu") -> None:
    """Sets the state of the random numbers to one of :func:`get_rng_state`."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The state of the random numbers of each device."""
    return [get_rng_state()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Sets the state of the random numbers of each device."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# Streams and events


class Stream(torch.Stream):
    """A name for the device's queue. Work on all streams runs in the order of its start."""

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        made = super().__new__(cls, torch.device("tpu", _index(device)), priority=priority)
        assert isinstance(made, Stream)
        return made


def Event(enable_timing: bool = False, **_: Any) -> torch.Event:
    """A point in the device's queue.

    One with ``enable_timing`` waits for the work before it when it is recorded.
    """
    return torch.Event(torch.device("tpu", 0), enable_timing=enable_timing)


def current_stream(device: Device = None) -> torch.Stream:
    """The stream on which work is started."""
    _index(device)
    return torch.accelerator.current_stream()


def default_stream(device: Device = None) -> torch.Stream:
    """The stream on which work is started unless another is chosen."""
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=20)


def set_stream(stream: torch.Stream) -> None:
    """Chooses the stream on which work is started."""
    torch.accelerator.set_stream(stream)


class StreamContext(AbstractContextManager[None]):
    """A context in which work is started on ``stream``; ``None`` for the current one."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._previous: torch.Stream | None = None

    def __enter__(self) -> None:
        if self.stream is not None:
            self._previous = current_stream()
            set_stream(self.stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            set_stream(self._previous)


def stream(stream: torch.Stream | None) -> StreamContext:
    """A context in which work is started on ``stream``."""
    return StreamContext(stream)


# Programs


def fallback_stats() -> dict[str, int]:
    """How often each operator ran on the CPU, for want of a program."""
    return dict(_native.fallback_stats())


def reset_fallback_stats() -> None:
    """Counts fallbacks from zero again."""
    _native.reset_fallback_stats()


def compile_stats() -> dict[str, float]:
    """Counters of the compile cache: hits in memory and on disk, misses, seconds."""
    return dict(_native.compile_stats())
