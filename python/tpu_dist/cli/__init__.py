"""The command ``tpu-dist``.

Each subcommand is a module of this package with a function ``add(commands)`` that adds its
parser and sets ``run``, which takes the parsed arguments and returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = ("topo", "explain", "bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tpu-dist", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="command")
    for name in COMMANDS:
        importlib.import_module(f"{__name__}.{name}").add(commands)
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except (ValueError, OSError) as error:
        print(f"tpu-dist: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    return status
