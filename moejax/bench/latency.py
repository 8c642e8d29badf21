"""The latency experiment: fixed batches, measured in interleaved iterations.

warm-up: every case once, so that all is compiled   → from here on a compilation is a defect
routing: every case once more, expert counts recorded, not timed
measure: iteration by iteration, each through all cases, so that a slow moment of the machine meets all
report:  result.json, requests.jsonl, plots, tracker, table
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.bench.metrics import RequestRecord, case_row, compute_metrics
from moejax.bench.result import build_result, ensure_writable, write_requests, write_result
from moejax.bench.timing import peak_memory, weight_metrics
from moejax.bench.workload import LatencyCase, WorkloadConfig, case_prompts, latency_cases, workload_hash
from moejax.core.errors import ConfigError
from moejax.core.hardware import Hardware, get_hardware, together
from moejax.core.resolve import as_dict
from moejax.engine.llm import LLM
from moejax.engine.request import RequestOutput
from moejax.nn.param import specs
from moejax.perf.cost import decode_step_cost
from moejax.perf.memory import held_weights
from moejax.perf.roofline import step_bound
from moejax.report.plots import save_latency_plots
from moejax.report.progress import progress
from moejax.report.tables import print_closing, print_latency, stderr_console
from moejax.tracking.base import CompositeTracker, RunInfo, TrackerConfig, make_tracker
from moejax.tracking.provenance import collect

logger = logging.getLogger(__name__)


@dataclass
class CaseData:
    """One case's prompts, what was measured of it, and its recorded routing."""

    case: LatencyCase
    prompts: list[list[int]]
    records: list[RequestRecord] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    decode_hits: np.ndarray | None = None
    overflow: dict[str, int] = field(default_factory=dict)


def run_latency(
    llm: LLM,
    workload: WorkloadConfig,
    tracker_config: TrackerConfig,
    out_dir: Path,
    *,
    config: Mapping[str, Any],
    name: str,
    hardware_kind: str = "auto",
) -> dict[str, Any]:
    """Runs the experiment and writes its results into `out_dir`.

    Args:
        config: the whole resolved configuration, for the record.
        name: the model's short name.
        hardware_kind: what the roofline is of, see `moejax.core.hardware.get_hardware`.

    Returns:
        The content of `result.json`.

    Raises:
        ConfigError: a case longer than the model allows; checked before anything runs.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    ensure_writable(out_dir)
    data = [CaseData(case, _prompts(llm, workload, case)) for case in latency_cases(workload)]
    hardware = get_hardware(hardware_kind, jax.devices()[0].device_kind)
    if hardware is not None:
        hardware = together(hardware, llm.parallel_config.num_devices)
    provenance = collect(
        config,
        seeds={"engine": llm.seed, "workload": workload.seed},
        checkpoint=llm.model_dir,
        workload=workload_hash(workload),
    )
    for resolution in llm.resolutions:
        logger.info("%s", resolution)
    info = RunInfo("latency", name, out_dir, config={**config, "provenance": provenance})
    with make_tracker(tracker_config, info) as tracker:
        _measure(llm, workload, data)
        rows = [_row(llm, item, workload, hardware, i) for i, item in enumerate(data)]
        result = _build(llm, workload, data, rows, config, provenance, hardware)
        files = [
            write_result(result, out_dir),
            write_requests([r for item in data for r in item.records], out_dir),
        ]
        _report(result, rows, data, files, tracker, out_dir)
    console = stderr_console()
    print_latency(result, console)
    if dropped := result["metrics"]["dropped_assignments"]:
        console.print(
            f"{dropped} expert assignments dropped for lack of capacity (recorded pass)", style="yellow"
        )
    print_closing(console, out_dir, tracker.hints(), llm.ledger.rows())
    return result


def _prompts(llm: LLM, workload: WorkloadConfig, case: LatencyCase) -> list[list[int]]:
    if case.total_len > llm.max_model_len:
        raise ConfigError(
            f"case {case.name}: {case.prompt_len} + {case.output_len} tokens exceed the limit of "
            f"{llm.max_model_len}; shorten workload.prompt_len or workload.output_len"
        )
    encode = llm.tokenizer.encode if llm.tokenizer else None
    return case_prompts(workload, case, llm.config.vocab_size, encode=encode)


def _measure(llm: LLM, workload: WorkloadConfig, data: Sequence[CaseData]) -> None:
    """Warm-up, routing pass, then the timed iterations."""
    total = len(data) * (workload.warmup + 1 + workload.iterations)
    with progress("compiling and warming up", total=total) as task:
        for item in data:
            for _ in range(workload.warmup):
                _generate(llm, workload, item)
                task.advance()
        task.describe("recording routing")
        for item in data:
            llm.routing.reset()
            _generate(llm, workload, item, record_routing=True)
            item.counts = {phase: counts.copy() for phase, counts in llm.routing_counts.items()}
            item.overflow = dict(llm.routing.overflow)
            steps = llm.routing.steps["decode"]
            item.decode_hits = llm.routing.hits["decode"] / steps if steps else None
            task.advance()
        llm.ledger.warmed_up = workload.warmup > 0
        task.describe("measuring")
        for _ in range(workload.iterations):
            for index, item in enumerate(data):
                outputs = _generate(llm, workload, item)
                start = min(output.metrics.arrival_time for output in outputs)
                end = max(output.metrics.token_times[-1] for output in outputs)
                item.durations.append(end - start)
                item.records += [RequestRecord.from_output(output, case=index) for output in outputs]
                task.advance()


def _generate(
    llm: LLM, workload: WorkloadConfig, item: CaseData, *, record_routing: bool = False
) -> list[RequestOutput]:
    params = [workload.sampling(item.case.output_len, i) for i in range(item.case.batch_size)]
    return llm.generate(item.prompts, params, record_routing=record_routing)


def _row(
    llm: LLM, item: CaseData, workload: WorkloadConfig, hardware: Hardware | None, index: int
) -> dict[str, Any]:
    """A case's metrics with its decode bound."""
    fields = {
        "case": index,
        "batch_size": item.case.batch_size,
        "prompt_len": item.case.prompt_len,
        "output_len": item.case.output_len,
    }
    row = case_row(fields, item.records, sum(item.durations), workload.slo)
    if item.decode_hits is None:
        return row
    row["mean_experts_hit"] = float(item.decode_hits[list(llm.config.moe_layers)].mean())
    context = item.case.prompt_len + item.case.output_len / 2
    declared = {name: spec for stage in llm.stages for name, spec in specs(stage).items()}
    held = held_weights(llm.config, declared)
    batch, kv = item.case.batch_size, llm.kv_cache_dtype
    cost = decode_step_cost(llm.config, batch, context, item.decode_hits, kv_dtype=kv, held=held)
    row["decode_step_mbytes"] = cost.bytes / 1e6
    bound = step_bound(cost, hardware, llm.config.dtype)
    if bound is not None and row.get("median_tpot_ms"):
        row["roofline_tpot_ms"] = bound.seconds * 1e3
        row["roofline_limit"] = bound.limit
        row["roofline_percent"] = 100 * bound.seconds * 1e3 / row["median_tpot_ms"]
    return row


