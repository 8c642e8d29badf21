"""`run_simulate`: every layout under every load, at the middle and both ends of its interval."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from moejax.bench.backends.simulated import SimulatedBackend
from moejax.bench.driver import TrafficRun, drive
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.simulate.config import SimulateSection, parse_layout
from moejax.bench.simulate.experts import check_law
from moejax.bench.simulate.replicas import Deployment, deploy
from moejax.bench.throughput.modes import Mode
from moejax.bench.throughput.rows import mode_rows
from moejax.bench.traffic import PlannedRequest, ThroughputWorkload, plan_requests
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.hardware import KNOWN
from moejax.engine.opening.resolve import find_model
from moejax.report.progress import Task, progress
from moejax.results.result import Result
from moejax.routing.source import open_trace
from moejax.simulate.routing import RoutingLaw
from moejax.simulate.step import time_row

WITH_INTERVAL = (
    "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms",
    "p99_itl_ms", "mean_e2el_ms", "median_e2el_ms", "p99_e2el_ms", "output_throughput", "request_throughput",
    "request_goodput",
)  # fmt: skip
"""Metrics whose 90 % intervals are told."""


class Asked(NamedTuple):
    """A simulation's configuration: the model, as `LLM` opens it, and the sections."""

    source: Any
    load_format: Any
    section: SimulateSection
    engine: EngineConfig
    workload: ThroughputWorkload

    @property
    def model(self) -> ModelConfig:
        """The configuration in bfloat16, in which tables were measured. Raises `ConfigError`: an unknown
        model."""
        return find_model(self.source, self.load_format)[1].replace(dtype="bfloat16")


class PlannedLoad(NamedTuple):
    """What is asked for, with its name in `simulate.loads` and its requests."""

    name: str | None
    workload: ThroughputWorkload
    plan: Sequence[PlannedRequest]


def run_simulate(asked: Asked, run: ExperimentRun) -> Result:
    """Simulates a model on `run.hardware_kind` ("auto" is the A100) and finishes `run`; `cases` has a row per
    layout and rate.

    Raises:
        ConfigError: an unknown model or device, or a request that is too long.
    """
    section, workload, kind = asked.section, asked.workload, simulated_kind(run)
    deployments, refused = deployed(asked, kind)
    if not deployments:
        same = {why: [name for name in refused if refused[name] == why] for why in refused.values()}
        told = "; ".join(f"{', '.join(names)}: {why}" for why, names in same.items())
        raise ConfigError(f"simulate.layouts: none can be simulated: {told}")
    loads = planned(asked)
    start_simulated(run, workload, kind)
    with progress("simulating") as task:
        rows = load_rows(deployments, section, loads, task)
    rows += [{"layout": name, "error": why} for name, why in refused.items()]
    laws = _laws(deployments, section, loads[0])
    sound = [row for row in rows if row["error"] is None]
    best = max(sound, key=lambda row: (row["request_goodput"] or 0.0, row["output_throughput"] or 0.0))
    result = run.result(
        metrics={name: best.get(name) for name in (*WITH_INTERVAL, "tokens_per_s_per_device")}
        | {"best_layout": best["layout"]},
        cases=[{"case": number, **row} for number, row in enumerate(rows)],
        hardware={**dataclasses.asdict(KNOWN[kind]), "simulated": True},
        slo=dataclasses.asdict(workload.slo),
        routing_laws=laws,
        calibration=deployments[0].calibration.origin,
    )
    return run.finish(result, tables={"layouts": result["cases"]})


def deployed(asked: Asked, kind: str) -> tuple[list[Deployment], dict[str, str]]:
    """Returns the deployments of the layouts, and why others cannot be. Raises `ConfigError`: an unknown
    model or device, no such trace, or one of `simulate.autoscale.layouts` cannot be."""
    section, model = asked.section, asked.model
    section.kernels(kind)  # refused once, not by each layout
    law = section.routing.law
    if section.routing.trace is not None:
        law = RoutingLaw(
            "capture", capture=open_trace("simulate.routing.trace", section.routing.trace, model)
        )
    for other in section.laws:
        check_law(RoutingLaw(other), asked.engine.rebalance, section.routing.shift_steps)
    found, refused = {}, {}
    others = {name: None for fleet in section.cases().values() for name in fleet.autoscale.layouts}
    for name in {**others, **dict.fromkeys(section.layouts)}:
        try:
            found[name] = deploy(name, model, parse_layout(name), asked.engine, section, kind, law)
        except ConfigError as error:
            if name in others:
                raise ConfigError(f"simulate.autoscale.layouts: {name}: {error}") from error
            refused[name] = str(error)
    deployments = [found[name] for name in section.layouts if name in found]
    known = {name: found[name] for name in others}
    return [dataclasses.replace(one, others=known) for one in deployments], refused


