"""From rounds to verdicts: each arm's ratio to the baseline, pair by pair."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moejax.bench.ab.variants import Arm
from moejax.bench.common.agreement import token_agreement
from moejax.core.errors import ConfigError
from moejax.results.metric_names import JUDGED, latency_name, least_samples
from moejax.results.statistics import fewest_samples
from moejax.results.verdict import ALPHA, NO_FLOOR, Floor, Trial, Values, Verdict, decide


@dataclass(frozen=True)
class Judged:
    """The verdicts of an A/B run.

    Attributes:
        control: the baseline's second engine against the first: a family of its own. Its intervals are what
            counts as noise for the others.
        verdicts: the other variants over all cases, or in the only one.
        case_verdicts: the same in each of several cases; a family of its own.
    """

    control: tuple[Verdict, ...]
    verdicts: tuple[Verdict, ...]
    case_verdicts: tuple[Verdict, ...]

    def half_width(self) -> float:
        """How far the widest interval over all cases reaches from its estimate, relative to it; 0 without
        any."""
        ratios = [verdict.trial.ratio for verdict in self.verdicts if verdict.trial.ratio is not None]
        reaches = [max(r.high - r.estimate, r.estimate - r.low) / r.estimate for r in ratios]
        return max(reaches, default=0.0)


def judged_metrics(arms: Sequence[Arm], cases: Sequence[dict[str, Any]], chosen: Sequence[str]) -> list[str]:
    """The metrics that every pass of every arm has: those asked for, or the usual ones. A fixed batch's
    rate says what its end-to-end latency has said, and is left out."""
    rates = any("request_rate" in case for case in cases)
    names = chosen or [name for name in JUDGED if latency_name(name) or rates]
    passes = [metrics for arm in arms for metrics in arm.rounds.values()]
    return [name for name in names if all((metrics.get(name) or 0) > 0 for metrics in passes)]


def too_few_values(name: str, cases: Sequence[dict[str, Any]]) -> bool:
    """Whether a pass has fewer values than a percentile needs to be more than their largest."""
    if (parts := latency_name(name)) is None:
        return False
    each = [(case["batch_size"], case["output_len"] - 1 if parts[1] == "itl" else 1) for case in cases]
    return min(requests * values for requests, values in each) < least_samples(parts[0])


def check_rounds(rounds: int, variants: int, cases: Sequence[dict[str, Any]], chosen: Sequence[str]) -> None:
    """Raises `ConfigError` where no verdict can come of so few rounds of `variants` beside the baseline."""
    rates = bool(chosen) or any("request_rate" in case for case in cases)
    asked = [m for m in chosen or JUDGED if (rates or latency_name(m)) and m != "request_goodput"]
    judged = [m for m in asked if not too_few_values(m, cases)]
    needed = fewest_samples(variants * max(1, len(judged)), paired=True, alpha=ALPHA)
    if rounds < needed:
        raise ConfigError(
            f"ab.rounds={rounds} can give no verdict: {', '.join(judged)} of {variants} variant(s) need at"
            f" least {needed}; raise ab.rounds, or judge by fewer with ab.metrics"
        )


def judge(
    baseline: Arm,
    control: Arm,
    others: Sequence[Arm],
    metrics: Sequence[str],
    cases: Sequence[str],
) -> Judged:
    """Verdicts on what has been measured so far. `cases` are the cases' labels."""
    table = {
        (arm.name, metric): values_of(arm, metric, len(cases))
        for arm in (baseline, control, *others)
        for metric in metrics
    }

    def trial(arm: Arm, metric: str, case: int | None, floor: Floor = NO_FLOOR) -> Trial:
        mine, theirs = table[baseline.name, metric], table[arm.name, metric]
        # Over all cases: their geometric mean in each round.
        one, two = (
            np.exp(np.log(values).mean(axis=1)) if case is None else values[:, case]
            for values in (mine, theirs)
        )
        label = cases[case] if case is not None and len(cases) > 1 else None
        blocked = _blocked(baseline, arm, metric)
        names = metric, label, arm.name, baseline.name
        return Trial.of(*names, two, one, paired=True, floor=floor, blocked=blocked)

    places: list[int | None] = [None] if len(cases) == 1 else [None, *range(len(cases))]
    controls = {(m, c): trial(control, m, c) for c in places for m in metrics}
    floors = {key: _floor(control_trial) for key, control_trial in controls.items()}
    overall = [trial(arm, m, None, floors[m, None]) for arm in others for m in metrics]
    each = [trial(b, m, c, floors[m, c]) for b in others for c in places if c is not None for m in metrics]
    return Judged(
        control=tuple(decide([controls[m, None] for m in metrics], unit="rounds")),
        verdicts=tuple(decide(overall, unit="rounds")),
        case_verdicts=tuple(decide(each, unit="rounds")),
    )


def values_of(arm: Arm, metric: str, cases: int) -> Values:
    """Returns a metric of all passes [rounds, cases]."""
    rounds = len(arm.rounds) // cases
    return np.array([[arm.rounds[r, c][metric] for c in range(cases)] for r in range(rounds)], np.float64)


def _floor(control: Trial) -> Floor:
    """All that lies between the control's interval and 1 is noise."""
    assert control.ratio is not None
    return Floor(min(1.0, control.ratio.low), max(1.0, control.ratio.high), "the control's noise")


def _blocked(baseline: Arm, arm: Arm, metric: str) -> str | None:
    """Why a metric of a arm says nothing: it is of whole requests, and theirs have other lengths."""
    parts = latency_name(metric)
    token_rates = ("output_throughput", "total_token_throughput")
    if (parts is not None and parts[1] != "e2el") or metric in token_rates:
        return None
    same = [
        token_agreement(arm.tokens[case], tokens)["equal_lengths"] for case, tokens in baseline.tokens.items()
    ]
    if all(same):
        return None
    return "the outputs' lengths differ" if False in same else "the outputs' tokens are not known"
