"""Plans what `quant=` does while a model opens, and settles what products with quantized weights run on.

Without calibration each weight is rounded as it arrives (`moejax.ptq.on_load`); methods that calibrate
need the whole model in floating point, on one device (`moejax.ptq`).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from flax import nnx

from moejax.checkpoint.hf import read_json
from moejax.core.config import ModelConfig, MoeConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantConfig
from moejax.core.resolve import Resolution
from moejax.engine.requests.tokenizer import Tokenizer
from moejax.models.decoder import Decoder
from moejax.nn.param import ParamSpec, specs
from moejax.nn.quantized import quantized_weights
from moejax.ops.dispatch import choose_quantized, compute_capability
from moejax.ptq.text import calibration_tokens
from moejax.quantization.arithmetic import why_no_kernel
from moejax.quantization.formats import WeightFormat
from moejax.quantization.rules import Chosen, resolve_rules, weight_name
from moejax.sharding.axes import Axes
from moejax.sharding.rules import make_rules


@dataclass(frozen=True)
class QuantizationPlan:
    """A model's quantization as far as it is known before weights are read.

    Attributes:
        weights: path of a weight → what becomes of it; empty for a model that is left as it is.
        tokens: int32 `[S, L]`, calibration text; None where no method calibrates.
    """

    weights: Mapping[str, Chosen]
    tokens: np.ndarray | None = None

    @property
    def calibrates(self) -> bool:
        """Whether weights are quantized once the whole model is there, not as each arrives."""
        return any(chosen.calibrated for chosen in self.weights.values())


def plan_quantization(
    quant: QuantConfig,
    parallel: ParallelConfig,
    config: ModelConfig,
    moe: MoeConfig,
    axes: Axes,
    platform: str,
    experts: str,
    directory: Path | None,
    tokenizer: Tokenizer | None,
    ends: Sequence[int],
) -> QuantizationPlan:
    """Decides what is quantized and how; draws the calibration's tokens.

    Args:
        experts: what the expert products run on, or how they are executed where it is not grouped.
        ends: tokens that end a document, the first of which separates calibration's.

    Raises:
        ConfigError: a rule that is not used, a format that does not fit a weight or its devices, kernels
            asked for by name that cannot run it; weights that are quantized already; calibration without a
            tokenizer, with too short a text, or on more than one device.
    """
    declared = specs(Decoder(config, moe=moe))
    plan = QuantizationPlan(plan_weights(quant, declared, axes))
    asked = [Asked(name, c.format, local_inputs(declared[name], axes)) for name, c in plan.weights.items()]
    choose_implementation(quant, platform, asked, experts)
    if not plan.weights:
        return plan
    stored = read_json(directory / "config.json") if directory else {}
    if stored.get("quantization_config") is not None:
        by = stored["quantization_config"].get("quant_method", "an unnamed method")
        raise ConfigError(
            f"quant.method={quant.method}: {directory} holds weights quantized by {by} already; "
            "leave quant.method=none to run them, or give the full-precision checkpoint"
        )
    if not plan.calibrates:
        return plan
    method = f"quant.method={quant.method}"
    if not parallel.is_single:
        raise ConfigError(
            f"{method} calibrates on one device: quantize there, save_pretrained, and open that "
            "directory with parallel=; rtn runs on any mesh"
        )
    if tokenizer is None:
        raise ConfigError(
            f"{method} calibrates with text, and there is no tokenizer "
            f"({directory or 'a configuration without a directory'}); use rtn, or add tokenizer.json"
        )
    tokens = calibration_tokens(quant.calibration, tokenizer, end=ends[0] if ends else None)
    return dataclasses.replace(plan, tokens=tokens)


def settle_products(
    plan: QuantizationPlan,
    quant: QuantConfig,
    stages: Sequence[nnx.Module],
    axes: Axes,
    platform: str,
    experts: str,
) -> list[Resolution]:
    """Tells each quantized weight, planned or of a quantized checkpoint, what its products run on.

    Returns:
        What is quantized and what it runs on; nothing for a model in full precision.

    Raises:
        ConfigError: see `plan_quantization`.
    """
    weights = [item for stage in stages for item in quantized_weights(stage)]
    for path, weight in weights:
        check_split(path, weight.stands_for, weight.format, axes)
    asked = [Asked(path, w.format, local_inputs(w.stands_for, axes)) for path, w in weights]
    implementation = choose_implementation(quant, platform, asked, experts)
    if not weights:
        return []
    bits = numbers = 0
    for _, weight in weights:
        weight.implementation = implementation.value
        shape = weight.stands_for.canonical_shape
        bits, numbers = bits + weight.format.bits_held(shape), numbers + math.prod(shape)
    counts = sorted(Counter(weight.format.name for _, weight in weights).items())
    each = f"{bits / numbers:.3f} bits a weight over {len(weights)} weights, scales included"
    source = "asked for" if plan.weights else "the checkpoint's weights are quantized"
    return [
        Resolution("quant.method", quant.method, source),
        Resolution("quant.format", ", ".join(f"{count} × {name}" for name, count in counts), each),
        implementation,
    ]


def plan_weights(quant: QuantConfig, declared: Mapping[str, ParamSpec], axes: Axes) -> dict[str, Chosen]:
    """What is quantized, of the whole model's declarations; nothing for a configuration that leaves all.

    Raises:
        ConfigError: see `resolve_rules`; a device's part of a weight would cut a group or a piece of packed
            bytes in two.
    """
    if quant.method == "none" and not quant.rules:
        return {}
    chosen = resolve_rules(quant, {name: spec.canonical_shape for name, spec in declared.items()})
    for name, choice in chosen.items():
        check_split(name, declared[name], choice.format, axes)
    return chosen


def check_split(name: str, spec: ParamSpec, fmt: WeightFormat, axes: Axes) -> None:
    """Raises `ConfigError` where a device's part of a weight is not made of whole groups and pieces."""
    D, F = spec.canonical_shape[-2:]
    over_in, over_out = _devices(spec, axes)
    _check_whole(name, fmt, "inputs", D, over_in, fmt.group if not fmt.indexed else 0)
    if fmt.packed:
        _check_whole(name, fmt, "inputs", D, over_in, fmt.pack(D), "pieces of packed bytes")
    if fmt.granularity == "block":
        _check_whole(name, fmt, "outputs", F, over_out, fmt.group)


