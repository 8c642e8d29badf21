"""Quantizes weights without calibration, one by one: as a model's values arrive, or of a model that is there.

So the model is never whole in both forms.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.core.quant import QuantConfig
from moejax.nn.param import specs
from moejax.nn.quantized import QuantizedWeight, replace_weights, weight_size
from moejax.ptq.methods import Rounded, errors, weight_report
from moejax.ptq.report import QuantReport, StageReport, WeightReport
from moejax.quantization.formats import PARTS, QTensor
from moejax.quantization.rtn import round_to_nearest
from moejax.quantization.rules import Chosen
from moejax.sharding.rules import shardings
from moejax.sharding.spmd import MeshDevices, SingleDevice


class QuantizeOnLoad:
    """Takes a model's parameters as they come and keeps those that are to be quantized as codes alone.

    Args:
        plan: path of a weight → what becomes of it, of the whole model.
    """

    def __init__(self, plan: Mapping[str, Chosen], quant: QuantConfig) -> None:
        self._plan, self._quant = plan, quant
        self._tensors: dict[str, QTensor] = {}
        self._programs: dict[Any, Any] = {}
        self._weights: list[WeightReport] = []
        self._seconds = 0.0

    def take(self, place: SingleDevice, name: str, param: nnx.Param, value: jax.Array) -> None:
        """Rounds the value of a parameter that lies there, or assigns it where it is to be left as it is.

        Each device rounds its part: with the scales that one device would find, and its codes but for numbers
        next to the middle of two, where compiled programs differ. A weight to be quantized stays abstract
        until `put`.
        """
        choice = self._plan.get(name)
        if choice is None:
            param.set_value(value)
            return
        start = time.perf_counter()
        spec, quant, fmt = param.get_metadata("spec"), self._quant, choice.format
        parts, D = specs(QuantizedWeight(spec, fmt)), spec.canonical_shape[-2]
        placed = shardings(parts, place.mesh, place.axes) if isinstance(place, MeshDevices) else None
        if not value.sharding.addressable_devices:  # another process's stage: no part of any array is here
            assert placed is not None
            arrays = {}
            for array, where in placed.items():
                shape, dtype = parts[array].shape, parts[array].dtype
                arrays[array] = jax.make_array_from_single_device_arrays(shape, where, [], dtype=dtype)
            self._tensors[name] = QTensor.of(arrays, fmt, D)
            return
        program = self._programs.get((spec, fmt, place))
        if program is None:

            def run(value: jax.Array) -> tuple[QTensor, jax.Array]:
                w = spec.without_padding(value)  # which a tensor's percentile would see
                w = jnp.swapaxes(w, -1, -2) if spec.transposed else w
                q = round_to_nearest(w, fmt, clip=quant.clip, percentile=quant.percentile)
                padded = {name: part.with_padding(getattr(q, name)) for name, part in parts.items()}
                return dataclasses.replace(q, **padded), errors(w.astype(jnp.float32), q, None)[0]

            out = None if placed is None else (QTensor.of(placed, fmt, D), None)
            program = self._programs[spec, fmt, place] = jax.jit(run, out_shardings=out)
        tensor, error = jax.block_until_ready(program(value))
        self._tensors[name] = tensor
        seconds = time.perf_counter() - start
        self._seconds += seconds
        rounded = Rounded(tensor, error, None, None, None, seconds)
        self._weights.append(weight_report(name, choice, rounded, value.nbytes)[0])

    def take_out(self, name: str) -> list[tuple[str, jax.Array]]:
        """Returns the arrays of a quantized weight, by their names, which `put` is not to place."""
        tensor = self._tensors.pop(name)
        return [(part, array) for part in PARTS if (array := getattr(tensor, part)) is not None]

    def put(self, models: Sequence[nnx.Module], *, elsewhere: bool = False) -> None:
        """Puts the weights quantized so far into their places in these models; with `elsewhere` those taken
        out get places without values."""
        for model in models if elsewhere else ():
            gone = {path: chosen.format for path, chosen in self._plan.items() if path not in self._tensors}
            replace_weights(model, gone)
        place_tensors(models, self._tensors)

    def report(self) -> StageReport:
        """Returns what has been quantized."""
        return StageReport("weights", 0, None, [], None, [], self._weights, [], self._seconds)


def place_tensors(models: Sequence[nnx.Module], tensors: dict[str, QTensor]) -> None:
    """Moves quantized weights out of `tensors`, path → weight, into their places in these models."""
    formats = {path: tensor.format for path, tensor in tensors.items()}
    for model in models:
        for path, weight in replace_weights(model, formats).items():
            weight.set(tensors.pop(path))
    assert not tensors, list(tensors)


def quant_report(
    models: Sequence[nnx.Module], quant: QuantConfig, stages: list[StageReport], seconds: float
) -> QuantReport:
    """Returns the report of a model, in parts or whole, that has been quantized in these stages."""
    sizes = [weight_size(model) for model in models]
    num_bytes = sum(size for size, _ in sizes)
    saved = sum(weight.float_bytes - weight.bytes for stage in stages for weight in stage.weights)
    numbers = sum(count for _, count in sizes)
    return QuantReport(quant.method, quant.format, num_bytes, num_bytes + saved, numbers, seconds, stages)
