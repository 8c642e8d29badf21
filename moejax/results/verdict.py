"""Whether one of two is better, or nobody can say: the rule that comparisons and A/B runs share.

A winner is called where all of these hold, and otherwise the reason is given:

1. the two can be compared (same model, workload, device, or a difference that was asked for);
2. there are samples enough for the test to come out at all;
3. the rank test's p-value, adjusted after Holm over all that is asked at once, is at most alpha;
4. the ratio's bootstrap interval leaves out 1;
5. it also leaves out what counts as noise (`Floor`), such as the difference of two runs of the same command.

The test guards against a false call at few samples, where bootstrap intervals are too narrow; the interval
says how large the difference is. No JAX here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moejax.results.metric_names import better_word, lower_is_better, short_name
from moejax.results.statistics import (
    Interval,
    cliffs_delta,
    fewest_samples,
    holm,
    interval_fields,
    least_p,
    paired_ratio,
    rank_test,
    ratio_of_medians,
    sign_effect,
    signed_rank_test,
)

Values = NDArray[np.float64]

ALPHA = 0.05
"""Chance of even one false call in a family of tests where nothing differs."""

Outcome = Literal["better", "worse", "no winner", "too few", "not comparable", "differs", "same"]
"""`differs` and `same` are of metrics that are counted rather than timed."""


@dataclass(frozen=True)
class Floor:
    """Ratios between `low` and `high` count as noise; `why` completes "inside …"."""

    low: float
    high: float
    why: str

    @classmethod
    def symmetric(cls, relative: float, why: str) -> "Floor":
        """From 1 / (1 + relative) to 1 + relative."""
        return cls(1.0 / (1.0 + relative), 1.0 + relative, why)

    def holds(self, ratio: Interval) -> bool:
        """Whether any of the interval lies inside."""
        return ratio.low <= self.high and ratio.high >= self.low

    def widened(self, other: "Floor") -> "Floor":
        """Returns the floor that spans what either takes for noise."""
        if self.low <= other.low and self.high >= other.high:
            return self
        return Floor(min(self.low, other.low), max(self.high, other.high), other.why)


NO_FLOOR = Floor(1.0, 1.0, "the noise")


@dataclass(frozen=True)
class Trial:
    """One metric of one run against the baseline, measured but not judged.

    Attributes:
        metric: its name; case: what it was measured on, None for all cases together.
        run, baseline: the two's labels.
        value, base: each one's median over its samples.
        ratio: value over base with its interval; None where it is not defined.
        effect: in [-1, 1], see `cliffs_delta` and `sign_effect`; positive where `run` has more.
        p_value: of the rank test.
        samples: iterations (or pairs) of run and baseline.
        paired: whether sample i of both was measured at the same time.
        floor: what counts as noise.
        blocked: why the two cannot be compared, if so.
    """

    metric: str
    case: str | None
    run: str
    baseline: str
    value: float | None
    base: float | None
    ratio: Interval | None = None
    effect: float | None = None
    p_value: float | None = None
    samples: tuple[int, int] = (0, 0)
    paired: bool = False
    floor: Floor = NO_FLOOR
    blocked: str | None = None

    @classmethod
    def of(
        cls, metric: str, case: str | None, run: str, baseline: str, values: Values, base: Values, **more: Any
    ) -> "Trial":
        """Returns the trial of samples of two runs, tested in pairs if `more` has them `paired`."""
        tests: Any = (ratio_of_medians, cliffs_delta, rank_test)
        if more.get("paired"):
            tests = (paired_ratio, sign_effect, signed_rank_test)
        ratio, effect, p_value = (test(values, base) for test in tests)
        medians = float(np.median(values)), float(np.median(base))
        sizes = values.size, base.size
        return cls(metric, case, run, baseline, *medians, ratio, effect, p_value, sizes, **more)


OF_TRIAL = ("metric", "case", "run", "baseline", "value", "effect", "p_value")
"""Fields of a trial that a verdict's row has as they are."""


