"""The Python face of the model; values are checked against libtpu's in the Rust tests."""

import json
from pathlib import Path

import pytest
from tpu_dist.topology import (
    Topology,
    environment_of_rank,
    from_environment,
    legal_topologies,
    position_from_environment,
)

DUMPS = Path(__file__).resolve().parents[2] / "crates/mesh/testdata/topologies.jsonl"


def test_devices_equal_libtpu():
    """Every dump, through the binding and with its options."""
    for line in DUMPS.read_text().splitlines():
        dump = json.loads(line)
        options = dump["options"]
        per_chip = None
        if dump["name"].startswith("v4") and "chip_config_name" not in options:
            per_chip = 2
        topology = Topology(
            dump["name"],
            num_slices=dump["num_slices"],
            wrap=tuple(bool(wrap) for wrap in dump["wrap"]),
            chips_per_host=tuple(options.get("chips_per_host_bounds", ())) or None,
            devices_per_chip=per_chip,
        )
        ours = topology.devices()
        if dump["num_slices"] == 1:
            ours = [(*device[:6], -1) for device in ours]
        assert ours == [tuple(device) for device in dump["devices"]], dump["name"]
        assert topology.kind == dump["kind"]
        assert topology.twisted == bool(dump["twist"])


def test_properties():
    topology = Topology("v5p:4x4x8_twisted")
    assert topology.libtpu_name == "v5p:4x4x8_twisted"
    assert topology.accelerator_type == "v5p-256"
    assert (topology.generation, topology.chips, topology.hosts) == ("v5p", 128, 32)
    assert topology.shape == (4, 4, 8)
    assert topology.wrap == (True, True, True)
    assert topology.host_bounds == (2, 2, 8)
    assert topology.chips_per_host == (2, 2, 1)
    assert topology.link_bandwidth == 100e9
    assert topology == Topology("v5p=4x4x8_twisted")
    assert topology != Topology("v5p:4x4x8")
    assert repr(topology) == 'Topology("v5p:4x4x8_twisted")'
    assert len({topology, Topology("v5p:4x4x8_twisted")}) == 1
    assert Topology("v6e:16x16").bisection_bandwidth() == 3.2e12
    assert Topology("2*v5e:4x4").num_slices == 2
    assert Topology.from_labels("tpu-v5p-slice", "2x2x1").name == "v5p:2x2x1"
    assert "v5e:8x16" in legal_topologies("v5e")


def test_routes_and_rings():
    topology = Topology("v5e:4x4")
    assert topology.route((0, 0, 0), (2, 1, 0)) == [(0, 0, 0), (1, 0, 0), (2, 0, 0), (2, 1, 0)]
    around = topology.route((0, 0, 0), (2, 0, 0), dead_chips=[(1, 0, 0)])
    assert len(around) == 5
    assert (1, 0, 0) not in around
    with pytest.raises(ValueError, match=r"chip \(0,0,0\) is cut off"):
        topology.route(
            (3, 3, 0),
            (0, 0, 0),
            dead_links=[((0, 0, 0), (1, 0, 0)), ((0, 0, 0), (0, 1, 0))],
        )
    assert len(topology.rings()) == 1
    host = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
    around = Topology("v5e:4x4").rings(dead_chips=host)
    assert len(around[0]) == 12
    assert not set(host) & set(around[0])
    with pytest.raises(ValueError, match="8 even and 7 odd places"):
        Topology("v5e:4x4").rings(dead_chips=[(1, 0, 0)])
    rings = Topology("v5p:4x4x4").rings()
    assert [len(set(ring)) for ring in rings] == [64, 64, 64]


def test_costs():
    topology = Topology("v5p:4x4x4")
    costs = topology.costs([0, 1, 2, 3], "all_reduce", 1 << 20)
    assert costs == sorted(costs, key=lambda cost: cost[1])
    assert len({name for name, _ in costs}) == len(costs) > 2
    assert topology.costs([0, 1], "all_gather", 0)[0][1] == pytest.approx(1e-6)
    assert topology.group([0]) == []
    with pytest.raises(ValueError, match="collective: expected one of all_reduce"):
        topology.costs([0, 1], "allreduce", 1)


