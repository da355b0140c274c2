"""The command ``tpu-dist``.

Each subcommand is a module of this package with a function ``add(commands)`` that adds its
parser and sets ``run``, which takes the parsed arguments and returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import os
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
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read has seen enough; the interpreter must not flush again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"tpu-dist: {error}", file=sys.stderr)
        return 2
    return status
