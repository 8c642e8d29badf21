"""What the simulator says of published end-to-end results: errors, intervals, and why one is missed."""

import csv
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moejax.bench.backends.replica import FleetCosts, Layout
from moejax.bench.backends.simulated import SimulatedBackend
from moejax.bench.driver import drive
from moejax.bench.simulate.published import Point, model_of
from moejax.bench.simulate.replicas import device_room
from moejax.bench.traffic import ThroughputWorkload, plan_requests
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import check_parallel
from moejax.engine.requests.api import SamplingParams
from moejax.engine.scheduling.plan import Plan
from moejax.results.metrics import Slo
from moejax.sharding.pipeline import split_layers
from moejax.simulate.calibration import Calibration, kind_of, load_calibration
from moejax.simulate.kernels import Kernels
from moejax.simulate.routing import RoutingLaw
from moejax.simulate.runner import simulated_engine
from moejax.simulate.step import GroupWork, StepDurations, StepTime, time_row

CALIBRATION = "calibration_points.csv"
_BLOCK = 16

_LAWS = {"qwen3": RoutingLaw("power", {"exponent": 1.2}), "deepseek": RoutingLaw("power", {"exponent": 1.01})}
"""What the tables' collectors hold a family's routing to be near; others' tokens choose independently."""


@dataclass(frozen=True)
class Stack:
    """What an engine sets where its command does not.

    Attributes:
        share: of the device's memory for weights, cache and step.
        seqs, tokens: sequences and tokens of a step; of devices with more than 70 GiB that are no A100 where
            there are two.
        evicts: a sequence is admitted whose output may not fit; else the longest length is kept for each.
    """

    share: float
    seqs: tuple[int, int]
    tokens: tuple[int, int]
    evicts: bool = True


STACKS = {
    "vllm-v0": Stack(0.9, (256, 256), (32768, 32768)),
    "vllm": Stack(0.9, (256, 1024), (2048, 8192)),
    "sglang": Stack(0.88, (2048, 2048), (8192, 8192)),
    "trtllm": Stack(0.9, (2048, 2048), (8192, 8192), evicts=False),
    "trtllm-0.14": Stack(0.95, (4096, 4096), (8192, 8192), evicts=False),
}
"""Documented defaults by engine: vLLM up to 0.4 and from V1 on, SGLang, TensorRT-LLM's server and the
benchmark of its 0.14."""


def rows_of_point(
    point: Point, calibration: Calibration | None = None, law: RoutingLaw | None = None, used: bool = False
) -> list[dict[str, Any]]:
    """Returns a row per metric that was published of a point.

    A row has `id`, `group`, `device`, `model`, `layout`, `stack`, `metric`, `published`, `simulated`, its
    90 % interval `low` to `high`, `error` (simulated over published, less 1), whether it is `inside`,
    `used_for_calibration` (then in no error), `routing_law`, `num_blocks`, `merged` (requests that move
    as one, for speed), `from_*` and `time_*` (shares of the time by source and operation), and `note`: why
    there is no figure, or why it is off by more than 30 %.

    Args:
        calibration: instead of its stack's own.
        law: instead of its family's.
    """
    head = {name: getattr(point, name) for name in ("id", "group", "device", "model", "layout", "stack")}
    head["used_for_calibration"] = used
    try:
        if point.reason:
            raise ConfigError(point.reason)
        models = kind_of(model_of(point.model))
        known = calibration or load_calibration(point.device, point.stack, models)
        metrics, told = simulate_point(point, known, law)
    except ConfigError as error:
        missing = {"simulated": None, "note": str(error)}
        return [{**head, "metric": name, "published": v, **missing} for name, v in point.published.items()]
    rows, spread = [], told["relative_spread"]
    for metric, published in point.published.items():
        value = metrics[metric]
        low, high, off = value / (1 + spread), value * (1 + spread), value / published - 1
        figures = {"metric": metric, "published": published, "simulated": value, "low": low, "high": high}
        figures |= {"error": off, "inside": low <= published <= high}
        rows.append({**head, **figures, **told, "note": _why(point, metric, told) if abs(off) > 0.3 else ""})
    return rows


def _why(point: Point, metric: str, told: Mapping[str, Any]) -> str:
    """Returns the likeliest reason of a large error: what is known least of the point."""
    if metric == "mean_ttft_ms":
        return "the first token waits in a queue: few percent of throughput, or how users begin, decide it"
    if isinstance(point.output, int) and point.output <= 8:
        return "short answers: the server's front end decides, and is not modelled"
    if told["num_blocks"] < 4096:
        return "few blocks fit: the memory that the engine left for the cache decides"
    if point.weights == "w8a16_int8" and point.device == "a100_80gb":
        return "8-bit weights of 16-bit arithmetic: no table of such experts on this device"
    if point.stack == "vllm-v0":
        return "kernels before their tuning; the host launches each of them"
    return "all lengths are off alike: the machine or the engine's version is another than the tables'"


