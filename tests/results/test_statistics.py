"""Intervals cover the truth as often as they say, and pairing removes drift."""

import numpy as np
import pytest

from moejax.results.statistics import interval_fields, paired_ratio, ratio_of_medians


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    ones = np.ones(30)
    hits = sum(not paired_ratio(rng.normal(10.0, 1.0, 30), ones).excludes(10.0) for _ in range(200))
    assert 0.88 * 200 <= hits <= 200


def test_same_samples_same_interval():
    values = np.random.default_rng(1).gamma(2.0, 1.0, 25)
    interval = paired_ratio(values, np.ones(25))
    assert interval == paired_ratio(values, np.ones(25)) and interval.confidence == 0.95
    assert interval.low <= interval.estimate <= interval.high
    one = interval_fields("x", paired_ratio([3.0], [2.0]))
    assert one == {"x": 1.5, "x_low": None, "x_high": None}  # a single sample has no interval


def test_one_sample_has_no_width():
    found = paired_ratio([2.0], [1.0])
    assert (found.low, found.estimate, found.high, found.samples) == (2.0, 2.0, 2.0, 1)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_no_or_unusable_samples_are_an_error(values):
    with pytest.raises(ValueError, match="samples"):
        ratio_of_medians(values, [1.0])


def test_paired_ratio_sees_through_drift_that_hides_it_unpaired():
    rng = np.random.default_rng(0)
    drift = np.exp(rng.normal(0, 0.5, 20))
    base = drift * rng.normal(1.0, 0.01, 20)
    slower = drift * 1.1 * rng.normal(1.0, 0.01, 20)
    ratio = paired_ratio(slower, base)
    assert ratio.estimate == pytest.approx(1.1, abs=0.02) and ratio.excludes(1.0)
    assert not ratio_of_medians(slower, base).excludes(1.0)


def test_pairs_must_match():
    with pytest.raises(ValueError, match="2 samples cannot be paired with 1"):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="positive"):
        paired_ratio([1.0], [0.0])
