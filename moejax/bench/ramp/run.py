"""`run_ramp`: passes at rising rates, the result, its report."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import as_backend, engine_of
from moejax.bench.backends.provenance import backends_provenance, encoder, without_our_process
from moejax.bench.common.telemetry import Meter
from moejax.bench.ramp.config import RampConfig
from moejax.bench.ramp.rule import best_goodput, judge, knee, pareto_front, user_rates
from moejax.bench.throughput.measure import run_pass, warm_up
from moejax.bench.throughput.modes import Mode, check_lengths, plan_modes
from moejax.bench.throughput.rows import mode_rows, request_rows
from moejax.bench.traffic import ThroughputWorkload, plan_requests, traffic_hash
from moejax.core.hardware import Hardware, get_hardware
from moejax.core.price import Price
from moejax.core.resolve import as_dict
from moejax.engine.llm import LLM
from moejax.report.progress import progress
from moejax.report.ramp import print_ramp, save_ramp_plots
from moejax.report.tables import print_closing, stderr_console
from moejax.results.result import build_result, ensure_writable, write_request_rows, write_result
from moejax.sharding.distributed import agree
from moejax.tracking.base import TrackerConfig, make_tracker
from moejax.tracking.naming import run_info
from moejax.tracking.publish import publish
from moejax.tracking.telemetry import TelemetryConfig

logger = logging.getLogger(__name__)

_NAMES = ("case", "backend", "batching", "batch_size", "prompt_len", "output_len", "first_error", "saturated")


def run_ramp(
    llm: LLM | Backend,
    workload: ThroughputWorkload,
    tracker_config: TrackerConfig,
    out_dir: Path,
    *,
    ramp: RampConfig,
    config: Mapping[str, Any],
    name: str,
    hardware_kind: str = "auto",
    peers: Sequence[Backend] = (),
    telemetry: TelemetryConfig | None = None,
    price: Price | None = None,
) -> dict[str, Any]:
    """Offers rising rates to each mode until it is saturated, and writes the results into `out_dir`.

    Arguments, errors and files are those of `run_throughput`; `workload` gives lengths, objectives and
    repetitions, `ramp` the rates. `cases` has a row per mode and rate, in order of measurement;
    `ramp` the knee and the best goodput of each mode; the flat metrics are the first mode's at its knee.

    Raises:
        ConfigError: also where the workload brings arrivals of its own.
    """
    ramp.check_alone(workload.request_rate, workload.trace_file)
    ensure_writable(out_dir)
    backends = [as_backend(llm), *peers]
    vocab_size = min(backend.vocab_size for backend in backends)
    encode = encoder(backends)

    def plan(rate: float) -> Any:
        step = dataclasses.replace(workload, request_rate=rate, num_requests=ramp.num_requests(rate))
        return plan_requests(step, vocab_size, encode=encode)

    longest = plan(ramp.steps()[-1])  # a lower rate's requests are the first of these
    check_lengths(backends, workload, longest)
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
        modes: list[Mode] = []
        rows: list[dict[str, Any]] = []
        for mode in plan_modes(backends, workload, longest):
            _climb(mode, workload, ramp, plan, modes, rows, hardware, meter)
        extra: dict[str, Any] = {}
        if engine is not None:
            extra = {"compile_ledger": engine.ledger.rows(), "resolved": as_dict(engine.resolutions)}
        result = build_result(
            "throughput",
            metrics=_metrics(rows) | backends[0].memory(),
            cases=rows,
            config=config,
            provenance=provenance,
            hardware=dataclasses.asdict(hardware) if hardware else None,
            slo=dataclasses.asdict(workload.slo),
            ramp=_summary(rows),
            **extra,
        )
        meter.add_to(result, [_knee_case(rows)])
        without_our_process(result["metrics"], backends[0])
        requests = [row for mode in modes for row in request_rows(mode, workload)]
        files = [write_result(result, out_dir), write_request_rows(requests, out_dir)]
        plots = save_ramp_plots(result, out_dir)
        publish(tracker, result, requests=requests, plots=plots, files=files)
    console = stderr_console()
    print_ramp(result, console)
    print_closing(console, out_dir, tracker.hints(), result.get("compile_ledger", ()))
    return result


def _climb(
    mode: Mode,
    workload: ThroughputWorkload,
    ramp: RampConfig,
    plan: Any,
    modes: list[Mode],
    rows: list[dict[str, Any]],
    hardware: Hardware | None,
    meter: Meter,
) -> None:
    """One mode's steps up to saturation and those between; appends to `modes` and `rows`."""
    rates = ramp.steps()
    followed, saturated, refined = 0.0, None, 0
    with progress(f"compiling and warming up ({mode.label})"):
        warm_up(mode, workload)
    while True:
        if saturated is None:
            if not rates:
                return
            rate = rates.pop(0)
        elif refined < ramp.refine and followed:
            rate, refined = (followed * saturated) ** 0.5, refined + 1
        else:
            return
        step = Mode(mode.backend, plan(rate), rate)
        total = len(step.plan) * workload.iterations
        with progress(f"{rate:.3g} requests/s", total=total) as task:
            for _ in range(workload.iterations):
                run_pass(step, workload, len(modes), task, meter)
        modes.append(step)
        rows.append(_row(step, workload, ramp, len(rows), hardware))
        # The clocks differ between processes; all must take the same next step.
        if agree(int(rows[-1]["saturated"])):
            saturated = rate
        else:
            followed = rate


def _row(
    mode: Mode, workload: ThroughputWorkload, ramp: RampConfig, index: int, hardware: Hardware | None
) -> dict[str, Any]:
    """A step's row; of several passes a saturated one decides, then the one that followed least."""
    (row,) = mode_rows([mode], workload, hardware)
    verdicts = [judge(run, ramp.followed) for run in mode.runs]
    verdict = min(verdicts, key=lambda found: (not found.saturated, found.followed))
    engine = engine_of(mode.backend)
    devices = engine.parallel_config.num_devices if engine is not None else 1
    throughput = row["output_throughput"]
    return {
        **row,
        "case": index,
        **dataclasses.asdict(verdict),
        **user_rates(mode.served, row["median_tpot_ms"]),
        "tokens_per_s_per_device": throughput / devices if throughput is not None else None,
        "num_devices": devices,
    }


def _by_mode(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Mapping[str, Any]]]:
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["backend"], row["batching"]), []).append(row)
    return groups


def _summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per mode: the knee, the best goodput with its rate, and the cases on the Pareto front."""
    found = []
    for (backend, batching), mine in _by_mode(rows).items():
        at, best = knee(mine), best_goodput(mine)
        found.append(
            {
                "backend": backend,
                "batching": batching,
                "saturated": any(row["saturated"] for row in mine),
                "knee_rate": at["request_rate"] if at else None,
                "knee_case": at["case"] if at else None,
                "max_output_throughput": max(row["output_throughput"] or 0.0 for row in mine),
                "max_goodput": best["request_goodput"] if best else None,
                "max_goodput_rate": best["request_rate"] if best else None,
                "pareto": [mine[place]["case"] for place in pareto_front(mine)],
            }
        )
    return found


def _knee_case(rows: Sequence[Mapping[str, Any]]) -> int:
    return _summary(rows)[0]["knee_case"] or 0


def _metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first mode's figures at its knee (at its lowest rate, where it followed none), and the ramp's."""
    first = _summary(rows)[0]
    metrics = {key: value for key, value in rows[_knee_case(rows)].items() if key not in _NAMES}
    names = ("knee_rate", "max_output_throughput", "max_goodput", "max_goodput_rate")
    return metrics | {name: first[name] for name in names}
