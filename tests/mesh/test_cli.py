"""The command line."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from tpu_dist.cli import main
from tpu_dist.cli.explain import parse_ranks
from tpu_dist.cli.units import format_size, format_time, parse_mesh, parse_size


def test_topo_text_and_svg(capsys, tmp_path):
    path = tmp_path / "mesh.svg"
    assert main(["topo", "v5p:4x4x8", "--mesh", "dp=8,tp=16", "--svg", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("v5p:4x4x8: 128 chips, 128 devices, 32 hosts; wraps x, y, z")
    assert "tp=16 on x 4 ring · y 4 ring; ring of neighbours" in out
    assert "all_reduce" in out
    root = ElementTree.parse(path).getroot()
    chips = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("rx") == "4"]
    assert len(chips) == 128


def test_topo_json(capsys):
    arguments = ["topo", "2*v5e:4x4", "--mesh", "dp=8,tp=4", "--dcn", "dp=2", "--json"]
    assert main([*arguments, "--traffic", "tp:all_reduce=1MiB", "--sizes", "1KiB,1MiB"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["topology"] == "2*v5e:4x4"
    assert len(answer["devices"]) == 32
    assert sorted(answer["mesh"]["ranks"]) == list(range(32))
    assert answer["mesh"]["traffic"] == [
        {
            "axis": "tp",
            "collective": "all_reduce",
            "bytes": 2**20,
            "seconds": answer["mesh"]["seconds"],
        }
    ]
    assert {entry["bytes"] for entry in answer["predictions"]} == {1024, 2**20}
    assert answer["mesh"]["axes"][0]["components"][0]["physical"] == "dcn"


def test_topo_without_mesh(capsys):
    assert main(["topo", "v6e-16"]) == 0
    out = capsys.readouterr().out
    assert "v6e:4x4: 16 chips" in out
    assert "world" in out


def test_explain(capsys):
    arguments = ["explain", "all_reduce", "64MiB", "v5p:4x4x8", "--mesh", "dp=8,tp=16"]
    assert main([*arguments, "--axis", "dp"]) == 0
    out = capsys.readouterr().out
    assert "8 in a ring: 100 GB/s a wire and way" in out
    assert "bidirectional_ring" in out
    assert "halving_doubling" in out
    assert "x" in out
    assert main([*arguments, "--axis", "tp", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    chips, hosts = answer["chips"], answer["hosts"]
    times = [candidate["seconds"] for candidate in chips["candidates"]]
    assert times == sorted(times)
    assert chips["chosen"] == chips["candidates"][0]["algorithm"] == "bucket"
    assert chips["candidates"][0]["formula"]
    assert len(answer["ranks"]) == 16
    usable = [c for c in hosts["candidates"] if c["seconds"] is not None]
    assert hosts["chosen"] == usable[0]["algorithm"]
    assert not hosts["shared_memory"]
    assert usable == sorted(usable, key=lambda candidate: candidate["seconds"])
    assert {c["algorithm"] for c in hosts["candidates"] if c["excluded"]} >= {"pairwise", "pat"}
    assert main(["explain", "all_reduce", "1KiB", "2*v5e:2x2", "--ranks", "0-3,4"]) == 0


def test_small_messages_take_few_steps(capsys):
    for size, algorithm in (("256", "direct"), ("1GiB", "bidirectional_ring")):
        command = ["explain", "all_reduce", size, "v6e:16x16", "--mesh", "a=16,b=16"]
        assert main([*command, "--axis", "a", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["chips"]["chosen"] == algorithm


def test_hosts_run_what_is_selected(capsys):
    def hosts(*arguments):
        command = ["explain", "all_reduce", "64MiB", "v5p:4x4x4", "--json", *arguments]
        assert main(command) == 0
        return json.loads(capsys.readouterr().out)["hosts"]

    # Narrow types round once; a demand is met; four chips of a host share memory.
    narrow = hosts("--dtype", "bfloat16")
    assert narrow["chosen"] == "direct"
    rounds = [
        c["algorithm"] for c in narrow["candidates"] if c["excluded"] == "rounds partial sums"
    ]
    assert "ring" in rounds
    demanded = hosts("--algorithm", "ring")
    assert demanded["chosen"] == "ring"
    assert demanded["forced"]
    local = hosts("--ranks", "0-3")
    assert local["shared_memory"]
    assert {c["algorithm"] for c in local["candidates"]} == {"one_shot", "direct"}
    assert main(["explain", "all_reduce", "1KiB", "v5p:4x4x4", "--algorithm", "ring"]) == 0
    out = capsys.readouterr().out
    assert "ring: as demanded; " in out
    assert "estimated" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["topo", "v5p:4x4x9"], "v5p has no slice 4x4x9"),
        (["topo", "v5e:4x4", "--mesh", "dp"], "mesh: expected name=size"),
        (["topo", "v5e:4x4", "--mesh", "dp=8"], "has 8 positions"),
        (["topo", "v5e:4x4", "--dcn", "dp=2"], "need --mesh"),
        (["topo", "v5e:4x4", "--mesh", "a=16", "--traffic", "a:x=1"], "--traffic: expected"),
        (["topo", "v5e:4x4", "--mesh", "a=16", "--dcn", "b=1"], "--dcn: ['b']"),
        (["topo", "v5e:4x4", "--sizes", "1XB"], "size: expected bytes"),
        (["explain", "all_reduce", "1", "v5e:4x4", "--axis", "a"], "go together"),
        (["explain", "all_reduce", "1", "v5e:4x4", "--ranks", "a"], "--ranks: expected"),
        (["explain", "all_reduce", "1", "v5e:4x4", "--ranks", "3,3"], "3 repeats"),
        (["explain", "all_reduce", "1", "v5e:4x4", "--op", "MEAN"], "op: expected one of SUM"),
        (["explain", "all_reduce", "1", "v5e:4x4", "--dtype", "f32"], "dtype: expected one of"),
        (["explain", "all_reduce", "1", "v5e:4x4", "--algorithm", "x"], "algorithm: expected"),
        (["topo", "v5e:4x4", "--svg", "/nonexistent/x.svg"], "No such file"),
    ],
)
def test_errors(capsys, arguments, words):
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_units():
    assert [parse_size(t) for t in ("4096", "64MiB", "1.5 GB", "2k")] == [
        4096,
        64 << 20,
        1_500_000_000,
        2000,
    ]
    assert (format_size(1536), format_size(64 << 20)) == ("1.5 KiB", "64 MiB")
    assert (format_time(1.5e-6), format_time(0.0123)) == ("1.5 us", "12.3 ms")
    assert parse_mesh("dp=8, tp=16") == (["dp", "tp"], [8, 16])
    assert parse_ranks("0,1,4-7") == [0, 1, 4, 5, 6, 7]
    for text in ("", ".", "1.2.3", "x", "1i"):
        with pytest.raises(ValueError, match="size: expected"):
            parse_size(text)
