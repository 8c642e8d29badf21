"""What `quant=` does while a model opens: choices, checks before weights are read, what products run on.

Without calibration each weight is rounded as it arrives (`rounding.py`); methods that calibrate
need the whole model in floating point, on one device (`moejax.ptq`).
"""

import math
from collections.abc import Mapping, Sequence
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
from moejax.engine.opening.rounding import QuantizeOnLoad
from moejax.engine.opening.setup import compute_capability
from moejax.engine.requests.tokenizer import Tokenizer
from moejax.models.decoder import Decoder
from moejax.nn.param import ParamSpec, specs
from moejax.nn.quantized import quantized_weights
from moejax.ops.dispatch import choose_quantized
from moejax.ptq.apply import Progress, quantize_model
from moejax.ptq.report import QuantReport
from moejax.ptq.text import calibration_tokens
from moejax.quantization.arithmetic import why_no_kernel
from moejax.quantization.formats import WeightFormat
from moejax.quantization.rules import Chosen, resolve_rules, weight_name
from moejax.sharding.axes import Axes
from moejax.sharding.rules import make_rules
from moejax.sharding.spmd import SingleDevice

Plan = Mapping[str, Chosen]
"""Path of a weight → what becomes of it."""


class QuantizationPlan:
    """One model's quantization from its configuration to the record of it.

    Attributes:
        rounding: takes the weights that need no calibration.

    Raises:
        ConfigError: a rule that is not used, a format that does not fit a weight or its devices, kernels
            asked for by name that cannot run it.
    """

    def __init__(
        self,
        quant: QuantConfig,
        parallel: ParallelConfig,
        config: ModelConfig,
        moe: MoeConfig,
        places: Sequence[SingleDevice],
        platform: str,
        experts: str,
    ) -> None:
        self._quant, self._parallel, self._platform, self._experts = quant, parallel, platform, experts
        self._axes = places[0].axes
        declared = specs(Decoder(config, moe=moe))
        self._plan = plan_weights(quant, declared, self._axes)
        self._calibrates = any(chosen.calibrated for chosen in self._plan.values())
        self._choose(asked_of(self._plan, declared, self._axes))
        self.rounding = QuantizeOnLoad({} if self._calibrates else self._plan, quant)
        self._tokens: np.ndarray | None = None

    def check(self, directory: Path | None, tokenizer: Tokenizer | None, end: int | None) -> None:
        """What can be known before weights are read; draws the calibration's tokens.

        Args:
            end: token that ends a document.

        Raises:
            ConfigError: the directory's weights are quantized already; calibration has no tokenizer, too
                short a text, or more than one device.
        """
        if not self._plan:
            return
        stored = read_json(directory / "config.json") if directory else {}
        if stored.get("quantization_config") is not None:
            by = stored["quantization_config"].get("quant_method", "an unnamed method")
            raise ConfigError(
                f"quant.method={self._quant.method}: {directory} holds weights quantized by {by} already; "
                "leave quant.method=none to run them, or give the full-precision checkpoint"
            )
        if not self._calibrates:
            return
        method = f"quant.method={self._quant.method}"
        if not self._parallel.is_single:
            raise ConfigError(
                f"{method} calibrates on one device: quantize there, save_pretrained, and open that "
                "directory with parallel=; rtn runs on any mesh"
            )
        if tokenizer is None:
            raise ConfigError(
                f"{method} calibrates with text, and there is no tokenizer "
                f"({directory or 'a configuration without a directory'}); use rtn, or add tokenizer.json"
            )
        self._tokens = calibration_tokens(self._quant.calibration, tokenizer, end=end)

    def finish(self, stages: Sequence[Decoder], on_progress: Progress | None = None) -> QuantReport | None:
        """Quantizes what is not yet, once the weights are in place, and decides what products run on."""
        report = None
        if self._calibrates:
            (model,) = stages
            report = quantize_model(model, self._quant, self._tokens, progress=on_progress)
        elif self._plan:
            report = self.rounding.finish(stages)
        for stage in stages:
            for path, weight in quantized_weights(stage):
                check_split(path, weight.stands_for, weight.format, self._axes)
        self._choice = self._choose(held_by(stages, self._axes))
        for stage in stages:
            for _, weight in quantized_weights(stage):
                weight.implementation = self._choice.value
        return report

    def _choose(self, weights: Sequence["Asked"]) -> Resolution:
        return choose(self._quant, self._platform, weights, self._experts)

    def resolutions(self, stages: Sequence[nnx.Module]) -> list[Resolution]:
        """What was quantized; nothing for a model in full precision."""
        counts: dict[str, int] = {}
        held = numbers = 0
        for stage in stages:
            for _, weight in quantized_weights(stage):
                counts[weight.format.name] = counts.get(weight.format.name, 0) + 1
                shape = weight.stands_for.canonical_shape
                held, numbers = held + weight.format.bits_held(shape), numbers + math.prod(shape)
        if not counts:
            return []
        formats = ", ".join(f"{count} × {name}" for name, count in sorted(counts.items()))
        bits = f"{held / numbers:.3f} bits a weight over {sum(counts.values())} weights, scales included"
        source = "asked for" if self._plan else "the checkpoint's weights are quantized"
        return [
            Resolution("quant.method", self._quant.method, source),
            Resolution("quant.format", formats, bits),
            self._choice,
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


def asked_of(plan: Plan, declared: Mapping[str, ParamSpec], axes: Axes) -> list[Asked]:
    """Weights that are to be quantized."""
    return [Asked(name, c.format, local_inputs(declared[name], axes)) for name, c in plan.items()]


def held_by(stages: Sequence[nnx.Module], axes: Axes) -> list[Asked]:
    """Weights that are quantized."""
    return [
        Asked(path, weight.format, local_inputs(weight.stands_for, axes))
        for stage in stages
        for path, weight in quantized_weights(stage)
    ]


def choose(quant: QuantConfig, platform: str, weights: Sequence[Asked], experts: str) -> Resolution:
    """Implementation of the products with quantized weights.

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
