"""Which layout, how many devices and what batch serve so many tokens a second within the objectives.

Every layout of up to `most_devices` of each kind is looked at in a steady state, in which each of B sequences
decodes a token a step and prompts come as fast as outputs end:

    seconds a token = t(B decodes) + B · t(prompt) / output length          (a sequence waits for both)

The largest B within the memory and the TPOT objective gives a replica's tokens/s. Those that promise most for
a device, or for the money, are then simulated under the workload at the rate that they promise.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.simulate.config import PlanSection, SimulateSection
from moejax.bench.simulate.replicas import Deployment, deploy, layouts
from moejax.bench.simulate.run import Asked, PlannedLoad, simulated_kind, simulated_row, start_simulated
from moejax.bench.traffic import ThroughputWorkload, plan_requests
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.report.progress import progress
from moejax.results.result import Result
from moejax.simulate.step import GroupWork

_UTILISED = 0.9
"""Share of the steady state's rate that is asked for at first, as arrivals are not even."""
_KEPT, _ATTEMPTS = 0.95, 6
"""Share of the requests that must keep to the objectives, and rates that are tried."""
_TIMES = 3
"""A simulation's length, in times that a request may take."""


def steady_state(
    deployment: Deployment, prompt_len: float, output_len: float, tpot_s: float
) -> dict[str, Any]:
    """Returns the largest batch of a replica within its memory and a time per output token, with its rate.

    `batch_size` is 0 where even one sequence is too slow.
    """
    engine, groups = deployment.engine, deployment.parallel.data_groups
    each = math.ceil((prompt_len + output_len) / engine.block_size)
    fits = min(engine.max_num_seqs, deployment.room.blocks // each)
    context, prompt = prompt_len + output_len / 2, round(prompt_len)
    prefill = deployment.step.of([GroupWork(0, 0, ((prompt, prompt),), 1)] * groups).seconds

    def token_s(batch: int) -> float:
        decode = deployment.step.of([GroupWork(batch, round(batch * context), (), batch)] * groups).seconds
        return decode + batch * prefill / output_len

    low, high = 0, fits
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if token_s(middle) <= tpot_s else (low, middle - 1)
    rate = groups * low / token_s(low) if low else 0.0
    devices = deployment.parallel.num_devices
    return {
        "batch_size": low * groups,
        "steady_tokens_per_s_per_device": rate / devices,
        "steady_tpot_ms": 1e3 * token_s(max(low, 1)),
        "steady_tokens_per_s": rate,
    }


def choose_layout(
    model: ModelConfig,
    engine: EngineConfig,
    section: SimulateSection,
    kind: str,
    devices: int,
    lengths: tuple[float, float],
    tpot_ms: float | None = None,
) -> ParallelConfig:
    """Returns the layout over all of so many devices of a kind that serves the most tokens/s in a steady
    state of requests of (prompt, output) `lengths`, within its memory and a time per output token.

    Raises:
        ConfigError: an unknown kind, no layout fits, or none is fast enough.
    """
    section.kernels(kind)
    found: list[tuple[float, ParallelConfig]] = []
    refused = f"no layout suits {devices} devices; powers of two do"
    for name, parallel in layouts(model, devices):
        if parallel.num_devices == devices:
            try:
                one = deploy(name, model, parallel, engine, section, kind, section.routing.law)
            except ConfigError as error:
                refused = str(error)
                continue
            rate = steady_state(one, *lengths, (tpot_ms or math.inf) / 1e3)["steady_tokens_per_s"]
            refused = f"none keeps {tpot_ms} ms a token (workload.slo.tpot_ms)"
            found.append((rate, parallel))
    best = max(found, key=lambda pair: pair[0], default=(0.0, ParallelConfig()))
    if not best[0]:
        raise ConfigError(f"parallel.auto={devices} on {kind}: {refused}")
    return best[1]


def plan_rows(
    model: ModelConfig,
    engine: EngineConfig,
    section: SimulateSection,
    workload: ThroughputWorkload,
    devices: Mapping[str, float | None],
    begin: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Returns a row per layout and device kind that fits, the best first: those that keep the
    objectives when they are simulated, those that do not, then the others by what a steady state promises.

    Args:
        devices: kinds, with the price of an hour where it is known.
        begin: called before anything is simulated, and not at all where nothing fits.

    Raises:
        ConfigError: the workload has no TPOT objective, or nothing fits.
    """
    if workload.slo.tpot_ms is None:
        raise ConfigError(
            "simulate.mode=plan needs workload.slo.tpot_ms: without it any batch is good enough"
        )
    sample = plan_requests(dataclasses.replace(workload, request_rate=math.inf), model.vocab_size)
    prompt_len = sum(request.prompt_len for request in sample) / len(sample)
    output_len = sum(request.output_len for request in sample) / len(sample)
    rows: list[dict[str, Any]] = []
    found: dict[tuple[str, str], Deployment] = {}
    plan, refused = section.plan, ""
    for kind, price in devices.items():
        for name, parallel in layouts(model, plan.most_devices):
            try:
                one = deploy(name, model, parallel, engine, section, kind, section.routing.law)
            except ConfigError as error:
                refused = str(error)
                continue
            steady = steady_state(one, prompt_len, output_len, workload.slo.tpot_ms / 1e3)
            if steady["batch_size"]:
                found[kind, name] = one
                rows.append({"device_kind": kind, **_sized(name, one, steady, plan, price)})
    if not rows:
        raise ConfigError(
            f"simulate.plan: no layout serves this within {workload.slo.tpot_ms:g} ms a token "
            f"(simulate.plan.most_devices={plan.most_devices}); the last one: {refused}"
        )
    begin()
    rows.sort(key=lambda row: _rank(row, "steady_tokens_per_s"))
    with progress("simulating the best layouts", total=min(plan.simulated, len(rows))) as task:
        for row in rows[: plan.simulated]:
            task.describe(f"simulating {row['layout']} on {row['device_kind']}")
            one = found[row["device_kind"], row["layout"]]
            rate = _UTILISED * row["steady_tokens_per_s"] / output_len
            simulated = _kept(one, section, workload, rate, output_len)
            row |= simulated | _sized(row["layout"], one, simulated, plan, devices[row["device_kind"]])
            task.advance()
    done = [row for row in rows if "request_rate" in row]
    kept = [row for row in done if (row["request_goodput"] or 0.0) >= _KEPT * row["request_throughput"]]
    late = [row for row in done if row not in kept]
    best = (sorted(some, key=lambda row: _rank(row, "output_throughput")) for some in (kept, late))
    return [*itertools.chain(*best), *rows[len(done) :]]


def _kept(
    one: Deployment, section: SimulateSection, workload: ThroughputWorkload, rate: float, output_len: float
) -> dict[str, Any]:
    """Returns the simulated row of the highest rate tried at which the objectives are kept: each next one is
    lower by a fifth. Of those that keep them at none, the lowest's."""
    # Long enough that most of it is neither filling up nor draining.
    once = max(1.0, output_len * (workload.slo.tpot_ms or 0.0) / 1e3)
    plain = dataclasses.replace(section, interval=False)
    for attempt in range(_ATTEMPTS):
        given = dataclasses.replace(
            workload,
            request_rate=rate,
            num_requests=math.ceil(rate * _TIMES * once),
            warmup_s=once,
            duration_s=_TIMES * once,
        )
        load = PlannedLoad(None, given, plan_requests(given, one.model.vocab_size))
        row = simulated_row(one, plain, load)
        good, ended = row["request_goodput"], row["request_throughput"]
        if attempt == _ATTEMPTS - 1 or (good and good >= _KEPT * ended):
            break
        rate *= 0.8
    return simulated_row(one, section, load) if section.interval else row


def _sized(
    name: str, one: Deployment, of: dict[str, Any], plan: PlanSection, price: float | None
) -> dict[str, Any]:
    """Returns replicas, devices and price for the tokens/s that are wanted, by a replica's rate in `of`."""
    rate = of.get("output_throughput") or of["steady_tokens_per_s"]
    devices = one.parallel.num_devices
    replicas = math.ceil(plan.tokens_per_s / rate)
    cost = None if price is None else price * devices / rate / 3600 * 1e6
    sizes = {"replicas": replicas, "num_devices": devices * replicas, "cost_per_million_output_tokens": cost}
    return {"layout": name, "error": None, **of, **sizes, "tokens_per_s_per_device": rate / devices}


def _rank(row: dict[str, Any], rate: str) -> tuple[float, ...]:
    cost = row["cost_per_million_output_tokens"]
    return (math.inf if cost is None else cost, -(row[rate] or 0.0) / (row["num_devices"] / row["replicas"]))


def run_plan(asked: Asked, run: ExperimentRun) -> Result:
    """Plans a deployment and finishes `run`; `cases` are `plan_rows`. Errors are theirs, before anything is
    written."""
    model, price = asked.model, run.price.per_hour if run.price else None
    devices = asked.section.plan.devices or {simulated_kind(run): price}
    begin = functools.partial(start_simulated, run, asked.workload, "/".join(devices))
    rows = plan_rows(model, asked.engine, asked.section, asked.workload, devices, begin)
    best = rows[0]
    names = ("num_devices", "replicas", "batch_size", "output_throughput", "median_ttft_ms", "median_tpot_ms",
             "cost_per_million_output_tokens")  # fmt: skip
    result = run.result(
        metrics={name: best.get(name) for name in names} | {"best_layout": best["layout"]},
        cases=[{"case": number, **row} for number, row in enumerate(rows)],
        hardware={"kind": best["device_kind"], "simulated": True},
        slo=dataclasses.asdict(asked.workload.slo),
    )
    return run.finish(result, tables={"layouts": result["cases"]})
