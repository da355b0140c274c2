"""init_device_mesh gives stock meshes in the placement's order."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from tpu_dist.mesh import init_device_mesh, place
from tpu_dist.topology import Topology


@pytest.fixture
def world(request):
    """One process that takes itself for rank 5 of 16."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_order_is_the_placement():
    mesh = init_device_mesh((4, 4), ("dp", "tp"), topology="v5e:4x4")
    assert type(mesh) is DeviceMesh
    assert mesh.mesh_dim_names == ("dp", "tp")
    placement = place((4, 4), ("dp", "tp"), "v5e:4x4")
    assert mesh.mesh.flatten().tolist() == placement.ranks
    # Every tp group is a square of neighbours.
    devices = Topology("v5e:4x4").devices()
    for group in mesh.mesh.tolist():
        xs = {devices[rank][1] for rank in group}
        ys = {devices[rank][2] for rank in group}
        assert max(xs) - min(xs) == max(ys) - min(ys) == 1
    assert 5 in mesh["tp"].mesh.tolist()


@pytest.mark.usefixtures("world")
def test_environment_and_renumbered_ranks(monkeypatch):
    monkeypatch.setenv("TPU_DIST_VIRTUAL_SLICE", "v5e:4x4")
    mesh = init_device_mesh((2, 8), ("dp", "tp"))
    backwards = init_device_mesh((2, 8), ("dp", "tp"), ranks=range(15, -1, -1))
    assert torch.equal(backwards.mesh, 15 - mesh.mesh)


@pytest.mark.usefixtures("world")
def test_traffic_decides():
    light = {"a": {"all_reduce": 1.0}, "b": {"all_reduce": 2**30}}
    heavy = {"a": {"all_reduce": 2**30}, "b": {"all_reduce": 1.0}}
    first = place((8, 2), ("a", "b"), "v5e:4x4", traffic=light)
    second = place((8, 2), ("a", "b"), "v5e:4x4", traffic=heavy)
    assert first.ranks != second.ranks
    assert [len(axis["components"]) for axis in second.axes] == [2, 1]


@pytest.mark.usefixtures("world")
def test_dcn_shape():
    mesh = init_device_mesh((2, 8), ("dp", "tp"), topology="2*v5e:2x4", dcn_shape=(2, 1))
    assert sorted(mesh.mesh[0].tolist()) == list(range(8))
    mesh = init_device_mesh((2, 8), ("dp", "tp"), topology="2*v5e:2x4", dcn_shape=(1, 2))
    assert sorted(mesh.mesh[0].tolist()) != list(range(8))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("shape", "names", "options", "words"),
    [
        ((4, 8), ("a", "b"), {"topology": "v5e:4x4"}, "has 32 positions, v5e:4x4 has 16"),
        ((4, 8), ("a", "b"), {"topology": "v5e:4x8"}, "v5e:4x8 has 32 devices, the job has 16"),
        ((4, 4), ("a",), {"topology": "v5e:4x4"}, "names: expected 2"),
        ((4, 4), ("a", "a"), {"topology": "v5e:4x4"}, "names: expected distinct"),
        ((16, 0), ("a", "b"), {"topology": "v5e:4x4"}, "shape: expected positive sizes"),
        ((4, 4), ("a", "b"), {"topology": "v5e:5x4"}, "v5e has no slice 5x4; legal"),
        ((4, 4), ("a", "b"), {}, "topology: not given"),
        (
            (4, 4),
            ("a", "b"),
            {"topology": "v5e:4x4", "traffic": {"c": {"all_reduce": 1}}},
            "traffic: 'c' is not among the axes",
        ),
        (
            (4, 4),
            ("a", "b"),
            {"topology": "v5e:4x4", "traffic": {"a": {"reduce": 1}}},
            "collective: expected one of",
        ),
        ((4, 4), ("a", "b"), {"topology": "v5e:4x4", "ranks": [0] * 16}, "ranks: expected"),
        ((2, 8), ("a", "b"), {"topology": "2*v5e:2x4", "dcn_shape": (4, 1)}, "dcn_shape"),
    ],
)
def test_errors_name_the_argument(monkeypatch, shape, names, options, words):
    for name in ("TPU_DIST_VIRTUAL_SLICE", "TPU_ACCELERATOR_TYPE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=words.replace("*", r"\*")):
        init_device_mesh(shape, names, **options)
