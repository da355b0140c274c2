"""Runs functions on the ranks of a world, each in a process of its own."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch.distributed as dist

from harness.worker import Failure, Me, Settings, main

if TYPE_CHECKING:
    from harness.hosts import Host

BACKEND = os.environ.get("TPU_DIST_TEST_BACKEND", "tpu_dist")
"""The backend under test. The suite also runs on `gloo`, to check the tests themselves."""

_TESTS = Path(__file__).resolve().parent.parent
_context = multiprocessing.get_context("forkserver")
_preloaded = ["harness.worker"]


def preload(module: str, directory: Path) -> None:
    """Adds `module`, found in `directory`, to what the fork server imports at its start."""
    if module not in _preloaded:
        _preloaded.append(module)
        sys.path.insert(0, str(directory))


def process(
    target: Callable[..., Any], args: tuple[Any, ...], **options: Any
) -> ForkServerProcess:
    """A process, not started yet, that the preloaded fork server will fork."""
    _context.set_forkserver_preload(list(_preloaded))
    return _RankProcess(target=target, args=args, **options)


class _RankProcess(ForkServerProcess):
    """A forked process that does not import this process's main module again."""

    def start(self) -> None:
        with patch.multiple(sys.modules["__main__"], __file__=None, __spec__=None, create=True):
            super().start()


def start_fork_server() -> None:
    """Starts the fork server with this process's module search path."""
    from multiprocessing import forkserver

    _context.set_forkserver_preload(list(_preloaded))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_TESTS), *(p for p in sys.path if p)])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


_open: set[Ranks] = set()


@atexit.register
def _close_all() -> None:
    """Ends worlds that an interrupted test left, before multiprocessing waits for them."""
    for ranks in list(_open):
        for rank in range(len(ranks._processes)):
            ranks._end_session(rank)


@dataclass
class Outcome:
    """How a call ended on one rank."""

    rank: int
    value: Any = None
    failure: Failure | None = None
    seconds: float = 0.0
    ended: float = 0.0
    """When, on the clock of `time.monotonic` in the test's process."""
    died: bool = False
    """The process ended before it answered."""
    hung: bool = False
    """The deadline passed; the process was killed."""
    log: str = ""
    """What the process wrote, for ranks that died or hung."""

    @property
    def ok(self) -> bool:
        """Whether the call returned."""
        return not (self.failure or self.died or self.hung)

    def __str__(self) -> str:
        if self.hung:
            return f"rank {self.rank} hung after {self.seconds:.1f} s\n{self.log}"
        if self.died:
            return f"rank {self.rank} died\n{self.log}"
        if self.failure:
            return f"rank {self.rank}: {self.failure.trace}"
        return f"rank {self.rank}: {self.value!r}"


