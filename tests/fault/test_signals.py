"""Ctrl-C ends a wait; the backend leaves signal handling to the program."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Ranks

CALLS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "large all_reduce": lambda: dist.all_reduce(torch.ones(1 << 22)),
    "wait": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
    "recv": lambda: dist.recv(torch.ones(1), 1),
    "barrier": lambda: dist.barrier(),
    "monitored_barrier": lambda: dist.monitored_barrier(),
}


def wait_forever(me, call):
    """Rank 0 waits for rank 1, which does not come."""
    dist.barrier()
    if me.rank != 0:
        me.sync()
        return None
    me.say("waiting")
    try:
        CALLS[call]()
    except KeyboardInterrupt:
        when = time.monotonic()
        me.sync()
        return when
    return None


@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c_ends_a_wait(call):
    """KeyboardInterrupt within a second."""
    sent = []
    with Ranks(2, init={"timeout": 30}) as ranks:

        def interrupt(rank, _):
            time.sleep(0.3)
            sent.append(ranks.kill(rank, signal.SIGINT))

        outcome = ranks.run(wait_forever, call, deadline=8, on_say=interrupt)[0]
        assert outcome.ok, outcome
        assert outcome.value is not None, "the call returned"
        assert outcome.value - sent[0] < 1


def handled(me):
    """A Python handler that does not raise lets the wait go on."""
    hits = []
    signal.signal(signal.SIGUSR2, lambda *_: hits.append(time.monotonic()))
    dist.barrier()
    tensor = torch.full((3,), float(me.rank))
    if me.rank == 1:
        time.sleep(0.8)
    else:
        me.say("waiting")
    dist.all_reduce(tensor)
    return tensor.tolist(), len(hits), time.monotonic() - hits[0] if hits else None


def test_other_signals_do_not_end_a_wait():
    """EINTR is not an error, and the handler runs while the call waits."""
    with Ranks(2, init={"timeout": 30}) as ranks:

        def signal_it(rank, _):
            time.sleep(0.2)
            ranks.kill(rank, signal.SIGUSR2)

        values = ranks.values(handled, deadline=8, on_say=signal_it)
        assert values[0][0] == values[1][0] == [1.0] * 3
        assert values[0][1] == 1
        assert values[0][2] > 0.2, "the handler ran only after the wait"


def masks(me, init_process_group, init):
    """Signal dispositions before and after there is a group in use."""

    def caught():
        status = Path("/proc/self/status").read_text()
        return [line for line in status.splitlines() if line.startswith(("SigCgt", "SigIgn"))]

    before = caught()
    init_process_group(init, me.rank, me.world)
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1 << 20))
    return before, caught()


def test_no_signal_handlers_are_installed():
    """What was caught and ignored before stays so."""
    from harness import BACKEND
    from harness.worker import init_process_group

    with Ranks(2, init=None) as ranks:
        init = {"backend": BACKEND, "store": ranks.host_store(), "timeout": 10}
        for before, after in ranks.values(masks, init_process_group, init, deadline=15):
            assert before == after


def test_sigterm_ends_a_waiting_rank():
    """Its default action is not delayed or swallowed."""
    sent = []
    with Ranks(2, init={"timeout": 30}) as ranks:

        def terminate(rank, _):
            time.sleep(0.2)
            sent.append(ranks.kill(rank, signal.SIGTERM))

        outcome = ranks.run(wait_forever, "all_reduce", deadline=8, on_say=terminate)[0]
        assert outcome.died
        assert outcome.ended - sent[0] < 1
