"""Runs side by side: which inputs differ, which metrics differ beyond noise, and which run is better, or that
nobody can say. No JAX here.

    from moejax.results.compare import compare
    comparison = compare(["outputs/latency/A", "outputs/latency/B"])
    comparison.lines(), comparison.verdicts, comparison.differences
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence

from moejax.core.errors import ConfigError, unknown
from moejax.results.compare.comparison import MetricRow, RunComparison, exact_trial
from moejax.results.compare.inputs import (
    between,
    conditions,
    incomparable,
    input_differences,
    same_inputs,
)
from moejax.results.compare.judge import noise_floor, trials
from moejax.results.compare.runs import Run, load_runs
from moejax.results.compare.samples import Cases, shared_cases
from moejax.results.machine import has_same_roof, is_share_of_roof, roof_line
from moejax.results.metric_names import EXACT, JUDGED, RATES, latency_name
from moejax.results.metrics import is_number, objectives
from moejax.results.verdict import Floor, Trial, decide, exact_verdict

__all__ = ["ACROSS", "SHOWN_FIRST", "RunComparison", "compare"]

ACROSS = ("model", "workload", "device")
"""Differences that keep a winner from being called, unless `across` says that they are what is compared."""


def compare(
    paths: Sequence[str | os.PathLike[str]],
    metrics: Sequence[str] | None = None,
    *,
    across: Iterable[str] = (),
    floor: float | None = None,
) -> RunComparison:
    """Loads and compares runs of one experiment.

    Args:
        paths: run folders, result.json files or offline W&B runs; the first is the baseline.
        metrics: what to judge by; None takes those of `JUDGED` that the runs have. Each costs the others some
            power, since all are adjusted together.
        across: among `ACROSS`, in what the runs are meant to differ.
        floor: the relative difference of two runs of the same command that is still noise; None takes the
            platform's, see `judge.NOISE_FLOOR`. Where some of the runs have the baseline's very inputs, their
            difference counts as noise too.

    Raises:
        ConfigError: fewer than two runs, a path that is none, other experiments, an unknown metric or kind.
    """
    if len(paths) < 2:
        raise ConfigError(f"compare needs at least two runs, got {len(paths)}")
    across = tuple(across)
    for kind in across:
        if kind not in ACROSS:
            raise ConfigError(f"across: {unknown('kind', kind, ACROSS)}")
    if floor is not None and not 0 <= floor < 1:
        raise ConfigError(f"noise_floor must be at least 0 and below 1 (0.05: five per cent), got {floor}")
    runs = load_runs(paths)
    chosen = _chosen(runs, metrics)
    cases = [Cases(run) for run in runs]
    apart = input_differences(runs)
    reasons = {run.label: incomparable(runs, 0, i, apart) for i, run in enumerate(runs) if i}
    platform = (runs[0].result["provenance"].get("device") or {}).get("platform")
    noise = noise_floor(platform, floor)
    overall: list[Trial] = []
    each: list[Trial] = []
    notes = [f"{run.label}: {line}" for run in runs for line in run.missing]
    notes += [line for run in runs for line in conditions(run)]
    notes += [f"{run.label}: good requests: {text}" for run in runs if (text := objectives(run.result))]
    if not has_same_roof(run.result for run in runs):
        notes.append("shares of the roof are not compared: the runs' roofs differ")
        notes += [f"{run.label}: {line}" for run in runs if (line := roof_line(run.result))]
    for index, other in enumerate(cases[1:], start=1):
        why = [text for kind, text in reasons[other.run.label].items() if kind not in across]
        same_slo = not any(d.key.startswith("workload.slo") for d in between(apart, 0, index))
        first, second, left = trials(
            cases[0], other, chosen, noise, why[0] if why else None,
            same_work="workload" not in across, same_slo=same_slo,
        )  # fmt: skip
        overall, each, notes = overall + first, each + second, notes + left
    known = numeric_metrics(runs)
    counted = [name for name in EXACT if name in known and (metrics is None or name in metrics)]
    same = {run.label for index, run in enumerate(runs) if index and same_inputs(apart, index)}
    overall, each = _seen_noise(overall, same), _seen_noise(each, same)
    return RunComparison(
        runs=tuple(runs),
        cases=tuple(cases),
        differences=tuple(apart),
        blocked=reasons,
        verdicts=tuple(decide(overall)),
        case_verdicts=tuple(decide(each)),
        exact=tuple(exact_verdict(exact_trial(name, run, runs[0])) for run in runs[1:] for name in counted),
        metrics=tuple(_metric_rows(runs, cases, metrics)),
        notes=tuple(dict.fromkeys(notes)),
        floor=noise,
    )


def _seen_noise(trials_: Sequence[Trial], same: set[str]) -> list[Trial]:
    """Trials whose noise is at least what runs with the baseline's inputs differ by; such a run has no winner
    itself, however far apart the two are: nothing that is recorded could be the reason."""
    seen: dict[tuple[str, str | None], Floor] = {}
    for trial in trials_:
        if trial.run in same and trial.ratio is not None:
            factor = max(trial.ratio.estimate, 1.0 / trial.ratio.estimate)
            why = f"session noise: {trial.run} has {trial.baseline}'s inputs and differs by {factor:.2f}x"
            floor = Floor.symmetric(factor - 1.0, why)
            key = (trial.metric, trial.case)
            seen[key] = seen[key].widened(floor) if key in seen else floor
    floors = [trial.floor.widened(seen.get((trial.metric, trial.case), trial.floor)) for trial in trials_]
    return [dataclasses.replace(trial, floor=floor) for trial, floor in zip(trials_, floors, strict=True)]


def numeric_metrics(runs: Sequence[Run], *, cases: bool = False) -> dict[str, None]:
    """Every metric that any run, or with `cases` any of its cases, has a number for, without shares of
    different roofs."""
    rows = [run.result["metrics"] for run in runs]
    rows += [case for run in runs for case in run.result.get("cases") or ()] if cases else []
    same = has_same_roof(run.result for run in runs)
    values = [item for row in rows for item in row.items()]
    return {name: None for name, value in values if is_number(value) and (same or not is_share_of_roof(name))}


def _chosen(runs: Sequence[Run], metrics: Sequence[str] | None) -> list[str]:
    """The metrics to judge by: of the whole run, or of its cases where the whole has other figures."""
    known = numeric_metrics(runs, cases=True)
    if metrics is None:
        # A fixed batch's rate says what its end-to-end latency has said.
        rates = () if runs[0].experiment.startswith("latency") else RATES
        return [name for name in JUDGED if name in known and (latency_name(name) or name in rates)]
    for name in metrics:
        if name not in known:
            raise ConfigError(unknown("metric", name, known))
    return [name for name in metrics if latency_name(name) or name in RATES]


SHOWN_FIRST = (
    "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "median_itl_ms", "p99_itl_ms",
    "median_e2el_ms", "p99_e2el_ms", *RATES, "p99_queue_ms", "mean_batch_size", "cache_use_mean",
    "padding_waste", "preemptions", "failed", "speedup_over_static", "process_peak_bytes",
    "device_peak_bytes", "compile_seconds", "energy_per_output_token_j", "cost_per_million_output_tokens",
    "mfu_percent", "mbu_percent", "launches_per_layer", "launches_per_step", "launches_outside", "host_syncs",
    "kernels_with_spills", "copies_of_pool_bytes", "f32_weight_copy_bytes", "temp_bytes", "peak_bytes",
    "modelled_ms",
)  # fmt: skip


def _metric_rows(
    runs: Sequence[Run], cases: Sequence[Cases], asked: Sequence[str] | None
) -> Iterator[MetricRow]:
    """Yields flat metrics, and then case by case those that not every run has flat."""
    flat, known = numeric_metrics(runs), numeric_metrics(runs, cases=True)
    first = [name for name in (SHOWN_FIRST if asked is None else asked) if name in known]
    for name in first or [name for name in flat if not name.endswith(("_low", "_high"))]:
        if name in flat:
            yield MetricRow(name, tuple(run.result["metrics"].get(name) for run in runs))
    apart = [name for name in first if any(run.result["metrics"].get(name) is None for run in runs)]
    for case, places in shared_cases(cases) if all(c.rows for c in cases) else ():
        for name in apart:
            values = tuple(c.rows[place].get(name) for c, place in zip(cases, places, strict=True))
            if any(map(is_number, values)):
                yield MetricRow(name, values, case)
