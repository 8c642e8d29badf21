"""Published end-to-end results, read from the `e2e_*` files of a folder into one kind of point."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moejax.bench.traffic import Lengths
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.models.registry import config_from_hf
from moejax.simulate.tables import FOLDER, rows_of

DEVICES = {"a100": "a100_80gb", "a800": "a100_80gb", "h100": "h100", "h200": "h200"}
METRICS = ("output_throughput", "request_throughput", "mean_latency_ms", "mean_ttft_ms", "mean_tpot_ms",
           "tok_s_per_request")  # fmt: skip
_DTYPES = {"fp8_block": "fp8_block128", "fp8": "fp8", "bfloat16": "bf16", "float16": "bf16"}

Size = int | Lengths
Row = Mapping[str, str]


@dataclass(frozen=True)
class Point:
    """One published measurement.

    Attributes:
        group: what it is judged with.
        stack: engine, a key of `moejax.bench.simulate.points.STACKS`.
        prompt, output: tokens, or their distribution.
        concurrency: users who wait for their answers; None: all requests come at once.
        weights, dense, cache: the tables' names of dtypes.
        max_tokens: of a step; None: the engine's default.
        published: one of `METRICS` → value.
        reason: why it cannot be simulated.
    """

    id: str
    group: str
    device: str
    model: str
    stack: str
    prompt: Size
    output: Size
    requests: int
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    concurrency: int | None = None
    weights: str = "bf16"
    dense: str = "bf16"
    cache: str = "bf16"
    max_tokens: int | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None

    @property
    def layout(self) -> str:
        """Returns the degrees above 1, such as "ep4_tp2"."""
        named = {name: getattr(self.parallel, name) for name in ("dp", "pp", "ep", "tp")}
        told = [f"{name}{value}" for name, value in named.items() if value > 1] or ["single"]
        return "_".join(told + ["data"] * (self.parallel.attention == "data"))


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
    """Returns the points of a folder's `e2e_*` files.

    Raises:
        ConfigError: a file cannot be read, or the folder has none.
    """
    points: list[Point] = []
    for path in sorted(folder.glob("e2e_*.csv*")):
        reader = next((read for start, read in _READERS.items() if path.name.startswith(start)), None)
        if reader is None:
            continue
        try:
            for number, row in enumerate(rows_of(path)):
                points += reader(row, number)
        except (KeyError, ValueError, ConfigError) as error:
            raise ConfigError(f"{path}: {type(error).__name__}: {error}") from None
    if not points:
        raise ConfigError(f"simulate.points={folder} has no file e2e_*.csv with points")
    return points


def _trtllm(row: Row, number: int) -> list[Point]:
    points, shape = [], f"{row['isl']}-{row['osl']}-tp{row['tp']}"
    for column, value in row.items():
        if value and (device := column.split("_")[0]) in DEVICES:
            weights = "fp8" if column.endswith("fp8") else "bf16"
            name = row["model"].lower().replace(" ", "-")
            points.append(Point(
                f"trtllm-{name}-{shape}-{column}", f"trtllm-0.14 {column}", DEVICES[device], row["model"],
                "trtllm-0.14", int(row["isl"]), int(row["osl"]), int(row["requests"]),
                ParallelConfig(tp=int(row["tp"])), None, weights, weights, weights,
                published={"output_throughput": float(value)},
                reason="PCIe without NVLink: its links are not known" if "pcie" in column else None,
            ))  # fmt: skip
    return points


def _single(row: Row, number: int) -> list[Point]:
    device = row["gpu"].split("-")[0].lower()
    stack = {"tensorrt-llm": "trtllm"}.get(row["engine"].lower(), row["engine"].lower())
    if stack == "vllm" and re.search(r"2024|CI build", row["version"]):
        stack = "vllm-v0"
    renamed = {"mean_latency": "mean_latency_ms", "ttft": "mean_ttft_ms"}
    metric, batch = renamed.get(row["metric"], row["metric"]), int(row["batch_or_concurrency"] or 0)
    reason = None
    if not (row["input"] and row["output"]):
        reason = "its lengths are not published"
    elif not batch and not row["requests"]:
        reason = "its load is not published"
    elif metric not in METRICS:
        reason = f"{metric} is of prompts or outputs alone"
    chat = row["input"] == "ShareGPT"
    lengths = (int(row[name] or 1) for name in ("input", "output"))
    prompt, output = (chat_lengths(217), chat_lengths(201)) if chat else lengths
    weights = weights_of(row["weights"], device, stack)
    ep, tp, nodes = (1 if reason else int(row[name]) for name in ("ep", "tp", "nodes"))
    return [Point(
        row["id"], f"{stack} {device}", DEVICES[device], row["model"], stack, prompt, output,
        int(row["requests"] or batch or 1), ParallelConfig(ep=ep, tp=tp, nodes=nodes), None, weights, weights,
        published={metric: float(row["value"])}, reason=reason,
    )]  # fmt: skip


def chat_lengths(mean: float) -> Lengths:
    """Returns a log-normal with a data set's mean, and as much for its deviation."""
    return Lengths(4, max(1024, math.ceil(4 * mean)), "lognormal", max(4.0, mean), mean)


