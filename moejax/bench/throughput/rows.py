"""A throughput result's rows: a mode's latencies, rates, queue and cache; and one mode over another."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from moejax.bench.backends.moejax import MoejaxBackend
from moejax.bench.backends.peer_ratios import against_first, blank_unknown
from moejax.bench.common.agreement import percent_agreed
from moejax.bench.common.step_cost import traffic_step_costs
from moejax.bench.common.timeline import step_metrics
from moejax.bench.throughput.modes import Mode
from moejax.bench.traffic import ThroughputWorkload, ideal_hit_rate, plan_fields
from moejax.core.hardware import Hardware
from moejax.results.metric_names import RATES
from moejax.results.metrics import RequestRecord, case_row, compute_metrics, summarize
from moejax.results.statistics import interval_fields, paired_ratio


def mode_rows(
    modes: Sequence[Mode], workload: ThroughputWorkload, hardware: Hardware | None = None
) -> list[dict[str, Any]]:
    """A row for each mode, in their order; utilisation is of `hardware`, one device, where it is known."""
    rows = [_row(mode, workload, index, hardware) for index, mode in enumerate(modes)]
    ours = next((mode for mode in modes if isinstance(mode.backend, MoejaxBackend)), modes[0])
    for mode, row in zip(modes, rows, strict=True):
        if mode.backend.name != modes[0].backend.name:
            row |= against_first(_iterations(mode), _iterations(modes[0]))
        if mode.backend.name != ours.backend.name and workload.temperature == 0:
            row["tokens_agree_percent"] = percent_agreed(
                *([item.token_ids for item in one.runs[0].served] for one in (mode, ours))
            )
    return rows


def _iterations(mode: Mode) -> list[tuple[list[RequestRecord], float]]:
    return [(run.records, run.duration_s) for run in mode.runs]


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
        **plan_fields(plan, mode.request_rate),
    }
    served, steps = mode.served, [step for run in mode.runs for step in run.steps]
    records = [item.record for item in served]
    row = case_row(fields, records, sum(run.duration_s for run in mode.runs), workload.slo)
    rates = iteration_rates(mode, workload)
    row |= {name: _median([run[name] for run in rates]) for name in RATES}
    row |= summarize([item.queue_s * 1e3 for item in served if item.queue_s is not None], "queue")
    row |= step_metrics(steps, mode.backend.stats()["block_size"])
    row = blank_unknown(row, itl_known=mode.backend.itl_known)
    if isinstance(mode.backend, MoejaxBackend):
        traced = mode.trace, mode.runs[0].steps
        used, mode.step_costs = traffic_step_costs(mode.backend.llm, records, steps, hardware, *traced)
        row |= used
        if mode.backend.llm.engine_config.prefix_cache.enabled:
            prompts = sum(item.record.prompt_len for item in served)
            cached = sum(item.record.metrics.cached_tokens for item in served)
            row["prefix_hit_rate"] = cached / prompts if prompts else None
            row["prefix_hit_rate_ideal"] = ideal_hit_rate(plan)
    else:
        row["preemptions"] = None  # not told
    row["failed"] = sum(item.failed for item in served)
    row["aborted"] = sum(item.aborted for item in served)
    row["failed_steps"] = mode.failed_steps
    row["first_error"] = next((item.error for item in served if item.error), None)
    return row


def iteration_rates(mode: Mode, workload: ThroughputWorkload) -> list[dict[str, Any]]:
    """Each iteration's rates and duration."""
    passes = [compute_metrics(run.records, run.duration_s, workload.slo) for run in mode.runs]
    return [{name: metrics[name] for name in ("duration_s", *RATES)} for metrics in passes]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def speedup(
    modes: Sequence[Mode], rows: Sequence[Mapping[str, Any]], workload: ThroughputWorkload
) -> dict[str, float | None]:
    """Continuous over static, where both were measured: output tokens/s, as the median of the iterations'
    ratios with its bootstrap interval, and the 99th percentile of the time to the first token where both
    have one."""
    by_name = {mode.batching: mode for mode in modes if isinstance(mode.backend, MoejaxBackend)}
    if not {"continuous", "static"} <= by_name.keys():
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
