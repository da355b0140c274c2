"""Runs a program in which ``init_process_group()`` has another default backend.

Usage: python -m tpu_dist._worker BACKEND path|module PROGRAM [ARGUMENT...]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from torch.distributed.distributed_c10d import Backend, BackendConfig


def main() -> None:
    """Sets the default, also of each device that it serves, then becomes the program."""
    backend, kind, program, *arguments = sys.argv[1:]
    for device, name in BackendConfig(backend).device_backend_map.items():
        Backend.default_device_backend_map[device] = str(name)
    original = BackendConfig.__init__

    def __init__(self: BackendConfig, named: str | Backend) -> None:
        original(self, backend if named == Backend.UNDEFINED else named)

    # Torch's own default is the backend of one device, the accelerator where there is one.
    BackendConfig.__init__ = __init__  # type: ignore[method-assign,assignment]
    sys.argv = [program, *arguments]
    if kind == "module":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        # As `python program` has it: its directory, in the place of this module's.
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
