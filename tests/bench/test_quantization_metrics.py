"""Figures of the quantization comparison against values worked out by hand."""

import numpy as np
import pytest

from moejax.bench.quantization.metrics import WindowBootstrap, popularity_errors, total_variation
from moejax.bench.quantization.rows import (
    FULL,
    against_rtn,
    compare_methods,
    loss_fields,
    mark_pareto,
)
from moejax.results.pareto import pareto

TOKENS = np.array([4, 4, 2])


def test_perplexity_counts_tokens_not_windows():
    boot = WindowBootstrap(TOKENS)
    nats = np.array([4.0, 8.0, 8.0])  # 20 nats over 10 tokens
    fields = loss_fields(boot, nats, nats - TOKENS * 0.01, bytes_per_token=2.0)
    assert fields["perplexity"] == pytest.approx(np.exp(2.0), rel=1e-12)
    assert fields["perplexity_loss_percent"] == pytest.approx(100 * (np.exp(0.01) - 1), rel=1e-9)
    assert fields["perplexity_delta"] == pytest.approx(np.exp(2.0) - np.exp(1.99), rel=1e-9)
    assert fields["bits_per_byte"] == pytest.approx(2 / np.log(2) / 2, rel=1e-12)


def test_a_constant_difference_has_no_spread_and_is_outside_the_noise():
    """Windows differ wildly, but each loses the same: pairing takes the windows' own spread away."""
    boot = WindowBootstrap(np.full(40, 100))
    base = np.random.default_rng(0).uniform(50, 500, 40)
    ratio = boot.ratio(base + 100 * 1e-4, base)
    assert ratio.high - ratio.low < 1e-12 and ratio.excludes(1.0)
    difference = boot.difference(base + 100 * 1e-4, base)
    assert difference.low > 0 and difference.samples == 40


def test_a_difference_without_direction_is_inside_the_noise():
    boot = WindowBootstrap(np.full(60, 10))
    rng = np.random.default_rng(1)
    base = rng.normal(20, 3, 60)
    noise = rng.normal(0, 0.5, 60)
    assert not boot.ratio(base + noise - noise.mean(), base).excludes(1.0)
    assert boot.ratio(base + noise - noise.mean() + 0.5, base).excludes(1.0)


def test_the_interval_covers_about_as_often_as_it_says():
    """300 samples with a known mean, 95 % intervals: 6 standard deviations of how many hold it are 23."""
    rng = np.random.default_rng(2)
    held = 0
    for seed in range(300):
        boot = WindowBootstrap(np.full(50, 8), resamples=400, seed=seed)
        found = boot.mean(8 * rng.normal(1.0, 0.3, 50))
        held += found.low <= 1.0 <= found.high
    assert 300 * 0.93 - 23 <= held <= 300


def test_the_same_seed_gives_the_same_interval():
    nats, base = np.array([5.0, 9.0, 3.0]), np.array([4.0, 8.0, 3.1])
    assert WindowBootstrap(TOKENS, seed=3).ratio(nats, base) == WindowBootstrap(TOKENS, seed=3).ratio(
        nats, base
    )


def test_a_share_of_nothing_is_not_given():
    boot = WindowBootstrap(np.full(30, 10))
    base = np.random.default_rng(0).uniform(20, 30, 30)
    rtn, gptq = base + 0.2, base + 0.1
    share = boot.loss_ratio(gptq, rtn, base)
    assert share is not None
    assert share.estimate == pytest.approx((np.exp(0.01) - 1) / (np.exp(0.02) - 1), rel=1e-9)
    noise = np.random.default_rng(1).normal(0, 1, 30)
    assert boot.loss_ratio(gptq, base + noise - noise.mean(), base) is None


