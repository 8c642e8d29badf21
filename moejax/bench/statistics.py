"""How sure a number is: percentiles, confidence intervals, and the ratio of paired runs.

Timings on a shared machine are skewed and drift, so intervals are bootstrapped, and two variants are
compared within pairs that were measured next to each other. No JAX here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Statistic = Literal["mean", "median"]

_REDUCE: dict[str, Callable[..., NDArray[np.float64]]] = {"mean": np.mean, "median": np.median}


@dataclass(frozen=True)
class Interval:
    """An estimate with the bounds between which it lies at `confidence`, from `samples` measurements."""

    estimate: float
    low: float
    high: float
    confidence: float
    samples: int

    def __str__(self) -> str:
        return f"{self.estimate:.4g} [{self.low:.4g}, {self.high:.4g}]"

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside the interval; for a ratio, `excludes(1.0)` is "they differ"."""
        return not self.low <= value <= self.high


def _samples(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64).reshape(-1)
    if array.size == 0:
        raise ValueError("no samples")
    if not np.isfinite(array).all():
        raise ValueError("samples hold NaN or an infinity")
    return array


def percentiles(values: ArrayLike, points: Sequence[float] = (50, 90, 95, 99)) -> dict[float, float]:
    """Percentiles by linear interpolation (numpy's and vLLM's).

    Raises:
        ValueError: no samples, or one is not finite.
    """
    return dict(zip(points, (float(v) for v in np.percentile(_samples(values), points)), strict=True))


def bootstrap_interval(
    values: ArrayLike,
    statistic: Statistic = "median",
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile-bootstrap interval of the median or mean (Efron & Tibshirani 1993, chapter 13).

    The same seed gives the same interval. One sample, or equal samples, give an interval of width 0: no
    spread was seen, which is not the same as knowing that there is none.
    """
    array = _samples(values)
    reduce = _REDUCE[statistic]
    rng = np.random.default_rng(seed)
    draws = reduce(array[rng.integers(0, array.size, (resamples, array.size))], axis=1)
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(draws, (tail, 100.0 - tail))
    return Interval(float(reduce(array)), float(low), float(high), confidence, array.size)


def mean_interval(values: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Student's t interval of the mean: for roughly normal samples, and better than a bootstrap at few."""
    array = _samples(values)
    mean = float(array.mean())
    if array.size < 2:
        return Interval(mean, mean, mean, confidence, array.size)
    half = float(stats.t.ppf(0.5 + confidence / 2, array.size - 1) * array.std(ddof=1) / np.sqrt(array.size))
    return Interval(mean, mean - half, mean + half, confidence, array.size)


def paired_ratio(
    values: ArrayLike, baseline: ArrayLike, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Median of `values[i] / baseline[i]` with its bootstrap interval; the pairs are what is resampled.

    For interleaved runs: both members of a pair were measured within moments, so the machine's drift cancels
    in their ratio, as it would not in a ratio of two medians.

    Raises:
        ValueError: the lengths differ, or a sample is not positive.
    """
    top, bottom = _samples(values), _samples(baseline)
    if top.size != bottom.size:
        raise ValueError(f"{top.size} samples cannot be paired with {bottom.size}")
    if (top <= 0).any() or (bottom <= 0).any():
        raise ValueError("a ratio needs positive samples")
    return bootstrap_interval(top / bottom, "median", confidence=confidence, resamples=resamples, seed=seed)
