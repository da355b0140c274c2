"""The examples do what they say they print."""

from __future__ import annotations

import os
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest
from harness import BACKEND, Ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def free_port():
    """A port nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def program(me, path, arguments, port):
    """Runs an example as torchrun's worker would."""
    os.environ.update(
        RANK=str(me.rank),
        LOCAL_RANK=str(me.rank),
        WORLD_SIZE=str(me.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
    sys.stdout.flush()


@pytest.fixture(scope="module")
def example():
    """Runs an example on four ranks; returns what they printed."""
    with Ranks(4, init=None) as ranks:

        def run(name, *arguments, deadline=120):
            before = [len(ranks.log(rank)) for rank in range(4)]
            path = str(EXAMPLES / name)
            ranks.values(
                program,
                path,
                ["--backend", BACKEND, *arguments],
                free_port(),
                deadline=deadline,
            )
            return "".join(ranks.log(rank)[before[rank] :] for rank in range(4))

        yield run


def losses(output):
    """Step and loss of every line that has them."""
    return {
        int(step): float(loss)
        for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)
    }


def test_llama(example):
    """The loss falls from that of guessing a byte."""
    found = losses(example("fsdp2_llama.py", "--steps", "40"))
    assert found[0] > 5.3, found
    assert found[39] < 3.2, found


def test_tensor_parallel(example):
    """It compares itself with one rank, and fails where they differ."""
    output = example("tensor_parallel.py")
    assert "largest difference from one rank" in output


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_pipeline(example, schedule):
    """Each rank has its stages; the loss of the last falls."""
    output = example("pipeline.py", "--schedule", schedule)
    assert output.count("has stages") == 4
    found = losses(output)
    assert found[29] < 0.9 * found[0], output


def test_mpmd(example):
    """Four programs, no lockstep; the evaluator tested what the stages trained."""
    output = example("mpmd.py", "--steps", "240")
    accuracy = re.search(r"accuracy ([\d.]+)%", output)
    assert accuracy, output
    assert float(accuracy.group(1)) > 90
    # Every push arrived: one in 20 steps of the first stage, one in 30 of the second.
    assert "server: 12 and 8 versions" in output


def test_elastic_with_another_world(example, tmp_path):
    """A second run goes on from the checkpoint of the first."""
    whole = losses(example("elastic.py", "--checkpoints", str(tmp_path / "whole")))
    assert sorted(whole) == list(range(12))
    path = str(tmp_path / "parts")
    first = losses(example("elastic.py", "--checkpoints", path, "--steps", "6"))
    output = example("elastic.py", "--checkpoints", path)
    assert "from step 6" in output
    assert first | losses(output) == whole
