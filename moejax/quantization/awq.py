"""AWQ: inputs with large activations are scaled up before rounding, and clipping ranges are searched.

    found = search_scales([up, gate], [gram, gram], mean_abs_x, (fmt, fmt))   # x feeds both weights
    s = found.scales                                  # fold: weight rows · s, what precedes / s
    result = awq_round(up * s[..., None], scale_gram(gram, s), fmt)
    result.tensor                                     # QTensor

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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.core.errors import ConfigError
from moejax.core.quant import Clip
from moejax.quantization.arithmetic import (
    assemble,
    codes_to_values,
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


class AwqScales(NamedTuple):
    """
    Attributes:
        scales: float32 `[*batch, D]`; the weights' rows are multiplied by it, what precedes is divided by it.
            1 for inputs that calibration never saw.
        exponent: float32 `[*batch]`, the α chosen.
        error, unscaled_error: float32 `[*batch]`, output error with these scales, and rounded without them.
    """

    scales: jax.Array
    exponent: jax.Array
    error: jax.Array
    unscaled_error: jax.Array


class AwqClip(NamedTuple):
    """
    Attributes:
        low, high: float32 `[..., G, O]`, ranges for `scales_from_range`.
        error, unclipped_error: float32 `[...]`, output error with them, and with the ranges of `clip`.
    """

    low: jax.Array
    high: jax.Array
    error: jax.Array
    unclipped_error: jax.Array


class AwqResult(NamedTuple):
    """
    Attributes:
        tensor: with the leading axes of the weight.
        error, unclipped_error: as `AwqClip`'s.
    """

    tensor: QTensor
    error: jax.Array
    unclipped_error: jax.Array


def search_scales(
    weights: Sequence[jax.Array],
    grams: Sequence[jax.Array],
    activations: jax.Array,
    formats: Sequence[WeightFormat],
    *,
    grid: int = 20,
    clip: Clip = "minmax",
    percentile: float = 99.9,
) -> AwqScales:
    """Scales for an input that one or several weights read; one vector for each entry of the batch axes.

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
    errors = scale_errors(weights, grams, activations, formats, grid=grid, clip=clip, percentile=percentile)
    return best_scales(activations, errors)


def scale_errors(
    weights: Sequence[jax.Array],
    grams: Sequence[jax.Array],
    activations: jax.Array,
    formats: Sequence[WeightFormat],
    *,
    grid: int = 20,
    clip: Clip = "minmax",
    percentile: float = 99.9,
) -> jax.Array:
    """Returns the output error of each exponent, float32 `[grid + 1, *batch]`; arguments as `search_scales`.

    They add up over weights and experts: where those do not fit in memory at once, sum the results of several
    calls and give them to `best_scales`.
    """
    for fmt, w in zip(formats, weights, strict=True):
        _check(fmt, w.shape)
    return _scale_errors(
        tuple(weights), tuple(grams), activations, formats=tuple(formats), grid=grid, clip=clip,
        percentile=percentile,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("formats", "grid", "clip", "percentile"))
def _scale_errors(
    weights: tuple[jax.Array, ...],
    grams: tuple[jax.Array, ...],
    activations: jax.Array,
    *,
    formats: tuple[WeightFormat, ...],
    grid: int,
    clip: Clip,
    percentile: float,
) -> jax.Array:
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
def best_scales(activations: jax.Array, errors: jax.Array) -> AwqScales:
    """Returns the scales of the exponent with the least error; of equal ones the smallest exponent.

    Args:
        activations: mean |x|, float32 `[*batch, D]`.
        errors: float32 `[grid + 1, *batch]`, see `scale_errors`.
    """
    grid = errors.shape[0] - 1
    best = jnp.argmin(jnp.where(jnp.isfinite(errors), errors, jnp.inf), axis=0)
    exponent = best.astype(jnp.float32) / grid
    least = jnp.take_along_axis(errors, best[None], axis=0)[0]
    return AwqScales(scales_at(activations, exponent), exponent, least, errors[0])


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


def scale_gram(gram: jax.Array, scales: jax.Array) -> jax.Array:
    """Returns the Gram matrix `[..., D, D]` of inputs divided by `scales` `[..., D]` (same leading axes)."""
    return gram / (scales[..., :, None] * scales[..., None, :])


