"""``torchrun --rdzv-backend tpu_dist``: ranks in the order of the hosts in the slice.

Everything is c10d's rendezvous (the store, the rounds, elastic restarts, its options),
except for the last step: c10d numbers hosts by their names. Where every host knows its place
(``TPU_WORKER_ID``, and ``MEGASCALE_SLICE_ID`` with several slices), they are numbered by slice
and place instead, so that ranks follow libtpu's order of devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from tpu_dist._backend import NAME

logger = logging.getLogger(__name__)


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point of ``torchrun.handlers``: what makes a handler."""
    return TopologyRendezvous


class TopologyRendezvous(RendezvousHandler):
    """c10d's rendezvous with hosts numbered by their place in the slice.

    Takes the options of c10d's (``join_timeout``, ``last_call_timeout``, ``store_type``...).
    """

    def __init__(self, params: RendezvousParameters) -> None:
        backend, store = create_backend(params)
        self._inner = create_handler(store, backend, params)
        self._local_addr = params.local_addr

    def get_backend(self) -> str:
        """The name that ``--rdzv-backend`` takes."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the store of the agents; as c10d."""
        return self._inner.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        """Joins the next round; see the base class."""
        info = self._inner.next_rendezvous()
        # The store of a round is the round's own, so a restart starts afresh.
        rank = _reorder(PrefixStore(NAME, info.store), info.rank, info.world_size)
        if rank == info.rank and self.use_agent_store:
            return info
        bootstrap = info.bootstrap_store_info
        if bootstrap is None or not self.use_agent_store:
            # The worker with rank 0 will host the store: the address must be its host's.
            store = PrefixStore(f"{NAME}/bootstrap", info.store)
            bootstrap = RendezvousStoreInfo.build(rank, store, local_addr=self._local_addr)
        return RendezvousInfo(info.store, rank, info.world_size, bootstrap)

    def is_closed(self) -> bool:
        """Whether no further round will start."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Lets no further round start."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Hosts that came too late for this round."""
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """The id of the job."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Leaves and closes the rendezvous."""
        return self._inner.shutdown()


def _reorder(store: Store, rank: int, world_size: int) -> int:
    """This host's rank by place, or ``rank`` where some host does not know its place."""
    from tpu_dist.topology import position_from_environment

    position = position_from_environment()
    mine = "" if position is None else f"{position[0]} {position[1]}"
    store.set(f"place/{rank}", mine)
    keys = [f"place/{other}" for other in range(world_size)]
    places = [value.decode() for value in store.multi_get(keys)]
    unknown = places.count("")
    if unknown:
        if unknown < world_size and rank == 0:
            logger.warning(
                "%d of %d hosts do not know their place in the slice (TPU_WORKER_ID); "
                "ranks are in the order of host names",
                unknown,
                world_size,
            )
        return rank
    order = sorted(
        range(world_size),
        key=lambda other: (*(int(part) for part in places[other].split()), other),
    )
    reordered = order.index(rank)
    logger.info("host %s (rank %d by name) gets rank %d by place", mine, rank, reordered)
    return reordered
