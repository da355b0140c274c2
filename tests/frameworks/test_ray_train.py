"""Ray Train: CPU workers, and hosts of fake TPU slices."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from harness import BACKEND
from test_examples import EXAMPLES, losses
from test_launch import finish
from torch import nn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="needs Ray Train: pip install tpu_dist[ray]",
    ),
]

SLICE = Path(__file__).with_name("fake_slice.py")


SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    # Processes are started when a job wants them, and reports are read at once.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}


def run(program, *arguments, timeout=280):
    """What a program that starts a Ray cluster printed."""
    # Names of sockets are short.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as directory:
        child = subprocess.Popen(
            [sys.executable, str(program), *map(str, arguments)],
            env={**os.environ, **SETTINGS, "RAY_TMPDIR": directory},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        code, output = finish(child, timeout)
    assert code == 0, output
    return output


def alone():
    """The losses of the example's model, trained by one process on the whole batch."""
    example = runpy.run_path(str(EXAMPLES / "ray_train.py"))
    width, batch = example["WIDTH"], example["GLOBAL_BATCH"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    found = {}
    for step in range(6):
        rows = torch.randn(batch, width, generator=torch.Generator().manual_seed(step))
        loss = nn.functional.mse_loss(model(rows), rows.cumsum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found[step] = loss.item()
    return found


@pytest.mark.parametrize(
    ("workers", "arguments", "start"), [(2, ["--kill=3"], 3), (4, [], 0)], ids=["2", "4"]
)
def test_workers_train_and_restart(workers, arguments, start):
    """Losses are those of one process; a killed worker brings the job back where it was."""
    output = run(
        EXAMPLES / "ray_train.py", f"--workers={workers}", f"--backend={BACKEND}", *arguments
    )
    last = re.search(r"finished: (.*)", output)
    assert last, output
    assert f"'start': {start}, 'world': {workers}" in last[1], output
    assert losses(output) == pytest.approx(alone(), rel=1e-4), output


@pytest.fixture(scope="module")
def jobs():
    """What the workers of each job on fake slices saw, by rank, and where they started."""
    output = run(SLICE)
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


def by_rank(job):
    """What each rank saw; the numbers they have of torch, Ray and the environment agree."""
    everybody = job["everybody"]
    world = len(everybody)
    for rank, seen in enumerate(everybody):
        assert (seen["rank"], seen["context"], seen["RANK"]) == (rank, rank, str(rank))
        assert seen["total"] == world * (world + 1) / 2
        assert seen["device"] == "cpu"
    return everybody


def test_two_processes_a_host_restart_in_order(jobs):
    """Ranks follow host and chips; a killed worker brings the job back from its checkpoint."""
    job = jobs["two processes a host"]
    everybody = by_rank(job)
    assert job["start"] == 1
    places = [(seen["worker"], seen["chips"]) for seen in everybody]
    assert [worker for worker, _ in places] == [0, 0, 1, 1]
    assert places == sorted(places)
    assert sorted(chip for _, chips in places[:2] for chip in chips) == [0, 1, 2, 3]
    assert [seen["LOCAL_RANK"] for seen in everybody] == ["0", "1", "0", "1"]
    assert [seen["NODE_RANK"] for seen in everybody] == ["0", "0", "1", "1"]
    for seen in everybody:
        assert seen["topology"] == "v5p:2x2x2"
        assert not seen["coordinator"]


def test_two_slices(jobs):
    """One process a host; slices keep together, and have what libtpu needs to meet."""
    everybody = by_rank(jobs["two slices"])
    assert [seen["chips"] for seen in everybody] == [[0, 1, 2, 3]] * 4
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


def test_a_mesh_on_the_slice(jobs):
    """One process a chip: the mesh of the environment's topology has every rank once."""
    everybody = by_rank(jobs["one process a chip"])
    places = [(seen["worker"], seen["chips"]) for seen in everybody]
    assert places == [(0, [chip]) for chip in range(4)]
    assert {seen["topology"] for seen in everybody} == {"v6e:2x2"}
    meshes = [seen["mesh"] for seen in everybody]
    assert meshes.count(meshes[0]) == 4
    assert sorted(rank for row in meshes[0] for rank in row) == list(range(4))


def place(worker, *chips, slice="a", shape="2x2x2"):
    """A worker on a host of a v5p slice."""
    from tpu_dist.ray import Place

    return Place(slice, worker, chips, "v5p-16", shape, f"node {slice} {worker}")


def test_order_of_ranks():
    """By slice, host, chip; slices of several shapes are no job."""
    from tpu_dist.ray import order_of_ranks

    places = [place(1, 2, 3), place(0, 0, slice="b"), place(0, 2, 3), place(1, 0, 1)]
    assert order_of_ranks(places) == [2, 3, 0, 1]
    nowhere = [place(0, slice="", shape="")] * 3
    assert order_of_ranks(nowhere) == [0, 1, 2]
    for other in (place(0, shape="2x2x1"), nowhere[0]):
        with pytest.raises(ValueError, match="places: expected slices of one shape"):
            order_of_ranks([place(0, 0, 1, 2, 3), other])


def test_a_part_of_a_slice_has_no_topology(caplog):
    """Ray gives a job that wants one host any host, also one of a larger slice."""
    from tpu_dist.ray import _environment

    places = [place(1, 0, 1), place(1, 2, 3)]
    assert _environment(places, [0, 1], "") == [{}, {}]
    assert "the workers hold 4 of the 8 chips of v5p:2x2x2" in caplog.text
    places += [place(0, 0, 1, 2, 3)]
    ids = [env["TPU_WORKER_ID"] for env in _environment(places, [2, 0, 1], "")]
    assert ids == ["0", "1", "1"]
    places += [place(worker, 0, 1, 2, 3, slice="b") for worker in (0, 1)]
    slices = [env["MEGASCALE_SLICE_ID"] for env in _environment(places, [2, 0, 1, 3, 4], "")]
    assert slices == ["0", "0", "0", "1", "1"]
    assert _environment(places[:4], [2, 0, 1, 3], "") == [{}] * 4
