"""`run_throughput`: plan, measure, rows, result, report."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import as_backend, engine_of
from moejax.bench.backends.registry import without_our_process
from moejax.bench.common.timeline import bin_steps
from moejax.bench.common.trace_io import write_capture
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.throughput.measure import measure
from moejax.bench.throughput.modes import Mode, plan_modes, plan_traffic
from moejax.bench.throughput.rows import iteration_rates, metrics_of_all, mode_rows, request_rows, speedup
from moejax.bench.traffic import ThroughputWorkload
from moejax.core.resolve import as_dict
from moejax.engine.llm import LLM
from moejax.results.metrics import histograms
from moejax.results.result import Result
from moejax.results.service import group_rows
from moejax.routing.capture import CAPTURE_FILE

# Rows of the first mode's timeline that go to the tracker; the result has up to `timeline.MAX_POINTS`.
_TRACKED_POINTS = 200


def run_throughput(
    engines: Sequence[LLM | Backend], workload: ThroughputWorkload, run: ExperimentRun
) -> Result:
    """Runs the experiment and finishes `run`.

    The first engine's own batching mode comes first and is what the flat metrics are of; `workload.compare`
    adds modes that share its weights and have a cache and a scheduler of their own.

    Args:
        engines: ours or others, measured in turns on the same requests. Whoever opened them closes them.

    Returns:
        The content of `result.json`.

    Raises:
        ConfigError: a request longer than the model or the cache allows; checked before anything runs.
        RequestError: no request at all was completed.
        BackendError: a backend died.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    backends = [as_backend(engine) for engine in engines]
    plan = plan_traffic(backends, workload)
    run.start_backends(backends, workload)
    modes = plan_modes(backends, workload, plan)
    measure(modes, workload, run)
    result = _build(run, modes, workload)
    run.meter.add_to(result, _first(modes))
    without_our_process(result["metrics"], backends[0])
    with run.parts.part(CAPTURE_FILE):
        result |= write_capture([modes[0].trace], run.out_dir, run.provenance)
    requests = [row for mode in modes for row in request_rows(mode, workload)]
    return run.finish(
        result,
        requests=requests,
        timeline=bin_steps(modes[0].runs[0].steps, modes[0].runs[0].start, _TRACKED_POINTS),
    )


def _build(run: ExperimentRun, modes: Sequence[Mode], workload: ThroughputWorkload) -> Result:
    """Returns the result; its flat metrics are the first backend's, over several numbers of users totals and
    best rates."""
    rows = mode_rows(modes, workload, run.hardware)
    mine = [rows[place] for place in _first(modes)]
    metrics = metrics_of_all(mine)
    if len(mine) > 1:
        metrics["max_output_throughput"] = max(row["output_throughput"] or 0.0 for row in mine)
        metrics["max_goodput"] = max(row["request_goodput"] or 0.0 for row in mine) if workload.slo else None
    metrics |= speedup(modes, rows, workload) | modes[0].backend.memory()
    extra: dict[str, Any] = {}
    if workload.mix:
        extra["groups"] = [
            {"case": case, **_names(mode), **row}
            for case, mode in enumerate(modes)
            for row in group_rows(
                [item.record for run in mode.runs for item in run.measured], mode.backend.scheduling
            )
        ]
    engines = [llm for mode in modes if (llm := engine_of(mode.backend)) is not None]
    if (first := engine_of(modes[0].backend)) is not None:
        # A variant may have a ledger of its own or share the first one's.
        ledgers = {id(llm.ledger): llm.ledger for llm in engines}.values()
        metrics["compile_seconds"] = sum(ledger.seconds for ledger in ledgers)
        metrics["recompiles_after_warmup"] = sum(len(ledger.recompiles) for ledger in ledgers)
        extra["compile_ledger"] = [row for ledger in ledgers for row in ledger.rows()]
        extra["resolved"] = as_dict(first.resolutions)
        if modes[0].trace is not None:
            extra["roofline"] = [{"case": 0, **cost} for cost in modes[0].step_costs]
    distinct = {mode.backend.name: mode.backend for mode in reversed(modes)}
    return run.result(
        metrics=metrics,
        cases=rows,
        hardware=run.hardware,
        backends=[{**b.describe(), **b.memory()} for b in reversed(distinct.values())],
        slo=dataclasses.asdict(workload.slo),
        histograms=[
            histograms((one.record for run in m.runs for one in run.measured), m.backend.itl_known)
            for m in modes
        ],
        iterations=[
            {"case": case, **_names(mode), "iteration": iteration, **rates}
            for case, mode in enumerate(modes)
            for iteration, rates in enumerate(iteration_rates(mode, workload))
        ],
        # Of the first iteration: a mean over several would show a run that never was.
        timeline=[
            {"case": case, **_names(mode), **bin_steps(mode.runs[0].steps, mode.runs[0].start)}
            for case, mode in enumerate(modes)
        ],
        **extra,
    )


def _first(modes: Sequence[Mode]) -> list[int]:
    """Returns the places of the first backend's modes."""
    return [place for place, mode in enumerate(modes) if mode.backend is modes[0].backend]


def _names(mode: Mode) -> dict[str, Any]:
    users = {} if mode.workload.concurrency is None else {"concurrency": mode.workload.concurrency}
    return {"backend": mode.backend.name, "batching": mode.batching, **users}
