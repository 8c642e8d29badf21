"""Bounded exchanges: what is dropped, counted by another program than the one that drops."""

import math

import numpy as np
import pytest

from moejax.moe.exchange_size import HopSize, fixed_capacities
from tests.examples import slow_but
from tests.moe.expert_parallel import (
    LAYOUTS,
    PER_RANK,
    expert_weights,
    groups,
    inputs,
    limit,
    num_experts,
    outputs,
    reference,
    routing,
)
from tests.numerics import assert_close

pytestmark = pytest.mark.multidevice

TOKENS, TOP_K = 12, 2
KINDS = ("balanced", "random", "one_expert", "one_rank", "empty", "one_sender")


def probability(top_k, span, count):
    """That k different experts of `count` include one of `span` given ones, one choice after another."""
    missed = 1.0
    for chosen in range(top_k):
        missed *= max(0, count - span - chosen) / (count - chosen)
    return 1 - missed


def kept_by_rank(layout, ids, room):
    """bool like ids: each device's first `room` tokens for each rank go there."""
    kept, P = np.zeros(ids.shape, bool), num_experts(layout)
    for group in range(groups(layout)):
        used = np.zeros(P // PER_RANK, int)
        for token in range(group * TOKENS, (group + 1) * TOKENS):
            for rank in sorted({e // PER_RANK for e in ids[token] if e < P}):
                used[rank] += 1
                if used[rank] <= room:
                    kept[token] |= ids[token] // PER_RANK == rank
    return kept


def kept_by_node(layout, ids, capacities):
    """The same on two hops: the first `capacities[0]` tokens for each node, then on the node's device of the
    same local rank the first `capacities[1]` for each of its devices, by source node and token."""
    parallel, P = LAYOUTS[layout], num_experts(layout)
    nodes, local = parallel.expert_nodes, parallel.ep // parallel.expert_nodes
    span, kept = local * PER_RANK, np.zeros(ids.shape, bool)
    for own in range(local):
        for node in range(nodes):
            arrived = []
            for source in range(nodes):
                group = source * local + own
                tokens = range(group * TOKENS, (group + 1) * TOKENS)
                arrived += [t for t in tokens if any(e < P and e // span == node for e in ids[t])][
                    : capacities[0]
                ]
            for rank in range(node * local, (node + 1) * local):
                there = [t for t in arrived if (ids[t] // PER_RANK == rank).any()][: capacities[1]]
                for token in there:
                    kept[token] |= ids[token] // PER_RANK == rank
    return kept


@pytest.mark.parametrize(
    ("layout", "method", "capacity"),
    slow_but(
        [
            ("ep8", "all_to_all", 0.5),
            ("dp2_ep4", "all_to_all", 2.0),
            ("nodes2", "hierarchical", 1.0),
            ("nodes4", "hierarchical", 0.5),
        ],
        [
            (*case, capacity)
            for case in [
                ("ep8", "all_to_all"),
                ("dp2_ep4", "all_to_all"),
                ("nodes2", "hierarchical"),
                ("nodes4", "hierarchical"),
            ]
            for capacity in (0.5, 1.0, 2.0)
        ],
    ),
)
def test_drops_are_the_latest_and_counted(layout, method, capacity):
    parallel, P = LAYOUTS[layout], num_experts(layout)
    some = 0
    for kind in KINDS:
        ids = routing(kind, layout, TOKENS, TOP_K)
        if method == "all_to_all":
            room = min(TOKENS, math.ceil(capacity * TOKENS * probability(TOP_K, PER_RANK, P)))
            kept = kept_by_rank(layout, ids, room)
        else:
            nodes, local = parallel.expert_nodes, parallel.ep // parallel.expert_nodes
            first = min(TOKENS, math.ceil(capacity * TOKENS * probability(TOP_K, local * PER_RANK, P)))
            second = math.ceil(capacity * nodes * TOKENS * probability(TOP_K, PER_RANK, P))
            kept = kept_by_node(layout, ids, (first, min(second, nodes * first)))
        data = inputs(layout, ids)
        out, dropped = outputs(layout, method, data, capacity=capacity)
        expected = reference(data, expert_weights(P), kept)
        assert_close(out, expected, limit(TOP_K))
        lost = ((ids < P) & ~kept).reshape(groups(layout), -1).sum(axis=1)
        np.testing.assert_array_equal(dropped, lost)
        some += lost.sum()
    assert some > 0 or capacity > 1


@pytest.mark.parametrize(("layout", "method"), [("ep8", "all_to_all"), ("nodes2", "hierarchical")])
def test_each_microbatch_has_its_room(layout, method):
    """Both halves' drops are counted; what is kept is right."""
    ids = routing("one_rank", layout, TOKENS, TOP_K)
    data, P = inputs(layout, ids), num_experts(layout)
    out, dropped = outputs(layout, method, data, capacity=1.0, microbatches=2)
    whole = reference(data, expert_weights(P))
    right = np.abs(out - whole).max(axis=1) <= limit(TOP_K) * np.abs(whole).max()
    gone = ~out.any(axis=1)
    assert (right | gone).all() and right.any() and gone.any()
    np.testing.assert_array_equal(dropped, TOP_K * gone.reshape(groups(layout), -1).sum(axis=1))


@pytest.mark.parametrize(("layout", "method"), [("ep8", "all_to_all"), ("nodes2", "hierarchical")])
def test_room_for_all_drops_nothing(layout, method):
    ids = routing("one_rank", layout, TOKENS, TOP_K)
    data = inputs(layout, ids)
    out, dropped = outputs(layout, method, data, capacity=100.0)
    assert not dropped.any()
    assert_close(out, reference(data, expert_weights(num_experts(layout))), limit(TOP_K))


def test_fixed_rooms():
    assert fixed_capacities(12, 2, [HopSize(8, 2)], 1.0) == (3,)  # 12 · (1 - 14·13 / (16·15)) = 2.9
    assert fixed_capacities(12, 2, [HopSize(8, 2)], 0.01) == (1,)
    assert fixed_capacities(12, 2, [HopSize(2, 8), HopSize(4, 2)], 1.0) == (10, 6)  # 9.2 and 5.8
    assert fixed_capacities(12, 2, [HopSize(2, 8), HopSize(4, 2)], 9.0) == (12, 24)
