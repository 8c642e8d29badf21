"""Temporal locality and working sets against plain loops."""

from typing import Any

import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.routing.capture import RoutingCapture
from moejax.routing.generate import generate
from moejax.routing.locality import hits_per_step, temporal_locality, working_set
from tests.routing.traces import trace_of

E = 16


def sequences(trace: RoutingCapture, layer: int) -> list[list[set[int]]]:
    """Experts of each token of each sequence, in order; a token computed again counts once."""
    found: dict[tuple[int, int], dict[int, set[int]]] = {}
    for row in range(trace.num_rows):
        own = found.setdefault((int(trace.request[row]), int(trace.sample[row])), {})
        own.setdefault(int(trace.position[row]), {int(e) for e in trace.ids[row, layer] if e < E})
    return [[tokens[at] for at in sorted(tokens)] for tokens in found.values()]


@pytest.fixture(scope="module")
def trace() -> RoutingCapture:
    """Correlated; requests of different lengths, two samples, rows computed twice, some without experts."""
    made = generate(
        "correlated", num_experts=E, top_k=2, layers=2, requests=6, prompt_len=9, output_len=12, exponent=0.7
    )
    keep = made.position < 8 + 2 * made.request
    rows = np.concatenate([np.flatnonzero(keep), np.flatnonzero(made.request == 1)[:5]])
    ids = made.ids[rows].copy()
    ids[7, 0] = ids[11, 1, 1] = E
    step = np.concatenate([made.step[keep], np.full(len(rows) - keep.sum(), 50)])
    sample = np.where((made.request == 3) & (made.position >= 9), 1, 0)[rows]
    return trace_of(ids, step, made.request[rows], made.position[rows], experts=E, sample=sample)


def test_reuse_and_distances_by_loops(trace: RoutingCapture) -> None:
    found = temporal_locality(trace, most=4)
    for layer in range(2):
        again = could = visits = tokens = 0
        gaps = np.zeros(4)
        far = first = 0
        loads = np.zeros(E)
        for sequence in sequences(trace, layer):
            last: dict[int, int] = {}
            for at, experts in enumerate(sequence):
                tokens += bool(experts)
                follows = at + 1 < len(sequence)
                could += len(experts) * follows
                again += len(experts & sequence[at + 1]) if follows else 0
                for expert in experts:
                    visits += 1
                    loads[expert] += 1
                    gap = at - last[expert] if expert in last else 0
                    first += gap == 0
                    far += gap > 4
                    if 1 <= gap <= 4:
                        gaps[gap - 1] += 1
                    last[expert] = at
        assert found.reuse[layer] == pytest.approx(again / could, rel=1e-12)
        assert found.chance[layer] == pytest.approx((loads / visits * loads / tokens).sum(), rel=1e-12)
        np.testing.assert_allclose(found.distances[layer], gaps / visits, rtol=1e-12)
        assert found.farther[layer] == pytest.approx(far / visits, rel=1e-12)
        assert found.first[layer] == pytest.approx(first / visits, rel=1e-12)


@pytest.mark.parametrize("unit", ["tokens", "steps"])
def test_working_sets_by_loops(trace: RoutingCapture, unit: str) -> None:
    found = working_set(trace, unit=unit)
    for layer in range(2):
        if unit == "tokens":
            parts = sequences(trace, layer)
        else:
            steps = np.unique(trace.step)
            parts = [[set(trace.ids[trace.step == s, layer].ravel().tolist()) - {E} for s in steps]]
        for window, value in zip(found.windows, found.experts[layer], strict=True):
            sizes = [
                len(set().union(*part[i : i + window]))
                for part in parts
                for i in range(len(part) - window + 1)
            ]
            assert value == pytest.approx(np.mean(sizes), rel=1e-12)
    assert found.windows.tolist() == [1, 2, 4, 8, 16][: len(found.windows)]
    assert 2 * found.windows[-1] > (18 if unit == "tokens" else 10)
    np.testing.assert_allclose(found.nbytes(10.0), found.experts.sum(0) * 10)


def test_hits_of_each_step(trace: RoutingCapture) -> None:
    hits = hits_per_step(trace)
    for number, step in enumerate(np.unique(trace.step)):
        own = trace.ids[trace.step == step]
        assert hits[number].tolist() == [len(set(own[:, layer].ravel().tolist()) - {E}) for layer in (0, 1)]
    curve = working_set(trace, unit="steps")
    np.testing.assert_allclose(curve.experts[:, 0], hits.mean(0))


def test_single_tokens_have_no_next_one() -> None:
    alone = trace_of([[[0, 1]], [[1, 2]]], [0, 0], [0, 1], [0, 0], experts=E)
    found = temporal_locality(alone)
    assert np.isnan(found.reuse).all() and found.first == 1
    nothing = temporal_locality(alone.select(np.zeros(2, bool)))
    assert np.isnan(nothing.chance).all()


@pytest.mark.parametrize(
    ("how", "message"),
    [({"unit": "bytes"}, "over tokens or steps, not 'bytes'"), ({}, "no rows")],
)
def test_mistakes_are_named(trace: RoutingCapture, how: dict[str, Any], message: str) -> None:
    chosen = trace if how else trace.select(np.zeros(trace.num_rows, bool))
    with pytest.raises(ConfigError, match=message):
        working_set(chosen, **how)
