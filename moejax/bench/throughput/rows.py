"""A throughput result's rows: a mode's latencies, rates, queue and cache; and one mode over another."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from moejax.bench.backends.moejax import MoejaxBackend
from moejax.bench.backends.peer_ratios import against_first, blank_unknown
from moejax.bench.common.agreement import percent_agreed
from moejax.bench.common.step_cost import traffic_step_costs
from moejax.bench.common.timeline import step_metrics
from moejax.bench.driver import TrafficRun
from moejax.bench.throughput.modes import Mode
from moejax.bench.traffic import ThroughputWorkload, ideal_hit_rate, plan_fields
from moejax.core.hardware import Hardware
from moejax.results.metric_names import GLOSSARY, RATES, SERVICE
from moejax.results.metrics import case_row, flat_metrics, summarize
from moejax.results.statistics import interval_fields, paired_ratio

_TOTALS = ("completed", "total_input_tokens", "total_output_tokens", "duration_s")


def mode_rows(
    modes: Sequence[Mode], workload: ThroughputWorkload, hardware: Hardware | None = None
) -> list[dict[str, Any]]:
    """A row for each mode, in their order; utilisation is of `hardware`, one device, where it is known."""
    rows = [_row(mode, workload, index, hardware) for index, mode in enumerate(modes)]
    own = [mode for mode in modes if isinstance(mode.backend, MoejaxBackend)] or modes
    for mode, row in zip(modes, rows, strict=True):
        if mode.backend.name != modes[0].backend.name:
            first = next(one for one in modes if one.workload == mode.workload)
            row |= against_first(*([run.metrics(workload.slo) for run in one.runs] for one in (mode, first)))
        ours = next(one for one in own if one.workload == mode.workload)
        if mode.backend.name != ours.backend.name and workload.temperature == 0:
            row["tokens_agree_percent"] = percent_agreed(
                *([item.token_ids for item in one.runs[0].served] for one in (mode, ours))
            )
    return rows


def _row(mode: Mode, workload: ThroughputWorkload, index: int, hardware: Hardware | None) -> dict[str, Any]:
    """Returns a mode's row in `cases`. Records and steps of all iterations are pooled. Rates are medians over
    them: a pooled rate would let one slow iteration pull it down. `duration_s` is their sum."""
    limit, plan = mode.backend.max_num_seqs, mode.plan
    fields = {
        "case": index,
        "backend": mode.backend.name,
        "batching": mode.batching,
        "max_num_seqs": limit,
        "batch_size": limit or len(plan),
        **plan_fields(plan, mode.workload),
    }
    if workload.duration_s is not None:
        fields["num_requests"] = len(mode.runs[0].served)
    served, steps = mode.served, [step for run in mode.runs for step in run.steps]
    records, measured = [item.record for item in served], [item for run in mode.runs for item in run.measured]
    row = case_row(fields, [item.record for item in measured], 0.0, workload.slo)
    passes = [run.metrics(workload.slo) for run in mode.runs]
    row |= {name: _median([one[name] for one in passes]) for name in RATES}
    row |= {name: sum(one[name] or 0 for one in passes) for name in _TOTALS}
    row |= {name: _median([one.get(name) for one in passes]) for name in SERVICE if name in passes[0]}
    row |= summarize([item.queue_s * 1e3 for item in measured if item.queue_s is not None], "queue")
    counted = [step for run in mode.runs for step in run.measured_steps]
    row |= step_metrics(counted, mode.backend.stats()["block_size"])
    row = blank_unknown(row, itl_known=mode.backend.itl_known)
    if isinstance(mode.backend, MoejaxBackend):
        traced = mode.trace, mode.runs[0].steps
        used, mode.step_costs = traffic_step_costs(mode.backend.llm, records, steps, hardware, *traced)
        row |= used
        if mode.backend.llm.engine_config.prefix_cache.enabled:
            prompts = sum(item.record.prompt_len for item in served)
            cached = sum(item.record.metrics.cached_tokens for item in served)
            row["prefix_hit_rate"] = cached / prompts if prompts else None
            row["prefix_hit_rate_ideal"] = ideal_hit_rate(map(_asked, mode.runs))
    else:
        row["preemptions"] = None  # not told
    row["failed"] = sum(item.failed for item in served)
    row["aborted"] = sum(item.aborted for item in served)
    row["failed_steps"] = mode.failed_steps
    row["first_error"] = next((item.error for item in served if item.error), None)
    return row


def metrics_of_all(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the flat metrics of a mode's cases: of a single one all, of several the totals."""
    counts = [m.name for m in GLOSSARY if m.section == "Rates and totals" and m.exact]
    totals = {name: sum(row[name] for row in rows) for name in (*counts, "duration_s")}
    return totals if len(rows) > 1 else flat_metrics(rows[0])


def iteration_rates(mode: Mode, workload: ThroughputWorkload) -> list[dict[str, Any]]:
    """Each iteration's rates and duration."""
    passes = [run.metrics(workload.slo) for run in mode.runs]
    return [{name: metrics[name] for name in ("duration_s", *RATES)} for metrics in passes]


def _asked(run: TrafficRun) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Returns the prompts and outputs of a pass in order of arrival."""
    in_order = sorted(run.served, key=lambda item: item.record.metrics.arrival_time)
    return [(item.prompt_token_ids, item.token_ids) for item in in_order if item.prompt_token_ids]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def speedup(
    modes: Sequence[Mode], rows: Sequence[Mapping[str, Any]], workload: ThroughputWorkload
) -> dict[str, float | None]:
    """Continuous over static, where both were measured in one case: output tokens/s, as the median of the
    iterations' ratios with its bootstrap interval, and the 99th percentile of the time to the first token
    where both have one."""
    by_name = {mode.batching: mode for mode in modes if isinstance(mode.backend, MoejaxBackend)}
    if not {"continuous", "static"} <= by_name.keys() or len(workload.users) > 1:
        return {}
    rates = (
        [rates["output_throughput"] for rates in iteration_rates(by_name[name], workload)]
        for name in ("continuous", "static")
    )
    ratio = paired_ratio(*rates)
    ttft = {row["batching"]: row["p99_ttft_ms"] for row in rows if row["backend"] == "moejax"}
    return {
        **interval_fields("speedup_over_static", ratio),
        "p99_ttft_ratio": None if None in ttft.values() else ttft["continuous"] / ttft["static"],
    }


def request_rows(mode: Mode, workload: ThroughputWorkload) -> list[dict[str, Any]]:
    """Rows of requests.jsonl; `arrival_s` counts from its iteration's start."""
    return [
        {
            **row,
            "backend": mode.backend.name,
            "batching": mode.batching,
            "iteration": iteration,
        }
        for iteration, run in enumerate(mode.runs)
        for row in run.rows(workload.slo)
    ]