def planned(asked: Asked) -> list[PlannedLoad]:
    """Returns what is asked for with its requests. Raises `ConfigError`: one is too long."""
    model, engine = asked.model, asked.engine
    loads = [
        PlannedLoad(name, given, plan_requests(given, model.vocab_size))
        for name, given in asked.section.asked(asked.workload)
    ]
    longest = max(request.total_len for load in loads for request in load.plan)
    if longest > (limit := engine.max_model_len or model.max_position_embeddings):
        raise ConfigError(
            f"the longest request has {longest} tokens, over the limit of {limit} (engine.max_model_len)"
        )
    return loads


def load_rows(
    deployments: Sequence[Deployment], section: SimulateSection, loads: Sequence[PlannedLoad], task: Task
) -> list[dict[str, Any]]:
    """Returns a row for each deployment, fleet and load."""
    cases = list(itertools.product(deployments, section.cases().items(), loads))
    rows: list[dict[str, Any]] = []
    for number, (deployment, (fleet, described), load) in enumerate(cases):
        words = (f"simulating {deployment.name}", fleet, load.name, f"({number + 1} of {len(cases)})")
        task.describe(" ".join(filter(None, words)))
        row = simulated_row(deployment, described, load)
        named = {"fleet": fleet, "load": load.name}
        rows.append(row | {key: value for key, value in named.items() if value})
    return rows


def simulated_kind(run: ExperimentRun) -> str:
    """Returns the device kind that a run asks for; "auto" is the A100."""
    return "a100_80gb" if run.hardware_kind == "auto" else run.hardware_kind


def start_simulated(run: ExperimentRun, workload: ThroughputWorkload, device: str) -> None:
    """Records the provenance, with the simulated device for this machine's, and starts the tracker."""
    run.record(seeds={"workload": workload.seed}, workload=workload.hash)
    run.provenance["device"] = {"platform": "simulated", "kind": f"{device}, simulated", "count": 1}
    run.track()


def _serve(
    deployment: Deployment, section: SimulateSection, load: PlannedLoad, scale: float = 1.0
) -> tuple[SimulatedBackend, TrafficRun]:
    """Returns replicas whose steps take `scale` times as long, and the pass of a load through them."""
    _, workload, plan = load
    backend = deployment.backend(section, scale, workload.slo)
    served = drive(
        backend, plan, workload.sampling, workload=workload, clock=backend.clock, sleep=backend.sleep
    )
    served.require_completed(deployment.name)
    return backend, served


def simulated_row(deployment: Deployment, section: SimulateSection, load: PlannedLoad) -> dict[str, Any]:
    """Returns the figures of a deployment under a load with their intervals, sources and assumptions."""
    workload = load.workload
    backend, served = _serve(deployment, section, load)
    (row,) = mode_rows([Mode(backend, load.plan, workload, [served])], workload)
    fleet = backend.fleet_row()
    rooms = [deployment.others[name].room for name in section.autoscale.layouts] or [deployment.room]
    met = [each["slo_met"] for each in served.rows(workload.slo)]
    row |= fleet | {
        "attainment": sum(map(bool, met)) / len(met) if workload.slo and met else None,
        "layout": deployment.name,
        "error": None,
        "tokens_per_s_per_device": (row["output_throughput"] or 0.0) / fleet["num_devices"],
        **deployment.room.memory.row(),
        "memory_gb": (held := max(room.held(row["cache_use_peak"]) for room in rooms)) / 1e9,
        "device_memory_use_peak": held / (deployment.step.kernels.hardware.memory or math.inf),
        "routing_law": str(deployment.step.routing),
        **time_row(backend.parts(), deployment.calibration.spreads),
    }
    if section.interval:
        widest = 1 + row["relative_spread"]
        ends = [_serve(deployment, section, load, scale)[1] for scale in (1 / widest, widest)]
        figures = [row, *(end.metrics(workload.slo) for end in ends)]
        for name in WITH_INTERVAL:
            values = [value for figure in figures if (value := figure.get(name)) is not None]
            if values:
                row |= {f"{name}_low": min(values), f"{name}_high": max(values)}
    return row


def _laws(
    deployments: Sequence[Deployment], section: SimulateSection, load: PlannedLoad
) -> list[dict[str, Any]]:
    """Returns each layout's TPOT and tokens/s of a load under other laws of routing."""
    rows = []
    for law in section.laws:
        for each in deployments:
            _, served = _serve(each.under(RoutingLaw(law)), section, load)
            metrics = served.metrics(load.workload.slo)
            names = ("median_tpot_ms", "median_ttft_ms", "output_throughput")
            rows.append({"layout": each.name, "law": law, **{name: metrics[name] for name in names}})
    return rows
