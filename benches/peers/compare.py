"""Compares native collectives with Open MPI, Intel MPI and oneCCL on this host.

``benches/peers/install.sh`` installs the peers. Each program runs the same loop on the same
sizes; for each operation they take turns, in several rounds, and a figure is the median over
the rounds. Sizes are of the whole: what a rank holds after an all_gather.

usage: compare.py [--ranks 2] [--ops all_reduce,...] [--sizes 8,64K,1M,64M]
                  [--dtype float32] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tpu_dist.cli.bench import OPERATIONS

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "build" / "peers"
INTEL = {
    "I_MPI_ROOT": str(PEERS / "venv"),
    "PATH": f"{PEERS / 'venv' / 'bin'}:{os.environ['PATH']}",
    "LD_LIBRARY_PATH": str(PEERS / "venv" / "lib"),
    "CCL_ATL_TRANSPORT": "mpi",
    "CCL_LOG_LEVEL": "error",
}


def native_benchmark() -> str:
    """Builds the benchmark of the runtime; its path."""
    command = ["cargo", "build", "--release", "--package", "tpu-dist-runtime"]
    command += ["--bench", "collectives", "--message-format", "json"]
    output = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    for line in output.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == "collectives":
            return str(message["executable"])
    raise RuntimeError("cargo named no benchmark")


class Program:
    """One contender: a name with its version, and how to run it."""

    def __init__(self, name: str, command: Sequence[str], env: dict[str, str]) -> None:
        self.name, self.command, self.env = name, list(command), env

    def run(self, arguments: Sequence[str]) -> dict[int, float]:
        """Microseconds by bytes."""
        done = subprocess.run(
            [*self.command, *arguments],
            env=os.environ | self.env,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise RuntimeError(f"{self.name}: {done.stdout}{done.stderr}")
        rows = re.findall(r"^(?:\s*[a-z_]+)?\s*(\d+)\s+([\d.]+)", done.stdout, re.MULTILINE)
        return {int(size): float(time) for size, time in rows}


def version(command: Sequence[str], env: dict[str, str] | None = None) -> str:
    """The first version number that a command prints."""
    text = subprocess.run(
        command, env=os.environ | (env or {}), capture_output=True, text=True
    ).stdout
    found = re.search(r"\d+\.\d+[\d.]*", text)
    return found.group() if found else "?"


def contenders(options: argparse.Namespace) -> dict[str, Program]:
    """The programs there are, ours first."""
    native = native_benchmark()
    ranks = str(options.ranks)
    programs = {
        "tpu_dist": Program(
            "tpu_dist", [native, "--ranks", ranks, "--dtype", options.dtype], {}
        ),
        "arena": Program(
            "tpu_dist, in place",
            [native, "--ranks", ranks, "--dtype", options.dtype, "--memory", "arena"],
            {},
        ),
    }
    mpirun = str(PEERS / "venv" / "bin" / "mpirun")
    pip = [str(PEERS / "venv" / "bin" / "python"), "-m", "pip", "show"]
    if options.dtype == "float32":
        openmpi = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", ranks]
        programs["openmpi"] = Program(
            f"Open MPI {version(['mpirun.openmpi', '--version'])}",
            [*openmpi, str(PEERS / "openmpi")],
            {},
        )
        programs["intelmpi"] = Program(
            f"Intel MPI {version([*pip, 'impi-devel'])}",
            [mpirun, "-n", ranks, str(PEERS / "intelmpi")],
            INTEL,
        )
    programs["oneccl"] = Program(
        f"oneCCL {version([*pip, 'oneccl-devel'])}",
        [mpirun, "-n", ranks, str(PEERS / "oneccl")],
        INTEL,
    )
    return programs


def arguments(kind: str, operation: str, sizes: list[str], dtype: str) -> list[str]:
    """How a contender is told what to run."""
    if kind in ("tpu_dist", "arena"):
        return ["--ops", operation, "--sizes", ",".join(sizes)]
    return [operation, *([dtype] if kind == "oneccl" else []), *sizes]


def rounded_up(options: argparse.Namespace) -> list[str]:
    """The sizes in bytes, each a whole number of elements for each rank."""
    unit = options.ranks * {"float32": 4, "bfloat16": 2}[options.dtype]
    factors = {"K": 1 << 10, "M": 1 << 20}
    sizes = [
        int(size.rstrip("KM")) * factors.get(size[-1], 1) for size in options.sizes.split(",")
    ]
    return [str(-(-size // unit) * unit) for size in sizes]


def main() -> int:
    """Prints one table for each operation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ops", default=",".join(OPERATIONS))
    parser.add_argument("--sizes", default="8,1K,16K,64K,256K,1M,8M,64M")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not (PEERS / "oneccl").exists() or shutil.which("mpirun.openmpi") is None:
        print("peers missing: run benches/peers/install.sh", file=sys.stderr)
        return 2
    programs = contenders(options)
    for operation in options.ops.split(","):
        # oneCCL's messages need a thread of their own; left out.
        taking_part = {
            kind: program
            for kind, program in programs.items()
            if not (kind == "oneccl" and operation == "send_recv")
            and not (kind == "arena" and operation in ("send_recv", "barrier"))
        }
        sizes = ["8"] if operation == "barrier" else rounded_up(options)
        rounds: dict[str, list[dict[int, float]]] = {kind: [] for kind in taking_part}
        for _ in range(options.rounds):
            for kind, program in taking_part.items():
                told = arguments(kind, operation, sizes, options.dtype)
                rounds[kind].append(program.run(told))
        print(f"\n{operation}, {options.dtype}, {options.ranks} ranks, microseconds")
        names = [program.name for program in taking_part.values()]
        print(
            f"{'bytes':>10} " + " ".join(f"{name:>20}" for name in names) + "  best peer / own"
        )
        for size in rounds["tpu_dist"][0]:
            times = {
                kind: statistics.median(found[size] for found in rounds[kind])
                for kind in taking_part
            }
            peers = [time for kind, time in times.items() if kind not in ("tpu_dist", "arena")]
            ratio = min(peers) / times["tpu_dist"]
            line = " ".join(f"{time:20.2f}" for time in times.values())
            print(f"{size:10} {line}  {ratio:14.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
