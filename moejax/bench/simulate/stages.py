"""`run_stages`: configurations that build on each other, simulated: what each gains over the one before."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from moejax.bench.ab.config import AblationSection
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.simulate.run import Asked, deployed, load_rows, planned, simulated_kind, start_simulated
from moejax.core.hardware import KNOWN
from moejax.report.progress import progress
from moejax.results.result import Result

_RATIOS = ("output_throughput", "median_ttft_ms", "median_tpot_ms")
"""Metrics of each case that are told as ratios over the first stage's of the same load."""


def run_stages(stages: Mapping[str, Asked], ablation: AblationSection, run: ExperimentRun) -> Result:
    """Simulates each stage's layouts under its loads and finishes `run`.

    Args:
        stages: in their order, each with the overrides of those before.

    Returns:
        The content of `result.json`: a row in `cases` for each stage, layout and load; `stages` as
        `moejax.report.ablation` takes them, a stage that does not fit its devices without a latency and with
        "OOM" for its memory; `reference`.

    Raises:
        ConfigError: an unknown model or device, or a request that is too long.
    """
    kind = simulated_kind(run)
    loads = {name: planned(asked) for name, asked in stages.items()}
    found = {name: deployed(asked, kind) for name, asked in stages.items()}
    start_simulated(run, next(iter(stages.values())).workload, kind)
    rows: list[dict[str, Any]] = []
    told: list[dict[str, Any]] = []
    with progress("simulating") as task:
        for name, asked in stages.items():
            deployments, refused = found[name]
            mine = load_rows(deployments, asked.section, loads[name], task)
            first = [row for row in rows if row["error"] is None]
            rows += [{"stage": name, **_against(row, first)} for row in mine]
            rows += [{"stage": name, "layout": layout, "error": why} for layout, why in refused.items()]
            told.append(_stage(name, mine, refused, ablation, told))
    metrics: dict[str, Any] = {
        f"{metric}_{row['stage']}": row[metric]
        for row in told
        for metric in ("gain", "cumulative_gain")
        if metric in row
    }
    result = run.result(
        metrics=metrics,
        cases=[{"case": number, **row} for number, row in enumerate(rows)],
        hardware={**dataclasses.asdict(KNOWN[kind]), "simulated": True},
        stages=told,
        reference=[dataclasses.asdict(stage) for stage in ablation.reference],
    )
    return run.finish(result, tables={"stages": told})


def _against(row: dict[str, Any], earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a case with its metrics over the first stage's that served the same load."""
    before = next((one for one in earlier if one.get("load") == row.get("load")), None)
    if before is None:
        return row
    known = [name for name in _RATIOS if row.get(name) and before.get(name)]
    return row | {f"ratio_{name}": row[name] / before[name] for name in known}


def _stage(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    refused: Mapping[str, str],
    ablation: AblationSection,
    before: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Returns a stage's row: of several cases geometric means, and the most memory. Gains have 90 % intervals
    for which the errors of both stages' steps are independent, which is wide where both run the same kernels.
    """
    stage: dict[str, Any] = {"stage": name, "overrides": ablation.stages[name], "latency_ms": None}
    if not rows:
        return stage | {"memory_gb": "OOM", "error": "; ".join(refused.values())}
    stage["latency_ms"] = _mean([row["mean_e2el_ms"] for row in rows])
    stage |= {metric: _mean([row.get(metric) for row in rows]) for metric in ablation.metrics}
    stage["memory_gb"] = max(row["memory_gb"] for row in rows)
    stage["relative_spread"] = statistics.mean(row["relative_spread"] for row in rows)
    timed = [one for one in before if one["latency_ms"] is not None]
    for metric, other in (("gain", timed[-1:]), ("cumulative_gain", timed[:1])):
        for one in other or [stage]:
            ratio = one["latency_ms"] / stage["latency_ms"]
            both = (one["relative_spread"], stage["relative_spread"]) if other else (0.0,)
            spread = math.exp(math.hypot(*map(math.log1p, both)))
            stage |= {metric: ratio, f"{metric}_low": ratio / spread, f"{metric}_high": ratio * spread}
    return stage


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value]
    return statistics.geometric_mean(known) if known else None
