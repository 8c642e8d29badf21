"""`run_latency`: plan, measure, rows, result, report."""

from collections.abc import Sequence
from typing import Any

from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import as_backend, engine_of
from moejax.bench.backends.registry import without_our_process
from moejax.bench.common.trace_io import write_capture
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.latency.cases import CaseData, answer_prompts, plan_batches
from moejax.bench.latency.measure import measure
from moejax.bench.latency.rows import case_rows
from moejax.bench.workload import WorkloadConfig
from moejax.core.hardware import Hardware, together
from moejax.engine.llm import LLM
from moejax.results.metrics import compute_metrics, flat_metrics, histograms
from moejax.results.result import Result, request_rows
from moejax.routing.capture import CAPTURE_FILE


def run_latency(engines: Sequence[LLM | Backend], workload: WorkloadConfig, run: ExperimentRun) -> Result:
    """Runs the experiment and finishes `run`.

    Args:
        engines: ours or others, measured in turns on the same cases; the flat metrics are the first one's:
            those of its only case, or what is defined over several. Whoever opened them closes them.

    Returns:
        The content of `result.json`.

    Raises:
        ConfigError: a case longer than the model allows; checked before anything runs.
        BackendError: a backend died.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    backends = [as_backend(engine) for engine in engines]
    plan = plan_batches(backends, workload)
    data = [CaseData(case, backend, prompts) for case, prompts in plan for backend in backends]
    run.start_backends(backends, workload)
    answer_prompts(plan, backends, workload)
    measure(data, workload, run)
    hardware, llm = run.hardware, engine_of(backends[0])
    if hardware is not None and llm is not None:
        hardware = together(hardware, llm.parallel_config.num_devices)
    result = _build(run, backends, workload, data, hardware)
    first = [index for index, item in enumerate(data) if item.backend is backends[0]]
    run.meter.add_to(result, first)
    without_our_process(result["metrics"], backends[0])
    with run.parts.part(CAPTURE_FILE):
        result |= write_capture([data[index].trace for index in first], run.out_dir, run.provenance)
    records = [record for item in data for record in item.records]
    return run.finish(result, requests=request_rows(records))


def _build(
    run: ExperimentRun,
    backends: Sequence[Backend],
    workload: WorkloadConfig,
    data: Sequence[CaseData],
    hardware: Hardware | None,
) -> Result:
    """Returns the result; its flat metrics are the first backend's."""
    rows = case_rows(data, workload, hardware)
    first = [item for item in data if item.backend is backends[0]]
    metrics: dict[str, Any] = flat_metrics(rows[0])
    if len(first) > 1:
        duration = sum(sum(item.durations) for item in first)
        records = [record for item in first for record in item.records]
        metrics = dict(compute_metrics(records, duration, workload.slo, latencies=False))
    metrics |= backends[0].memory()
    extra: dict[str, Any] = {}
    if (llm := engine_of(backends[0])) is not None:
        metrics["compile_seconds"] = llm.ledger.seconds
        # Of the recorded pass through every case; a drop is possible only under capacity execution.
        for name in ("dropped", "rerouted"):
            metrics[f"{name}_assignments"] = sum(item.overflow[name] for item in first)
        metrics["recompiles_after_warmup"] = len(llm.ledger.recompiles)
        extra = {
            "routing": _routing(llm, data),
            "roofline": [{"case": i, **cost} for i, item in enumerate(data) for cost in item.step_costs],
        }
    return run.result(
        metrics=metrics,
        cases=rows,
        histograms=[histograms(item.records, item.backend.itl_known) for item in data],
        engine=llm,
        hardware=hardware,
        backends=[{**backend.describe(), **backend.memory()} for backend in backends],
        **extra,
    )


def _routing(llm: LLM, data: Sequence[CaseData]) -> dict[str, Any]:
    recorded = [(index, item) for index, item in enumerate(data) if item.counts]
    return {
        "counts": sum(sum(item.counts.values()) for _, item in recorded),
        "cases": [{"case": index, **item.counts, **item.overflow} for index, item in recorded],
        "num_experts_per_tok": llm.config.num_experts_per_tok,
        "moe_layers": list(llm.config.moe_layers),
    }
