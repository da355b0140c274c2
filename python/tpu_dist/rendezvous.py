"""``torchrun --rdzv-backend tpu_dist``: ranks in the order of the hosts in the slice.

Rounds, elastic membership and options are c10d's. Two things differ. c10d numbers hosts by
their names; where every host knows its place (``TPU_WORKER_ID``, and ``MEGASCALE_SLICE_ID``
with several slices), they are numbered by slice and place instead, so that ranks follow
libtpu's order of devices. And the workers of each round get a store of their own, so that a
restart cannot meet the addresses of workers that died.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
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
        self._server: TCPStore | None = None

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
        store = PrefixStore(NAME, info.store)
        rank = _reorder(store, info.rank, info.world_size)
        port = None
        if self.use_agent_store:
            # c10d keeps the workers' store from round to round, where those of the next
            # find what the last left behind. Here each round has its own server.
            host = self._local_addr or socket.getfqdn()
            self._server = _serve(host) if rank == 0 else None
            port = self._server.port if self._server else 0
        # Without a port of the agent's, the worker with rank 0 serves on its host.
        address = RendezvousStoreInfo.build(
            rank, store, local_addr=self._local_addr, server_port=port
        )
        return RendezvousInfo(info.store, rank, info.world_size, address)

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


def _serve(host: str) -> TCPStore:
    """A store of this process for the workers of a round, on a free port."""
    return TCPStore(host, 0, is_master=True, multi_tenant=True, wait_for_workers=False)


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
