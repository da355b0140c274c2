"""What happens at ``import torch``: next to nothing.

The device "tpu" gets its name, and what torch asks of a device; it is opened when it is first
used. The process group backend is registered as its default; where there is no such device,
when its name is first used, by the entry point group ``torch.distributed.backends``.

Another package may claim the same names, TorchTPU on a TPU host for one, and does so
while torch is being imported. Whoever registered the backend before the first use keeps the
name; ``TPU_DIST_PREFER=1`` in the environment makes it this package. The device is left to
TorchTPU on a host with a TPU. A log line says who it is.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from typing import Any

from tpu_dist._backend import NAME, create, load, register

logger = logging.getLogger(__name__)

_DEVICE = "tpu"
_UNNAMED = "privateuseone"


def _preferred() -> bool:
    return os.environ.get("TPU_DIST_PREFER") == "1"


def _origin(function: Any) -> str:
    return getattr(function, "__module__", None) or repr(function)


def autoload() -> None:
    """Registers the device; watches for other claims to the backend's name.

    The entry point of ``torch.backends``.
    """
    _watch_backend_name()
    _register_device()


def _watch_backend_name() -> None:
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


def _register_device() -> None:
    import torch

    taken = torch._C._get_privateuse1_backend_name()
    if taken != _UNNAMED:
        logger.warning(
            "torch's device for other packages is %r already: that one is used", taken
        )
        return
    try:
        native = load().device
    except ImportError as error:
        # A torch that this package was not built for is still of use for other things.
        logger.warning("no device %r: %s", _DEVICE, error)
        return
    if importlib.util.find_spec("torch_tpu") is not None and native.has_tpu():
        logger.warning("the device %r is left to TorchTPU", _DEVICE)
        return
    native.set_search_path([path for path in sys.path if path])
    torch.utils.rename_privateuse1_backend(_DEVICE)
    native.register_device()
    torch.utils.generate_methods_for_privateuse1_backend()
    from tpu_dist import tpu

    torch._register_device_module(_DEVICE, tpu)
    # The device's default must be known to groups whose backend nobody names.
    if (
        torch.distributed.is_available()
        and NAME.upper() not in torch.distributed.Backend._plugins
    ):
        register()
    _name_device_for_dlpack()


def _name_device_for_dlpack() -> None:
    """Lets tensors say what DLPack calls their device.

    Torch asks for a type "privateuse1", which no device has once it has a name.
    """
    import torch
    from torch.utils.dlpack import DLDeviceType

    original = torch.Tensor.__dlpack_device__

    def __dlpack_device__(self: Any) -> Any:
        if type(self) is torch.Tensor and self.device.type == _DEVICE:
            return (DLDeviceType.kDLExtDev, self.device.index or 0)
        return original(self)

    torch.Tensor.__dlpack_device__ = __dlpack_device__  # type: ignore[method-assign]
