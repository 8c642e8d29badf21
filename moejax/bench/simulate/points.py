"""Published end-to-end results, and what the simulator says of each: errors, intervals, and why one is missed."""

import csv
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moejax.bench.backends.simulated import SimulatedBackend
from moejax.bench.driver import drive
from moejax.bench.simulate.replicas import device_room
from moejax.bench.traffic import Lengths, ThroughputWorkload, plan_requests
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig, check_parallel
from moejax.engine.requests.api import SamplingParams
from moejax.models.registry import config_from_hf
from moejax.results.metrics import Slo
from moejax.simulate.calibration import Calibration, load_calibration
from moejax.simulate.kernels import Kernels
from moejax.simulate.routing import RoutingLaw
from moejax.simulate.runner import simulated_engine
from moejax.simulate.step import GroupWork, Part, StepModel, relative_spread
from moejax.simulate.tables import FOLDER, SOURCES, rows_of

CALIBRATION = "calibration_points.csv"
_BLOCK = 16

_DEVICES = {"a100": "a100_80gb", "a800": "a100_80gb", "h100": "h100", "h200": "h200"}

_LAWS = {"qwen3": RoutingLaw("power", {"exponent": 1.2}), "deepseek": RoutingLaw("power", {"exponent": 1.01})}
"""What the tables' collectors hold a model's routing to be near; others' tokens choose independently."""


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
"""Documented defaults by engine: vLLM up to 0.4 and from V1 on, SGLang, TensorRT-LLM's server and its benchmark of
0.14, whose log tells 4096 sequences, 8192 tokens and 98 % of the free memory."""


@dataclass(frozen=True)
class Point:
    """One published measurement.

    Attributes:
        group: file and device it is judged with.
        model: as published; `stack` a key of `STACKS`.
        weights, dense, cache: the tables' names of dtypes.
        prompt, output: tokens, or their distribution.
        concurrency: users who wait for their answers; None: all requests at once.
        published: metric → value; a metric of `_METRICS`.
        reason: why it cannot be simulated.
    """

    id: str
    group: str
    device: str
    model: str
    parallel: ParallelConfig
    stack: str
    prompt: int | Lengths = 1
    output: int | Lengths = 1
    requests: int = 1
    concurrency: int | None = None
    weights: str = "bf16"
    dense: str = "bf16"
    cache: str = "bf16"
    max_num_seqs: int | None = None
    max_tokens: int | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None

    @property
    def layout(self) -> str:
        named = {name: getattr(self.parallel, name) for name in ("dp", "pp", "ep", "tp")}
        told = [f"{name}{value}" for name, value in named.items() if value > 1] or ["single"]
        return "_".join(told + ["data"] * (self.parallel.attention == "data"))


_METRICS = {
    "output_throughput": 1.0, "request_throughput": 1.0, "mean_latency_ms": -1.0, "mean_ttft_ms": -1.0,
    "mean_tpot_ms": -1.0, "tok_s_per_request": 1.0,
}  # fmt: skip
"""Metric → 1 where more is better."""


# -- what was published ------------------------------------------------------------------------------------


def model_of(name: str) -> ModelConfig:
    """Returns the shape of a published model in bfloat16.

    Raises:
        ConfigError: it is not in `models.json`.
    """
    shapes = json.loads((FOLDER / "models.json").read_text())
    key = name.rpartition("/")[2].strip("- ").lower().replace(" ", "-").replace("llama-v3", "llama-3")
    found = [shape for shape in shapes if re.match(re.escape(shape) + r"(?![.\d])", key)]
    if not found:
        raise ConfigError(f"no shape of {name} is known (moejax/assets/gpu_tables/models.json)")
    return config_from_hf(shapes[max(found, key=len)], name).replace(dtype="bfloat16")


def read_points(folder: Path = FOLDER) -> list[Point]:
    """Returns the points of a folder's `e2e_*` files, of each in its order.

    Raises:
        ConfigError: a file cannot be read, or the folder has none.
    """
    points: list[Point] = []
    for path in sorted(folder.glob("e2e_*.csv*")):
        reader = next((read for start, read in _READERS.items() if path.name.startswith(start)), None)
        if reader is not None:
            try:
                points += [point for row, number in _numbered(path) for point in reader(row, number)]
            except (KeyError, ValueError, ConfigError) as error:
                raise ConfigError(f"{path}: {type(error).__name__}: {error}") from None
    if not points:
        raise ConfigError(f"validate.points={folder} has no file e2e_*.csv with points")
    return points