@functools.partial(jax.jit, static_argnames=("fmt", "steps", "least", "clip", "percentile"))
def search_clip(
    w: jax.Array,
    gram: jax.Array,
    fmt: WeightFormat,
    *,
    steps: int = 10,
    least: float = 0.5,
    clip: Clip = "minmax",
    percentile: float = 99.9,
) -> AwqClip:
    """Returns narrower ranges for each scale where that makes the output error smaller.

    Each range shrinks by one of `steps` + 1 factors from 1 to `least`. The groups of an output are searched
    one after the other, each with what the other groups' errors do to the output at that point (the paper's
    code takes each group's error alone, whose sum can grow): the error never grows.

    Args:
        w: `[..., D, F]`, scaled.
        gram: float32 `[..., D, D]`, of the scaled inputs.

    Raises:
        ConfigError: a format does not fit its weight or has a group index.
    """
    _check(fmt, w.shape)
    *lead, D, F = w.shape
    n = math.prod(lead)
    w = w.astype(jnp.float32).reshape(n, D, F)
    gram = gram.astype(jnp.float32).reshape(n, D, D)
    low, high = ranges(w, fmt, clip, percentile)
    factor = _search_factors(w, gram, low, high, jnp.linspace(1.0, least, steps + 1, dtype=jnp.float32), fmt)
    plain = output_error(_rounded(w, low, high, fmt) - w, gram)
    clipped = output_error(_rounded(w, low * factor, high * factor, fmt) - w, gram)
    # nvfp4's second scale depends on all ranges at once; and sums round.
    better = clipped < plain
    factor = jnp.where(better[:, None, None], factor, 1.0)
    shape = (*lead, *low.shape[1:])
    return AwqClip(
        (low * factor).reshape(shape),
        (high * factor).reshape(shape),
        jnp.where(better, clipped, plain).reshape(lead),
        plain.reshape(lead),
    )


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


@functools.partial(jax.jit, static_argnames=("fmt", "search", "steps", "least", "clip", "percentile"))
def awq_round(
    w: jax.Array,
    gram: jax.Array,
    fmt: WeightFormat,
    *,
    search: bool = True,
    steps: int = 10,
    least: float = 0.5,
    clip: Clip = "minmax",
    percentile: float = 99.9,
    input_scale: jax.Array | None = None,
) -> AwqResult:
    """Rounds a weight that has been scaled, in searched ranges.

    Args:
        w: `[..., D, F]`, rows times the scales.
        gram: float32 `[..., D, D]`, of the scaled inputs (`scale_gram`).
        search: False takes the ranges of `clip` as they are. (The paper's code does not clip query and key
            projections, whose outputs meet in a product.)
        steps, least: see `search_clip`.
        input_scale: float32 `[..., 1]`, passed on where the format has static activations.

    Raises:
        ConfigError: the format does not fit the weight, has a group index, or has static activations and no
            `input_scale` is given.
    """
    _check(fmt, w.shape)
    check_input_scale("awq", fmt, input_scale)
    if search:
        low, high, error, plain = search_clip(
            w, gram, fmt, steps=steps, least=least, clip=clip, percentile=percentile
        )
    else:
        w = w.astype(jnp.float32)
        low, high = ranges(w, fmt, clip, percentile)
        error = plain = output_error(_rounded(w, low, high, fmt) - w, gram)
    scales, zeros, tensor_scale = scales_from_range(low, high, fmt)
    codes = _codes(w.astype(jnp.float32), *step_and_zero(scales, zeros, tensor_scale, fmt), fmt)
    tensor = assemble(codes, scales, zeros, fmt, tensor_scale=tensor_scale, input_scale=input_scale)
    return AwqResult(tensor, error, plain)


def _check(fmt: WeightFormat, shape: tuple[int, ...]) -> None:
    fmt.check("awq", *shape[-2:])
    if fmt.indexed:
        raise ConfigError(f"awq: {fmt.name}: inputs are not reordered; take the format without a group index")


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=HIGHEST)


def _codes(w: jax.Array, step: jax.Array, zero: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns codes `[..., F, D]` of `w` `[..., D, F]`."""
    D, F = w.shape[-2:]
    step, zero = spread(step, fmt, D, F), spread(zero, fmt, D, F)
    return round_to_codes(jnp.swapaxes(w, -1, -2), step, zero, fmt)


def _rounded(w: jax.Array, low: jax.Array, high: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns `w` `[..., D, F]` quantized in these ranges and dequantized, float32."""
    D, F = w.shape[-2:]
    step, zero = step_and_zero(*scales_from_range(low, high, fmt), fmt)
    codes = _codes(w, step, zero, fmt)
    step, zero = spread(step, fmt, D, F), spread(zero, fmt, D, F)
    return jnp.swapaxes(codes_to_values(codes, step, zero, fmt), -1, -2)


def _sum_outputs(errors: jax.Array, columns: int, fmt: WeightFormat) -> jax.Array:
    """Errors `[n, F]` of outputs, summed over the outputs that share a scale: `[n, O]`."""
    n, F = errors.shape
    if fmt.granularity != "block":
        return errors if columns == F else jnp.sum(errors, axis=1, keepdims=True)
    padded = jnp.pad(errors, ((0, 0), (0, columns * fmt.group - F)))
    return jnp.sum(padded.reshape(n, columns, fmt.group), axis=2)
