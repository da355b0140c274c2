"""Who serves the backend name when two packages claim it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OTHER = """
import sys, types
from torch.distributed.distributed_c10d import Backend

other = types.ModuleType("other_package")
exec("def create(options, pg_options): raise RuntimeError('other')", other.__dict__)

def claim():
    Backend.register_backend("tpu_dist", other.create, extended_api=True, devices=["cpu"])

def server():
    Backend._ensure_backend_registered("tpu_dist")
    return Backend._plugins["TPU_DIST"].creator_fn.__module__
"""
# The other package registers before or after this one looks, both during `import torch`.
BEFORE = f"{OTHER}\nclaim()\nimport tpu_dist._autoload as a; a.autoload()\nprint(server())"
AFTER = f"{OTHER}\nimport tpu_dist._autoload as a; a.autoload()\nclaim()\nprint(server())"


def run(code: str, **environment: str) -> tuple[str, str]:
    """Standard output and standard error of `code` in a Python of its own."""
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return child.stdout.strip(), child.stderr.strip()


@pytest.mark.parametrize("code", [BEFORE, AFTER], ids=["before", "after"])
def test_who_registered_first_keeps_the_name(code):
    """One log line says so, and how to choose."""
    served, log = run(code)
    assert served == "other_package"
    assert log.count("\n") == 0
    assert "other_package" in log
    assert "other_package serves it" in log
    assert "TPU_DIST_PREFER=1" in log


@pytest.mark.parametrize("code", [BEFORE, AFTER], ids=["before", "after"])
def test_a_variable_prefers_this_package(code):
    """TPU_DIST_PREFER=1 overrides the order."""
    served, log = run(code, TPU_DIST_PREFER="1")
    assert served == "tpu_dist._backend"
    assert log.count("\n") == 0
    assert "this package serves it" in log


def test_alone_it_says_nothing():
    """No claim, no line."""
    served, log = run(f"{OTHER}\nimport tpu_dist._autoload as a; a.autoload()\nprint(server())")
    assert (served, log) == ("tpu_dist._backend", "")


def test_the_cpu_keeps_its_default():
    """`init_process_group()` without a name still gives Gloo."""
    served, _ = run(
        f"{OTHER}\nserver()\nprint(Backend.default_device_backend_map['cpu'], "
        "Backend.backend_capability['tpu_dist'])"
    )
    assert served == "gloo ['cpu']"
