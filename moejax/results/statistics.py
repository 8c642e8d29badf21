"""How sure a number is: percentiles, confidence intervals, ratios of paired and unpaired runs, and tests.

Timings on a shared machine are skewed and drift, so intervals are bootstrapped, and two variants are
compared within pairs that were measured next to each other. Whether two differ at all is asked of a rank
test, which holds at few samples too. No JAX here.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with the bounds between which it lies at `confidence`, from `samples` measurements."""

    estimate: float
    low: float
    high: float
    confidence: float
    samples: int

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside the interval; for a ratio, `excludes(1.0)` is "they differ"."""
        return not self.low <= value <= self.high


def interval_fields(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Returns an interval as three flat fields: `name`, `name_low` and `name_high`; of one sample no ends."""
    values: tuple[float | None, ...] = (None,) * 3
    if interval is not None:
        ends = (interval.low, interval.high) if interval.samples > 1 else (None, None)
        values = (interval.estimate, *ends)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def _pair_ratios(values: ArrayLike, baseline: ArrayLike) -> NDArray[np.float64]:
    """Returns `values[i] / baseline[i]`; raises `ValueError` where the lengths differ."""
    if np.size(values) != np.size(baseline):
        raise ValueError(f"{np.size(values)} samples cannot be paired with {np.size(baseline)}")
    return _samples(values, positive=True) / _samples(baseline, positive=True)


def _bootstrap(sides: Sequence[NDArray[np.float64]], resamples: int) -> Interval:
    """Returns the percentile bootstrap (Efron & Tibshirani 1993, chapter 13) of one side's median, or of the
    first's over the second's.

    The same samples give the same interval. One sample, or equal samples, give an interval of width 0: no
    spread was seen, which is not the same as knowing that there is none.
    """
    rng = np.random.default_rng(0)
    draws = [np.median(side[rng.integers(0, side.size, (resamples, side.size))], axis=1) for side in sides]
    values = [np.median(side) for side in sides]
    tail = 50.0 * (1.0 - _CONFIDENCE)
    low, high = np.percentile(functools.reduce(np.divide, draws), (tail, 100.0 - tail))
    estimate = float(functools.reduce(np.divide, values))
    return Interval(estimate, float(low), float(high), _CONFIDENCE, min(side.size for side in sides))


def _samples(values: ArrayLike, *, positive: bool = False) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    if array.size == 0:
        raise ValueError("no samples")
    if not np.isfinite(array).all():
        raise ValueError("samples hold NaN or an infinity")
    if positive and (array <= 0).any():
        raise ValueError("a ratio needs positive samples")
    return array


def paired_ratio(values: ArrayLike, baseline: ArrayLike) -> Interval:
    """Median of `values[i] / baseline[i]` with its bootstrap interval; the pairs are what is resampled.

    For interleaved runs: both members of a pair were measured within moments, so the machine's drift cancels
    in their ratio, as it would not in a ratio of two medians.

    Raises:
        ValueError: the lengths differ, or a sample is not positive.
    """
    return _bootstrap([_pair_ratios(values, baseline)], resamples=2000)


def ratio_of_medians(values: ArrayLike, baseline: ArrayLike, *, resamples: int = 4000) -> Interval:
    """`median(values) / median(baseline)` of two runs that were not interleaved, with its bootstrap interval.

    Each side is resampled by itself, so a sample must be what is independent: one number an iteration. The
    requests of an iteration share its moment of the machine, and resampling them one by one would make the
    interval far too narrow (Kalibera & Jones, ISMM 2013). `samples` is the smaller side's number.

    Raises:
        ValueError: no samples, or one that is not positive and finite.
    """
    sides = [_samples(side, positive=True) for side in (values, baseline)]
    return _bootstrap(sides, resamples=resamples)


_MOST_EXACT = 50  # samples a side up to which the distribution of a rank statistic is computed exactly


def rank_test(values: ArrayLike, baseline: ArrayLike) -> float:
    """Two-sided p-value of Mann and Whitney's test that neither side tends to be larger.

    Exact for up to fifty samples a side without ties: it holds for any distribution and at any number of
    samples, which a bootstrap interval of a few samples does not. Samples must be independent.
    """
    top, bottom = _samples(values), _samples(baseline)
    together = np.concatenate([top, bottom])
    distinct = np.unique(together).size
    if distinct == 1:
        return 1.0
    exact = distinct == together.size and max(top.size, bottom.size) <= _MOST_EXACT
    return float(stats.mannwhitneyu(top, bottom, method="exact" if exact else "asymptotic").pvalue)


def signed_rank_test(values: ArrayLike, baseline: ArrayLike) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test on the logarithms of the pairs' ratios.

    Raises:
        ValueError: the lengths differ, or a sample is not positive.
    """
    logs = np.log(_pair_ratios(values, baseline))
    logs = logs[logs != 0]
    return float(stats.wilcoxon(logs).pvalue) if logs.size else 1.0


def cliffs_delta(values: ArrayLike, baseline: ArrayLike) -> float:
    """Effect size in [-1, 1]: how much more often a sample of `values` is above one of `baseline` than below
    (Cliff, Psychological Bulletin 114, 1993). 0: the two cannot be told apart; 1 and -1: they do not overlap.
    Unlike a standardised difference it needs no normal distribution and one slow sample does not move it."""
    return float(np.sign(np.subtract.outer(_samples(values), _samples(baseline))).mean())


def sign_effect(values: ArrayLike, baseline: ArrayLike) -> float:
    """The same for pairs: the share of pairs in which `values` is above, less the share in which it is
    below; in [-1, 1]."""
    return float(np.sign(_samples(values) - _samples(baseline)).mean())


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of a family adjusted after Holm (Scandinavian Journal of Statistics 6, 1979): calling those at
    or below alpha keeps the chance of even one false call at alpha, however the tests hang together."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def least_p(samples: int, *, paired: bool, other: int | None = None) -> float:
    """The smallest p-value that so many samples can give: every pair the same way round, or every sample of
    one side (`other`: of the second side, where the numbers differ) above all of the second."""
    if paired:
        return 2.0 ** (1 - samples)
    return 2.0 / math.comb(samples + (samples if other is None else other), samples)


def fewest_samples(tests: int, *, paired: bool, alpha: float) -> int:
    """Samples a side (or pairs) below which none of so many tests could ever come out after `holm`."""
    return next(n for n in range(2, 1000) if least_p(n, paired=paired) * tests <= alpha)
