"""Two and three hosts, each a network namespace of its own, over TCP."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from harness import BACKEND, Census, Host, Lan, Ranks, why_no_hosts
from harness.operations import OPERATIONS, Case, problems, run_table
from harness.worker import init_process_group

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))

CASES = [
    Case(name, dtype, count, op=op, root=count, asynchronous=bool(count % 2))
    for name in OPERATIONS
    for dtype, op in (("float32", "SUM"), ("bfloat16", "AVG"), ("int64", "MAX"))
    for count in (0, 1, 17, 1000, 70_000)
] + [
    Case("all_reduce", "float32", 1 << 20),
    # Several parts, the last of odd length.
    Case("all_reduce", "bfloat16", 1_500_003, op="AVG"),
    Case("all_reduce", "float64", 700_001, op="PREMUL_SUM"),
    Case("all_to_all_single", "float32", 1 << 18),
]


def on(lan, placement, *, timeout=20, address=None, init=True, env=None):
    """Ranks on the hosts whose numbers `placement` lists, meeting at the first."""
    return Ranks(
        len(placement),
        hosts=[lan.hosts[n] for n in placement],
        init={"init_method": "env://", "timeout": timeout} if init else None,
        env={
            "MASTER_ADDR": address or lan.address(placement[0]),
            "MASTER_PORT": "29500",
            **(env or {}),
        },
    )


def verify(ranks, cases=CASES):
    """Runs a table; every line must be right."""
    found = problems(cases, ranks.run(run_table, cases, deadline=120))
    assert not found, "\n".join(found[:20])


def silent(ranks):
    """No rank said more than the one warning that a fallback may cost."""
    for rank in range(ranks.world):
        assert len(ranks.said(rank)) <= 1, ranks.said(rank)


@pytest.fixture
def two():
    """Two hosts."""
    with Lan(2) as lan:
        yield lan


@pytest.mark.parametrize(
    "placement", [[0, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]], ids=str
)
def test_two_hosts(two, placement):
    """One or more ranks on each, in and out of order."""
    with on(two, placement) as ranks:
        verify(ranks)
        silent(ranks)


def test_three_hosts():
    """Two ranks on each, and a rank alone."""
    with Lan(3) as lan, on(lan, [0, 0, 1, 1, 2]) as ranks:
        verify(ranks)
        silent(ranks)


def test_ipv6_only():
    """Hosts that have no IPv4 address but loopback."""
    with Lan(2, ipv4=False) as lan, on(lan, [0, 0, 1, 1], address=lan.address6(0)) as ranks:
        verify(ranks, CASES[::5])


def test_host_names(two):
    """MASTER_ADDR as a name."""
    with on(two, [0, 1], address="host0") as ranks:
        verify(ranks, CASES[::7])


def ports(me):
    """What this rank listens on."""
    dist.all_reduce(torch.ones(1))
    me.sync()


def test_a_host_name_that_means_loopback(two):
    """As Debian's 127.0.1.1 and many containers have it: still not loopback across hosts."""
    text = "127.0.0.1 localhost\n127.0.1.1 {name}\n"
    with Lan(2, etc_hosts=text) as lan, on(lan, [0, 0, 1, 1]) as ranks:
        verify(ranks, CASES[::7])


def add_networks(host):
    """An interface that is down, and one that every host has with the same address."""
    for command in (
        "ip link add dead0 type bridge",
        "ip addr add 10.1.0.1/24 dev dead0",
        # As Docker's: up and running, but it leads nowhere.
        "ip link add adocker0 type veth peer name adocker1",
        "ip addr add 172.17.0.1/16 dev adocker0",
        "ip link set adocker0 up",
        "ip link set adocker1 up",
    ):
        host.run(command.split())


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"TPU_DIST_SOCKET_IFNAME": "eth0"},
        {"TPU_DIST_SOCKET_IFNAME": "nosuch,eth0"},
        {"TPU_DIST_SOCKET_IFNAME": "^adocker0,lo"},
        {"TPU_DIST_SOCKET_IFNAME": "10.77.0.0/24"},
        {"GLOO_SOCKET_IFNAME": "eth0"},
        {"TPU_DIST_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "adocker0"},
    ],
    ids=lambda v: ",".join(f"{name}={value}" for name, value in v.items()) or "none",
)
def test_the_interface_that_works(two, variables):
    """Among loopback, a dead one, and one that leads nowhere."""
    for host in two.hosts:
        add_networks(host)
    with on(two, [0, 0, 1, 1], env=variables) as ranks:
        verify(ranks, CASES[::9])


def begin(me, timeout):
    """Initialises, and returns how that failed."""
    start = time.monotonic()
    try:
        init = {"backend": BACKEND, "init_method": "env://", "timeout": timeout}
        init_process_group(init, me.rank, me.world)
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        return str(error), time.monotonic() - start
    return None


@pytest.mark.parametrize("name", ["nope", "dead0", "10.99.0.0/16", "^eth0,lo,adocker0"])
def test_an_interface_that_is_not_there(two, name):
    """An error at once, with what was asked for and what there is."""
    for host in two.hosts:
        add_networks(host)
    with on(two, [0, 1], init=False, env={"TPU_DIST_SOCKET_IFNAME": name}) as ranks:
        for result in ranks.values(begin, 10, deadline=20):
            assert result is not None, f"{name} was accepted"
            message, took = result
            assert took < 5, f"{took:.1f} s: {message}"
            for part in (name, "eth0", two.address(0)[:-1]):
                assert part in message, f"no {part!r} in {message!r}"


