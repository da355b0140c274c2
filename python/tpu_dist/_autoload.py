"""What happens at ``import torch``: next to nothing.

The backend itself is registered when its name is first used, by the entry point group
``torch.distributed.backends``. Another package may claim the same name, TorchTPU on a
TPU host for one, and does so while torch is being imported. Whoever registered before
the first use keeps the name; a log line says who that is. ``TPU_DIST_PREFER=1`` in the
environment makes it this package.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from tpu_dist._backend import NAME, create, register

logger = logging.getLogger(__name__)


def _preferred() -> bool:
    return os.environ.get("TPU_DIST_PREFER") == "1"


def _origin(function: Any) -> str:
    return getattr(function, "__module__", None) or repr(function)


def autoload() -> None:
    """Watches for other claims to the name; the entry point of ``torch.backends``."""
    from torch.distributed import distributed_c10d

    backend = getattr(distributed_c10d, "Backend", None)
    if backend is None:  # A torch without distributed support.
        return
    earlier = backend._plugins.get(NAME.upper())
    if earlier is not None and earlier.creator_fn is not create:
        if _preferred():
            register()
        _report(earlier.creator_fn)

    original = backend.register_backend

    def register_backend(name: str, func: Any, *args: Any, **kwargs: Any) -> None:
        if name.lower() == NAME and func is not create:
            _report(func)
            if _preferred():
                return
        original(name, func, *args, **kwargs)

    register_backend.__doc__ = original.__doc__
    backend.register_backend = register_backend


def _report(other: Any) -> None:
    serves = "this package" if _preferred() else _origin(other)
    logger.warning(
        "the backend name %r is claimed by %s and by the package tpu_dist: %s serves it "
        "(TPU_DIST_PREFER=1 chooses tpu_dist)",
        NAME,
        _origin(other),
        serves,
    )
