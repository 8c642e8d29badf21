"""Round to nearest: the method without calibration, and the baseline of all others."""

import functools

import jax
import jax.numpy as jnp

from moejax.core.quant import Clip
from moejax.quantization import arithmetic
from moejax.quantization.clipping import ranges
from moejax.quantization.formats import QTensor, WeightFormat


@functools.partial(jax.jit, static_argnames=("fmt", "clip", "percentile"))
def round_to_nearest(
    w: jax.Array, fmt: WeightFormat, *, clip: Clip = "minmax", percentile: float = 99.9
) -> QTensor:
    """Rounds each weight to the nearest code of its scale.

    Args:
        w: `[..., D, F]`, of any floating dtype, finite; rounded in float32.
        clip, percentile: how scales are found, see `moejax.quantization.clipping`.

    Returns:
        For indexed formats with the group index of inputs in order; for static activation scales, which only
        calibration can tell, with an `input_scale` of 1.

    Raises:
        ConfigError: the format does not fit D.
    """
    D, F = w.shape[-2:]
    fmt.check("round_to_nearest", D, F)
    low, high = ranges(w, fmt, clip, percentile)
    scales, zeros, tensor_scale = arithmetic.scales_from_range(low, high, fmt)
    step, zero = arithmetic.step_and_zero(scales, zeros, tensor_scale, fmt)
    rows = jnp.swapaxes(w.astype(jnp.float32), -1, -2)
    codes = arithmetic.round_to_codes(
        rows, arithmetic.spread(step, fmt, D, F), arithmetic.spread(zero, fmt, D, F), fmt
    )
    lead, group_index, input_scale = w.shape[:-2], None, None
    if fmt.indexed:
        group_index = jnp.broadcast_to(jnp.arange(D, dtype=jnp.int32) // fmt.group, (*lead, D))
    if fmt.activations == "static":
        input_scale = jnp.ones((*lead, 1), jnp.float32)
    return arithmetic.assemble(
        codes,
        scales,
        zeros,
        fmt,
        tensor_scale=tensor_scale,
        group_index=group_index,
        input_scale=input_scale,
    )
