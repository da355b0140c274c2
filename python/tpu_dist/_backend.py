"""Registers the backend with torch and makes its process groups."""

from __future__ import annotations

import atexit
import functools
import sys
from types import ModuleType
from typing import Any

NAME = "tpu_dist"


@functools.cache
def load() -> ModuleType:
    """Loads the compiled part."""
    from tpu_dist import _C

    # Callbacks of futures take the GIL: they must end before the interpreter does.
    atexit.register(_C._close)
    return _C


def create(options: Any, pg_options: Any) -> Any:
    """Makes the backend of a group; what torch calls a creator with the extended API."""
    return load().create_backend(options, pg_options)


def register() -> None:
    """Registers the backend; the entry point of ``torch.distributed.backends``."""
    import torch
    from torch.distributed.distributed_c10d import Backend

    # Being a device's default where it has none is part of the registration. The CPU
    # has one, Gloo, and keeps it.
    devices = ["cpu"]
    if getattr(torch, "tpu", None) is sys.modules.get("tpu_dist.tpu", ...):
        devices.append("tpu")
    Backend.register_backend(NAME, create, extended_api=True, devices=devices)
