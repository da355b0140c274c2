"""Runs every check and test of the repository, stage by stage.

Usage: check.py [--only lint|rust|python]

Some stages that keep a core busy run beside the Python tests, which mostly wait for each
other's ranks; their output comes when they have ended. Prints each stage's time, and at the end
how many tests and checks passed and failed.
The exit code is 0 only when all passed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


OPERATORS = "tests/device/test_opinfo.py"
"""The longest of the Python tests, and the only ones that keep a core busy."""

SUMMARY = re.compile(r"^(=* ?\d+ (passed|failed).* in [\d.]+s|test result: | *Summary \[)")
"""The summary lines of pytest, cargo test and cargo nextest."""

FAILURE = re.compile(r"^(FAILED|ERROR) |^ +(FAIL|TIMEOUT|SIG[A-Z]+) \[")
"""The lines by which pytest and cargo nextest name a test that failed."""


@dataclass
class Result:
    """How a stage ended: by its own count where it runs tests, else as one check."""

    succeeded: bool = False
    passed: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)

    def count(self, line: str) -> None:
        """Adds the figures of a summary line, or the name of a test that failed."""
        if FAILURE.match(line):
            self.failures.append(line.strip())
        if SUMMARY.match(line):
            self.passed += sum(map(int, re.findall(r"(\d+) passed", line)))
            self.failed += sum(map(int, re.findall(r"(\d+) (?:failed|errors?)", line)))

    def totals(self) -> tuple[int, int]:
        """Tests or checks that passed, and that failed."""
        passed, failed = self.passed, self.failed
        if not passed and not failed:
            passed = int(self.succeeded)
        return passed, failed or int(not self.succeeded)


@dataclass
class Stage:
    """One command."""

    kind: str
    name: str
    command: list[str]
    cwd: Path = ROOT
    env: dict[str, str] = field(default_factory=dict)
    again: list[str] | None = None
    """Runs once more what failed: tests of time limits miss one when the machine is taken
    from them for a moment. What fails twice has failed."""
    beside: bool = False
    """Runs beside the stages that follow."""

    def run(self, show: Callable[[str], None]) -> Result:
        """Runs it with its output shown, line by line."""
        result = self._run(self.command, show)
        if not result.succeeded and self.again is not None:
            second = self._run(self.again, show)
            if second.succeeded:
                show(f"=== {self.name}: {result.failed} passed at the second attempt only")
                result = Result(True, result.passed + second.passed)
        return result

    def _run(self, command: list[str], show: Callable[[str], None]) -> Result:
        show(f"\n=== {self.name}: {' '.join(command)}")
        start = time.monotonic()
        result = Result()
        with subprocess.Popen(
            command,
            cwd=self.cwd,
            env=os.environ | self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                show(line.removesuffix("\n"))
                result.count(line)
        result.succeeded = process.returncode == 0
        verdict = "passed" if result.succeeded else f"FAILED, exit code {process.returncode}"
        show(f"=== {self.name}: {verdict} after {time.monotonic() - start:.1f} s")
        return result


def fuzz_stages() -> list[Stage]:
    """A short run of each fuzz target.

    The flags are those of `cargo fuzz run --sanitizer none`, which a stable toolchain
    knows; `cargo fuzz` itself adds the address sanitizer and needs a nightly one.
    """
    host = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    triple = re.findall(r"^host: (.*)$", host, re.MULTILINE)[0]
    coverage = ["level=4", "inline-8bit-counters", "pc-table", "trace-compares"]
    flags = [
        "--cfg=fuzzing",
        "-Cpasses=sancov-module",
        *(f"-Cllvm-args=-sanitizer-coverage-{what}" for what in coverage),
        "-Ccodegen-units=1",
        "-Cdebug-assertions",
        "-Coverflow-checks",
    ]
    env = {"RUSTFLAGS": " ".join(flags), "CARGO_TARGET_DIR": str(ROOT / "target" / "fuzz")}
    stages = []
    for target in sorted(ROOT.glob("crates/*/fuzz/fuzz_targets/*.rs")):
        manifest = target.parents[1] / "Cargo.toml"
        cargo = ["cargo", "run", "--quiet", "--release", "--target", triple]
        options = ["-max_total_time=15", "-print_final_stats=1"]
        command = [
            *cargo,
            "--manifest-path",
            str(manifest),
            "--bin",
            target.stem,
            "--",
            *options,
        ]
        name = f"fuzz {target.stem}"
        stages.append(Stage("rust", name, command, env=env, beside=True))
    return stages


def loom_stages() -> list[Stage]:
    """The model checks of the runtime, which is built with `cfg(tpu_dist_loom)` for them."""
    flags = f"{os.environ.get('RUSTFLAGS', '')} --cfg tpu_dist_loom".strip()
    env = {
        "RUSTFLAGS": flags,
        "CARGO_TARGET_DIR": str(ROOT / "target" / "loom"),
        "LOOM_MAX_PREEMPTIONS": "3",
    }
    manifest = (ROOT / "crates/runtime/Cargo.toml").read_text()
    if "cfg(tpu_dist_loom)" not in manifest:
        return []
    command = ["cargo", "test", "--release", "-p", "tpu-dist-runtime", "--lib", "loom"]
    return [Stage("rust", "loom", command, env=env, beside=True)]


def stages() -> list[Stage]:
    """Everything, cheapest first."""
    nextest = shutil.which("cargo-nextest") is not None
    rust_test = ["cargo", "nextest", "run"] if nextest else ["cargo", "test", "--tests"]
    if nextest:
        rust_test += ["--retries", "1"]
    pytest = [sys.executable, "-m", "pytest", "-q"]
    typed = ["python", "tests/harness", "examples", "benches", "tools"]
    return [
        Stage("lint", "rustfmt", ["cargo", "fmt", "--all", "--check"]),
        Stage("lint", "ruff format", [str(BIN / "ruff"), "format", "--check", "."]),
        Stage("lint", "ruff", [str(BIN / "ruff"), "check", "."]),
        Stage("lint", "mypy", [str(BIN / "mypy"), *typed]),
        Stage(
            "lint",
            "clippy",
            ["cargo", "clippy", "--workspace", "--all-targets", "--", "-D", "warnings"],
        ),
        Stage("rust", "rust tests", [*rust_test, "--workspace"]),
        Stage("rust", "rust doc tests", ["cargo", "test", "--workspace", "--doc", "--quiet"]),
        *loom_stages(),
        *fuzz_stages(),
        Stage(
            "python",
            "pytest, operators",
            [*pytest, "-p", "no:cacheprovider", OPERATORS],
            beside=True,
        ),
        *(
            Stage("python", name, command, again=[*command, "--last-failed"])
            for name, command in {
                "pytest": [*pytest, "-m", "not slow", f"--ignore={OPERATORS}"],
                "pytest, long tests": [*pytest, "-m", "slow"],
            }.items()
        ),
    ]


def run(chosen: list[Stage]) -> dict[str, Result]:
    """How each stage ended, by name."""
    results = {}
    with ThreadPoolExecutor(max_workers=1) as beside:
        apart = []
        for stage in chosen:
            if stage.beside:
                lines: list[str] = []
                apart.append((stage, lines, beside.submit(stage.run, lines.append)))
            else:
                results[stage.name] = stage.run(print)
        for stage, lines, future in apart:
            results[stage.name] = future.result()
            print("\n".join(lines), flush=True)
    return results


def main() -> int:
    """Runs the stages; the exit code."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["lint", "rust", "python"])
    only = parser.parse_args().only
    start = time.monotonic()
    results = run([stage for stage in stages() if only is None or stage.kind == only])
    passed, failed = (sum(n) for n in zip(*(r.totals() for r in results.values()), strict=True))
    broken = [name for name, result in results.items() if not result.succeeded]
    print(f"\n{passed} passed, {failed} failed in {time.monotonic() - start:.0f} s", end="")
    print(f"; failed stages: {', '.join(broken)}" if broken else "")
    for name in broken:
        print("\n".join([f"{name}:", *(f"  {line}" for line in results[name].failures)]))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