def test_launch():
    processes = Topology("2*v5p:2x2x2").launch(["a", "b", "c", "d"])
    assert [process["ranks"] for process in processes] == [[rank] for rank in range(16)]
    last = processes[15]
    assert (last["host"], last["slice"], last["visible_chips"]) == (3, 1, [3])
    assert last["environment"]["MEGASCALE_SLICE_ID"] == "1"
    assert last["environment"]["TPU_PROCESS_BOUNDS"] == "2,2,2"
    per_host = Topology("v5p:2x2x2").launch(["a", "b"], processes="per_host", port=9000)
    assert per_host[1]["environment"]["TPU_PROCESS_ADDRESSES"] == "a:9000,b:9000"
    with pytest.raises(ValueError, match="processes: expected per_chip or per_host"):
        Topology("v5p:2x2x2").launch(["a", "b"], processes="each")


@pytest.mark.parametrize(
    ("environ", "name", "hosts"),
    [
        ({}, None, 0),
        ({"TPU_DIST_VIRTUAL_SLICE": "v5e:4x4"}, "v5e:4x4", 4),
        ({"TPU_ACCELERATOR_TYPE": "v5p-16"}, "v5p:2x2x2", 2),
        ({"TPU_ACCELERATOR_TYPE": "v6e-16", "TPU_TOPOLOGY": "4x4"}, "v6e:4x4", 4),
        ({"TPU_ACCELERATOR_TYPE": "tpu-v5p-slice", "TPU_TOPOLOGY": "2x2x1"}, "v5p:2x2x1", 1),
        (
            {
                "TPU_ACCELERATOR_TYPE": "v5litepod-8",
                "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
                "MEGASCALE_NUM_SLICES": "2",
            },
            "2*v5e:2x4",
            2,
        ),
    ],
)
def test_environment(environ, name, hosts):
    topology = from_environment(environ)
    if name is None:
        assert topology is None
    else:
        assert (topology.name, topology.hosts) == (name, hosts)


def test_launch_environment_reads_back():
    """What a launch sets names the topology that it launches."""
    for name in ("v5e:4x4", "2*v6e:4x8", "v5p:2x2x2", "v4:4x4x4", "v7x:2x2x2"):
        topology = Topology(name)
        hosts = [f"h{host}" for host in range(topology.hosts)]
        for processes in ("per_chip", "per_host"):
            for process in topology.launch(hosts, processes=processes):
                assert from_environment(process["environment"]) == topology
                place = (
                    process["slice"],
                    process["host"] % (len(hosts) // topology.num_slices),
                )
                assert position_from_environment(process["environment"]) == place


def test_position():
    assert position_from_environment({}) is None
    assert position_from_environment({"TPU_WORKER_ID": ""}) is None
    assert position_from_environment({"TPU_WORKER_ID": "x"}) is None
    assert position_from_environment({"TPU_WORKER_ID": "3"}) == (0, 3)
    both = {"TPU_WORKER_ID": "3", "MEGASCALE_SLICE_ID": "1"}
    assert position_from_environment(both) == (1, 3)


HOST = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2",
    "TPU_WORKER_ID": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "LOCAL_RANK": "2",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
}


def test_environment_of_a_rank():
    """Four ranks on each of two hosts of a 2x4 slice: the third of the second host."""
    found = environment_of_rank(HOST)
    expected = {
        "CLOUD_TPU_TASK_ID": "6",
        "TPU_VISIBLE_CHIPS": "2",
        "TPU_PROCESS_BOUNDS": "2,4,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_PORT": "8473",
        "TPU_WORKER_ID": "1",
    }
    assert expected.items() <= found.items()
    addresses = [f"10.0.0.{host}:{port}" for host in (1, 2) for port in range(8471, 8475)]
    assert found["TPU_PROCESS_ADDRESSES"] == ",".join(addresses)
    # Each slice is told of itself alone.
    several = HOST | {"WORLD_SIZE": "16", "MEGASCALE_NUM_SLICES": "2"}
    assert environment_of_rank(several) == found


@pytest.mark.parametrize(
    "change",
    [
        {"TPU_PROCESS_BOUNDS": "1,1,1"},
        {"WORLD_SIZE": "2"},
        {"TPU_WORKER_HOSTNAMES": "10.0.0.1"},
        {"TPU_ACCELERATOR_TYPE": ""},
        {"TPU_ACCELERATOR_TYPE": "tpu7x-16"},
    ],
    ids=lambda change: "".join(change),
)
def test_other_jobs_keep_their_environment(change):
    assert environment_of_rank(HOST | change) == {}
