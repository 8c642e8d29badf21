"""The rule that calls winners: false ones are as rare as it says, and true ones are found."""

import numpy as np
import pytest

from moejax.results.statistics import (
    cliffs_delta,
    fewest_samples,
    holm,
    least_p,
    rank_test,
    ratio_of_medians,
    sign_effect,
    signed_rank_test,
)
from moejax.results.verdict import ALPHA, Floor, Trial, decide, exact_verdict


def unpaired(values, base, metric="median_tpot_ms", **fields) -> Trial:
    return Trial(
        metric, None, "B", "A", float(np.median(values)), float(np.median(base)),
        ratio=ratio_of_medians(values, base, resamples=200), effect=cliffs_delta(values, base),
        p_value=rank_test(values, base), samples=(len(values), len(base)), **fields,
    )  # fmt: skip


def wins(make, seeds=300) -> float:
    """Share of families in which anybody is called a winner."""
    return float(
        np.mean([any(v.decided for v in decide(make(np.random.default_rng(s)))) for s in range(seeds)])
    )


@pytest.mark.parametrize("count", [4, 6, 10, 30])
@pytest.mark.parametrize("shape", ["normal", "heavy"])
def test_two_runs_of_one_truth_have_a_winner_at_most_as_often_as_alpha_says(count, shape):
    def draw(rng):
        noise = rng.normal(0, 0.05, count) if shape == "normal" else 0.02 * rng.standard_t(1.5, count)
        return np.exp(np.clip(noise, -2, 2))

    share = wins(lambda rng: [unpaired(draw(rng), draw(rng))])
    assert share <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 300)


def test_many_metrics_together_have_no_more_false_winners_than_one():
    def family(rng):
        common = [rng.normal(0, 0.05, 10) for _ in range(2)]

        def side(k):
            return np.exp(common[k] * 0.7 + rng.normal(0, 0.03, 10))

        return [unpaired(side(0), side(1)) for _ in range(12)]

    assert wins(family, 80) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 80)
    # Without the adjustment it would not hold.
    raw = [min(t.p_value for t in family(np.random.default_rng(s))) <= 0.05 for s in range(80)]
    assert np.mean(raw) > 0.15


def test_requests_of_one_iteration_taken_as_independent_would_make_false_winners():
    """Why the iteration is the sample: eight requests share each iteration's moment."""

    def iterations(rng):
        return np.exp(rng.normal(0, 0.05, 8)[:, None] + rng.normal(0, 0.005, (8, 8)))

    def clustered(rng):
        return [unpaired(np.median(iterations(rng), axis=1), np.median(iterations(rng), axis=1))]

    def pooled(rng):
        return [unpaired(iterations(rng).ravel(), iterations(rng).ravel())]

    assert wins(clustered, 200) <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 200)
    assert wins(pooled, 100) > 0.3


@pytest.mark.parametrize(("factor", "least"), [(1.1, 0.99), (1.03, 0.6), (0.9, 0.99)])
def test_differences_well_above_the_noise_are_found(factor, least):
    def pair(rng):
        base = np.exp(rng.normal(0, 0.02, 10))
        return [unpaired(factor * np.exp(rng.normal(0, 0.02, 10)), base)]

    assert wins(pair, 200) >= least


def test_the_interval_covers_the_true_ratio():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        top, bottom = 1.2 * np.exp(rng.normal(0, 0.05, 12)), np.exp(rng.normal(0, 0.05, 12))
        hits += not ratio_of_medians(top, bottom, resamples=500).excludes(1.2)
    assert hits >= 0.9 * 200


def test_needs_are_what_the_exact_test_can_give():
    assert [fewest_samples(n, paired=False, alpha=ALPHA) for n in (1, 3, 15)] == [4, 5, 6]
    assert [fewest_samples(n, paired=True, alpha=ALPHA) for n in (1, 3, 12)] == [6, 7, 9]
    apart = np.arange(1.0, 5.0), np.arange(11.0, 15.0)
    assert rank_test(*apart) == pytest.approx(least_p(4, paired=False))
    assert signed_rank_test(np.arange(2.0, 8.0), np.arange(1.0, 7.0)) == pytest.approx(
        least_p(6, paired=True)
    )
    few = unpaired(np.array([1.0, 1.1, 1.2]), np.array([3.0, 3.1, 3.2]))
    (verdict,) = decide([few])
    assert verdict.outcome == "too few" and verdict.text == "too few iterations: 3, needs 4"
    uneven = unpaired(np.array([1.0, 1.1, 1.2]), np.arange(3.0, 13.0))
    assert decide([uneven])[0].decided  # three against ten can


def test_equal_values_and_ties_are_no_difference():
    same = np.full(8, 2.0)
    assert rank_test(same, same) == 1.0 and signed_rank_test(same, same) == 1.0
    assert cliffs_delta(same, same) == 0.0 and sign_effect(same, same) == 0.0
    assert cliffs_delta([2.0, 3.0], [1.0, 1.0]) == 1.0 and cliffs_delta([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert sign_effect([1.0, 1.0, 3.0], [2.0, 2.0, 2.0]) == pytest.approx(-1 / 3)


def test_holm_is_the_textbooks():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []


def test_floors_blocks_and_directions():
    base = np.linspace(1.0, 1.01, 10)
    slower, faster = unpaired(base * 1.04, base), unpaired(base / 1.5, base)
    assert decide([slower])[0].outcome == "worse" and decide([faster])[0].text.startswith("faster 1.50x [")
    inside = unpaired(base * 1.04, base, floor=Floor.symmetric(0.05, "session noise"))
    assert decide([inside])[0].text == "no winner: inside session noise"
    blocked = unpaired(base * 9, base, blocked="the model differs")
    assert decide([blocked])[0].outcome == "not comparable"
    # A blocked one takes no power from the others.
    assert decide([blocked, faster])[1].p_adjusted == faster.p_value
    rate = unpaired(base * 1.5, base, metric="output_throughput")
    assert decide([rate])[0].outcome == "better" and "higher" in decide([rate])[0].text
    neither = unpaired(base * 1.5, base, metric="mean_batch_size")
    assert decide([neither])[0].outcome == "differs"
    exact = Trial("model_bytes", None, "B", "A", 0.0, 5.0)
    assert exact_verdict(exact).text == "0 instead of 5"
