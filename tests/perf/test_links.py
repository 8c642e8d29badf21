"""Which links a group's bytes take, and how long."""

import numpy as np
import pytest

from moejax.core.hardware import KNOWN
from moejax.core.parallel import ParallelConfig
from moejax.perf.comm import CommTerm, Exchange, step_comm
from moejax.perf.links import latency, leaving, link_seconds, spread
from moejax.sharding.mesh import make_axes
from tests.perf.models import small_model

A100 = KNOWN["a100_80gb"]
CLUSTER = ParallelConfig(ep=32, nodes=4, attention="data")
ROLES = ("tensor", "kv", "data", "exchange", "node", "local")


def groups_on_the_mesh(role: str, parallel: ParallelConfig, kv_heads: int) -> tuple[int, int]:
    """(devices, nodes at most) of a role's groups, from the mesh's own axes."""
    axes = make_axes(parallel, kv_heads)
    shape, names = [size for _, size in axes.sizes], [name for name, _ in axes.sizes]
    devices = np.arange(parallel.num_devices).reshape(parallel.pp, *shape)
    own = [1 + names.index(name) for name in getattr(axes, role)]
    rows = np.moveaxis(devices, own, range(devices.ndim - len(own), devices.ndim))
    rows = rows.reshape(-1, axes.size(getattr(axes, role)))
    each = parallel.num_devices // parallel.nodes
    return rows.shape[1], max(len(set(row // each)) for row in rows.tolist() for row in [np.array(row)])


LAYOUTS = [
    ParallelConfig(tp=8),
    ParallelConfig(ep=4, tp=2, nodes=2),
    ParallelConfig(ep=8, tp=4, nodes=4),
    ParallelConfig(ep=8, tp=4, nodes=4, attention="data"),
    ParallelConfig(dp=2, ep=8, tp=2, nodes=4, attention="data"),
    ParallelConfig(dp=4, ep=8, nodes=4, attention="data"),
    ParallelConfig(dp=2, pp=2, ep=4, tp=2, nodes=4),
    ParallelConfig(pp=2, ep=16, nodes=4, attention="data"),
    CLUSTER,
]


@pytest.mark.parametrize("parallel", LAYOUTS)
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_groups_are_those_of_the_mesh(parallel: ParallelConfig, kv_heads: int) -> None:
    model = small_model(num_kv_heads=kv_heads)
    for role in ROLES:
        if role == "exchange" and parallel.attention == "tensor":
            continue
        assert spread(role, parallel, model) == groups_on_the_mesh(role, parallel, kv_heads), role


def test_stages_on_two_nodes() -> None:
    model = small_model()
    assert spread("pipeline", ParallelConfig(pp=2, ep=4), model) == (2, 1)
    assert spread("pipeline", ParallelConfig(pp=2, ep=4, nodes=2), model) == (2, 2)


def test_what_leaves_a_node() -> None:
    """By following the bytes: between nodes a device speaks to its like on each other node."""
    nodes, local = 4, 8
    group = nodes * local
    shard = 1.0
    gathered = (nodes - 1) * shard, (local - 1) * nodes * shard  # between, then all of it within
    assert leaving("all-gather", group, nodes) == pytest.approx(gathered[0] / sum(gathered), rel=1e-15)
    assert sum(gathered) == group - 1
    # An all-reduce scatters within, reduces the 1/local part between, and gathers within.
    within, between = 2 * (local - 1) / local, 2 * (nodes - 1) / nodes / local
    assert leaving("all-reduce", group, nodes) == pytest.approx(between / (within + between), rel=1e-15)
    assert leaving("all-to-all", group, nodes) == 24 / 31
    assert leaving("collective-permute", 2, 2) == leaving("all-to-all", nodes, nodes) == 1
    assert leaving("all-reduce", 8, 1) == leaving("all-gather", 1, 1) == 0


def test_seconds_within_a_node() -> None:
    """7/4 of 300 MB at 300 GB/s, half of what the data sheet counts for both directions."""
    model, parallel = small_model(), ParallelConfig(tp=8)
    times = link_seconds([CommTerm("mlp", "all-reduce", "tensor", 8, 3, 300e6)], A100, parallel, model)
    assert times is not None
    assert times[0].transfer == pytest.approx(3 * 1.75e-3, rel=1e-12)
    assert times[0].latency == 3 * latency("all-reduce", 8, 1)


def test_seconds_between_nodes() -> None:
    """A device's 8 MB to each of 31 others: 24 of them over its 25 GB/s adapter, 7 at 300 GB/s meanwhile."""
    term = CommTerm("dispatch", "all-to-all", "exchange", 32, 1, 32 * 8e6)
    times = link_seconds([term], A100, CLUSTER, small_model())
    assert times is not None
    (time,) = times
    assert time.between == pytest.approx(24 * 8e6 / 25e9, rel=1e-12)
    assert time.within == pytest.approx(7 * 8e6 / 300e9, rel=1e-12)
    assert time.transfer == time.between


def test_latencies_rise_with_size_and_distance() -> None:
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        assert latency(kind, 1, 1) == 0
        assert 0 < latency(kind, 2, 1) < latency(kind, 8, 1) < latency(kind, 32, 4)
    assert latency("all-to-all", 8, 1) < latency("all-to-all", 8, 2) < latency("all-gather", 32, 4)
    # NCCL's ring of eight: 6.6 µs and 14 steps of 0.6.
    assert latency("all-reduce", 8, 1) == pytest.approx(15.0e-6)


def test_unknown_links() -> None:
    model, terms = small_model(), step_comm(small_model(), ParallelConfig(tp=8), tokens=4, rows=4)
    assert link_seconds(terms, KNOWN["cpu"], ParallelConfig(tp=8), model) is None
    assert link_seconds([], KNOWN["cpu"], ParallelConfig(tp=8), model) is not None


def test_hierarchy_sends_less_between_nodes() -> None:
    """A token goes to each node at most once, so with many experts a token two hops send less there."""
    model = small_model(num_experts=64, num_experts_per_tok=8, hidden_size=4096)

    def between(exchange: Exchange) -> float:
        terms = step_comm(model, CLUSTER, tokens=256, rows=256, exchange=exchange)
        times = link_seconds(terms, A100, CLUSTER, model)
        assert times is not None
        exchanged = [term.operation in ("dispatch", "combine") for term in terms]
        return sum(time.between for time, moved in zip(times, exchanged, strict=True) if moved)

    assert between(Exchange("hierarchical", (256, 256))) < between(Exchange("all_to_all", (64,)))
