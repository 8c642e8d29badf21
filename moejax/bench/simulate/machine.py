"""`simulate.mode=machine`: the simulator beside the engine on this machine.

Steps of some traffic are timed; other traffic is predicted with their durations and really served, in turns
with the timing, so that a machine whose speed drifts is fair to both (`assets/machine_cases.toml`).

The simulated engine has the real one's limits, cache blocks and buckets, and its loop.
"""

import dataclasses
import math
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from moejax.bench.backends.moejax import MoejaxBackend
from moejax.bench.backends.replica import Layout
from moejax.bench.backends.simulated import SimulatedBackend
from moejax.bench.driver import TrafficRun, drive
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.simulate.points import write_rows
from moejax.bench.simulate.run import Asked
from moejax.bench.traffic import Lengths, PlannedRequest, ThroughputWorkload, plan_requests
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.engine.core import Engine
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOutput
from moejax.engine.scheduling.plan import Plan
from moejax.report.progress import progress
from moejax.results.metrics import Slo
from moejax.results.result import Result
from moejax.simulate.measured import Loop, StepTable, TimedStep, Turn, Work, timed_steps, usual_steps
from moejax.simulate.runner import CostModelRunner, VirtualClock, simulated_engine
from moejax.simulate.step import StepTime
from moejax.simulate.tables import FOLDER

CASES = FOLDER.parent / "machine_cases.toml"
GOALS = {
    "steps": 0.02, "duration_s": 0.05, "median_tpot_ms": 0.05, "median_ttft_ms": 0.1,
    "output_throughput": 0.05,
}  # fmt: skip
"""Relative errors that are aimed at; the steps of requests that come at once are to be exactly as many."""
QUIET = 0.05
"""The relative spread of a machine's own repeats from which on they tell nothing of a prediction."""


class Case(NamedTuple):
    """Traffic on an engine: `engine` has the settings that differ, `load` is the rate's share of what the
    engine was seen to serve; None: the workload's own arrivals."""

    workload: ThroughputWorkload
    engine: Mapping[str, Any]
    load: float | None

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Case":
        """Returns a file's entry."""
        fields: dict[str, Any] = {
            key: Lengths(**value) if key.endswith("_len") and isinstance(value, dict) else value
            for key, value in entry.items()
        }
        engine, load = fields.pop("engine", {}), fields.pop("load", None)
        return cls(ThroughputWorkload(**fields, request_rate=load or math.inf), engine, load)


class Recorded(NamedTuple):
    """A run of the engine, its steps, seconds of the host for each request, and the instants, in seconds
    since the start, at which it was given requests after it had been idle."""

    run: TrafficRun
    steps: list[TimedStep]
    submits: list[float]
    wakes: list[float]


class TimedBackend(MoejaxBackend):
    """An engine whose turns are noted, by standing before its runner; `record` serves traffic."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self._turns: list[Loop] = []
        self._submits: list[float] = []
        self._taken = 0
        self._looked = 0.0
        self._woke: float | None = None
        self._launched: tuple[float, Work] | tuple[None, None] = (None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm.runner, name)  # what else the loop asks of its runner

    def launch(self, plan: Plan) -> Any:
        tokens = plan_tokens(plan)
        handle: Any = self.llm.runner.launch(plan)
        self._launched = (
            time.perf_counter(),
            Work((handle.key.rows, handle.key.tokens, handle.key.blocks), tokens),
        )
        return handle

    def submit(self, *args: Any, **kwargs: Any) -> RequestOutput:
        if self._turns and self.llm.engine.scheduler.idle:
            self._woke = self._looked
        begin = time.perf_counter()
        output = super().submit(*args, **kwargs)
        self._submits.append(time.perf_counter() - begin)
        return output

    def step(self) -> bool:
        stats, self._launched = self.llm.engine.stats, (None, None)
        before, looked = stats.steps, self._looked
        busy = super().step()
        taken, self._taken = sum(self._submits[self._taken :]), len(self._submits)
        self._turns.append(Loop(looked, self._woke, taken, *self._launched, stats.steps - before))
        self._woke = None
        return busy

    def _look(self) -> float:
        """Returns the time to the driver, which last asks for it when it looks for requests that are due."""
        self._looked = time.perf_counter()
        return self._looked

    def record(self, plan: Sequence[PlannedRequest], workload: ThroughputWorkload) -> Recorded:
        """Serves a plan."""
        self._turns, self._submits, self._taken, self._woke = [], [], 0, None
        engine = self.llm.engine
        engine.runner, runner = self, engine.runner
        try:
            run = drive(self, plan, workload.sampling, workload=workload, clock=self._look)
        finally:
            engine.runner = runner
        steps = timed_steps(self._turns, [step.time for step in run.steps], run.start)
        wakes = [turn.woke - run.start for turn in self._turns if turn.woke is not None]
        return Recorded(run, steps, self._submits, wakes)


def plan_tokens(plan: Plan) -> int:
    """Returns the tokens that experts compute: rows that static batching pads with are among them."""
    chunks = [max(p.chunk_tokens, p.min_tokens) if p.chunks else 0 for p in plan.groups]
    return len(plan.decodes) + sum(chunks)


class _OneEngine(SimulatedBackend):
    """One engine, which its driver's host gives requests, for `submit_s` seconds each."""

    submit_s: Iterator[float]

    def submit(self, *args: Any, **kwargs: Any) -> RequestOutput:
        clock = self.replicas[0].clock
        clock.now = max(clock.now, self.now)
        output = super().submit(*args, **kwargs)
        clock.sleep(next(self.submit_s))
        return output