def test_total_variation_by_hand():
    base = [[2, 2, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    other = [[1, 2, 1, 0], [2, 2, 2, 2], [0, 0, 0, 0]]
    np.testing.assert_allclose(total_variation(other, base), [0.25, 0.0, 0.0])


def test_errors_are_grouped_by_popularity_within_layers():
    counts = [[1, 9, 0, 5, 3], [4, 1, 2, 3, 10]]
    norm = np.ones((2, 5))
    error = np.array([[0.4, 0.1, 7.0, 0.2, 0.3], [0.2, 0.5, 0.4, 0.3, 0.1]])
    found = popularity_errors(error**2, norm, counts, 2)
    assert np.isnan(found.error[0, 2])  # no token: no error
    np.testing.assert_allclose(found.error[1], error[1])
    np.testing.assert_allclose(found.share[0], np.array([1, 9, 0, 5, 3]) / 18)
    # Layer 0: 0.4, 0.3 | 0.2, 0.1. Layer 1: 0.5, 0.4, 0.3 | 0.2, 0.1; rarest first.
    rare, popular = [0.4, 0.3, 0.5, 0.4, 0.3], [0.2, 0.1, 0.2, 0.1]
    np.testing.assert_allclose(found.bins, [np.sqrt(np.mean(np.square(g))) for g in (rare, popular)])
    assert found.correlation == pytest.approx(-1.0)


def test_one_expert_has_no_correlation():
    found = popularity_errors([[0.1]], [[1.0]], [[3]], 4)
    assert found.correlation is None and found.bins.shape == (1,)


def test_pareto_keeps_what_nothing_beats():
    bits = [4.25, 4.25, 8.0, 8.0, 16.0, 4.0]
    losses = [3.0, 2.0, 0.1, 0.2, 0.1, 9.0]
    assert pareto(bits, losses) == [5, 1, 2]


def test_pairs_and_shares_are_written_into_rows():
    boot = WindowBootstrap(np.full(30, 10))
    base = np.random.default_rng(0).uniform(20, 30, 30)
    nats = {FULL: base, "rtn": base + 0.2, "gptq": base + 0.1, "other": base + 0.1}
    pairs = compare_methods(boot, nats)
    assert [(p["first"], p["second"]) for p in pairs if p["inside_noise"]] == [("gptq", "other")]
    assert len(pairs) == 6

    def row(name, method, fmt, bits, nats):
        return {
            "name": name, "method": method, "format": fmt, "kv_cache": "auto", "error": None,
            "bits_per_weight": bits, "changes_weights": name != FULL,
            "perplexity": float(np.exp(nats.sum() / 300)),
        }  # fmt: skip

    rows = [
        row(FULL, "none", "float32", 32, base),
        row("rtn", "rtn", "int4", 4, nats["rtn"]),
        row("gptq", "gptq", "int4", 4, nats["gptq"]),
        row("other", "awq", "int8", 8, nats["other"] + 0.1),
        {"name": "broken", "method": "awq", "format": "int4", "kv_cache": "auto", "error": "x",
         "changes_weights": False},
    ]  # fmt: skip
    against_rtn(boot, rows, nats)
    mark_pareto(rows)
    assert rows[2]["rtn"] == "rtn" and 0.4 < rows[2]["loss_vs_rtn"] < 0.6
    assert "loss_vs_rtn" not in rows[3] and "loss_vs_rtn" not in rows[1] and "rtn" not in rows[4]
    assert [r.get("pareto") for r in rows] == [None, False, True, False, None]


def test_a_traces_loads_take_the_place_of_the_texts() -> None:
    """Groups, shares and weights by the trace; errors are measured where the text visits."""
    wrong, norm = np.array([[1.0, 4.0, 9.0, 0.0]]), np.array([[100.0, 100.0, 100.0, 0.0]])
    counts, loads = np.array([[5, 5, 5, 0]]), np.array([[10, 60, 10, 20]])
    plain = popularity_errors(wrong, norm, counts, 3)
    assert plain.weighted == pytest.approx(np.sqrt((0.01 + 0.04 + 0.09) / 3)) and plain.unmeasured == 0
    found = popularity_errors(wrong, norm, counts, 3, loads)
    np.testing.assert_allclose(found.share, loads / 100)
    np.testing.assert_allclose(found.error[0, :3], [0.1, 0.2, 0.3])
    np.testing.assert_allclose(found.bins, [0.1, 0.3, 0.2])  # rarest first, and the second is the popular one
    np.testing.assert_allclose(found.bin_share, [0.4, 0.4, 2.4])
    assert found.weighted == pytest.approx(np.sqrt((0.1 * 0.01 + 0.6 * 0.04 + 0.1 * 0.09) / 0.8))
    assert found.unmeasured == pytest.approx(0.2)
    assert np.isnan(popularity_errors(wrong, norm, counts * 0, 3).weighted)
