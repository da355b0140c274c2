"""A ``torch.distributed`` backend for TPU topologies, written in Rust.

Installing the package registers the backend ``tpu_dist``; scripts need no import::

    torch.distributed.init_process_group("tpu_dist")

What is imported from here adds to that: :func:`stats` tells what the groups of this
process did, :class:`Options` are the options that ``pg_options`` takes.
"""

from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  the compiled part needs torch's libraries in the process

from tpu_dist.debug import Stat, stats, stats_table

if TYPE_CHECKING:
    from tpu_dist._C import ProcessGroupTpuDist

    Options = ProcessGroupTpuDist.Options

__all__ = ["Options", "ProcessGroupTpuDist", "Stat", "stats", "stats_table"]


def __getattr__(name: str) -> Any:
    # The compiled part is loaded when it is needed: this module is imported by
    # `import torch` in every program of an environment that has it.
    if name in ("Options", "ProcessGroupTpuDist"):
        from tpu_dist._backend import load

        backend = load().ProcessGroupTpuDist
        return backend.Options if name == "Options" else backend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