def _numbered(path: Path) -> Iterable[tuple[dict[str, str], int]]:
    return ((row, number) for number, row in enumerate(rows_of(path)))


def _trtllm(row: Mapping[str, str], number: int) -> list[Point]:
    points = []
    for column, value in row.items():
        device, precision = column.split("_")[0], column.rpartition("_")[2]
        if device in _DEVICES and value:
            weights = "fp8" if precision == "fp8" else "bf16"
            pcie = "its links are not known: PCIe, no NVLink" if "pcie" in column else None
            points.append(
                Point(
                    f"trtllm-{row['model'].lower().replace(' ', '-')}-{row['isl']}-{row['osl']}-tp{row['tp']}-{column}",
                    f"trtllm-0.14 {column}", _DEVICES[device], row["model"], ParallelConfig(tp=int(row["tp"])),
                    "trtllm-0.14", int(row["isl"]), int(row["osl"]), int(row["requests"]), weights=weights,
                    dense=weights, cache=weights, published={"output_throughput": float(value)}, reason=pcie,
                )  # fmt: skip
            )
    return points


def _single(row: Mapping[str, str], number: int) -> list[Point]:
    engine, version, metric = row["engine"].lower(), row["version"], row["metric"]
    stack = {"tensorrt-llm": "trtllm"}.get(engine, engine)
    if stack == "vllm" and ("2024" in version or "CI build" in version):
        stack = "vllm-v0"
    device, weights = row["gpu"].split("-")[0].lower(), _weights(row["weights"], row["gpu"].lower(), stack)
    batch = int(row["batch_or_concurrency"] or 0)
    name = {"mean_latency": "mean_latency_ms", "ttft": "mean_ttft_ms"}.get(metric, metric)
    lengths = [row["input"], row["output"]]
    sharegpt = lengths[0] == "ShareGPT"
    sizes: list[int | Lengths] = [_sharegpt(217), _sharegpt(201)] if sharegpt else [int(x or 1) for x in lengths]
    requests = int(row["requests"] or batch or 1)
    reason = None
    if not all(lengths):
        reason = "its lengths are not published"
    elif not batch and not row["requests"]:
        reason = "its load is not published"
    elif name not in _METRICS:
        reason = f"its metric {metric} is of a deployment split in two"
    parallel = ParallelConfig(ep=int(row["ep"]), tp=int(row["tp"]), nodes=int(row["nodes"])) if not reason else ParallelConfig()
    return [
        Point(
            row["id"], f"{row['id'].rsplit('-', 1)[0] if stack != 'vllm-v0' else 'vllm-v0'} {device}",
            _DEVICES[device], row["model"], parallel, stack, *sizes, requests, None, weights, weights,
            published={name: float(row["value"])}, reason=reason,
        )
    ]  # fmt: skip


def _sharegpt(mean: float) -> Lengths:
    """Returns a distribution with a data set's mean; its tail is as long as its mean."""
    return Lengths(4, max(1024, math.ceil(4 * mean)), "lognormal", max(4.0, mean), mean)


def _weights(name: str, device: str, stack: str) -> str:
    """Returns the tables' name of a model's weights; an A100 computes 8-bit floats in 16 bits."""
    name = name.lower()
    if "int4" in name or "awq" in name:
        return "w4a16_int4"
    if "int8" in name or ("fp8" in name and device.startswith("a")):
        return "w8a16_int8"
    return ("fp8_block128" if "trtllm" not in stack else "fp8") if "fp8" in name else "bf16"


