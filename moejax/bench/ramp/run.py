"""`run_ramp`: passes at rising rates, the result, its report."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import as_backend, engine_of
from moejax.bench.backends.registry import without_our_process
from moejax.bench.common.compilation import shown_compilation
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.ramp.config import RampConfig
from moejax.bench.ramp.rule import best_goodput, judge, knee, pareto_front, user_rates
from moejax.bench.throughput.measure import run_pass, warm_up
from moejax.bench.throughput.modes import Mode, plan_modes, plan_traffic
from moejax.bench.throughput.rows import metrics_of_all, mode_rows, request_rows
from moejax.bench.traffic import PlannedRequest, ThroughputWorkload
from moejax.core.hardware import Hardware
from moejax.engine.llm import LLM
from moejax.report.progress import progress
from moejax.results.result import Result
from moejax.sharding.distributed import agree


def run_ramp(
    engines: Sequence[LLM | Backend], workload: ThroughputWorkload, ramp: RampConfig, run: ExperimentRun
) -> Result:
    """Offers rising rates to each mode until it is saturated, and finishes `run`.

    Arguments, errors and files are those of `run_throughput`; `workload` gives lengths, objectives and
    repetitions, `ramp` the rates. `cases` has a row per mode and rate, in order of measurement;
    `ramp` the knee and the best goodput of each mode; the flat metrics are the first mode's knee and best
    rates, and totals over its rates.

    Raises:
        ConfigError: also where the workload brings arrivals of its own.
    """
    ramp.check_alone(workload)
    backends = [as_backend(engine) for engine in engines]

    def plan(rate: float) -> list[PlannedRequest]:
        count = ramp.num_requests(rate) * workload.turns
        return plan_traffic(backends, dataclasses.replace(workload, request_rate=rate, num_requests=count))

    longest = plan(ramp.steps()[-1])  # a lower rate's requests are the first of these
    run.start_backends(backends, workload)
    modes: list[Mode] = []
    run.read_peaks()
    for mode in plan_modes(backends, workload, longest):
        _climb(mode, workload, ramp, plan, modes, run)
    run.read_peaks()
    rows = [_row(mode, workload, ramp, case, run.hardware) for case, mode in enumerate(modes)]
    summary = _summary(rows)
    first = [index for index, mode in enumerate(modes) if mode.backend is modes[0].backend]
    result = run.result(
        metrics=_metrics([rows[index] for index in first], summary[0]) | backends[0].memory(),
        cases=rows,
        engine=engine_of(backends[0]),
        hardware=run.hardware,
        slo=dataclasses.asdict(workload.slo),
        ramp=summary,
    )
    run.meter.add_to(result, first)
    without_our_process(result["metrics"], backends[0])
    return run.finish(result, requests=[row for mode in modes for row in request_rows(mode, workload)])


def _climb(
    mode: Mode,
    workload: ThroughputWorkload,
    ramp: RampConfig,
    plan: Any,
    modes: list[Mode],
    run: ExperimentRun,
) -> None:
    """One mode's steps up to saturation and those between; appends to `modes`."""
    rates = ramp.steps()
    followed, saturated, refined = 0.0, None, 0
    with progress(f"compiling and warming up ({mode.label})") as task:
        with shown_compilation(engine_of(mode.backend), task):
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
        step = Mode(mode.backend, plan(rate), dataclasses.replace(workload, request_rate=rate))
        total = len(step.plan) * workload.iterations
        with progress(f"{rate:.3g} requests/s", total=total) as task:
            for _ in range(workload.iterations):
                run_pass(step, workload, len(modes), task, run.meter)
        modes.append(step)
        # The clocks differ between processes; all must take the same next step.
        if agree(int(_row(step, workload, ramp, len(modes) - 1)["saturated"])):
            saturated = rate
        else:
            followed = rate


def _row(
    mode: Mode, workload: ThroughputWorkload, ramp: RampConfig, index: int, hardware: Hardware | None = None
) -> dict[str, Any]:
    """A step's row; of several passes a saturated one decides, then the one that followed least."""
    (row,) = mode_rows([mode], workload, hardware)
    verdicts = [judge(passed, ramp.followed) for passed in mode.runs]
    verdict = min(verdicts, key=lambda one: (not one.saturated, one.followed))
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


def _summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns by mode the knee, the best goodput with its rate, and the cases on the Pareto front."""
    modes: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        modes.setdefault((row["backend"], row["batching"]), []).append(row)
    summary = []
    for (backend, batching), mine in modes.items():
        at, best = knee(mine), best_goodput(mine)
        summary.append(
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
    return summary


def _metrics(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the totals over a mode's rates, of a single one all its metrics; and its ramp's figures."""
    names = ("knee_rate", "max_output_throughput", "max_goodput", "max_goodput_rate")
    return metrics_of_all(rows) | {name: summary[name] for name in names}
