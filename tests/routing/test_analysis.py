"""Loads, co-activation and transitions against plain loops and values known by hand."""

import itertools

import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.routing import analysis
from moejax.routing.capture import RoutingCapture
from moejax.routing.generate import generate
from tests.routing.traces import trace_of

E = 8


@pytest.fixture(scope="module")
def trace() -> RoutingCapture:
    """Four steps of three requests, two layers; some assignments are not made."""
    made = generate(
        "zipf", num_experts=E, top_k=3, layers=(0, 2), requests=5, prompt_len=7, output_len=6, seed=2
    )
    ids = made.ids.copy()
    ids[4, 0, 1] = ids[9, 1] = E
    return trace_of(
        ids, made.step, made.request, made.position, prefill=made.prefill, layers=(0, 2), experts=E
    )


def test_skew_of_known_loads() -> None:
    found = analysis.skew([[3] * 4, [5, 0, 0, 0], [2, 2, 0, 0], [0] * 4])
    np.testing.assert_allclose(found.max_over_mean, [1, 4, 2, np.nan])
    np.testing.assert_allclose(found.entropy_bits, [2, 0, 1, np.nan])
    np.testing.assert_allclose(found.entropy, [1, 0, 0.5, np.nan])
    np.testing.assert_allclose(found.gini, [0, 0.75, 0.5, np.nan], atol=1e-12)
    np.testing.assert_allclose(found.top_share, [0.25, 1, 0.5, np.nan])
    assert analysis.skew([7]).entropy == 1 and analysis.skew([7]).max_over_mean == 1


def test_gini_is_the_mean_absolute_difference() -> None:
    loads = np.random.default_rng(0).integers(0, 50, 20)
    pairs = np.abs(loads[:, None] - loads[None]).mean()
    assert analysis.skew(loads).gini == pytest.approx(pairs / (2 * loads.mean()), rel=1e-12)
    top = np.sort(loads)[-2:].sum() / loads.sum()
    assert analysis.skew(loads).top_share == pytest.approx(top, rel=1e-12)


def test_zipfs_exponent_of_exact_loads() -> None:
    ranks = np.arange(1, 65)
    loads = np.stack([1e6 * ranks**-s for s in (0.0, 0.7, 1.5)])
    np.testing.assert_allclose(analysis.zipf_exponent(loads), [0, 0.7, 1.5], atol=1e-6)
    assert np.isnan(analysis.zipf_exponent(np.zeros(4)))


def test_loads_count_what_was_made(trace: RoutingCapture) -> None:
    loads = trace.counts()
    assert loads.shape == (2, E) and loads.sum() == trace.num_rows * 6 - 4
    parts = [trace.phase(phase).counts() for phase in analysis.PHASES]
    np.testing.assert_array_equal(sum(parts), loads)
    whole = analysis.loads_of(trace, 4)
    np.testing.assert_array_equal(whole[[0, 2]], loads)
    assert not whole[[1, 3]].any()
    with pytest.raises(ConfigError, match="it has layer 2, and the model has 2 layers"):
        analysis.loads_of(trace, 2)


def test_windows_of_time_are_whole_steps(trace: RoutingCapture) -> None:
    loads, starts = analysis.load_over_time(trace, windows=3)
    np.testing.assert_array_equal(loads.sum(0), trace.counts())
    assert starts[0] == 0 and loads.shape == (3, 2, E)
    edges = [*starts.tolist(), trace.num_steps]
    for window, (first, last) in enumerate(itertools.pairwise(edges)):
        steps = (trace.step >= first) & (trace.step < last)
        np.testing.assert_array_equal(loads[window], trace.select(steps).counts())


def test_burstiness_by_hand() -> None:
    """Two windows, two experts, one token each: n = [[1, 0], [0, 1]], expected 1/2 everywhere."""
    ids = np.array([[[0]], [[1]]], np.uint8)
    two = trace_of(ids, [0, 1], [0, 0], [0, 1], experts=2)
    assert analysis.burstiness(two) == pytest.approx([4 * 0.25 / 0.5])
    one = trace_of(ids[:1], [0], [0], [0], experts=2)
    assert np.isnan(analysis.burstiness(one)).all()
    with pytest.raises(ConfigError, match="no rows"):
        analysis.burstiness(one.select(np.zeros(1, bool)))


def pairs(trace: RoutingCapture, one: int, other: int) -> np.ndarray:
    table = np.zeros((E, E), int)
    for row in trace.ids:
        for a, b in itertools.product(row[one], row[other]):
            if a < E and b < E:
                table[a, b] += 1
    return table


def test_co_activation_and_transitions_by_loops(trace: RoutingCapture) -> None:
    np.testing.assert_array_equal(analysis.co_activation(trace, 2), pairs(trace, 1, 1))
    expected = np.zeros((E + 1, E + 1), int)
    np.add.at(expected, (trace.ids[:, 0, 0], trace.ids[:, 1, 0]), 1)
    first = analysis.transition(trace, 0)
    np.testing.assert_array_equal(first, expected[:E, :E])
    assert first.sum() == trace.num_rows - 1  # row 9 goes nowhere in the second layer
    seen = expected[:E, :E][expected[:E, :E].any(1)]
    np.testing.assert_array_equal(analysis.transition(trace, 0, visited=True), seen[:, seen.any(0)])
    with pytest.raises(ConfigError, match=r"no layer 1 \(its layers with experts: 0, 2\)"):
        analysis.co_activation(trace, 1)
    with pytest.raises(ConfigError, match="layer 2 is its last"):
        analysis.transition(trace, 2)


def test_lift_has_the_margins_of_what_it_is_against() -> None:
    trace = generate("zipf", num_experts=E, top_k=3, layers=1, requests=32, prompt_len=64, output_len=1)
    met = analysis.co_activation(trace, 0).astype(float)
    lift = analysis.co_activation_lift(met)
    np.fill_diagonal(met, 0)
    assert np.isnan(np.diag(lift)).all()
    expected = np.divide(met, lift, out=np.zeros_like(met), where=~np.eye(E, dtype=bool))
    np.testing.assert_allclose(expected.sum(1), met.sum(1), rtol=1e-3)
    rank_one = expected / np.maximum(expected[0], 1)[None]
    np.testing.assert_allclose(rank_one[2, 3:], rank_one[2, 3], rtol=1e-6)
    assert np.isnan(analysis.co_activation_lift(np.diag([3, 4, 5]))).all()


def test_mutual_information_of_known_tables() -> None:
    assert analysis.mutual_information(np.diag([1000] * 8)) == pytest.approx(3, abs=0.01)
    assert analysis.mutual_information(np.full((8, 8), 100)) == 0
    assert analysis.mutual_information(np.zeros((4, 4), int)) == 0
    rng = np.random.default_rng(1)
    few = np.bincount(rng.integers(0, 1024, 600), minlength=1024).reshape(32, 32)
    assert analysis.mutual_information(few) < 0.1  # plug-in: more than a bit
