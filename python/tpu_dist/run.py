"""torchrun with two options more.

::

    python -m tpu_dist.run --standalone --nproc-per-node=4 --backend tpu_dist train.py

``--backend`` is what ``init_process_group()`` and ``init_device_mesh()`` use where the
program names no backend; programs that do name one keep it. ``--topology`` names the slice
that :mod:`tpu_dist.mesh` finds in the environment of every rank; it must have as many
devices as the job has ranks. All other options are torchrun's.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record


def get_args_parser() -> ArgumentParser:
    """torchrun's parser with ``--backend`` and ``--topology``."""
    parser = torchrun.get_args_parser()
    parser.prog = "python -m tpu_dist.run"
    parser.add_argument(
        "--backend",
        help="default backend of init_process_group: tpu_dist, cpu:tpu_dist, gloo, ...",
    )
    parser.add_argument(
        "--topology",
        help="slice whose devices the ranks stand for, such as v5e:2x4 or v5p-128",
    )
    return parser


def _check_topology(name: str, args: Namespace) -> None:
    """Raises ValueError unless `name` is a topology with a device for each rank."""
    from tpu_dist.topology import Topology

    topology = Topology(name)
    config, _, _ = torchrun.config_from_args(args)
    ranks = {nodes * config.nproc_per_node for nodes in (config.min_nodes, config.max_nodes)}
    if ranks != {topology.device_count}:
        job = " to ".join(str(count) for count in sorted(ranks))
        raise ValueError(
            f"--topology: {topology.name} has {topology.device_count} devices, the job has "
            f"{job} ranks"
        )


def with_backend(args: Namespace) -> Namespace:
    """The arguments of torchrun that start the program with its default backend."""
    if args.no_python:
        raise ValueError("--backend needs a Python program, and --no-python says it is none")
    kind = "module" if args.module else "path"
    changed = Namespace(**vars(args))
    changed.training_script_args = [
        args.backend,
        kind,
        args.training_script,
        *args.training_script_args,
    ]
    changed.training_script, changed.module, changed.run_path = "tpu_dist._worker", True, False
    return changed


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """Starts the job; the entry point of ``python -m tpu_dist.run``."""
    parser = get_args_parser()
    args = parser.parse_args(arguments)
    try:
        if args.topology:
            _check_topology(args.topology, args)
            os.environ["TPU_DIST_VIRTUAL_SLICE"] = args.topology
        if args.backend:
            args = with_backend(args)
    except ValueError as error:
        parser.error(str(error))
    torchrun.run(args)


if __name__ == "__main__":
    main()
