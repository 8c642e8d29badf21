"""SmoothQuant: outliers of activations move into the weights, so that both fit in 8 bits.

    s = scales_of_maxima(absmax_x, row_maxima([gate, up], 0), alpha=0.5)      # x feeds both weights
    # fold: weight rows · s, what precedes / s; then round the weights to nearest
    scale = static_input_scale(absmax_x / s, parse_format("w8a8_static"))

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
arXiv 2211.10438: s_i = max|x_i|^α / max|w_i|^(1-α), the maxima over tokens and over outputs.

Which weights read one input, and what precedes them, is the caller's (`moejax.ptq`).
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moejax.core.errors import ConfigError
from moejax.quantization.arithmetic import MOST
from moejax.quantization.formats import WeightFormat

LARGEST_SCALE = 1e4
"""Scales and their inverses stay below it: beyond, they would leave the dtype that they are folded into."""


def row_maxima(weights: Sequence[jax.Array], batch_axes: int) -> jax.Array:
    """Returns each input's max |w| over outputs, weights and all axes after `batch_axes`: `[*batch, D]`.

    So experts that read one input share its scales.

    Args:
        weights: `[*batch, *own, D, F]` each.
    """
    largest = []
    for w in weights:
        axes = (*range(batch_axes, w.ndim - 2), w.ndim - 1)
        largest.append(jnp.max(jnp.abs(w.astype(jnp.float32)), axis=axes))
    return functools.reduce(jnp.maximum, largest)


def scales_of_maxima(activations: jax.Array, rows: jax.Array, *, alpha: float = 0.5) -> jax.Array:
    """Returns the factors, float32 `[*batch, D]`, of the weights' rows and divisors of what precedes.

    Args:
        activations: max |x| of each input over tokens, `[*batch, D]`. Inputs whose scale must be one number
            (they fold into one channel) are given one maximum, and so are their rows.
        rows: max |w| of each input, `[*batch, D]`, see `row_maxima`.
        alpha: 0 smooths the weights only, 1 the activations only.

    Returns:
        1 where an input was never seen, or where its weights are all zero.
    """
    activations, rows = activations.astype(jnp.float32), rows.astype(jnp.float32)
    usable = (activations > 0) & (rows > 0) & jnp.isfinite(activations) & jnp.isfinite(rows)
    x, w = jnp.where(usable, activations, 1.0), jnp.where(usable, rows, 1.0)
    # In logarithms: powers of float32's extremes neither overflow nor vanish.
    scales = jnp.exp(alpha * jnp.log(x) - (1 - alpha) * jnp.log(w))
    return jnp.where(usable, jnp.clip(scales, 1 / LARGEST_SCALE, LARGEST_SCALE), 1.0)


def static_input_scale(activations: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns the value of one activation code, float32 `[..., 1]`: the largest |x| becomes the largest code.

    Args:
        activations: max |x| of each input over tokens, `[..., D]`, of the inputs as the product gets them (so
            after smoothing: divided by the scales).
        fmt: with static activations.

    Raises:
        ConfigError: a format without static activations.
    """
    if fmt.activations != "static":
        raise ConfigError(f"smoothquant: {fmt.name} has no static activation scales; use w8a8_static")
    largest = jnp.max(activations.astype(jnp.float32), axis=-1, keepdims=True)
    return jnp.where(largest > 0, largest / MOST[fmt.numbers], 1.0)
