"""The process of one rank: does what the test's process asks for, one call at a time.

Preloaded into the fork server, so that a rank starts in milliseconds with torch imported.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy  # noqa: F401  (preloaded for the tests)
import torch
import torch.distributed as dist

_PR_SET_PDEATHSIG = 1
# Order matters: the mount namespace last, because it changes what paths mean.
_NAMESPACES = ("ipc", "uts", "net", "mnt")


@dataclass
class Settings:
    """How a rank's process is set up; everything in it is picklable."""

    rank: int
    world: int
    env: dict[str, str]
    log: str
    namespaces_of: int | None = None
    init: dict[str, Any] | None = None


@dataclass
class Failure:
    """An exception that ended a call on a rank."""

    kind: str
    message: str
    trace: str
    bases: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describes `error` by names, because its class may not be importable elsewhere."""
        return cls(
            type(error).__name__,
            str(error),
            "".join(traceback.format_exception(error)),
            tuple(base.__name__ for base in type(error).__mro__),
        )

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


@dataclass
class Me:
    """The rank a test function runs on: its first argument."""

    rank: int
    world: int
    _pipe: Connection = field(repr=False)

    def say(self, message: object) -> None:
        """Tells the test's process something; see `Ranks.run(on_say=...)`."""
        self._pipe.send(("say", message))

    def sync(self) -> None:
        """A barrier of all living ranks that does not use the backend under test."""
        self._pipe.send(("sync", None))
        word, _ = self._pipe.recv()
        if word != "go":
            raise SystemExit(0)


def enter_namespaces(pid: int) -> None:
    """Joins the network, mount, IPC and host-name namespaces of process `pid`."""
    libc = ctypes.CDLL(None, use_errno=True)
    handles = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    for name, handle in zip(_NAMESPACES, handles, strict=True):
        if libc.setns(handle, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"setns({name}): {os.strerror(code)}")
        os.close(handle)


def init_process_group(init: dict[str, Any], rank: int, world: int) -> None:
    """`torch.distributed.init_process_group` from the picklable description `init`."""
    init = dict(init)
    init["timeout"] = timedelta(seconds=init.get("timeout", 60))
    if "store" in init:
        host, port = init.pop("store")
        # A store of its own timeout, as torchrun's: that of the group is under test.
        init["store"] = dist.TCPStore(
            host, port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False
        )
    dist.init_process_group(rank=rank, world_size=world, **init)


def main(pipe: Connection, settings: Settings) -> None:
    """Serves calls from `pipe` until told to end or until the test's process is gone."""
    os.setsid()
    # The fork server ends with the test's process; nothing may outlive it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(settings.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # A rank that is stuck says where before it is killed.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    for name in set(os.environ) - set(settings.env):
        del os.environ[name]
    os.environ.update(settings.env)
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    if settings.namespaces_of is not None:
        cwd = os.getcwd()
        enter_namespaces(settings.namespaces_of)
        os.chdir(cwd)

    me = Me(settings.rank, settings.world, pipe)
    if settings.init is not None:
        answer(pipe, init_process_group, (settings.init, me.rank, me.world))
    while True:
        try:
            word, call = pipe.recv()
        except EOFError:
            break
        if word == "end":
            break
        function, args = call
        answer(pipe, function, (me, *args))
    if dist.is_initialized():
        dist.destroy_process_group()


def answer(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Calls `function` and sends what it returned or raised, and how long it took."""
    start = time.monotonic()
    value = failure = None
    try:
        value = function(*args)
    except BaseException as error:
        failure = Failure.of(error)
    pipe.send(("done", (value, failure, time.monotonic() - start)))
