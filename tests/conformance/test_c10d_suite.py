"""PyTorch's own c10d suite at world sizes 2, 3 and 4, one test each."""

import tomllib
from pathlib import Path

import pytest
from harness import BACKEND, preload

HERE = Path(__file__).resolve().parent
preload("conformance_suite", HERE)

import conformance_suite  # noqa: E402  (found through the path that `preload` added)

PINNED = tomllib.loads((HERE / "suite.toml").read_text())
TWO = frozenset(PINNED["two_ranks"])
THREE = TWO | frozenset(PINNED["three_ranks"])
FOUR = THREE | frozenset(PINNED["four_ranks"])
DIFFERS = PINNED["differs"]

for name, reason in DIFFERS.items():
    # Gloo is the one backend that this suite expects.
    differs = pytest.mark.xfail(BACKEND != "gloo", reason=reason.strip(), strict=True)
    differs(getattr(conformance_suite.Conformance, name))


class TestWorld2(conformance_suite.Conformance):
    """Two ranks."""

    ranks = 2
    must_run = TWO


class TestWorld3(conformance_suite.Conformance):
    """Three ranks: no power of two."""

    ranks = 3
    must_run = THREE


class TestWorld4(conformance_suite.Conformance):
    """Four ranks."""

    ranks = 4
    must_run = FOUR


def test_the_pinned_set_is_the_whole_set():
    """126 tests at four ranks; each exists, and each difference is one of them."""
    assert len(FOUR) == 126
    assert [
        name
        for name in FOUR
        if not callable(getattr(conformance_suite.Conformance, name, None))
    ] == []
    assert set(DIFFERS) <= FOUR
