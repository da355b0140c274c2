"""Jobs on virtual slices: each rank knows its chip, collectives and DDP run on the device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("on_slice.py")


def coordinates(shape, host):
    """The chips of a slice in the order of ranks: host after host, x fastest in both."""
    hosts = [size // part for size, part in zip(shape, host, strict=True)]
    return [
        (i * host[0] + x, j * host[1] + y, k * host[2] + z, (k * hosts[1] + j) * hosts[0] + i)
        for k in range(hosts[2])
        for j in range(hosts[1])
        for i in range(hosts[0])
        for z in range(host[2])
        for y in range(host[1])
        for x in range(host[0])
    ]


@pytest.mark.parametrize(
    ("topology", "shape", "host", "memory"),
    [
        ("v5e:2x2", (2, 2, 1), (2, 2, 1), 16),
        pytest.param(
            *("v5p:2x2x4", (2, 2, 4), (2, 2, 1), 95),
            marks=[pytest.mark.slow, pytest.mark.timeout(400)],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_job_on_a_virtual_slice(topology, shape, host, memory):
    """Started as a user does, with one rank a chip."""
    places = coordinates(shape, host)
    command = [
        *(sys.executable, "-m", "tpu_dist.run", "--standalone"),
        *(f"--nproc-per-node={len(places)}", "--topology", topology),
        str(PROGRAM),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TPU_DIST_FALLBACK": "error"},
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = re.compile(r"rank (\d+) is TPU (\S+) (\d+) (\d+) (\d+) 0 (\d+) (\d+) GiB, (\S+) us")
    found = {int(rank): rest for rank, *rest in line.findall(done.stdout)}
    assert sorted(found) == list(range(len(places))), done.stdout
    times = {found[rank].pop() for rank in found}
    generation = topology.split(":")[0]
    for rank, place in enumerate(places):
        assert found[rank] == [generation, *map(str, place), str(memory)]
    assert len(times) == 1
    assert float(times.pop()) > 1


def test_a_slice_with_too_few_devices_is_told():
    """A rank beyond the slice gets an error that names both."""
    code = "import torch; torch.tpu.get_device_properties()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TPU_DIST_VIRTUAL_SLICE": "v5e:2x2", "RANK": "4"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "v5e:2x2 has 4 devices, this is rank 4" in done.stderr
