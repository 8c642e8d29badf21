"""`run_throughput`: plan, measure, rows, result, report."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import as_backend, engine_of
from moejax.bench.backends.provenance import backends_provenance, encoder, without_our_process
from moejax.bench.common.step_cost import traffic_accounts
from moejax.bench.common.telemetry import Meter
from moejax.bench.common.timeline import bin_steps
from moejax.bench.common.trace_io import write_capture
from moejax.bench.throughput.measure import measure
from moejax.bench.throughput.modes import Mode, check_lengths, plan_modes
from moejax.bench.throughput.rows import iteration_rates, mode_rows, request_rows, speedup
from moejax.bench.traffic import ThroughputWorkload, plan_requests, traffic_hash
from moejax.core.hardware import Hardware, get_hardware
from moejax.core.price import Price
from moejax.core.resolve import as_dict
from moejax.engine.llm import LLM
from moejax.report.tables import print_closing, print_throughput, stderr_console
from moejax.report.throughput_plots import save_throughput_plots
from moejax.results.result import build_result, ensure_writable, write_request_rows, write_result
from moejax.tracking.base import TrackerConfig, make_tracker
from moejax.tracking.naming import run_info
from moejax.tracking.publish import publish
from moejax.tracking.telemetry import TelemetryConfig

logger = logging.getLogger(__name__)

# Rows of the first mode's timeline that go to the tracker; the result has up to `timeline.MAX_POINTS`.
_TRACKED_POINTS = 200
# What a row has beside figures.
_NO_METRICS = (
    "case", "backend", "batching", "batch_size", "prompt_len", "output_len", "request_rate", "first_error"
)  # fmt: skip


def run_throughput(
    llm: LLM | Backend,
    workload: ThroughputWorkload,
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

    `llm`'s own batching mode comes first and is what the flat metrics are of; `workload.compare` adds modes
    that share its weights and have a cache and a scheduler of their own.

    Args:
        llm: our engine or another backend.
        config: the whole resolved configuration, for the record.
        name: the model's short name.
        hardware_kind: the device that the result names, see `moejax.core.hardware.get_hardware`.
        peers: further backends for the same requests, measured in turns. Whoever opened them closes them.
        telemetry: sampling of memory, CPU, power and energy beside the measured passes; None: none.
        price: of one device, for the cost per million tokens.

    Returns:
        The content of `result.json`.

    Raises:
        ConfigError: a request longer than the model or the cache allows; checked before anything runs.
        RequestError: no request at all was completed.
        BackendError: a backend died.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    ensure_writable(out_dir)
    backends = [as_backend(llm), *peers]
    vocab_size = min(backend.vocab_size for backend in backends)
    plan = plan_requests(workload, vocab_size, encode=encoder(backends))
    check_lengths(backends, workload, plan)
    hardware = get_hardware(hardware_kind, jax.devices()[0].device_kind)
    provenance = backends_provenance(
        backends, config, workload_seed=workload.seed, workload=traffic_hash(workload)
    )
    engine = engine_of(backends[0])
    for resolution in engine.resolutions if engine is not None else ():
        logger.info("%s", resolution)
    info = run_info("throughput", out_dir, config, provenance, model=name)
    meter = Meter(telemetry, price, engine.parallel_config.num_devices if engine is not None else 1)
    with make_tracker(tracker_config, info) as tracker:
        modes = plan_modes(backends, workload, plan)
        measure(modes, workload, meter)
        rows = mode_rows(modes, workload, hardware)
        result = _build(modes, workload, rows, config, provenance, hardware)
        meter.add_to(result, [0])
        without_our_process(result["metrics"], backends[0])
        result |= write_capture([modes[0].trace], out_dir, provenance)
        requests = [row for mode in modes for row in request_rows(mode, workload)]
        files = [write_result(result, out_dir), write_request_rows(requests, out_dir)]
        curves = bin_steps(modes[0].runs[0].steps, modes[0].runs[0].start, _TRACKED_POINTS)
        plots = save_throughput_plots(result, requests, out_dir)
        publish(tracker, result, requests=requests, plots=plots, files=files, timeline=curves)
    console = stderr_console()
    print_throughput(result, console)
    print_closing(console, out_dir, tracker.hints(), result.get("compile_ledger", ()))
    return result


def _build(
    modes: Sequence[Mode],
    workload: ThroughputWorkload,
    rows: list[dict[str, Any]],
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    hardware: Hardware | None,
) -> dict[str, Any]:
    """The result; its flat metrics are the first mode's."""
    metrics = {key: value for key, value in rows[0].items() if key not in _NO_METRICS}
    metrics |= speedup(modes, rows) | modes[0].backend.memory()
    extra: dict[str, Any] = {}
    engines = [llm for mode in modes if (llm := engine_of(mode.backend)) is not None]
    if (first := engine_of(modes[0].backend)) is not None:
        # A variant may have a ledger of its own or share the first one's.
        ledgers = {id(llm.ledger): llm.ledger for llm in engines}.values()
        metrics["compile_seconds"] = sum(ledger.seconds for ledger in ledgers)
        metrics["recompiles_after_warmup"] = sum(len(ledger.recompiles) for ledger in ledgers)
        extra["compile_ledger"] = [row for ledger in ledgers for row in ledger.rows()]
        extra["resolved"] = as_dict(first.resolutions)
        if modes[0].trace is not None:
            accounts = traffic_accounts(first, modes[0].trace, modes[0].runs[0].steps, hardware)
            extra["roofline"] = [{"case": 0, **found} for found in accounts]
    distinct = {mode.backend.name: mode.backend for mode in reversed(modes)}
    return build_result(
        "throughput",
        metrics=metrics,
        cases=rows,
        config=config,
        provenance=provenance,
        hardware=dataclasses.asdict(hardware) if hardware else None,
        backends=[{**b.describe(), **b.memory()} for b in reversed(distinct.values())],
        slo=dataclasses.asdict(workload.slo),
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


def _names(mode: Mode) -> dict[str, str]:
    return {"backend": mode.backend.name, "batching": mode.batching}
