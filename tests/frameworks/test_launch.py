"""torchrun with restarts and checkpoints, `python -m tpu_dist.run`, multiprocessing.spawn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from harness import BACKEND
from harness.hosts import end_session
from test_examples import EXAMPLES, free_port, losses

LAUNCHED = Path(__file__).with_name("launched.py")


def start(*arguments):
    """Starts a Python module in a session of its own, with one thread a rank."""
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(child, timeout=120):
    """Its exit code and output."""
    try:
        output, _ = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        output, _ = end_session(child)
        pytest.fail(f"it did not end in {timeout} s:\n{output}")
    return child.returncode, output


def test_a_restart_resumes_from_the_checkpoint(tmp_path):
    """Rank 1 dies in step 4; the second attempt starts from step 3 with the same losses."""
    code, output = finish(
        start(
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            "--max-restarts=1",
            EXAMPLES / "elastic.py",
            f"--backend={BACKEND}",
            f"--checkpoints={tmp_path}",
            "--kill=4",
            "--steps=6",
        )
    )
    assert code == 0, output
    first, second = output.split("attempt 1:")
    assert "attempt 0: 2 ranks, from step 0" in first, output
    assert "2 ranks, from step 3" in second, output
    before, after = losses(first), losses(second)
    assert sorted(before) == [0, 1, 2, 3], output
    assert sorted(after) == [3, 4, 5], output
    assert before[3] == after[3], output


def test_run_sets_backend_and_topology():
    """A program that names no backend gets that of --backend, and finds the topology."""
    code, output = finish(
        start(
            *("tpu_dist.run", "--standalone", "--nproc-per-node=2"),
            *("--backend", BACKEND, "--topology", "v5p:1x2x1", LAUNCHED, "--flag", "a b"),
        )
    )
    assert code == 0, output
    for rank in range(2):
        assert f"rank {rank} of 2 by {BACKEND} on v5p:1x2x1" in output, output
    assert output.count("main __main__ arguments ['--flag', 'a b']") == 2, output


@pytest.mark.slow
def test_run_on_two_nodes():
    """Two agents meet at the package's rendezvous; torchrun's options are taken."""
    port = free_port()
    children = [
        start(
            *("tpu_dist.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=tpu_dist"),
            *(f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two", "--backend", BACKEND),
            LAUNCHED,
        )
        for _ in range(2)
    ]
    results = [finish(child) for child in children]
    everything = "".join(output for _, output in results)
    assert [code for code, _ in results] == [0, 0], everything
    nodes = re.findall(rf"rank (\d) of 2 by {BACKEND} on None node (\d)", everything)
    assert sorted(nodes) == [("0", "0"), ("1", "1")], everything


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v5e:9x9x9"], "v5e"),
        (["--topology", "v5e:2x4"], "--topology: v5e:2x4 has 8 devices, the job has 3 ranks"),
        (["--no-python", "--backend", "tpu_dist"], "--backend needs a Python program"),
    ],
)
def test_run_refuses(arguments, message, capsys):
    """What cannot be meant is an error before anything starts."""
    from tpu_dist.run import main

    with pytest.raises(SystemExit) as stopped:
        main(["--nproc-per-node=3", *arguments, "program.py"])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def spawned(rank, world, port, results):
    """A rank of multiprocessing.spawn."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(BACKEND, init_method=address, rank=rank, world_size=world)
    part = torch.arange(4.0) + rank
    dist.all_reduce(part)
    results[rank] = part
    dist.barrier()
    dist.destroy_process_group()


def test_spawn():
    """torch.multiprocessing.spawn, with results in shared memory."""
    results = torch.zeros(2, 4).share_memory_()
    torch.multiprocessing.spawn(spawned, (2, free_port(), results), nprocs=2)
    assert results.tolist() == [[1.0, 3.0, 5.0, 7.0]] * 2
