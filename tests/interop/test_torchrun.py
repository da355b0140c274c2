"""The stock torchrun starts, restarts and ends jobs that run on the backend."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import BACKEND, Lan, why_no_hosts
from harness.hosts import end_session

JOB = Path(__file__).with_name("job.py")
DEMO = Path(__file__).resolve().parents[2] / "examples" / "ddp_digits.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def environment():
    """Two cores are shared by all ranks."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run(*command, timeout=90):
    """Runs torchrun on this host; returns its exit code, output and seconds."""
    start = time.monotonic()
    child = subprocess.Popen(
        [*TORCHRUN, *map(str, command)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        output, _ = end_session(child)
        pytest.fail(f"torchrun did not end in {timeout} s:\n{output}")
    return child.returncode, output, time.monotonic() - start


@pytest.mark.parametrize("backend", [BACKEND, f"cpu:{BACKEND}"])
def test_a_job_needs_no_import(backend):
    """The name is found through the package's entry points."""
    code, output, _ = run("--standalone", "--nproc-per-node=3", JOB, backend, "plain")
    assert code == 0, output
    for rank in range(3):
        assert f"rank {rank} of 3 on {os.uname().nodename} attempt 0 done" in output


def test_a_failed_rank_ends_the_job():
    """The other ranks do not hold it up until a timeout."""
    code, output, took = run("--standalone", "--nproc-per-node=3", JOB, BACKEND, "raises")
    assert code != 0
    assert "exitcode  : 3" in output, output
    assert took < 40, took


def test_a_restarted_job_runs():
    """A rank is killed once; torchrun starts all anew, on the same store."""
    code, output, _ = run(
        "--standalone", "--nproc-per-node=3", "--max-restarts=1", JOB, BACKEND, "killed once"
    )
    assert code == 0, output
    assert output.count("attempt 1 done") == 3, output


def test_the_demo_on_two_hosts():
    """Real data, DDP, two hosts joined by a wire: it learns, and says how it communicated."""
    if why_no_hosts():
        pytest.skip(why_no_hosts())
    with Lan(2) as lan:
        children = [
            host.popen(
                [
                    *TORCHRUN,
                    "--nnodes=2",
                    "--nproc-per-node=2",
                    f"--node-rank={number}",
                    f"--master-addr={lan.address(0)}",
                    "--master-port=29400",
                    str(DEMO),
                    "--backend",
                    BACKEND,
                ],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for number, host in enumerate(lan.hosts)
        ]
        outputs = []
        for child in children:
            try:
                outputs.append(child.communicate(timeout=150)[0])
            except subprocess.TimeoutExpired:
                outputs = [end_session(c)[0] for c in children]
                pytest.fail("the demo did not end:\n" + "\n".join(outputs))
        assert [child.returncode for child in children] == [0, 0], "\n".join(outputs)
        accuracy = re.search(r"accuracy\D*([\d.]+)", outputs[0])
        assert accuracy, outputs[0]
        assert float(accuracy.group(1)) > (0.95 if float(accuracy.group(1)) <= 1 else 95.0)
        assert "tcp" in outputs[0].lower(), outputs[0]


def test_import_torch_stays_quick_and_quiet():
    """What the package adds to `import torch` is under 20 ms, or a hundredth of it where the
    machine is slow, and says nothing."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import torch"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == ""
    lines = [
        line.split("|") for line in done.stderr.splitlines() if line.startswith("import time:")
    ]
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert said == [], said
    times = {
        name.strip(): int(own.removeprefix("import time:"))
        for own, _, name in lines
        if own.removeprefix("import time:").strip().isdecimal()
    }
    ours = {name: own for name, own in times.items() if name.split(".")[0] == BACKEND}
    assert ours, "torch did not load the package's entry point"
    assert sum(ours.values()) < max(20_000, 0.01 * sum(times.values())), ours
