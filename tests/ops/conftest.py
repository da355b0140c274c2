"""Worlds of ranks that many tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness import Outcome, Ranks


class Worlds:
    """Keeps one world of ranks alive between tests; makes a new one when it was spoilt."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None

    def get(self, world: int) -> Ranks:
        """A world of this size with its default group."""
        if self._ranks is None or self._ranks.world != world:
            self.close()
            self._ranks = Ranks(world, init={"timeout": 20})
        return self._ranks

    def run(
        self, world: int, function: Callable[..., Any], *args: Any, **options: Any
    ) -> list[Outcome]:
        """As `Ranks.run`; a world in which a call failed is not used again."""
        outcomes = self.get(world).run(function, *args, **options)
        if not all(o.ok for o in outcomes):
            self.close()
        return outcomes

    def values(
        self, world: int, function: Callable[..., Any], *args: Any, **options: Any
    ) -> list[Any]:
        """As `Ranks.values`."""
        outcomes = self.run(world, function, *args, **options)
        assert all(o.ok for o in outcomes), "\n".join(str(o) for o in outcomes if not o.ok)
        return [o.value for o in outcomes]

    def close(self) -> None:
        """Ends the world."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Worlds of ranks by size."""
    shared = Worlds()
    yield shared
    shared.close()
