"""Plans what `quant=` does while a model opens, and chooses what products with quantized weights run on.

Without calibration each weight is rounded as it arrives (`moejax.ptq.on_load`); methods that calibrate
need the whole model in floating point, on one device (`moejax.ptq`).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moejax.checkpoint.directory import stored_quantization
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantConfig
from moejax.core.resolve import Resolution
from moejax.engine.requests.tokenizer import Tokenizer
from moejax.models.decoder import Decoder
from moejax.nn.param import ParamSpec, specs
from moejax.ops.dispatch import choose_quantized, compute_capability
from moejax.ptq.text import calibration_tokens
from moejax.quantization.formats import WeightFormat
from moejax.quantization.kernel_formats import why_no_kernel
from moejax.quantization.rules import Chosen, resolve_rules, weight_name
from moejax.sharding.axes import Axes
from moejax.sharding.rules import make_rules


@dataclass(frozen=True)
class QuantizationPlan:
    """A model's quantization as far as it is known before weights are read.

    Attributes:
        weights: path of a weight → what becomes of it; empty for a model that is left as it is.
        tokens: int32 `[S, L]`, calibration text; None where no method calibrates.
        original: the configuration with all experts, of which some are left out; None where all stay.
    """

    weights: Mapping[str, Chosen]
    tokens: np.ndarray | None = None
    original: ModelConfig | None = None

    @property
    def calibrates(self) -> bool:
        """Tells whether weights are quantized once the whole model is there, not as each arrives."""
        return self.original is not None or any(chosen.calibrated for chosen in self.weights.values())


def plan_quantization(
    quant: QuantConfig,
    parallel: ParallelConfig,
    config: ModelConfig,
    original: ModelConfig,
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
        config, original: of the model with the experts that stay, and with all.
        experts: what the expert products run on, or how they are executed where it is not grouped.
        ends: tokens that end a document, the first of which separates calibration's.

    Raises:
        ConfigError: a rule that is not used, a format that does not fit a weight or its devices, kernels
            asked for by name that cannot run it; weights that are quantized already; calibration without a
            tokenizer, with too short a text, or on more than one device.
    """
    declared = specs(Decoder(config, moe=moe))
    plan = QuantizationPlan({}, original=None if config is original else original)
    if quant.method != "none" or quant.rules:
        shapes = {name: spec.matrix_shape for name, spec in declared.items()}
        plan = dataclasses.replace(plan, weights=resolve_rules(quant, shapes))
    planned = [(name, declared[name], chosen.format) for name, chosen in plan.weights.items()]
    choose_implementation(quant, planned, axes, platform, experts)
    if not plan.weights and plan.original is None:
        return plan
    if directory and (stored := stored_quantization(directory)):
        by = stored[0].get("quant_method", "an unnamed method")
        raise ConfigError(
            f"quant.method={quant.what}: {directory} holds weights quantized by {by} already; "
            "leave quant.method=none to run them, or give the full-precision checkpoint"
        )
    if not plan.calibrates:
        return plan
    method = f"quant.method={quant.what}"
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


def check_split(name: str, spec: ParamSpec, fmt: WeightFormat, axes: Axes) -> None:
    """Raises `ConfigError` where a device's part of a weight is not made of whole groups and pieces."""
    D, F = spec.canonical_shape[-2:]
    over_in, over_out = _devices(spec, axes)
    _check_whole(name, fmt, "inputs", D, over_in, fmt.group if not fmt.indexed else 0)
    if fmt.packed or fmt.sparse:
        piece = 8 if fmt.sparse else fmt.pack(D)
        _check_whole(name, fmt, "inputs", D, over_in, piece, "pieces of packed bytes")
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


def choose_implementation(
    quant: QuantConfig,
    weights: Sequence[tuple[str, ParamSpec, WeightFormat]],
    axes: Axes,
    platform: str,
    experts: str,
) -> Resolution:
    """Chooses what runs the products with quantized weights, given as (path, declaration, format).

    Args:
        experts: what the expert products run on, or how they are executed where it is not grouped.

    Raises:
        ConfigError: a device's part of a weight would cut a group or a piece of packed bytes in two; kernels
            that were asked for cannot run (the weight is named, and why).
    """
    for path, spec, fmt in weights:
        check_split(path, spec, fmt, axes)
    unsupported = None
    for path, spec, fmt in weights:
        rules, shape = make_rules(axes), spec.canonical_shape
        parts = math.prod(axes.size(rules.get(axis or "", ())) for axis in spec.axes)
        why = why_no_kernel(fmt, shape[-2] // _devices(spec, axes)[0], math.prod(shape) // parts)
        if why is not None:
            unsupported = f"{weight_name(path)}: {why}"
            break
    if unsupported is None and experts != "pallas_triton" and any(".experts." in w[0] for w in weights):
        unsupported = f"the expert products run on {experts}"
    return choose_quantized(quant.implementation, platform, compute_capability(platform), unsupported)
