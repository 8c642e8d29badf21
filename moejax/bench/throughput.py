"""The throughput experiment: requests that arrive over time, served by one or several batching modes.

plan:    every request's arrival, prompt and length, once for all modes; checked before anything runs
warm-up: every bucket that the traffic can reach, then a short pass; a later compilation is a defect
measure: iteration by iteration, each through all modes, every other one backwards, as `bench.timing` does
report:  result.json, requests.jsonl, plots, tracker, table
"""

import dataclasses
import gc
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from moejax.bench.driver import ServedRequest, TrafficRun, drive
from moejax.bench.metrics import case_row, compute_metrics, summarize
from moejax.bench.result import build_result, ensure_writable, write_request_rows, write_result
from moejax.bench.statistics import paired_ratio
from moejax.bench.timeline import bin_steps, step_metrics
from moejax.bench.timing import peak_memory, weight_metrics
from moejax.bench.traffic import PlannedRequest, ThroughputWorkload, plan_requests, traffic_hash
from moejax.core.errors import ConfigError, RequestError
from moejax.core.hardware import Hardware, get_hardware
from moejax.core.resolve import as_dict
from moejax.engine.llm import LLM
from moejax.report.progress import Task, progress
from moejax.report.tables import print_closing, print_throughput, stderr_console
from moejax.report.throughput_plots import save_throughput_plots
from moejax.sharding.distributed import agree
from moejax.tracking.base import CompositeTracker, RunInfo, TrackerConfig, make_tracker
from moejax.tracking.provenance import collect

logger = logging.getLogger(__name__)

# Rates are medians over the iterations; a pooled rate would let one slow iteration pull it down.
_RATES = ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput")
# A warm-up pass is twice the engine's batch, too short to cost much, and of unequal lengths: the batch fills,
# takes in single prompts as others end, and drains, so that most programs have run once before it counts. The
# first run of a compiled program takes tens of milliseconds more than the next on CPU.
_WARMUP_TOKENS = 16
# Rows of the first mode's timeline that go to the tracker; the result has up to `timeline.MAX_POINTS`.
_TRACKED_POINTS = 200


@dataclass
class Mode:
    """A batching mode, its engine, and what was measured of it."""

    batching: str
    llm: LLM
    runs: list[TrafficRun] = field(default_factory=list)
    failed_steps: int = 0

    @property
    def served(self) -> list[ServedRequest]:
        return [item for run in self.runs for item in run.served]