def simulate(
    llm: LLM,
    plan: Sequence[PlannedRequest],
    workload: ThroughputWorkload,
    turn_of: Callable[[Plan], Turn],
    submits: Iterator[float],
    wake: Callable[[float], float],
) -> TrafficRun:
    """Serves traffic on the simulated engine of an `LLM`.

    Args:
        turn_of: durations of a plan.
        submits: seconds of the host for each request.
        wake: when a driver wakes up that would sleep until an instant, in seconds since the start.
    """
    config = dataclasses.replace(llm.engine_config, max_model_len=llm.max_model_len)
    after = deque[float]()

    def make() -> tuple[Engine, CostModelRunner, VirtualClock]:
        def duration(plan: Plan) -> StepTime:
            turn = turn_of(plan)
            clock.sleep(turn.launch)
            after.append(turn.after)
            return StepTime(turn.device, ())

        blocks, groups = llm.runner.cache.num_blocks, llm.runner.groups
        engine, runner, clock = simulated_engine(config, duration, blocks, groups=groups)
        engine.rebalance = lambda: clock.sleep(after.popleft())  # called when a step's tokens are delivered
        return engine, runner, clock

    backend = _OneEngine(llm.config, config, [Layout(make)])
    backend.submit_s = submits
    sleep = lambda seconds: backend.sleep(wake(backend.now + seconds) - backend.now)  # noqa: E731
    return drive(backend, plan, workload.sampling, workload=workload, clock=backend.clock, sleep=sleep)


def replay(
    llm: LLM, plan: Sequence[PlannedRequest], workload: ThroughputWorkload, recorded: Recorded
) -> TrafficRun:
    """Returns a run whose every step and request takes what it took. Raises `ValueError`: its steps are not
    the recorded ones."""
    left, wakes = iter(recorded.steps), iter(recorded.wakes)

    def turn_of(plan: Plan) -> Turn:
        step = next(left, None)
        if step is None or step.work != work_of(llm, plan):
            raise ValueError(f"the steps of a replayed run are not its {len(recorded.steps)}")
        return step.turn

    return simulate(llm, plan, workload, turn_of, iter(recorded.submits), lambda _: next(wakes))


def work_of(llm: LLM, plan: Plan) -> Work:
    """Returns what the runner of an `LLM` would compute for a plan, see `BatchBuilder.key`."""
    buckets, sizes = llm.runner.buckets, []
    for part in plan.groups:
        rows, tokens = part.sequences, part.chunk_tokens
        last = max((max(row.blocks, default=-1) for row in rows), default=-1)
        segments = buckets.segments_for(last + 1, tokens)
        padded = max(tokens, part.min_tokens) if tokens else 0
        sizes.append(
            (
                buckets.rows_for(len(rows), tokens),
                buckets.tokens_for(padded),
                buckets.segments.ends[segments - 1],
            )
        )
    return Work(tuple(map(max, *sizes)) if len(sizes) > 1 else sizes[0], plan_tokens(plan))