def simulate_point(
    point: Point, calibration: Calibration, law: RoutingLaw | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the simulated metrics of a point, and its law, interval, sources and blocks.

    Raises:
        ConfigError: the model's shape is not known, or it does not fit.
    """
    model, stack, parallel = model_of(point.model), STACKS[point.stack], point.parallel
    check_parallel(parallel, model, parallel.num_devices)
    law = law or next((known for name, known in _LAWS.items() if model.family.startswith(name)), None)
    law = law or RoutingLaw("uniform")
    kernels = Kernels(point.device, point.stack.split("-")[0], point.weights, point.dense, point.cache)
    stages = split_layers(model, parallel.pp)
    step = StepDurations(model, parallel, kernels, law, calibration.host, stages=stages)
    large = point.device != "a100_80gb"
    sizes = (point.prompt, point.output)
    longest = [size if isinstance(size, int) else size.high for size in sizes]
    tokens, seqs = point.max_tokens or stack.tokens[large], stack.seqs[large]
    if point.stack == "trtllm-0.14":  # whole prompts only
        tokens = max(tokens, longest[0])
    engine = EngineConfig(
        max_model_len=sum(longest), max_num_seqs=seqs, max_num_batched_tokens=tokens, block_size=_BLOCK
    )
    room = device_room(model, parallel, engine, kernels, stack.share)
    groups, blocks = parallel.data_groups, room.blocks
    if not stack.evicts:
        kept = sum(size if isinstance(size, int) else size.mean or 0.0 for size in sizes)
        seqs = max(1, min(seqs, int(blocks // math.ceil(kept / _BLOCK))))
    merged = _merged(point, seqs, tokens, groups)
    engine = dataclasses.replace(
        engine, max_num_seqs=max(1, seqs // merged), max_num_batched_tokens=max(1, tokens // merged)
    )

    def time(plan: Plan) -> StepTime:
        return step.of([_times(GroupWork.of(part), merged) for part in plan.groups])

    backend = SimulatedBackend(
        model,
        engine,
        [Layout(lambda: simulated_engine(engine, time, max(1, blocks // merged), groups=groups))],
        costs=FleetCosts(request_s=calibration.host.request_s),
    )
    workload = ThroughputWorkload(
        num_requests=max(1, point.requests // merged),
        prompt_len=point.prompt,
        output_len=point.output,
        concurrency=point.concurrency,
    )
    sampling = lambda output, _: SamplingParams(max_tokens=output, ignore_eos=True)  # noqa: E731
    plan = plan_requests(workload, 2)
    run = drive(backend, plan, sampling, workload=workload, clock=backend.clock, sleep=backend.sleep)
    metrics = {name: float(value) for name, value in run.metrics(Slo()).items() if value is not None}
    for name in ("output_throughput", "request_throughput"):
        metrics[name] *= merged
    metrics["mean_latency_ms"] = 1e3 * run.duration_s
    metrics["tok_s_per_request"] = 1e3 / metrics.get("mean_tpot_ms", math.inf)
    return metrics, {
        "routing_law": str(law) if model.num_experts else "",
        "num_blocks": blocks,
        "merged": merged,
        **time_row(backend.parts(), calibration.spreads),
    }


def _merged(point: Point, seqs: int, tokens: int, groups: int) -> int:
    """Returns how many equal requests that all come at once move as one: no more than a step's tokens, and a
    hundredth of the requests, allow."""
    if point.concurrency or not isinstance(point.prompt, int) or groups > 1:
        return 1
    return max(1, min(16, tokens // point.prompt, point.requests // 100, seqs // 8))


def _times(work: GroupWork, count: int) -> GroupWork:
    if count == 1:
        return work
    return GroupWork(work.decodes * count, work.context * count, work.chunks * count, work.sampled * count)


def summary(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns by group and metric: `count`, `without` a figure, `median_error`, `p90_error`, `worst_error`,
    `bias` (median of the signed error), the share `inside` of the 90 % intervals and their `median_width`
    (high over low, less 1). Points of the calibration count in none."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if not row["used_for_calibration"]:
            grouped.setdefault((row["group"], row["metric"]), []).append(row)
    told = []
    for (group, metric), given in grouped.items():
        known = [row for row in given if row["simulated"] is not None]
        head = {"group": group, "metric": metric, "count": len(known), "without": len(given) - len(known)}
        if known:
            signed = np.array([row["error"] for row in known])
            sizes, widths = np.abs(signed), [row["high"] / row["low"] - 1 for row in known]
            head |= {"median_error": float(np.median(sizes)), "p90_error": float(np.quantile(sizes, 0.9))}
            head |= {"worst_error": float(sizes.max()), "bias": float(np.median(signed))}
            head |= {"inside": float(np.mean([row["inside"] for row in known]))}
            head |= {"median_width": float(np.median(widths))}
        told.append(head)
    return told


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as CSV, floats with four digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
