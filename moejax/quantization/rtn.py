"""Round to nearest: the method without calibration, and the baseline of all others."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp

from moejax.core.quant import Clip
from moejax.quantization.arithmetic import assemble, only_kept, round_in_ranges, two_of_four, with_zeros
from moejax.quantization.clipping import ranges
from moejax.quantization.formats import QTensor, WeightFormat


@functools.partial(jax.jit, static_argnames=("fmt", "clip", "percentile"))
def round_to_nearest(
    w: jax.Array,
    fmt: WeightFormat,
    *,
    clip: Clip = "minmax",
    percentile: float = 99.9,
    input_scale: jax.Array | None = None,
    importance: jax.Array | None = None,
) -> QTensor:
    """Rounds each weight to the nearest code of its scale; of a sparse format those that are kept.

    Args:
        w: `[..., D, F]`, of any floating dtype, finite; rounded in float32.
        clip, percentile: how scales are found, see `moejax.quantization.clipping`.
        input_scale: float32 `[..., 1]`, static scale of the activations, which only calibration can tell;
            None takes 1 where the format has one.
        importance: float32 `[..., D]`, factors of the inputs on the magnitudes by which a sparse format keeps
            two of every four; None is 1.

    Returns:
        For indexed formats with the group index of inputs in order.

    Raises:
        ConfigError: the format does not fit D.
    """
    fmt.check("round_to_nearest", *w.shape[-2:])
    if fmt.activations == "static" and input_scale is None:
        input_scale = jnp.ones((*w.shape[:-2], 1), jnp.float32)
    kept = None
    if fmt.sparse:
        rows = jnp.swapaxes(w, -1, -2).astype(jnp.float32)
        score = jnp.abs(rows)
        kept = two_of_four(score if importance is None else score * importance[..., None, :])
        w = jnp.swapaxes(with_zeros(only_kept(rows, kept), kept), -1, -2)
    if fmt.bits > 8:
        one = jnp.ones((*w.shape[:-2], 1, 1), jnp.float32)
        q = assemble(rows.astype(fmt.code_dtype), one, None, fmt)
    else:
        low, high = ranges(w, fmt, clip, percentile)
        q = round_in_ranges(w, low, high, fmt, input_scale=input_scale)
    return q if kept is None else replace(q, values=only_kept(q.values, kept), kept=kept)