def test_congestion_control(two):
    """One that the system has is used; another is an error at once, with those that it has."""
    with on(two, [0, 1], env={"TPU_DIST_TCP_CONGESTION": "reno"}) as ranks:
        verify(ranks, CASES[::7])
    with on(two, [0, 1], init=False, env={"TPU_DIST_TCP_CONGESTION": "nosuch"}) as ranks:
        results = ranks.values(begin, 10, deadline=20)
        assert all(result is not None and result[1] < 5 for result in results), results
        said = " ".join(message for message, _ in results)
        for part in ("TPU_DIST_TCP_CONGESTION", "reno", "nosuch"):
            assert part in said, said


def test_hosts_that_cannot_reach_each_other(two):
    """The interface was forced to one that leads nowhere: an error that says who and where."""
    for host in two.hosts:
        add_networks(host)
    with on(two, [0, 1], init=False, env={"TPU_DIST_SOCKET_IFNAME": "adocker0"}) as ranks:
        results = ranks.values(begin, 3, deadline=20)
        assert all(result is not None for result in results)
        # Meeting at the store and connecting each have the timeout.
        assert all(took < 8 for _, took in results), results
        assert any("172.17.0.1" in message for message, _ in results), results


def loop(me, victim):
    """All-reduces until something breaks."""
    tensor = torch.ones(1000)
    for _ in range(3):
        dist.all_reduce(tensor)
    me.sync()
    if me.rank == victim:
        me.say("ready")
    try:
        while True:
            dist.all_reduce(tensor.fill_(1))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic()


@pytest.mark.parametrize("victim", [1, 3])
def test_a_killed_rank_on_another_host(two, victim):
    """Named within a second, with its host, on both hosts."""
    died = []
    with on(two, [0, 0, 1, 1], timeout=30) as ranks:

        def kill(rank, _):
            time.sleep(0.05)
            died.append(ranks.kill(rank))

        outcomes = ranks.run(loop, victim, deadline=15, on_say=kill)
        host = f"host{victim // 2}"
        for outcome in outcomes:
            if outcome.rank == victim:
                continue
            assert outcome.ok, outcome
            kind, message, when = outcome.value
            assert kind == "DistBackendError"
            assert when - died[0] < 1, f"rank {outcome.rank}: {when - died[0]:.2f} s: {message}"
            for part in (f"rank {victim}", host, str(ranks.pids[victim])):
                assert part in message, f"rank {outcome.rank}: no {part!r} in {message!r}"


def test_a_link_that_is_cut(two):
    """Nothing is received and nobody says goodbye: an error within the timeout."""
    cut = []
    with on(two, [0, 0, 1, 1], timeout=3) as ranks:

        def unplug(rank, _):
            two.cut(1)
            cut.append(time.monotonic())

        outcomes = ranks.run(loop, 3, deadline=15, on_say=unplug)
        for outcome in outcomes:
            assert outcome.ok, outcome
            kind, message, when = outcome.value
            assert kind == "DistBackendError"
            assert when - cut[0] < 4.5, f"{when - cut[0]:.1f} s: {message}"
            others = {0, 1} if outcome.rank >= 2 else {2, 3}
            assert {int(n) for n in re.findall(r"\b[0-3]\b", message)} & others, message


def test_a_link_that_flaps(two):
    """A cut shorter than the timeout only delays."""
    with on(two, [0, 1], timeout=20) as ranks:
        said = []

        def flap(rank, _):
            if not said:
                said.append(rank)
                two.cut(1)
                time.sleep(0.3)
                two.join(1)

        values = ranks.values(flapping, deadline=30, on_say=flap)
        assert values == [300.0 * 2] * 2


def flapping(me):
    """Three hundred all-reduces with a break in the middle."""
    total = 0.0
    for n in range(300):
        if n == 100 and me.rank == 0:
            me.say("now")
        tensor = torch.ones(2000)
        dist.all_reduce(tensor)
        total += tensor[0].item()
    return total


def transports(me):
    """What the backend says that it used."""
    import tpu_dist

    for count in (1, 1000, 1 << 20):
        dist.all_reduce(torch.ones(count))
    return {row.transport for row in tpu_dist.stats()}


@pytest.mark.parametrize(("variable", "used"), [("tcp", "tcp"), ("auto", "shm")])
def test_tcp_may_be_forced_on_one_host(variable, used):
    """TPU_DIST_TRANSPORT=tcp: the same values by another way, seen from outside too."""
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TPU_DIST_TRANSPORT": variable,
    }
    init = {"init_method": "env://", "timeout": 20}
    with Host("alone") as host, Ranks(3, hosts=[host] * 3, init=init, env=environment) as ranks:
        assert ranks.values(transports, deadline=30) == [{used}] * 3
        verify(ranks, CASES[::3])
        # Connections beside those to the store, whose port is 29500, 733C in hexadecimal.
        peers = [
            line for line in Census.of(host).tcp if "state 01" in line and ":733C" not in line
        ]
        assert bool(peers) is (used == "tcp"), peers


@pytest.mark.parametrize("streams", ["1", "4"])
def test_several_connections(two, streams):
    """More streams carry the same data in the same order."""
    with on(two, [0, 1, 1], env={"TPU_DIST_TCP_STREAMS": streams}) as ranks:
        verify(
            ranks,
            [
                *CASES[::9],
                Case("all_reduce", "float32", 3_000_001),
                Case("broadcast", "uint8", 9_999_999),
            ],
        )


def test_nothing_is_left_on_either_host(two):
    """After an orderly end."""
    before = [Census.of(host) for host in two.hosts]
    with on(two, [0, 0, 1, 1]) as ranks:
        ranks.values(ports)
        assert ranks.end() == [0] * 4
    left = [Census.of(host).since(b) for host, b in zip(two.hosts, before, strict=True)]
    assert left == [{}, {}]