@dataclass(frozen=True)
class Verdict:
    """A trial and what it came to.

    Attributes:
        p_adjusted: the p-value after Holm.
        text: the reason in words: "faster 1.32x [1.28, 1.37]", "no winner: inside the noise".
    """

    trial: Trial
    outcome: Outcome
    p_adjusted: float | None
    text: str

    @property
    def decided(self) -> bool:
        """Whether there is a winner."""
        return self.outcome in ("better", "worse")

    def sentence(self) -> str:
        """One line for people: `TPOT p50 (ms): B is faster than A by 1.32x [1.28, 1.37]`."""
        trial = self.trial
        where = f" [{trial.case}]" if trial.case else ""
        head = f"{short_name(trial.metric)}{where}: "
        if not self.decided or trial.ratio is None:
            return f"{head}{trial.run} against {trial.baseline}: {self.text}"
        word, _, amount = self.text.partition(" ")
        return f"{head}{trial.run} is {word} than {trial.baseline} by {amount}"

    def row(self) -> dict[str, Any]:
        """As comparison.json has it."""
        trial = self.trial
        return {
            **{name: getattr(trial, name) for name in OF_TRIAL},
            "baseline_value": trial.base,
            **interval_fields("ratio", trial.ratio),
            "confidence": trial.ratio.confidence if trial.ratio else None,
            "p_adjusted": self.p_adjusted,
            "samples": list(trial.samples),
            "noise_low": trial.floor.low,
            "noise_high": trial.floor.high,
            "outcome": self.outcome,
            "text": self.text,
        }


def decide(trials: Sequence[Trial], *, unit: str = "iterations") -> list[Verdict]:
    """Verdicts of one family of trials: all that is asked of the same data at once. Holm's adjustment is over
    those that can be tested."""
    tested = [i for i, trial in enumerate(trials) if trial.blocked is None and trial.p_value is not None]
    adjusted = dict(zip(tested, holm([trials[i].p_value or 0.0 for i in tested]), strict=True))
    return [_verdict(trial, adjusted.get(i), len(tested), unit) for i, trial in enumerate(trials)]


def _verdict(trial: Trial, p_adjusted: float | None, family: int, unit: str) -> Verdict:
    def no(outcome: Outcome, text: str) -> Verdict:
        return Verdict(trial, outcome, p_adjusted, text)

    if trial.blocked is not None:
        return no("not comparable", f"not comparable: {trial.blocked}")
    ratio = trial.ratio
    if p_adjusted is None or ratio is None:
        return no("too few", "no samples")
    mine, others = trial.samples
    if least_p(mine, paired=trial.paired, other=others) * family > ALPHA:
        needed = fewest_samples(family, paired=trial.paired, alpha=ALPHA)
        have = f"{mine}" if mine == others else f"{mine} and {others}"
        return no("too few", f"too few {unit}: {have}, needs {needed}")
    if p_adjusted > ALPHA or not ratio.excludes(1.0):
        return no("no winner", "no winner: inside the noise")
    if trial.floor.holds(ratio):
        return no("no winner", f"no winner: inside {trial.floor.why}")
    lower = lower_is_better(trial.metric)
    if lower is None:
        return no("differs", f"differs {_times(ratio)}")
    better = (ratio.estimate < 1.0) == lower
    word = better_word(trial.metric, better=better)
    return Verdict(trial, "better" if better else "worse", p_adjusted, f"{word} {_times(ratio)}")


def _times(ratio: Interval) -> str:
    """The ratio as a factor above 1, whichever way round: `1.32x [1.28, 1.37]`."""
    values = (ratio.estimate, ratio.low, ratio.high)
    if ratio.estimate < 1.0:
        values = (1.0 / ratio.estimate, 1.0 / ratio.high, 1.0 / ratio.low)
    digits = 2 if max(values) < 100 else 0
    shown = [f"{value:.{3 if values[0] < 1.1 else digits}f}" for value in values]
    return f"{shown[0]}x [{shown[1]}, {shown[2]}]"


def exact_verdict(trial: Trial) -> Verdict:
    """Returns `same`, or `differs` with the factor, for a metric that is counted or computed."""
    if trial.value is None or trial.base is None:
        return Verdict(trial, "too few", None, "not in both")
    if trial.value == trial.base:
        return Verdict(trial, "same", None, "the same")
    if not trial.base or not trial.value or (trial.value < 0) != (trial.base < 0):
        return Verdict(trial, "differs", None, f"{trial.value:g} instead of {trial.base:g}")
    lower = lower_is_better(trial.metric)
    factor = trial.value / trial.base
    word = "differs" if lower is None else better_word(trial.metric, better=(factor < 1.0) == lower)
    return Verdict(trial, "differs", None, f"{word} {max(factor, 1.0 / factor):.2f}x")
