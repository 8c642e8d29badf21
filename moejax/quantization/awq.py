"""AWQ: inputs with large activations are scaled up before rounding, and clipping ranges are searched.

    errors = scale_errors([up, gate], [gram, gram], mean_abs_x, (fmt, fmt))   # x feeds both weights
    s = best_scales(mean_abs_x, errors)               # fold: weight rows · s, what precedes / s
    tensor = awq_round(up * s[..., None], gram_of_x_over_s, fmt)

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", arXiv
2306.00978: scales are s = a^α with a the mean |x| of each input, divided by √(max s · min s), and α the best
of a grid. Here the measure is the output error on all tokens of calibration, from Gram matrices
(`output_error`), where the paper's code runs a layer on a few samples. α = 0, no scaling, is among the
candidates, and so is no clipping: in that measure AWQ is never worse than round-to-nearest with the same
`clip`.

The cores know no layers: which weights read one input, and what precedes them, is the caller's
(`moejax.ptq`).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from moejax.core.errors import ConfigError
from moejax.core.quant import Clip
from moejax.quantization.arithmetic import (
    codes_to_values,
    round_in_ranges,
    round_to_codes,
    scales_from_range,
    spread,
    step_and_zero,
)
from moejax.quantization.clipping import ranges
from moejax.quantization.formats import QTensor, WeightFormat
from moejax.quantization.gptq import check_input_scale
from moejax.quantization.output_error import HIGHEST, output_error

SMALLEST_ACTIVATION = 1e-4
"""Smallest share of the largest mean activation: inputs below it are scaled alike."""
NUM_FACTORS, LEAST_FACTOR = 11, 0.5
"""Factors on a range that the search for clipping tries: evenly spaced, from 1 down to the least."""


@functools.partial(jax.jit, static_argnames=("formats", "grid", "clip", "percentile"))
def scale_errors(
    weights: Sequence[jax.Array],
    grams: Sequence[jax.Array],
    activations: jax.Array,
    formats: tuple[WeightFormat, ...],
    *,
    grid: int = 20,
    clip: Clip = "minmax",
    percentile: float = 99.9,
) -> jax.Array:
    """Returns the output error of each exponent of an input's scales, float32 `[grid + 1, *batch]`.

    Each entry of the batch axes has scales of its own. Errors add up over weights and experts: where those do
    not fit in memory at once, sum the results of several calls and give them to `best_scales`.

    Args:
        weights: `[*batch, *own, D, F]` each. Errors are summed over a weight's own axes and over weights:
            gate and up projections of all experts share their input's scales (batch = (), own = (E,)), while
            each expert's down projection has its own (batch = (E,)).
        grams: as many, `[*batch, *own, D, D]`, sums over tokens (what an expert saw more often counts more).
        activations: mean |x| of the input, float32 `[*batch, D]`. Inputs given the same mean get the same
            scale: so channels are tied whose scale folds into one channel of what precedes.
        formats: of each weight.
        grid: exponents are i / grid, i = 0..grid.
        clip, percentile: see `moejax.quantization.clipping.ranges`.

    Raises:
        ConfigError: a format does not fit its weight or has a group index.
    """
    for fmt, w in zip(formats, weights, strict=True):
        _check(fmt, w.shape)
    *batch, D = activations.shape

    def error_at(exponent: jax.Array) -> jax.Array:
        scales = scales_at(activations, jnp.full(batch, exponent))
        total = jnp.zeros(batch, jnp.float32)
        for w, gram, fmt in zip(weights, grams, formats, strict=True):
            own_axes = tuple(range(len(batch), w.ndim - 2))
            s = scales.reshape(*batch, *(1 for _ in own_axes), D, 1)
            w = w.astype(jnp.float32)
            scaled = w * s
            low, high = ranges(scaled, fmt, clip, percentile)
            total += jnp.sum(output_error(_rounded(scaled, low, high, fmt) / s - w, gram), axis=own_axes)
        return total

    return lax.map(error_at, jnp.linspace(0.0, 1.0, grid + 1, dtype=jnp.float32))


@jax.jit
def best_scales(activations: jax.Array, errors: jax.Array) -> jax.Array:
    """Returns the scales of the exponent with the least error; of equal ones the smallest exponent.

    Args:
        activations: mean |x|, float32 `[*batch, D]`.
        errors: float32 `[grid + 1, *batch]`, see `scale_errors`.

    Returns:
        float32 `[*batch, D]`; the weights' rows are multiplied by it, what precedes is divided by it. 1 for
        inputs that calibration never saw.
    """
    best = jnp.argmin(jnp.where(jnp.isfinite(errors), errors, jnp.inf), axis=0)
    return scales_at(activations, best.astype(jnp.float32) / (errors.shape[0] - 1))


def scales_at(activations: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns a^α / √(max · min) over the inputs seen, 1 for the others; float32 `[*batch, D]`.

    Args:
        activations: mean |x|, float32 `[*batch, D]`.
        exponent: α, float32 `[*batch]`.
    """
    seen = (activations > 0) & jnp.isfinite(activations)
    largest = jnp.max(jnp.where(seen, activations, 0.0), axis=-1, keepdims=True)
    bounded = jnp.maximum(activations, SMALLEST_ACTIVATION * largest)
    log = jnp.log(jnp.where(seen, bounded, 1.0)) * exponent[..., None]
    top = jnp.max(jnp.where(seen, log, -jnp.inf), axis=-1, keepdims=True)
    bottom = jnp.min(jnp.where(seen, log, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(seen, jnp.exp(log - 0.5 * (top + bottom)), 1.0)


@functools.partial(jax.jit, static_argnames=("fmt", "clip", "percentile"))
def search_clip(
    w: jax.Array, gram: jax.Array, fmt: WeightFormat, *, clip: Clip = "minmax", percentile: float = 99.9
) -> tuple[jax.Array, jax.Array]:
    """Returns narrower ranges for each scale where that makes the output error smaller.

    Each range shrinks by one of the `NUM_FACTORS`. The groups of an output are searched one after the other,
    each with what the other groups' errors do to the output at that point (the paper's code takes each
    group's error alone, whose sum can grow): the error never grows.

    Args:
        w: `[..., D, F]`, scaled.
        gram: float32 `[..., D, D]`, of the scaled inputs.

    Returns:
        low, high: float32 `[..., G, O]`, ranges for `scales_from_range`.

    Raises:
        ConfigError: a format does not fit its weight or has a group index.
    """
    _check(fmt, w.shape)
    *lead, D, F = w.shape
    n = math.prod(lead)
    w = w.astype(jnp.float32).reshape(n, D, F)
    gram = gram.astype(jnp.float32).reshape(n, D, D)
    low, high = ranges(w, fmt, clip, percentile)
    candidates = jnp.linspace(1.0, LEAST_FACTOR, NUM_FACTORS, dtype=jnp.float32)
    factor = _search_factors(w, gram, low, high, candidates, fmt)
    plain = output_error(_rounded(w, low, high, fmt) - w, gram)
    clipped = output_error(_rounded(w, low * factor, high * factor, fmt) - w, gram)
    # nvfp4's second scale depends on all ranges at once; and sums round.
    better = clipped < plain
    factor = jnp.where(better[:, None, None], factor, 1.0)
    shape = (*lead, *low.shape[1:])
    return (low * factor).reshape(shape), (high * factor).reshape(shape)


def _search_factors(
    w: jax.Array, gram: jax.Array, low: jax.Array, high: jax.Array, candidates: jax.Array, fmt: WeightFormat
) -> jax.Array:
    """Returns the factor of each range, float32 `[n, G, O]`."""
    n, D, _ = w.shape
    _, G, columns = low.shape
    size = fmt.group if fmt.granularity in ("group", "block") else D
    pad = G * size - D
    start_error = jnp.pad(_rounded(w, low, high, fmt) - w, ((0, 0), (0, pad), (0, 0)))
    w = jnp.pad(w, ((0, 0), (0, pad), (0, 0)))
    gram = jnp.pad(gram, ((0, 0), (0, pad), (0, pad)))

    def group(g: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        error, factors = state
        rows = functools.partial(lax.dynamic_slice_in_dim, start_index=g * size, slice_size=size, axis=1)
        members, gram_rows, now = rows(w), rows(gram), rows(error)
        own_gram = lax.dynamic_slice_in_dim(gram_rows, g * size, size, axis=2)
        others = _product(gram_rows, error) - _product(own_gram, now)
        bounds = [lax.dynamic_slice_in_dim(bound, g, 1, axis=1) for bound in (low, high)]

        def rounding_error(factor: jax.Array) -> jax.Array:
            return _rounded(members, bounds[0] * factor, bounds[1] * factor, fmt) - members

        def cost(factor: jax.Array) -> jax.Array:
            rounding = rounding_error(factor)
            by_output = jnp.sum(rounding * (_product(own_gram, rounding) + 2 * others), axis=1)
            return _sum_outputs(by_output, columns, fmt)

        costs = lax.map(cost, candidates)
        best = candidates[jnp.argmin(costs, axis=0)][:, None]
        error = lax.dynamic_update_slice_in_dim(error, rounding_error(best), g * size, axis=1)
        return error, lax.dynamic_update_slice_in_dim(factors, best, g, axis=1)

    _, factors = lax.fori_loop(0, G, group, (start_error, jnp.ones((n, G, columns), jnp.float32)))
    return factors


@functools.partial(jax.jit, static_argnames=("fmt", "search", "clip", "percentile"))
def awq_round(
    w: jax.Array,
    gram: jax.Array,
    fmt: WeightFormat,
    *,
    search: bool = True,
    clip: Clip = "minmax",
    percentile: float = 99.9,
    input_scale: jax.Array | None = None,
) -> QTensor:
    """Rounds a weight that has been scaled, in searched ranges.

    Args:
        w: `[..., D, F]`, rows times the scales.
        gram: float32 `[..., D, D]`, of the scaled inputs.
        search: False takes the ranges of `clip` as they are. (The paper's code does not clip query and key
            projections, whose outputs meet in a product.)
        input_scale: float32 `[..., 1]`, passed on where the format has static activations.

    Raises:
        ConfigError: the format does not fit the weight, has a group index, or has static activations and no
            `input_scale` is given.
    """
    _check(fmt, w.shape)
    check_input_scale("awq", fmt, input_scale)
    if search:
        low, high = search_clip(w, gram, fmt, clip=clip, percentile=percentile)
    else:
        low, high = ranges(w, fmt, clip, percentile)
    return round_in_ranges(w, low, high, fmt, input_scale=input_scale)


def _check(fmt: WeightFormat, shape: tuple[int, ...]) -> None:
    fmt.check("awq", *shape[-2:])
    if fmt.indexed:
        raise ConfigError(f"awq: {fmt.name}: inputs are not reordered; take the format without a group index")


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=HIGHEST)


def _rounded(w: jax.Array, low: jax.Array, high: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns `w` `[..., D, F]` quantized in these ranges and dequantized, float32."""
    D, F = w.shape[-2:]
    grids = step_and_zero(*scales_from_range(low, high, fmt), fmt)
    step, zero = (spread(grid, fmt, D, F) for grid in grids)
    codes = round_to_codes(jnp.swapaxes(w, -1, -2), step, zero, fmt)
    return jnp.swapaxes(codes_to_values(codes, step, zero, fmt), -1, -2)


def _sum_outputs(errors: jax.Array, columns: int, fmt: WeightFormat) -> jax.Array:
    """Sums errors `[n, F]` of outputs over the outputs that share a scale: `[n, O]`."""
    n, F = errors.shape
    if fmt.granularity != "block":
        return errors if columns == F else jnp.sum(errors, axis=1, keepdims=True)
    padded = jnp.pad(errors, ((0, 0), (0, columns * fmt.group - F)))
    return jnp.sum(padded.reshape(n, columns, fmt.group), axis=2)
