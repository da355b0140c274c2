"""torchft on this package's backend: replicas join and leave while the others train.

::

    from torchft import Manager
    from tpu_dist.elastic import ProcessGroupTpuDist

    manager = Manager(pg=ProcessGroupTpuDist(timeout=timedelta(seconds=30)), ...)

Install it with ``pip install tpu_dist[ft]``.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, _DistributedBackendOptions
from torch.distributed.distributed_c10d import GroupName

try:
    from torchft.process_group import ProcessGroupWrapper
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "torchft":
        raise
    raise ModuleNotFoundError(
        "tpu_dist.elastic needs torchft: pip install tpu_dist[ft]", name=error.name
    ) from error

from tpu_dist._backend import create

__all__ = ["ProcessGroupTpuDist"]

_FIRST_REPLICA = 1 << 20


class ProcessGroupTpuDist(ProcessGroupWrapper):  # type: ignore[misc]
    """A process group that torchft makes anew for each quorum.

    Args:
        timeout: After which an operation, or a replica that does not come, is an error.
    """

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout=timeout)

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        # Numbers that no other group of the process has: replicas meet at their own store.
        ranks = range(_FIRST_REPLICA, _FIRST_REPLICA + world_size)
        options = _DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, rank, world_size
        options.timeout = self._timeout
        options.group_id, options.global_ranks_in_group = GroupName("torchft"), list(ranks)
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        group._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, create(options, None)
        )
        return group

    def getBackendName(self) -> str:
        """The name that torchft's messages show."""
        return "torchft-tpu_dist"
