"""Worlds of ranks that the tests of this directory share, and what ranks import early."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Ranks, preload

preload("framework_modules", Path(__file__).parent)


def pytest_configure(config: pytest.Config) -> None:
    """Lets ranks start with TorchTitan imported, where a test may need it."""
    if "not slow" not in config.option.markexpr and importlib.util.find_spec("torchtitan"):
        preload("titan_configs", Path(__file__).parent)


class Worlds:
    """Worlds kept alive between tests; one in which a call failed is made anew."""

    def __init__(self) -> None:
        self._ranks: dict[int, Ranks] = {}

    def values(
        self, world: int, function: Callable[..., Any], *args: Any, deadline: float = 120
    ) -> list[Any]:
        """What `function(me, *args)` returned on each of `world` ranks; it must succeed."""
        if world not in self._ranks:
            self._ranks[world] = Ranks(world, init={"timeout": 60}, start_deadline=120)
        outcomes = self._ranks[world].run(function, *args, deadline=deadline)
        if not all(o.ok for o in outcomes):
            self._ranks.pop(world).close()
            pytest.fail("\n".join(str(o) for o in outcomes if not o.ok))
        return [o.value for o in outcomes]

    def close(self) -> None:
        """Ends all of them."""
        while self._ranks:
            self._ranks.popitem()[1].close()


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Worlds of ranks by size."""
    shared = Worlds()
    yield shared
    shared.close()
