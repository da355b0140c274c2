"""The optional packages: a missing one is an error that says how to get it."""

from __future__ import annotations

import importlib
import sys
from unittest.mock import patch

import pytest


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [("titan", "torchtitan", "titan"), ("ray", "ray", "ray"), ("elastic", "torchft", "ft")],
)
def test_a_missing_package_names_its_extra(module, package, extra):
    """As if it were not installed."""
    name = f"tpu_dist.{module}"
    loaded = {n: None for n in sys.modules if n.partition(".")[0] == package}
    with patch.dict(sys.modules, {**loaded, package: None}):
        sys.modules.pop(name, None)
        with pytest.raises(ModuleNotFoundError) as raised:
            importlib.import_module(name)
    assert f"pip install tpu_dist[{extra}]" in str(raised.value)
    assert raised.value.name.partition(".")[0] == package
