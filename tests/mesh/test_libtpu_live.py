"""The installed libtpu, asked again: does it still answer as the dumps in testdata say?

libtpu may abort on bad input and must not be loaded twice in a process, so a child
process asks; the model was checked against the dumps in ``crates/mesh/tests/libtpu.rs``.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DUMPS = Path(__file__).resolve().parents[2] / "crates/mesh/testdata/topologies.jsonl"

CHILD = """
import json, sys
from jax.experimental import topologies
for line in sys.stdin:
    request = json.loads(line)
    options = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in request["options"].items()
    }
    topology = topologies.get_topology_desc(request["name"], "tpu", **options)
    many = request["options"].get("num_slices", 1) > 1
    rows = [
        [d.id, *d.coords, d.core_on_chip, d.process_index, d.slice_index if many else -1]
        for d in topology.devices
    ]
    print(json.dumps({"kind": topology.devices[0].device_kind, "devices": rows}), flush=True)
"""


def load():
    """The dumps as dictionaries."""
    return [json.loads(line) for line in DUMPS.read_text().splitlines()]


def test_installed_libtpu_answers_as_the_dumps():
    """Kind and (id, coordinates, core, process, slice) of every device, in list order."""
    for module in ("jax", "libtpu"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    dumps = load()
    requests = "".join(
        json.dumps({"name": dump["name"], "options": dump["options"]}) + "\n" for dump in dumps
    )
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=requests,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    answers = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(answers) == len(dumps)
    for dump, answer in zip(dumps, answers, strict=True):
        what = f"{dump['name']} {dump['options']}"
        assert answer["kind"] == dump["kind"], what
        assert answer["devices"] == dump["devices"], what
