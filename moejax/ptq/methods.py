"""Quantization of one weight, folded and with its statistics, by its method; and its error."""

import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.core.quant import QuantConfig
from moejax.ptq.report import WeightReport
from moejax.quantization.arithmetic import dequantize
from moejax.quantization.awq import awq_round
from moejax.quantization.calibration import Statistics
from moejax.quantization.formats import QTensor
from moejax.quantization.gptq import GptqResult, damping_note, gptq
from moejax.quantization.output_error import output_error
from moejax.quantization.rtn import round_to_nearest
from moejax.quantization.rules import Chosen, weight_name
from moejax.quantization.smoothquant import static_input_scale

NOT_CLIPPED = ("q_proj", "k_proj")
"""Weights whose ranges AWQ's authors do not search: their outputs meet in a product, where a range that is
good for each output alone may be bad for the attention's scores."""


class Rounded(NamedTuple):
    """A quantized weight; errors and damping float32 `[...]` over its leading axes, None where there are
    none."""

    tensor: QTensor
    weight_error: jax.Array
    output_error: jax.Array | None
    damping: jax.Array | None
    raised: jax.Array | None
    seconds: float


def quantize(
    path: str, w: jax.Array, chosen: Chosen, quant: QuantConfig, stats: Statistics | None
) -> Rounded:
    """Quantizes `w`, float32 `[..., D, F]`, whose inputs' statistics (scales of folding already divided out)
    are `stats`, with the same leading axes; None for a method without calibration."""
    begin = time.perf_counter()
    fmt, ranges = chosen.format, {"clip": quant.clip, "percentile": quant.percentile}
    damping = raised = scale = None
    if fmt.activations == "static":
        assert stats is not None, path
        scale = static_input_scale(stats.max_abs, fmt)
    if chosen.method == "gptq":
        assert stats is not None, path
        options = {"damping": quant.damping, "act_order": quant.act_order, "block": quant.gptq_block}
        result = gptq(w, stats.mean_gram(), fmt, **options, **ranges, input_scale=scale)
        tensor, damping, raised = result.tensor, result.damping, result.raised
    elif chosen.method == "awq":
        assert stats is not None, path
        search = quant.awq_clip and weight_name(path).rpartition(".")[2] not in NOT_CLIPPED
        tensor = awq_round(w, stats.mean_gram(), fmt, search=search, **ranges, input_scale=scale)
    else:
        norms = None
        if chosen.method == "wanda":  # the inputs' norms: arXiv 2306.11695
            assert stats is not None, path
            norms = jnp.sqrt(jnp.diagonal(stats.gram, axis1=-2, axis2=-1))
        tensor = round_to_nearest(w, fmt, **ranges, input_scale=scale, importance=norms)
    by_weight, by_output = errors(w, tensor, None if stats is None else stats.gram)
    jax.block_until_ready((tensor, by_weight, by_output))
    return Rounded(tensor, by_weight, by_output, damping, raised, time.perf_counter() - begin)


@jax.jit
def errors(w: jax.Array, tensor: QTensor, gram: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Returns the relative change of the weight's norm, and of its outputs': float32 `[...]` each."""
    change = dequantize(tensor) - w

    def share(part: jax.Array, whole: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.maximum(part, 0.0) / jnp.where(whole > 0, whole, 1.0))

    squares = (jnp.sum(jnp.square(a), axis=(-2, -1)) for a in (change, w))
    by_output = None if gram is None else share(output_error(change, gram), output_error(w, gram))
    return share(*squares), by_output


def joined(parts: list[Rounded]) -> Rounded:
    """Joins chunks of experts one after the other."""
    if len(parts) == 1:
        return parts[0]
    arrays = [part._replace(seconds=0.0) for part in parts]
    whole = jax.tree.map(lambda *a: jnp.concatenate(a) if hasattr(a[0], "shape") else a[0], *arrays)
    return whole._replace(seconds=sum(part.seconds for part in parts))


def weight_report(
    path: str, chosen: Chosen, done: Rounded, float_bytes: int
) -> tuple[WeightReport, list[str]]:
    """Returns the report's entry, and notes."""
    shape = done.tensor.shape
    note = None
    if done.damping is not None and done.raised is not None:
        note = damping_note(weight_name(path), GptqResult(done.tensor, done.damping, done.raised))
    raised = np.flatnonzero(np.asarray(False if done.raised is None else done.raised).reshape(-1))
    report = WeightReport(
        weight_name(path),
        chosen.method,
        chosen.format.name,
        shape,
        _floats(done.weight_error),
        None if done.output_error is None else _floats(done.output_error),
        None if done.damping is None else _floats(done.damping),
        [int(i) for i in raised],
        8 * done.tensor.nbytes / int(np.prod(shape)),
        done.tensor.nbytes,
        float_bytes,
        done.seconds,
    )
    return report, [note] if note else []


def _floats(values: jax.Array) -> list[float]:
    """Returns the values, or none where the leading axis lies on several processes."""
    if not values.is_fully_addressable:
        return []
    return [float(v) for v in np.asarray(values).reshape(-1)]
