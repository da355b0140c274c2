"""PyTorch's own c10d suite, from the installed wheel, on the backend under test.

Importing this module opens the suite's gates: its decorators compare the name in
``os.environ["BACKEND"]`` with built-in names when `distributed_test` is imported. While it
is imported, and in its module afterwards, the name is a string that also equals the
built-in names whose tests apply to CPU tensors. No test is copied or changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import SkipTest
from unittest.mock import patch

from harness.ranks import BACKEND, process, start_fork_server


class GateName(str):
    """A backend name that also equals the built-in names whose gates should be open.

    `gloo` and `custom` open what holds for CPU backends; `mpi` opens the tests of
    all_to_all on CPU tensors and those that ask for more than two ranks by name.
    """

    __slots__ = ()
    _also = frozenset({"gloo", "custom", "mpi"})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and (str.__eq__(self, other) or str(other) in self._also)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        # The suite looks names up in sets that hold "gloo".
        return hash("gloo")

    def __reduce__(self) -> tuple[Any, ...]:
        return (str, (str(self),))


class _Environment(os._Environ):  # type: ignore[type-arg]
    """The environment as the suite must see it while it is imported."""

    def __getitem__(self, key: str) -> str:
        value = super().__getitem__(key)
        return GateName(value) if key == "BACKEND" else value


def _import_suite() -> Any:
    environment = {
        "BACKEND": BACKEND,
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        # Seconds after which ranks that hang are ended; none needs a tenth of it.
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60",
    }
    with patch.dict(os.environ, environment):
        import torch.testing._internal.common_distributed as common

        features = common.DistTestCases.backend_feature
        for feature in ("ddp", "subgroup", "plugin"):
            features[feature] = {*features[feature], BACKEND}
        original = type(os.environ)
        os.environ.__class__ = _Environment
        try:
            import torch.testing._internal.distributed.distributed_test as suite
        finally:
            os.environ.__class__ = original
    suite.PROFILING_SUPPORTED_BACKENDS.append(BACKEND)
    suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(BACKEND)
    assert isinstance(suite.BACKEND, GateName)
    return suite


suite = _import_suite()


def _rank(
    environment: dict[str, str], target: Callable[..., None], *args: Any, **kw: Any
) -> None:
    """A rank's process: takes over the test's environment, which the fork server has not."""
    os.environ.update(environment)
    suite.INIT_METHOD = environment["INIT_METHOD"]
    target(*args, **kw)


class _NotRun:
    """Takes the place of a test that does not apply; the suite looks behind decorators."""

    def __init__(self, test: Callable[..., None]) -> None:
        self.__wrapped__ = getattr(test, "__wrapped__", test)


class Conformance(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """The suite at one world size; a subclass says which and what must run there."""

    ranks = 0
    must_run: frozenset[str] = frozenset()
    __test__ = False

    def __init_subclass__(cls) -> None:
        cls.__test__ = True
        for name in dir(cls):
            if name.startswith("test_") and name not in cls.must_run:
                setattr(cls, name, _NotRun(getattr(cls, name)))

    def setUp(self) -> None:
        """Starts the ranks, from the fork server."""
        environment = patch.dict(
            os.environ,
            # What the gates that are read at run time compare with.
            BACKEND="mpi",
            WORLD_SIZE=str(self.ranks),
            MASTER_ADDR="127.0.0.1",
        )
        environment.start()
        self.addCleanup(environment.stop)
        super().setUp()
        start_fork_server()
        names = ("BACKEND", "WORLD_SIZE", "MASTER_ADDR", "TEMP_DIR", "INIT_METHOD")
        passed_on = {name: os.environ[name] for name in names}

        def start(target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return process(_rank, (passed_on, target, *args), name=name, kwargs=kwargs)

        self._start_processes(start)

    def tearDown(self) -> None:
        """Ends ranks that are still there, whatever they are doing."""
        for rank in self.processes:
            if rank.is_alive():
                rank.kill()
        super().tearDown()

    def _join_processes(self, fn: Callable[..., Any]) -> None:
        try:
            super()._join_processes(fn)
        except SkipTest as skip:
            raise AssertionError(
                f"listed as running at world size {self.ranks}: {skip}"
            ) from skip