class Ranks:
    """A world of processes, by default with the default process group initialised.

    Args:
        world: number of ranks.
        init: keyword arguments for `init_process_group` (`timeout` in seconds), or None
            to leave that to the test. A store is added unless they say `init_method`.
        env: environment variables to add; None as a value removes one.
        hosts: for each rank the simulated host it runs on; they need `init_method`.
    """

    def __init__(
        self,
        world: int,
        *,
        init: dict[str, Any] | bool | None = True,
        env: dict[str, str | None] | None = None,
        hosts: Sequence[Host] | None = None,
        start_deadline: float = 60,
    ) -> None:
        _open.add(self)
        self.world = world
        self.directory = Path(tempfile.mkdtemp(prefix="ranks_"))
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection | None] = []
        self._store: dist.TCPStore | None = None
        if init is True:
            init = {}
        if init is False:
            init = None
        if init is not None:
            init = {"backend": BACKEND, **init}
            if "init_method" not in init and "store" not in init:
                init["store"] = self.host_store()
        environment = dict(os.environ)
        environment.pop("PYTHONPATH", None)
        for name, value in (env or {}).items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        start_fork_server()
        try:
            for rank in range(world):
                ours, theirs = _context.Pipe()
                settings = Settings(
                    rank=rank,
                    world=world,
                    env=environment,
                    log=str(self.directory / f"rank{rank}.log"),
                    namespaces_of=hosts[rank].pid if hosts else None,
                    init=init,
                )
                child = process(main, (theirs, settings), name=f"rank{rank}")
                child.start()
                theirs.close()
                self._processes.append(child)
                self._pipes.append(ours)
            if init is not None:
                failed = [o for o in self._collect(range(world), start_deadline) if not o.ok]
                if failed:
                    raise RuntimeError("\n".join(map(str, failed)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def host_store(self) -> tuple[str, int]:
        """The address of a key-value store in this process, as an agent like torchrun has."""
        if self._store is None:
            self._store = dist.TCPStore(
                "127.0.0.1",
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=60),
            )
        return ("127.0.0.1", self._store.port)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [p.pid for p in self._processes if p.pid is not None]

    def alive(self, rank: int) -> bool:
        """Whether the process of `rank` runs."""
        return self._processes[rank].is_alive()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Sends a signal to one rank; returns when, on `time.monotonic`'s clock."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, number)
        return time.monotonic()

    def log(self, rank: int) -> str:
        """What `rank` wrote to its standard output and error so far."""
        path = self.directory / f"rank{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def said(self, rank: int) -> list[str]:
        """The lines of `log`, without those about torch's own store and its host names."""
        return [line for line in self.log(rank).splitlines() if "socket.cpp" not in line]

    def start(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> None:
        """Begins a call on `ranks` (all by default); `finish` waits for it."""
        for rank in range(self.world) if ranks is None else ranks:
            pipe = self._pipes[rank]
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.send(("call", (function, args)))

    def finish(
        self,
        deadline: float = 60,
        ranks: Sequence[int] | None = None,
        on_say: Callable[[int, Any], None] | None = None,
    ) -> list[Outcome]:
        """Waits for the calls begun by `start`; kills ranks that pass the deadline."""
        return self._collect(range(self.world) if ranks is None else ranks, deadline, on_say)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        deadline: float = 60,
        ranks: Sequence[int] | None = None,
        on_say: Callable[[int, Any], None] | None = None,
    ) -> list[Outcome]:
        """Calls `function(me, *args)` on `ranks` and returns how it ended on each."""
        self.start(function, *args, ranks=ranks)
        return self.finish(deadline, ranks, on_say)

    def values(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """As `run`, for calls that must succeed everywhere."""
        outcomes = self.run(function, *args, **options)
        bad = [o for o in outcomes if not o.ok]
        assert not bad, "\n".join(map(str, bad))
        return [o.value for o in outcomes]

    def _collect(
        self,
        ranks: Sequence[int],
        deadline: float,
        on_say: Callable[[int, Any], None] | None = None,
    ) -> list[Outcome]:
        started = time.monotonic()
        end = started + deadline
        done: dict[int, Outcome] = {}
        syncing: set[int] = set()
        pipes: dict[int, Connection] = {}
        for rank in ranks:
            pipe = self._pipes[rank]
            if pipe is not None:
                pipes[rank] = pipe
            else:
                done[rank] = Outcome(rank, died=True, log=self.log(rank))
        while len(done) < len(ranks):
            waiting = [pipes[r] for r in ranks if r not in done]
            ready = wait_any(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                for outcome in self._give_up([r for r in ranks if r not in done], deadline):
                    done[outcome.rank] = outcome
                break
            for rank in [r for r in ranks if r not in done and pipes[r] in ready]:
                try:
                    word, body = pipes[rank].recv()
                except (EOFError, ConnectionResetError):
                    self._pipes[rank] = None
                    syncing.discard(rank)
                    done[rank] = Outcome(
                        rank, died=True, ended=time.monotonic(), log=self.log(rank)
                    )
                    continue
                if word == "say":
                    if on_say is not None:
                        on_say(rank, body)
                elif word == "sync":
                    syncing.add(rank)
                else:
                    value, failure, seconds = body
                    done[rank] = Outcome(rank, value, failure, seconds, ended=time.monotonic())
            if syncing and syncing == {r for r in ranks if r not in done}:
                for rank in syncing:
                    pipes[rank].send(("go", None))
                syncing = set()
        return [done[r] for r in ranks]

    def _give_up(self, ranks: Sequence[int], deadline: float) -> Iterator[Outcome]:
        """Ends ranks that passed the deadline, after asking them where they are."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                self.kill(rank, signal.SIGUSR1)
        time.sleep(0.5)
        for rank in ranks:
            self._end_session(rank)
            self._pipes[rank] = None
            yield Outcome(
                rank, hung=True, seconds=deadline, ended=time.monotonic(), log=self.log(rank)
            )

    def _end_session(self, rank: int) -> None:
        """Kills the process of `rank` and what it started."""
        pid = self._processes[rank].pid
        assert pid is not None
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def end(self, ranks: Sequence[int] | None = None, deadline: float = 20) -> list[int | None]:
        """Lets ranks leave in order (destroying their groups); returns their exit codes."""
        ranks = range(self.world) if ranks is None else ranks
        for rank in ranks:
            pipe = self._pipes[rank]
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError, OSError):
                    pipe.send(("end", None))
        end = time.monotonic() + deadline
        for rank in ranks:
            self._processes[rank].join(max(0.0, end - time.monotonic()))
        return [self._processes[rank].exitcode for rank in ranks]

    def close(self) -> None:
        """Ends everything; harmless when repeated."""
        self.end(deadline=5)
        for rank in range(len(self._processes)):
            if self._processes[rank].is_alive():
                self._end_session(rank)
            self._processes[rank].join(5)
        for pipe in self._pipes:
            if pipe is not None:
                pipe.close()
        self._pipes = [None] * len(self._pipes)
        self._store = None
        _open.discard(self)
        shutil.rmtree(self.directory, ignore_errors=True)


__all__ = [
    "BACKEND",
    "Failure",
    "Me",
    "Outcome",
    "Ranks",
    "preload",
    "process",
    "start_fork_server",
]
