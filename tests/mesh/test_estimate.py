"""c10d's time estimation returns the model's time, and carries nothing out."""

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from tpu_dist.topology import Topology

SLICE = "v5e:2x2"
COUNT = 1 << 20


def estimated(me, call):
    with dist._time_estimator() as estimate:
        call()
    return estimate.estimated_time


def estimates(me):
    x = torch.ones(COUNT)
    wide = torch.ones(COUNT * me.world)
    peer = me.rank ^ 1
    times = {
        "all_reduce": estimated(me, lambda: dist.all_reduce(x)),
        "all_gather": estimated(me, lambda: dist.all_gather_single(wide, x)),
        "reduce_scatter": estimated(me, lambda: dist.reduce_scatter_single(x, wide)),
        "all_to_all": estimated(me, lambda: dist.all_to_all_single(torch.ones(COUNT), x)),
        "two": estimated(me, lambda: (dist.all_reduce(x), dist.all_reduce(x))),
        "send": estimated(me, lambda: dist.send(x, peer)),
    }
    assert (x == 1).all(), "nothing was carried out"
    dist.all_reduce(x)
    assert (x == me.world).all(), "and afterwards all is"
    return times


@pytest.mark.parametrize("name", [SLICE, None])
def test_estimates(name):
    """On a virtual slice, what the mesh says of it; without one, of the host."""
    with Ranks(4, init={"timeout": 60}, env={"TPU_DIST_VIRTUAL_SLICE": name}) as ranks:
        outcomes = ranks.run(estimates)
    assert all(o.ok for o in outcomes), [str(o) for o in outcomes if not o.ok]
    times = outcomes[0].value
    assert times["two"] == pytest.approx(2 * times["all_reduce"], rel=1e-5)
    assert all(time > 0 for time in times.values()), times
    if name is None:
        return
    topology = Topology(name)
    for collective, elements in [
        ("all_reduce", COUNT),
        ("all_gather", 4 * COUNT),
        ("reduce_scatter", 4 * COUNT),
        ("all_to_all", COUNT),
    ]:
        said = topology.explain_chips(range(4), collective, 4 * elements)
        chosen = next(c for c in said["candidates"] if c["algorithm"] == said["chosen"])
        assert times[collective] == pytest.approx(chosen["seconds"] * 1e6, rel=1e-4), collective
