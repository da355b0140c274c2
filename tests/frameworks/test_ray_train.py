"""Ray Train: CPU workers, and hosts of fake TPU slices."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import BACKEND
from harness.hosts import end_session
from test_examples import EXAMPLES, losses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="needs Ray Train: pip install tpu_dist[ray]",
    ),
]

SLICE = Path(__file__).with_name("fake_slice.py")


def run(program, *arguments, timeout=280):
    """What a program that starts a Ray cluster printed."""
    child = subprocess.Popen(
        [sys.executable, str(program), *map(str, arguments)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
            "RAY_DEDUP_LOGS": "0",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        output, _ = end_session(child)
        pytest.fail(f"it did not end in {timeout} s:\n{output}")
    assert child.returncode == 0, output
    return output


def test_workers_train_and_restart():
    """Two workers, one dies: the losses are those of Gloo with four workers undisturbed."""
    found = run(EXAMPLES / "ray_train.py", "--workers=2", "--kill=3", f"--backend={BACKEND}")
    assert re.search(r"finished: .*'start': [123]", found), found
    expected = losses(run(EXAMPLES / "ray_train.py", "--workers=4", "--backend=gloo"))
    assert sorted(expected) == list(range(6))
    assert losses(found) == pytest.approx(expected, rel=1e-4), found


def slice_run(*arguments):
    """What the workers on fake slices saw, by rank, and the step they started from."""
    output = run(SLICE, *arguments)
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    metrics = json.loads(line.removeprefix("RESULT "))
    everybody = metrics["everybody"]
    assert [seen["rank"] for seen in everybody] == list(range(len(everybody)))
    return everybody, metrics["start"]


def test_one_process_a_chip_pair_restarts_in_order():
    """Ranks follow host and chips; a killed worker brings the job back from its checkpoint."""
    everybody, start = slice_run(1, 2, 2, "kill")
    assert start in (1, 2)
    places = [(seen["worker"], seen["chips"]) for seen in everybody]
    assert places == sorted(places)
    assert sorted(chip for _, chips in places[:2] for chip in chips) == [0, 1, 2, 3]
    assert [seen["LOCAL_RANK"] for seen in everybody] == ["0", "1", "0", "1"]
    assert [seen["NODE_RANK"] for seen in everybody] == ["0", "0", "1", "1"]
    for rank, seen in enumerate(everybody):
        assert seen["context"] == rank
        assert seen["RANK"] == str(rank)
        assert seen["total"] == 10
        assert seen["topology"] == "v5p:2x2x2"
        assert seen["device"] == "cpu"
        assert not seen["coordinator"]


def test_two_slices():
    """One process a host; slices keep together, and have what libtpu needs to meet."""
    everybody, _ = slice_run(2, 2, 4)
    assert [seen["worker"] for seen in everybody] == [0, 1, 0, 1]
    slices = [seen["slice"] for seen in everybody]
    assert slices[0] == slices[1] != slices[2] == slices[3]
    assert [seen["MEGASCALE_SLICE_ID"] for seen in everybody] == ["0", "0", "1", "1"]
    for seen in everybody:
        assert seen["topology"] == "2*v5p:2x2x2"
        assert seen["MEGASCALE_NUM_SLICES"] == "2"
        assert seen["TPU_WORKER_ID"] == str(seen["worker"])
        assert seen["coordinator"]
        assert seen["MEGASCALE_PORT"] == "8081"


def test_a_mesh_on_the_slice():
    """One process a chip: the mesh of the environment's topology has every rank once."""
    everybody, _ = slice_run(1, 1, 1)
    places = [(seen["worker"], seen["chips"]) for seen in everybody]
    assert places == [(0, [chip]) for chip in range(4)]
    meshes = [seen["mesh"] for seen in everybody]
    assert meshes.count(meshes[0]) == 4
    assert sorted(rank for row in meshes[0] for rank in row) == list(range(4))