def run_throughput(
    llm: LLM,
    workload: ThroughputWorkload,
    tracker_config: TrackerConfig,
    out_dir: Path,
    *,
    config: Mapping[str, Any],
    name: str,
    hardware_kind: str = "auto",
) -> dict[str, Any]:
    """Runs the experiment and writes its results into `out_dir`.

    `llm`'s own batching mode comes first and is what the flat metrics are of; `workload.compare` adds modes
    that share its weights and have a cache and a scheduler of their own.

    Args:
        config: the whole resolved configuration, for the record.
        name: the model's short name.
        hardware_kind: the device that the result names, see `moejax.core.hardware.get_hardware`.

    Returns:
        The content of `result.json`.

    Raises:
        ConfigError: a request longer than the model or the cache allows; checked before anything runs.
        RequestError: no request at all was completed.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    ensure_writable(out_dir)
    encode = llm.tokenizer.encode if llm.tokenizer else None
    plan = plan_requests(workload, llm.config.vocab_size, encode=encode)
    _check_lengths(llm, plan)
    hardware = get_hardware(hardware_kind, jax.devices()[0].device_kind)
    provenance = collect(
        config,
        seeds={"engine": llm.seed, "workload": workload.seed},
        checkpoint=llm.model_dir,
        workload=traffic_hash(workload),
    )
    for resolution in llm.resolutions:
        logger.info("%s", resolution)
    info = RunInfo("throughput", name, out_dir, config={**config, "provenance": provenance})
    with make_tracker(tracker_config, info) as tracker:
        modes = _modes(llm, workload)
        _measure(modes, workload, plan)
        rows = [_row(mode, workload, plan, index) for index, mode in enumerate(modes)]
        result = _build(modes, workload, rows, config, provenance, hardware)
        requests = [row for mode in modes for row in _request_rows(mode, workload)]
        files = [write_result(result, out_dir), write_request_rows(requests, out_dir)]
        curves = bin_steps(modes[0].runs[0].steps, modes[0].runs[0].start, _TRACKED_POINTS)
        _report(result, requests, curves, files, tracker, out_dir)
    console = stderr_console()
    print_throughput(result, console)
    print_closing(console, out_dir, tracker.hints(), result["compile_ledger"])
    return result


def _modes(llm: LLM, workload: ThroughputWorkload) -> list[Mode]:
    own = llm.engine_config.batching
    others = [mode for mode in dict.fromkeys(workload.compare) if mode != own]
    variants = [llm.variant(dataclasses.replace(llm.engine_config, batching=mode)) for mode in others]
    return [Mode(own, llm), *(Mode(mode, variant) for mode, variant in zip(others, variants, strict=True))]


def _check_lengths(llm: LLM, plan: Sequence[PlannedRequest]) -> None:
    """Every request fits the model, and alone also the cache: there is no use in waiting for more of it."""
    longest = max(plan, key=lambda asked: asked.total_len)
    prompt, output = len(longest.prompt_token_ids), longest.output_len
    text = f"the longest request has {prompt} + {output} tokens"
    remedy = "shorten workload.prompt_len or workload.output_len"
    if longest.total_len > llm.max_model_len:
        raise ConfigError(f"{text}, over the limit of {llm.max_model_len} (engine.max_model_len); {remedy}")
    stats = llm.stats()
    # The last token is never fed back, so its keys and values are not stored.
    blocks = math.ceil((longest.total_len - 1) / stats["block_size"])
    if blocks > stats["num_blocks"]:
        raise ConfigError(
            f"{text}: {blocks} blocks of {stats['block_size']}, and the cache has {stats['num_blocks']}; "
            f"raise engine.num_blocks or {remedy}"
        )


def _measure(modes: Sequence[Mode], workload: ThroughputWorkload, plan: Sequence[PlannedRequest]) -> None:
    """Warm-up, then the iterations."""
    with progress("compiling and warming up") as task:
        for mode in modes if workload.warmup else ():
            task.describe(f"compiling and warming up ({mode.batching})")
            _warm_up(mode, workload, plan)
    with progress("measuring", total=len(plan) * len(modes) * workload.iterations) as task:
        for iteration in range(workload.iterations):
            for index in range(len(modes))[:: 1 if iteration % 2 == 0 else -1]:
                _run(modes[index], workload, plan, index, task)


def _warm_up(mode: Mode, workload: ThroughputWorkload, plan: Sequence[PlannedRequest]) -> None:
    longest_output = max(asked.output_len for asked in plan)
    mode.llm.warmup(
        max_total_len=max(asked.total_len for asked in plan),
        sampling_params=[workload.sampling(longest_output)],
    )
    short = [
        dataclasses.replace(asked, arrival_s=0.0, output_len=min(asked.output_len, 1 + i % _WARMUP_TOKENS))
        for i, asked in enumerate(plan[: 2 * mode.llm.engine_config.max_num_seqs])
    ]
    for _ in range(workload.warmup):
        drive(mode.llm, short, workload.sampling, agree=agree)


def _run(
    mode: Mode, workload: ThroughputWorkload, plan: Sequence[PlannedRequest], case: int, task: Task
) -> None:
    """One measured pass of the traffic through a mode."""
    task.describe(f"measuring {mode.batching}")
    mode.llm.reset_stats()
    gc.collect()  # now, and not on the first mode's behalf in the second's time
    run = drive(mode.llm, plan, workload.sampling, case=case, on_progress=task.advance, agree=agree)
    mode.failed_steps += mode.llm.stats()["failed_steps"]
    if not any(record.completed for record in run.records):
        reason = next((item.error for item in run.served if item.error), "no reason given")
        raise RequestError(f"none of {len(plan)} requests was completed ({mode.batching}); first: {reason}")
    mode.runs.append(run)


def _row(
    mode: Mode, workload: ThroughputWorkload, plan: Sequence[PlannedRequest], index: int
) -> dict[str, Any]:
    """A mode's row in `cases`. Records and steps of all iterations are pooled, rates are medians over them;
    `duration_s` is their sum."""
    limit = mode.llm.engine_config.max_num_seqs
    rate = "inf" if workload.request_rate == math.inf else workload.request_rate
    fields = {
        "case": index,
        "batching": mode.batching,
        "request_rate": None if workload.trace_file else rate,
        "num_requests": len(plan),
        "max_num_seqs": limit,
        "batch_size": limit,
        "prompt_len": round(statistics.mean(len(asked.prompt_token_ids) for asked in plan)),
        "output_len": round(statistics.mean(asked.output_len for asked in plan)),
    }
    served = mode.served
    duration = sum(run.duration_s for run in mode.runs)
    row = case_row(fields, [item.record for item in served], duration, workload.slo)
    rates = _rates(mode, workload)
    row |= {name: _median([run[name] for run in rates]) for name in _RATES}
    row |= summarize([item.queue_s * 1e3 for item in served if item.queue_s is not None], "queue")
    row |= step_metrics([step for run in mode.runs for step in run.steps], mode.llm.stats()["block_size"])
    row["failed"] = sum(item.failed for item in served)
    row["aborted"] = sum(item.aborted for item in served)
    row["failed_steps"] = mode.failed_steps
    row["first_error"] = next((item.error for item in served if item.error), None)
    return row


def _rates(mode: Mode, workload: ThroughputWorkload) -> list[dict[str, Any]]:
    """Each iteration's rates and duration."""
    found = [compute_metrics(run.records, run.duration_s, workload.slo) for run in mode.runs]
    return [{name: metrics[name] for name in ("duration_s", *_RATES)} for metrics in found]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _speedup(modes: Sequence[Mode], rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Continuous over static, where both were measured: output tokens/s, as the median of the iterations'
    ratios with its bootstrap interval, and the 99th percentile of the time to the first token."""
    by_name = {mode.batching: mode for mode in modes}
    if not {"continuous", "static"} <= by_name.keys():
        return {}
    rates = {
        name: [
            sum(record.output_len for record in run.records if record.completed) / run.duration_s
            for run in by_name[name].runs
        ]
        for name in ("continuous", "static")
    }
    ratio = paired_ratio(rates["continuous"], rates["static"])
    ttft = {row["batching"]: row["p99_ttft_ms"] for row in rows}
    return {
        "speedup_over_static": ratio.estimate,
        "speedup_over_static_low": ratio.low,
        "speedup_over_static_high": ratio.high,
        "p99_ttft_ratio": ttft["continuous"] / ttft["static"],
    }


def _build(
    modes: Sequence[Mode],
    workload: ThroughputWorkload,
    rows: list[dict[str, Any]],
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    hardware: Hardware | None,
) -> dict[str, Any]:
    # A variant may have a ledger of its own or share the first one's.
    ledgers = {id(mode.llm.ledger): mode.llm.ledger for mode in modes}.values()
    kept = ("case", "batching", "batch_size", "prompt_len", "output_len", "request_rate", "first_error")
    metrics = {key: value for key, value in rows[0].items() if key not in kept}
    metrics |= _speedup(modes, rows)
    llm = modes[0].llm
    metrics |= peak_memory() | weight_metrics(llm.stages) | {"kv_cache_bytes": llm.runner.cache_bytes}
    metrics["compile_seconds"] = sum(ledger.seconds for ledger in ledgers)
    metrics["recompiles_after_warmup"] = sum(len(ledger.recompiles) for ledger in ledgers)
    return build_result(
        "throughput",
        metrics=metrics,
        cases=rows,
        config=config,
        provenance=provenance,
        compile_ledger=[row for ledger in ledgers for row in ledger.rows()],
        resolved=as_dict(modes[0].llm.resolutions),
        hardware=dataclasses.asdict(hardware) if hardware else None,
        slo=dataclasses.asdict(workload.slo),
        iterations=[
            {"case": case, "batching": mode.batching, "iteration": iteration, **rates}
            for case, mode in enumerate(modes)
            for iteration, rates in enumerate(_rates(mode, workload))
        ],
        # Of the first iteration: a mean over several would show a run that never was.
        timeline=[
            {"case": case, "batching": mode.batching, **bin_steps(mode.runs[0].steps, mode.runs[0].start)}
            for case, mode in enumerate(modes)
        ],
    )


def _request_rows(mode: Mode, workload: ThroughputWorkload) -> list[dict[str, Any]]:
    """Rows of requests.jsonl; `arrival_s` counts from its iteration's start."""
    return [
        {**item.row(run.start, workload.slo), "batching": mode.batching, "iteration": iteration}
        for iteration, run in enumerate(mode.runs)
        for item in run.served
    ]


def _report(
    result: Mapping[str, Any],
    requests: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Any],
    files: Sequence[Path],
    tracker: CompositeTracker,
    out_dir: Path,
) -> None:
    """Plots, and everything to the tracker."""
    plots = save_throughput_plots(result, requests, out_dir)
    rows = result["cases"]
    for metric in ("output_throughput", "request_throughput", "request_goodput"):
        tracker.define_metric(metric, step_metric="case", summary="max")
    for metric in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p99_itl_ms"):
        tracker.define_metric(metric, step_metric="case", summary="min")
    for i, row in enumerate(rows):
        tracker.log({k: v for k, v in row.items() if isinstance(v, (int, float))}, step=i)
    _track_timeline(curves, tracker, first_step=len(rows))
    tracker.summary({k: v for k, v in result["metrics"].items() if v is not None})
    columns = list(dict.fromkeys(key for row in rows for key in row))
    tracker.table("cases", columns, [[row.get(key) for key in columns] for row in rows])
    for plot in plots:
        tracker.image(plot.stem, plot)
    tracker.artifact("throughput-result", "result", files)


def _track_timeline(curves: Mapping[str, Any], tracker: CompositeTracker, first_step: int) -> None:
    """Queue, batch and cache over time as curves of the tracker's own, so that runs can be laid over each
    other there. `curves` are the first mode's, from `bin_steps`."""
    columns = ("time_s", "running_mean", "waiting_max", "used_blocks_max", "padded_tokens", "preempted")
    for column in columns[1:]:
        tracker.define_metric(f"timeline/{column}", step_metric="timeline/time_s")
    for i in range(len(curves["time_s"])):
        tracker.log({f"timeline/{column}": curves[column][i] for column in columns}, step=first_step + i)