def model_rows(
    model: str, llm: LLM, told: Mapping[str, Any], tick: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Returns a row for each case and metric: `measured` (the median of the repeats, `low` to `high`),
    `simulated`, their relative `error` and `spread`, the `goal`, whether it is "met", "missed" or, since the
    repeats differ too much, "unclear"; and `replay_error`, of the first repeat's own durations told again.

    Args:
        llm: open with the file's engine.
        told: the file's `calibration`, `cases` and `repeats`.
        tick: told what is served next.
    """
    timing = {name: Case.of(entry) for name, entry in told["calibration"].items()}
    cases = {name: Case.of(entry) for name, entry in told["cases"].items()}
    backends: dict[str, TimedBackend] = {}
    for case in (*timing.values(), *cases.values()):
        if (key := repr(case.engine)) not in backends:
            variant = (
                llm.variant(dataclasses.replace(llm.engine_config, **case.engine)) if case.engine else llm
            )
            variant.warmup(max_total_len=variant.max_model_len)
            backends[key] = TimedBackend(variant)
    plans = {name: plan_requests(case.workload, llm.config.vocab_size) for name, case in timing.items()}
    for name, case in reversed(timing.items()):  # the first runs are slow
        tick(f"{model}: {name}")
        run = backends["{}"].record(plans[name], case.workload).run
    served = len(run.served) / run.duration_s
    for name, case in cases.items():
        if case.load is not None:
            workload = dataclasses.replace(case.workload, request_rate=case.load * served)
            cases[name] = case._replace(workload=workload)
        plans[name] = plan_requests(cases[name].workload, llm.config.vocab_size)
    runs: dict[str, list[Recorded]] = {name: [] for name in plans}
    for _ in range(told["repeats"]):
        for name, case in (timing | cases).items():
            tick(f"{model}: {name}")
            runs[name].append(backends[repr(case.engine)].record(plans[name], case.workload))
    timed = [recorded for name in timing for recorded in runs[name]]
    table = StepTable([step for name in timing for step in usual_steps([each.steps for each in runs[name]])])
    submit_s, wake_s = median([s for recorded in timed for s in recorded.submits]), _wake_s()
    rows = []
    for name, case in cases.items():
        engine, first = backends[repr(case.engine)].llm, runs[name][0]
        of = lambda plan, engine=engine: table(work_of(engine, plan))  # noqa: E731
        told_of = simulate(engine, plans[name], case.workload, of, repeat(submit_s), lambda at: at + wake_s)
        simulated, again = _metrics(told_of), _metrics(replay(engine, plans[name], case.workload, first))
        repeats = [_metrics(recorded.run) for recorded in runs[name]]
        exact = case.load is None and case.workload.concurrency is None
        for metric in GOALS:
            row = judged([each[metric] for each in repeats], simulated[metric], metric, exact)
            error = again[metric] / repeats[0][metric] - 1
            rows.append({"model": model, "case": name, "metric": metric, **row, "replay_error": error})
    return rows


def _wake_s(times: int = 50, seconds: float = 1e-3) -> float:
    """Returns by how many seconds this machine usually sleeps too long."""
    late = []
    for _ in range(times):
        begin = time.perf_counter()
        time.sleep(seconds)
        late.append(time.perf_counter() - begin - seconds)
    return median(late)


def judged(measured: Sequence[float], simulated: float, metric: str, exact: bool = False) -> dict[str, Any]:
    """Returns a metric's figures and its verdict, see `model_rows`; `exact`: the number of steps must be."""
    truth, low, high = median(measured), min(measured), max(measured)
    error, spread = simulated / truth - 1, high / low - 1
    goal = 0.0 if exact and metric == "steps" else GOALS[metric]
    verdict = "unclear" if spread >= QUIET else "met" if abs(error) <= goal else "missed"
    return {
        "measured": truth, "low": low, "high": high, "simulated": simulated, "error": error, "spread": spread,
        "goal": goal, "verdict": verdict,
    }  # fmt: skip


def _metrics(run: TrafficRun) -> dict[str, float]:
    metrics = run.metrics(Slo())
    return {"steps": len(run.steps), **{name: float(metrics[name] or 0) for name in GOALS if name != "steps"}}


def run_machine(asked: Asked, run: ExperimentRun, file: Path = CASES) -> Result:
    """Holds the simulator against the engine on this machine and finishes `run`; machine.csv lies beside
    result.json. The configured model and engine are not used.

    Raises:
        ConfigError: `simulate.groups` names none of the file's models.
    """
    told = tomllib.loads(file.read_text(encoding="utf-8"))
    groups, engine = asked.section.groups, EngineConfig(**told["engine"])
    models = {name: of for name, of in told["models"].items() if not groups or name in groups}
    if not models or len(models) < len(groups):
        raise ConfigError(
            f"simulate.groups={groups}: with simulate.mode=machine models: {', '.join(told['models'])}"
        )
    run.start(seeds={"engine": asked.section.seed})
    served = len(told["calibration"]) * (1 + told["repeats"]) + len(told["cases"]) * told["repeats"]
    rows: list[dict[str, Any]] = []
    with progress("serving", total=len(models) * served) as task:

        def tick(what: str) -> None:
            task.describe(what)
            task.advance()

        for name, of in models.items():
            options = {"dtype": "auto", "load_format": "auto", **of}
            with LLM(options.pop("source"), engine=engine, seed=asked.section.seed, **options) as llm:
                rows += model_rows(name, llm, told, tick)
    source = run.provenance
    cpu, commit = source["cpu"], (source["git"]["commit"] or "")[:8] + "+" * bool(source["git"]["dirty"])
    device = f"{cpu['model']} {cpu['family']}, {cpu['usable_cores']} cores"
    where = {
        "device": device,
        "jax": source["versions"]["jax"],
        "date": source["time_utc"][:10],
        "commit": commit,
    }
    write_rows(path := run.out_dir / "machine.csv", [{**row, **where} for row in rows])
    verdicts = [row["verdict"] for row in rows]
    metrics = {f"figures_{verdict}": verdicts.count(verdict) for verdict in ("met", "missed", "unclear")}
    metrics |= {"replay_worst_error": max(abs(row["replay_error"]) for row in rows)}
    result = run.result(metrics=metrics, machine=rows, hardware={"kind": "validation", "simulated": True})
    return run.finish(result, files=[path])