def weights_of(name: str, device: str, stack: str) -> str:
    """Returns the tables' name of a model's weights; an A100 computes 8-bit floats in 16 bits."""
    name = name.lower()
    if re.search("int4|awq|gptq", name):
        return "w4a16_int4"
    if "int8" in name or ("fp8" in name and device.startswith("a")):
        return "w8a16_int8"
    return "bf16" if "fp8" not in name else "fp8" if stack.startswith("trtllm") else "fp8_block128"


def _gpustack(row: Row, number: int) -> list[Point]:
    command = f"{row['command']} {row['variant'] if row['variant'].startswith('--') else ''} "
    device, stack, requests = row["gpu"], row["engine"], int(row["requests"])

    def option(*names: str) -> int:
        return max(
            (int(found[-1]) for n in names if (found := re.findall(rf"-{n}[ =](\d+)", command))), default=0
        )

    data = "enable-dp-attention" in command
    devices = option("tp", "tp-size", "tp_size", "tensor-parallel-size") or 1
    ep = devices if "enable-expert-parallel" in command or data else option("ep-size", "ep_size") or 1
    reasons = [("speculative", "it speculates"), ("DeepSeek-V3.2", "its attention is sparse"),
               ("data-parallel-size", "replicas behind one server")]  # fmt: skip
    reason = next((why for word, why in reasons if word in command + row["model"]), None)
    if stack not in ("vllm", "sglang", "trtllm"):
        reason, stack = "its engine is not named", "vllm"
    names = [word for word in command.split() if re.search("qwen|deepseek", word, re.I)]
    weights = weights_of("fp8" if "deepseek" in row["model"] else (names or [row["model"]])[0], device, stack)
    means = [float(row[f"{kind}_tokens"] or requests) / requests for kind in ("input", "output")]
    chat = "ShareGPT" in row["dataset"] and "random" not in row["variant"]
    prompt, output = (chat_lengths(mean) if chat else max(1, round(mean)) for mean in means)
    users = re.search(r"batch size (\d+)", row["variant"])
    columns = {"output_throughput": "out_tok_s", **{f"mean_{n}_ms": f"mean_{n}_ms" for n in ("ttft", "tpot")}}
    return [Point(
        f"gpustack-{number:03d}", f"gpustack {device} {row['model'].rpartition('/')[2]} {row['engine']}",
        DEVICES[device], row["model"], stack, prompt, output, requests,
        ParallelConfig(ep=ep, tp=devices // ep, attention="data" if data and ep > 1 else "tensor"),
        int(users[1]) if users else None, weights, weights,
        max_tokens=option("max-num-batched-tokens", "max_num_tokens", "chunked-prefill-size") or None,
        published={name: float(row[column]) for name, column in columns.items() if row[column]},
        reason=reason,
    )]  # fmt: skip


_SILICON_SIZES = (
    "concurrency", "isl", "osl", "tp_size", "pp_size", "moe_ep_size", "moe_tp_size", "attention_dp_size"
)  # fmt: skip


def _silicon(row: Row, number: int) -> list[Point]:
    size = {name: int(float(row[name] or 1)) for name in _SILICON_SIZES}
    device, users = row["system"].split("_")[0], size["concurrency"]
    ep, tp, data = size["moe_ep_size"], size["moe_tp_size"], size["attention_dp_size"]
    if ep * tp != size["tp_size"] * data:  # no experts
        ep, tp = 1, size["tp_size"]
    dense = _DTYPES.get(row["gemm_quant_mode"] or row["precision"], "")
    reason = None if row["mode"] == "agg" else "prompts and outputs are computed by different devices"
    reason = reason or (None if dense else f"no table has {row['gemm_quant_mode'] or row['precision']}")
    columns = {f"mean_{name}_ms": row[f"silicon_{name}_ms"] for name in ("ttft", "tpot")}
    published = {name: float(text) for name, text in columns.items() if text}
    split = ParallelConfig(
        pp=size["pp_size"], ep=ep, tp=tp, attention="data" if min(data, ep) > 1 else "tensor"
    )
    return [Point(
        f"silicon-{number:04d}", f"silicon {device} {row['model_path'].rpartition('/')[2]} {row['backend']}",
        DEVICES[device], row["model_path"], row["backend"], size["isl"], size["osl"], 3 * users,
        ParallelConfig() if reason else split, users, _DTYPES.get(row["moe_quant_mode"], dense) or "bf16",
        dense or "bf16", reason=reason,
        published=published,
    )]  # fmt: skip


_READERS = {"e2e_trtllm": _trtllm, "e2e_points": _single, "e2e_gpustack": _gpustack, "e2e_silicon": _silicon}
