"""Weights that are quantized while a model opens, each before the next one is read or drawn.

So the model is never whole in floating point.
"""

import functools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.core.quant import QuantConfig
from moejax.nn.param import OnValue, ParamSpec, iter_params, specs
from moejax.nn.quantized import PARTS, QuantizedWeight, replace_weights
from moejax.ptq.methods import Rounded, errors, weight_report
from moejax.ptq.report import QuantReport, StageReport, WeightReport
from moejax.quantization.formats import QTensor, WeightFormat
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
        self._reports: list[WeightReport] = []
        self._seconds = 0.0

    def at(self, place: SingleDevice) -> OnValue:
        """What takes the values of a model, or of a pipeline stage, that lies there. Each device rounds its
        part: with the scales that one device would find, and its codes but for numbers next to the middle of
        two, where compiled programs differ. A weight to be quantized stays abstract until `finish`."""
        return functools.partial(self._store, place)

    def _store(self, place: SingleDevice, name: str, param: nnx.Param, value: jax.Array) -> None:
        choice = self._plan.get(name)
        if choice is None:
            param.set_value(value)
            return
        start = time.perf_counter()
        spec, quant, fmt = param.get_metadata("spec"), self._quant, choice.format
        placed = _shardings(spec, fmt, place)
        if not value.sharding.addressable_devices:  # another process's pipeline stage
            assert placed is not None
            self._tensors[name] = _elsewhere(spec, fmt, placed)
            return
        program = self._programs.get((spec, fmt, place))
        if program is None:

            def run(value: jax.Array) -> tuple[QTensor, jax.Array]:
                w = jnp.swapaxes(value, -1, -2) if spec.transposed else value
                q = round_to_nearest(w, fmt, clip=quant.clip, percentile=quant.percentile)
                return q, errors(w.astype(jnp.float32), q, None)[0]

            out = None if placed is None else (_like(spec, fmt, placed), None)
            program = self._programs[spec, fmt, place] = jax.jit(run, out_shardings=out)
        tensor, error = jax.block_until_ready(program(value))
        self._tensors[name] = tensor
        seconds = time.perf_counter() - start
        self._seconds += seconds
        done = Rounded(tensor, error, None, None, None, seconds)
        self._reports.append(weight_report(name, choice, done, value.nbytes)[0])

    def finish(self, stages: Sequence[nnx.Module]) -> QuantReport:
        """Puts the quantized weights into their places, once all stages have their values."""
        formats = {name: tensor.format for name, tensor in self._tensors.items()}
        for stage in stages:
            for name, weight in replace_weights(stage, formats).items():
                weight.set(self._tensors.pop(name))
        assert not self._tensors, list(self._tensors)
        params = [item for stage in stages for item in iter_params(stage)]
        rest = [param[...] for path, param in params if path.rpartition(".")[0] not in formats]
        float_bytes = sum(w.float_bytes for w in self._reports)
        numbers = sum(math.prod(w.shape) for w in self._reports)
        done = StageReport("weights", 0, None, [], None, [], self._reports, [], self._seconds)
        return QuantReport(
            method=self._quant.method,
            format=self._quant.format,
            bytes=sum(param[...].nbytes for _, param in params),
            float_bytes=float_bytes + sum(value.nbytes for value in rest),
            num_params=numbers + sum(value.size for value in rest),
            seconds=self._seconds,
            stages=[done],
        )


def _shardings(
    spec: ParamSpec, fmt: WeightFormat, place: SingleDevice
) -> dict[str, jax.sharding.Sharding] | None:
    """Of a weight's arrays; None on one device."""
    if not isinstance(place, MeshDevices):
        return None
    return dict(shardings(specs(QuantizedWeight(spec, fmt)), place.mesh, place.axes))


def _like(spec: ParamSpec, fmt: WeightFormat, parts: Mapping[str, Any]) -> QTensor:
    """A `QTensor` of one thing for each of its arrays."""
    held: dict[str, Any] = {name: parts.get(name) for name in PARTS}
    return QTensor(**held, format=fmt, pack=fmt.pack(spec.canonical_shape[-2]))


def _elsewhere(spec: ParamSpec, fmt: WeightFormat, placed: Mapping[str, jax.sharding.Sharding]) -> QTensor:
    """Arrays of which this process holds no part."""
    declared = specs(QuantizedWeight(spec, fmt))

    def empty(name: str, where: jax.sharding.Sharding) -> jax.Array:
        part = declared[name]
        return jax.make_array_from_single_device_arrays(part.shape, where, [], dtype=part.dtype)

    return _like(spec, fmt, {name: empty(name, where) for name, where in placed.items()})