def _check_whole(
    name: str, fmt: WeightFormat, what: str, size: int, devices: int, unit: int, units: str = "groups"
) -> None:
    if devices == 1 or not unit or size % (devices * unit) == 0:
        return
    most = math.gcd(size // unit, devices) if size % unit == 0 else 1
    raise ConfigError(
        f"{name}: {fmt.name} has {units} of {unit} {what}, which {size} {what} over {devices} devices "
        f"({size / devices:g} each) cut; split over at most {most} devices, or take another format for it"
    )


def _devices(spec: ParamSpec, axes: Axes) -> tuple[int, int]:
    """Devices that the inputs and the outputs of a weight are split over."""
    rules = make_rules(axes)
    last = spec.axes[-2:][::-1] if spec.transposed else spec.axes[-2:]
    into, out = (axes.size(rules.get(axis or "", ())) for axis in last)
    return into, out


def local_inputs(spec: ParamSpec, axes: Axes) -> int:
    """D of a device's part."""
    return spec.canonical_shape[-2] // _devices(spec, axes)[0]


class Asked(NamedTuple):
    """A quantized weight for the choice of an implementation.

    Attributes:
        inputs: D of a device's part.
    """

    path: str
    format: WeightFormat
    inputs: int


def choose_implementation(
    quant: QuantConfig, platform: str, weights: Sequence[Asked], experts: str
) -> Resolution:
    """Chooses what runs the products with quantized weights.

    Args:
        experts: what the expert products run on, or how they are executed where it is not grouped.

    Raises:
        ConfigError: the kernels were asked for and cannot run; the weight is named, and why.
    """
    unsupported = None
    for path, fmt, inputs in weights:
        why = why_no_kernel(fmt, inputs)
        if why is not None:
            unsupported = f"{weight_name(path)}: {why}"
            break
    if unsupported is None and experts != "pallas_triton" and any(".experts." in w.path for w in weights):
        unsupported = f"the expert products run on {experts}"
    return choose_quantized(quant.implementation, platform, compute_capability(platform), unsupported)
