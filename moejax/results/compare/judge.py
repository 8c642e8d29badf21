"""Trials of one run against the baseline: metric by metric, over all cases and in each."""

from collections.abc import Sequence

import numpy as np

from moejax.results.compare.samples import Cases, Values, cases_apart, match_cases, modes_differ
from moejax.results.metric_names import short_name
from moejax.results.verdict import Floor, Trial

NOISE_FLOOR = {"cpu": 0.5, "gpu": 0.03}
"""By how much medians of the same command differ between two processes, as a rule at most. It is a matter of
the machine: on two quiet but virtual cores four runs of latency's `experiment=quick` within a minute came out
1.1 to 1.4 times apart in TPOT, a single case up to 1.7 (docs/log.md, 2026-11-21). That of GPUs is assumed.
Give some runs of the same command to measure one's own, or set `noise_floor`."""

_OF_WHOLE_REQUESTS = ("request_throughput", "request_goodput")


def noise_floor(platform: str | None, given: float | None) -> Floor:
    """Returns the ratios that count as noise between two processes: `given`, or the platform's."""
    relative = NOISE_FLOOR.get(platform or "cpu", NOISE_FLOOR["gpu"]) if given is None else given
    return Floor.symmetric(relative, "session noise")


def trials(
    base: Cases,
    other: Cases,
    metrics: Sequence[str],
    floor: Floor,
    blocked: str | None,
    *,
    same_work: bool = True,
    same_slo: bool = True,
) -> tuple[list[Trial], list[Trial], list[str]]:
    """Makes the trials of one run against the baseline.

    Args:
        blocked: why no metric can be compared, if so.
        same_work: whether metrics of whole requests need outputs of the same lengths.
        same_slo: whether both count the same requests as good.

    Returns:
        Trials over all cases (the geometric mean of the cases, iteration by iteration) or of the only one;
        trials of each case where there are several; and lines on what was left out.
    """
    pairs, only_base, only_other = match_cases(base, other)
    notes = []
    for label, only in ((base.run.label, only_base), (other.run.label, only_other)):
        if only:
            notes.append(f"only in {label}: {', '.join(only)}")
    if not pairs:
        labels = f"{base.run.label} and {other.run.label}"
        return [], [], [*notes, f"{labels} have {cases_apart(base, other)}"]
    several = len(pairs) > 1
    averaged = several and not modes_differ(base)
    each: list[Trial] = []
    judged: dict[str, list[tuple[Values, Values]]] = {metric: [] for metric in metrics}
    stops: dict[str, str | None] = dict.fromkeys(metrics, blocked)
    for one, two, name in pairs:
        unequal = _other_lengths(base.lengths(one), other.lengths(two)) if same_work else None
        for metric in metrics:
            (mine, why), (theirs, why_too) = base.samples(one, metric), other.samples(two, metric)
            stop = blocked or _stop(metric, unequal, same_slo)
            stops[metric] = stops[metric] or stop
            trial = _trial(metric, name if several else None, base, other, (mine, theirs), floor, stop)
            if trial is not None:
                judged[metric].append((mine, theirs))
                each.append(trial)
                continue
            zero = "a value of 0 has no ratio" if mine.size and theirs.size else None
            if reason := why or why_too or zero:
                notes.append(f"{short_name(metric)} [{name}] is not judged: {reason}")
    if not averaged:
        return each, [], notes
    overall = []
    for metric, samples in judged.items():
        if len(samples) == len(pairs):
            joined = (_average([mine for mine, _ in samples]), _average([theirs for _, theirs in samples]))
            trial = _trial(metric, None, base, other, joined, floor, stops[metric])
            overall += [trial] if trial is not None else []
    return overall, each, notes


def _stop(metric: str, unequal: str | None, same_slo: bool) -> str | None:
    """Why a metric says nothing although the workload is the same."""
    if metric == "request_goodput" and not same_slo:
        return "the objectives differ (workload.slo)"
    return unequal if metric in _OF_WHOLE_REQUESTS or metric.endswith("_e2el_ms") else None


def _other_lengths(mine: set[tuple[int, ...]], theirs: set[tuple[int, ...]]) -> str | None:
    """Shorter outputs, or requests that failed, are less work and not more speed."""
    return "the outputs' lengths differ" if mine and theirs and mine != theirs else None


def _average(samples: Sequence[Values]) -> Values:
    """The cases' geometric mean in each iteration. All cases of an iteration met the same moment."""
    count = min(values.size for values in samples)
    return np.exp(np.mean([np.log(values[:count]) for values in samples], axis=0))


def _trial(
    metric: str,
    case: str | None,
    base: Cases,
    other: Cases,
    samples: tuple[Values, Values],
    floor: Floor,
    blocked: str | None,
) -> Trial | None:
    """None where a side has no samples, or some of 0, of which there is no ratio."""
    mine, theirs = samples
    if not mine.size or not theirs.size or (mine <= 0).any() or (theirs <= 0).any():
        return None
    labels = other.run.label, base.run.label
    return Trial.of(metric, case, *labels, theirs, mine, floor=floor, blocked=blocked)