def _build(
    llm: LLM,
    workload: WorkloadConfig,
    data: Sequence[CaseData],
    rows: list[dict[str, Any]],
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    hardware: Hardware | None,
) -> dict[str, Any]:
    records = [record for item in data for record in item.records]
    duration = sum(sum(item.durations) for item in data)
    metrics = compute_metrics(records, duration, workload.slo)
    metrics |= peak_memory() | weight_metrics(llm.stages) | {"kv_cache_bytes": llm.runner.cache_bytes}
    metrics["compile_seconds"] = llm.ledger.seconds
    # Of the recorded pass through every case; a drop is possible only under capacity execution.
    for name in ("dropped", "rerouted"):
        metrics[f"{name}_assignments"] = sum(item.overflow[name] for item in data)
    metrics["recompiles_after_warmup"] = len(llm.ledger.recompiles)
    routing = {
        "counts": sum(sum(item.counts.values()) for item in data),
        "cases": [{"case": i, **item.counts, **item.overflow} for i, item in enumerate(data)],
        "num_experts_per_tok": llm.config.num_experts_per_tok,
        "moe_layers": list(llm.config.moe_layers),
    }
    return build_result(
        "latency",
        metrics=metrics,
        cases=rows,
        config=config,
        provenance=provenance,
        compile_ledger=llm.ledger.rows(),
        routing=routing,
        resolved=as_dict(llm.resolutions),
        hardware=dataclasses.asdict(hardware) if hardware else None,
    )


def _report(
    result: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    data: Sequence[CaseData],
    files: Sequence[Path],
    tracker: CompositeTracker,
    out_dir: Path,
) -> None:
    """Plots, and everything to the tracker."""
    records = [record for item in data for record in item.records]
    plots = save_latency_plots(result, records, out_dir)
    for metric in ("median_ttft_ms", "median_tpot_ms", "median_e2el_ms"):
        tracker.define_metric(metric, step_metric="case", summary="min")
    tracker.define_metric("output_throughput", step_metric="case", summary="max")
    for i, row in enumerate(rows):
        tracker.log({k: v for k, v in row.items() if isinstance(v, (int, float))}, step=i)
    tracker.summary({k: v for k, v in result["metrics"].items() if v is not None})
    columns = list(dict.fromkeys(key for row in rows for key in row))
    tracker.table("cases", columns, [[row.get(key) for key in columns] for row in rows])
    for plot in plots:
        tracker.image(plot.stem, plot)
    tracker.artifact("latency-result", "result", files)
