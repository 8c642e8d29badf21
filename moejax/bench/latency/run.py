"""`run_latency`: plan, measure, rows, result, report."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import as_backend, engine_of
from moejax.bench.backends.peer_ratios import blank_unknown
from moejax.bench.backends.provenance import backends_provenance, encoder, without_our_process
from moejax.bench.common.telemetry import Meter
from moejax.bench.common.trace_io import write_capture
from moejax.bench.latency.cases import CaseData, plan_cases
from moejax.bench.latency.measure import measure
from moejax.bench.latency.rows import case_rows
from moejax.bench.workload import WorkloadConfig, workload_hash
from moejax.core.hardware import Hardware, get_hardware, together
from moejax.core.price import Price
from moejax.core.resolve import as_dict
from moejax.engine.llm import LLM
from moejax.report.plots import save_latency_plots
from moejax.report.tables import print_closing, print_latency, stderr_console
from moejax.results.metrics import compute_metrics, record_row
from moejax.results.result import build_result, ensure_writable, write_requests, write_result
from moejax.tracking.base import TrackerConfig, make_tracker
from moejax.tracking.naming import run_info
from moejax.tracking.publish import publish
from moejax.tracking.telemetry import TelemetryConfig

logger = logging.getLogger(__name__)


def run_latency(
    llm: LLM | Backend,
    workload: WorkloadConfig,
    tracker_config: TrackerConfig,
    out_dir: Path,
    *,
    config: Mapping[str, Any],
    name: str,
    hardware_kind: str = "auto",
    peers: Sequence[Backend] = (),
    telemetry: TelemetryConfig | None = None,
    price: Price | None = None,
) -> dict[str, Any]:
    """Runs the experiment and writes its results into `out_dir`.

    Args:
        llm: our engine or another backend; the flat metrics are of it.
        config: the whole resolved configuration, for the record.
        name: the model's short name.
        hardware_kind: what the roofline is of, see `moejax.core.hardware.get_hardware`.
        peers: further backends for the same cases, measured in turns. Whoever opened them closes them.
        telemetry: sampling of memory, CPU, power and energy beside the timed passes; None: none.
        price: of one device, for the cost per million tokens.

    Returns:
        The content of `result.json`.

    Raises:
        ConfigError: a case longer than the model allows; checked before anything runs.
        BackendError: a backend died.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    ensure_writable(out_dir)
    backends = [as_backend(llm), *peers]
    engine = engine_of(backends[0])
    data = plan_cases(backends, workload, encoder(backends))
    hardware = get_hardware(hardware_kind, jax.devices()[0].device_kind)
    if hardware is not None and engine is not None:
        hardware = together(hardware, engine.parallel_config.num_devices)
    provenance = backends_provenance(
        backends, config, workload_seed=workload.seed, workload=workload_hash(workload)
    )
    for resolution in engine.resolutions if engine is not None else ():
        logger.info("%s", resolution)
    info = run_info("latency", out_dir, config, provenance, model=name)
    meter = Meter(telemetry, price, engine.parallel_config.num_devices if engine is not None else 1)
    with make_tracker(tracker_config, info) as tracker:
        measure(data, workload, meter)
        rows = case_rows(data, workload, hardware)
        result = _build(backends, workload, data, rows, config, provenance, hardware)
        meter.add_to(result, [i for i, item in enumerate(data) if item.backend is backends[0]])
        without_our_process(result["metrics"], backends[0])
        own = [item.trace for item in data if item.backend is backends[0]]
        result |= write_capture(own, out_dir, provenance)
        records = [record for item in data for record in item.records]
        files = [write_result(result, out_dir), write_requests(records, out_dir)]
        plots = save_latency_plots(result, records, out_dir)
        publish(tracker, result, requests=map(record_row, records), plots=plots, files=files)
    _print(result, out_dir, tracker.hints())
    return result


def _build(
    backends: Sequence[Backend],
    workload: WorkloadConfig,
    data: Sequence[CaseData],
    rows: list[dict[str, Any]],
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    hardware: Hardware | None,
) -> dict[str, Any]:
    """The result; its flat metrics are the first backend's, over all cases."""
    first = [item for item in data if item.backend is backends[0]]
    duration = sum(sum(item.durations) for item in first)
    metrics: dict[str, Any] = blank_unknown(
        dict(compute_metrics([record for item in first for record in item.records], duration, workload.slo)),
        itl_known=backends[0].itl_known,
    )
    metrics |= backends[0].memory()
    extra: dict[str, Any] = {}
    if (llm := engine_of(backends[0])) is not None:
        metrics["compile_seconds"] = llm.ledger.seconds
        # Of the recorded pass through every case; a drop is possible only under capacity execution.
        for name in ("dropped", "rerouted"):
            metrics[f"{name}_assignments"] = sum(item.overflow[name] for item in first)
        metrics["recompiles_after_warmup"] = len(llm.ledger.recompiles)
        extra = {
            "compile_ledger": llm.ledger.rows(),
            "routing": _routing(llm, data),
            "resolved": as_dict(llm.resolutions),
            "roofline": [{"case": i, **account} for i, item in enumerate(data) for account in item.accounts],
        }
    return build_result(
        "latency",
        metrics=metrics,
        cases=rows,
        config=config,
        provenance=provenance,
        hardware=dataclasses.asdict(hardware) if hardware else None,
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


def _print(result: Mapping[str, Any], out_dir: Path, hints: Sequence[str]) -> None:
    """The table, and what the run ends with."""
    console = stderr_console()
    print_latency(result, console)
    if dropped := result["metrics"].get("dropped_assignments"):
        console.print(
            f"{dropped} expert assignments dropped for lack of capacity (recorded pass)", style="yellow"
        )
    print_closing(console, out_dir, hints, result.get("compile_ledger", ()))