def _gpustack(row: Mapping[str, str], number: int) -> list[Point]:
    command = f"{row['command']} {row['variant'] if row['variant'].startswith('--') else ''}"
    device, stack = row["gpu"], row["engine"] if row["engine"] in STACKS else "vllm"

    def option(*names: str) -> int:
        found = [re.findall(rf"--?{name}[ =](\d+)", command) for name in names]
        return max((int(values[-1]) for values in found if values), default=0)

    devices = option("tp", "tp-size", "tp_size", "tensor-parallel-size") or 1
    ep, dp = option("ep-size", "ep_size"), option("dp", "dp-size", "data-parallel-size")
    whole = "enable-expert-parallel" in command
    ep = devices * max(1, dp) if whole else max(1, ep)
    data = "enable-dp-attention" in command
    reason = None
    for word, why in (("speculative", "it speculates"), ("nsa", "its attention is sparse"), ("pp", "")):
        if word in command and why:
            reason = why
    if row["engine"] == "?":
        reason = "its engine is not named"
    if row["model"].rpartition("/")[2].lower().startswith(("deepseek-r1", "deepseek-v3")) and data:
        ep = devices
    named = next((word for word in command.split() if "Qwen" in word or "deepseek" in word.lower()), row["model"])
    weights = _weights(named if "deepseek" not in named.lower() else "fp8", device, stack)
    tokens = option("max-num-batched-tokens", "max_num_tokens", "chunked-prefill-size") or None
    dataset, requests = row["dataset"], int(row["requests"])
    means = float(row["input_tokens"]) / requests, float(row["output_tokens"]) / requests
    exact = "ShareGPT" not in dataset or "random" in row["variant"]
    sizes: list[int | Lengths] = [round(mean) if exact else _sharegpt(mean) for mean in means]
    batch = re.search(r"batch size (\d+)", row["variant"])
    published = {
        name: float(row[column])
        for name, column in (
            ("output_throughput", "out_tok_s"), ("mean_ttft_ms", "mean_ttft_ms"), ("mean_tpot_ms", "mean_tpot_ms"),
        )
        if row[column]
    }  # fmt: skip
    parallel = ParallelConfig(
        ep=ep, tp=max(1, devices // ep), attention="data" if data else "tensor"
    )
    return [
        Point(
            f"gpustack-{number:03d}", f"gpustack {device}", _DEVICES[device], row["model"], parallel, stack,
            *sizes, requests, int(batch[1]) if batch else None, weights, weights, max_tokens=tokens,
            published=published, reason=reason,
        )
    ]  # fmt: skip


def _silicon(row: Mapping[str, str], number: int) -> list[Point]:
    def size(name: str) -> int:
        return int(float(row[name] or 1))

    device, stack = row["system"].split("_")[0], row["backend"]
    ep, tp, data = size("moe_ep_size"), size("moe_tp_size"), size("attention_dp_size") > 1
    if ep * tp != size("tp_size") * size("attention_dp_size"):  # dense
        ep, tp = 1, size("tp_size")
    dtypes = {"fp8_block": "fp8_block128", "fp8": "fp8", "bfloat16": "bf16", "float16": "bf16"}
    reason = None if row["mode"] == "agg" else "prompts and outputs are computed by different devices"
    if reason is None and (row["gemm_quant_mode"] or "fp8") not in dtypes:
        reason = f"no table has {row['gemm_quant_mode']}"
    dense = dtypes.get(row["gemm_quant_mode"], "bf16")
    parallel = ParallelConfig() if reason else ParallelConfig(
        pp=size("pp_size"), ep=ep, tp=tp, attention="data" if data and ep > 1 else "tensor"
    )  # fmt: skip
    users = size("concurrency")
    published = {
        f"mean_{name}_ms": float(row[f"silicon_{name}_ms"]) for name in ("ttft", "tpot") if row[f"silicon_{name}_ms"]
    }
    return [
        Point(
            f"silicon-{number:04d}", f"silicon {device} {row['model_path'].rpartition('/')[2]} {stack}",
            _DEVICES[device], row["model_path"], parallel, stack, size("isl"), size("osl"), 3 * users, users,
            dtypes.get(row["moe_quant_mode"], dense), dense, published=published, reason=reason,
        )
    ]  # fmt: skip


_READERS = {"e2e_trtllm": _trtllm, "e2e_points": _single, "e2e_gpustack": _gpustack, "e2e_silicon": _silicon}


def calibration_ids(folder: Path = FOLDER) -> dict[str, str]:
    """Returns the ids of the points that constants are chosen on, with what each is for."""
    path = folder / CALIBRATION
    return {row["id"]: row["fits"] for row in rows_of(path)} if path.exists() else {}


# -- what the simulator says -------------------------------------------------------------------------------


def point_rows(
    folder: Path = FOLDER, groups: Sequence[str] = (), calibration: Calibration | None = None
) -> list[dict[str, Any]]:
    """Returns a row per published metric of a folder's points.

    A row has `id`, `group`, `device`, `model`, `layout`, `stack`, `metric`, `published`, `simulated`, its 90 %
    interval `low` to `high`, `error` (simulated over published, less 1), `inside` the interval,
    `used_for_calibration` (no such row belongs in an error), `routing_law`, `merged` (requests that move as one,
    for speed), `num_blocks`, `from_*` (shares of the time by source) and `note`: why there is no figure, or why it
    is off by more than 30 %.

    Args:
        groups: beginnings of the groups that are simulated; none: all.
        calibration: instead of each stack's own.
    """
    used = calibration_ids(folder)
    rows = []
    for point in read_points(folder):
        if not groups or point.group.startswith(tuple(groups)):
            rows += rows_of_point(point, calibration, used=point.id in used)
    return rows


def rows_of_point(
    point: Point, calibration: Calibration | None = None, law: RoutingLaw | None = None, used: bool = False
) -> list[dict[str, Any]]:
    """Returns the rows of one point, see `point_rows`; `law` is the model's own by default."""
    head = {"id": point.id, "group": point.group, "device": point.device, "model": point.model,
            "layout": point.layout, "stack": point.stack, "used_for_calibration": used}  # fmt: skip
    try:
        if point.reason:
            raise ConfigError(point.reason)
        told = simulate_point(point, calibration or load_calibration(point.device, point.stack), law)
    except ConfigError as error:
        return [
            {**head, "metric": metric, "published": value, "simulated": None, "note": str(error)}
            for metric, value in point.published.items()
        ]
    rows = []
    metrics, spread = told.pop("metrics"), told["relative_spread"]
    for metric, published in point.published.items():
        value = metrics[metric]
        low, high, error = value / (1 + spread), value * (1 + spread), value / published - 1
        note = _why(point, told) if abs(error) > 0.3 else ""
        rows.append({**head, "metric": metric, "published": published, "simulated": value, "low": low, "high": high,
                     "error": error, "inside": low <= published <= high, **told, "note": note})  # fmt: skip
    return rows


def _why(point: Point, told: Mapping[str, Any]) -> str:
    """Returns the likeliest reason of a large error: what is known least of the point."""
    waits, shares = told["num_blocks"] < 4096, {name: told[f"from_{name}"] for name in SOURCES}
    if waits:
        return "few blocks fit: its time is decided by the memory that the engine left for the cache"
    if shares["roofline"] > 0.4:
        return f"{shares['roofline']:.0%} of the time has no table: host, or kernels of other dtypes"
    if point.weights != "bf16" and point.device == "a100_80gb":
        return f"no table of {point.weights} experts on this device"
    return "engine's schedule or kernels of another version"


def simulate_point(point: Point, calibration: Calibration, law: RoutingLaw | None = None) -> dict[str, Any]:
    """Returns the simulated `metrics` of a point, with its law, interval, sources and blocks.

    Raises:
        ConfigError: the model's shape is not known, or it does not fit.
    """
    model, stack = model_of(point.model), STACKS[point.stack]
    check_parallel(point.parallel, model, point.parallel.num_devices)
    families = [known for name, known in _LAWS.items() if model.family.startswith(name)]
    law = law or (families[0] if families else RoutingLaw("uniform"))
    kernels = Kernels(point.device, point.stack.split("-")[0], point.weights, point.dense, point.cache)
    step = StepModel(model, point.parallel, kernels, law, calibration.host)
    large = point.device != "a100_80gb"
    tokens = point.max_tokens or stack.tokens[large]
    longest = [size if isinstance(size, int) else size.high for size in (point.prompt, point.output)]
    if not stack.evicts and point.stack != "trtllm":  # whole prompts only
        tokens = max(tokens, longest[0])
    seqs = point.max_num_seqs or stack.seqs[large]
    engine = EngineConfig(
        max_model_len=sum(longest), max_num_seqs=seqs, max_num_batched_tokens=tokens, block_size=_BLOCK
    )
    room = device_room(model, point.parallel, engine, kernels, stack.share)
    groups, blocks = point.parallel.data_groups, room.blocks
    if not stack.evicts:
        kept = sum(size if isinstance(size, int) else size.mean or 0 for size in (point.prompt, point.output))
        seqs = max(1, min(seqs, int(blocks // math.ceil(kept / _BLOCK))))
    merged = _merged(point, seqs, tokens, groups)
    engine = dataclasses.replace(
        engine, max_num_seqs=max(1, seqs // merged), max_num_batched_tokens=max(1, tokens // merged)
    )

    def time(plan: Any) -> Any:
        return step.of([_times(GroupWork.of(part), merged) for part in plan.groups])

    backend = SimulatedBackend(
        model,
        engine,
        lambda: simulated_engine(engine, time, max(1, blocks // merged), groups=groups),
        request_s=calibration.host.request_s,
    )
    workload = ThroughputWorkload(
        num_requests=max(1, point.requests // merged),
        prompt_len=point.prompt,
        output_len=point.output,
        concurrency=(point.concurrency,) if point.concurrency else None,
    )
    plan = plan_requests(workload, 2)
    run = drive(
        backend,
        plan,
        lambda output, _: SamplingParams(max_tokens=output, ignore_eos=True),
        workload=workload,
        clock=backend.clock,
        sleep=backend.sleep,
    )
    metrics = dict(run.metrics(Slo()))
    for name in ("output_throughput", "request_throughput"):
        metrics[name] = float(metrics[name] or 0) * merged
    metrics["mean_latency_ms"] = 1e3 * run.duration_s
    metrics["tok_s_per_request"] = 1e3 / float(metrics["mean_tpot_ms"] or math.inf)
    parts = backend.parts()
    total = sum(parts.values())
    told = {
        f"from_{name}": sum(s for (_, source), s in parts.items() if source == name) / total for name in SOURCES
    }
    shares = {f"time_{name}": 0.0 for name in ("gemm", "attention", "experts", "collective", "small", "host")}
    for (operation, _), seconds in parts.items():
        shares[f"time_{operation}"] += seconds / total
    spread = relative_spread([Part(*key, s) for key, s in parts.items()], calibration.spreads)
    return {"metrics": metrics, "relative_spread": spread, "routing_law": str(law) if model.num_experts else "",
            "num_blocks": blocks, "merged": merged, **told, **shares}  # fmt: skip


def _merged(point: Point, seqs: int, tokens: int, groups: int) -> int:
    """Returns how many equal requests that are all there at once move as one: no more than a step's tokens and a
    hundredth of the requests allow."""
    if point.concurrency or not isinstance(point.prompt, int) or groups > 1:
        return 1
    return max(1, min(16, tokens // point.prompt, point.requests // 100, seqs // 8))


def _times(work: GroupWork, count: int) -> GroupWork:
    if count == 1:
        return work
    return GroupWork(work.decodes * count, work.context * count, work.chunks * count, work.sampled * count)


def summary(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns by group and metric: `count`, `median_error`, `p90_error`, `worst_error`, `bias` (median of the signed
    error), the share `inside` of the 90 % intervals, their `median_width` (high over low, less 1), and how many have
    no figure. Points of the calibration count in none."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if not row["used_for_calibration"]:
            grouped.setdefault((row["group"], row["metric"]), []).append(row)
    told = []
    for (group, metric), given in grouped.items():
        known = [row for row in given if row["simulated"] is not None]
        errors = sorted(abs(row["error"]) for row in known)
        at = lambda share, e=errors: e[min(len(e) - 1, int(share * len(e)))] if e else None  # noqa: E731
        told.append({
            "group": group, "metric": metric, "count": len(known), "without": len(given) - len(known),
            "median_error": at(0.5), "p90_error": at(0.9), "worst_error": at(1.0),
            "bias": sorted(r["error"] for r in known)[len(known) // 2] if known else None,
            "inside": sum(r["inside"] for r in known) / len(known) if known else None,
            "median_width": sorted(r["high"] / r["low"] - 1 for r in known)[len(known) // 2] if known else None,
        })  # fmt: skip
    return told


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows as CSV, floats with four digits."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
        )
