"""Range of weights that a scale covers: everything (minmax), or less, for finer steps of the majority.

A range is `low, high`, float32 `[..., G, O]`, one for each scale of the format, which
`arithmetic.scales_from_range` makes of it. Weights outside saturate. All methods are vectorised over ranges,
see a weight in chunks of bounded size (`_in_chunks`), and work under `jit`.

- minmax: all weights of the group.
- percentile: a percentile of the group's magnitudes, between the nearest two by linear interpolation.
- mse: of a grid of shrunk ranges the one with the least squared error of the rounded weights, for each group.
- entropy: the threshold at which rounding changes the histogram of magnitudes least, by Kullback-Leibler
  divergence: `moejax.quantization.entropy`.

Thresholds of percentile and entropy are of magnitudes also for asymmetric formats: a side that is shorter
than the threshold stays as it is.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moejax.core.quant import Clip
from moejax.quantization import arithmetic, entropy
from moejax.quantization.formats import WeightFormat

CHUNK = 1 << 24
"""Weights that a method works on at a time; its temporaries are a few times that in float32."""

SHRINK = tuple(float(f) for f in np.linspace(1.0, 0.2, 49))
"""Factors on a group's range that "mse" tries."""

SHRINK_E8M0 = (1.0, 0.5, 2.0)
"""Factors for scales that are powers of two; one step wider, too, because the rule of OCP MX may saturate."""


@functools.partial(jax.jit, static_argnames=("fmt", "clip", "percentile", "chunk"))
def ranges(
    w: jax.Array, fmt: WeightFormat, clip: Clip = "minmax", percentile: float = 99.9, *, chunk: int = CHUNK
) -> tuple[jax.Array, jax.Array]:
    """Returns the range of each scale of a weight.

    Args:
        w: `[..., D, F]`, of any floating dtype, finite. Groups are by place, for indexed formats too.
        percentile: of "percentile", 0 to 100.
        chunk: weights to work on at a time; the result depends on it by the rounding of sums at most.

    Returns:
        low, high: float32 `[..., G, O]`, low <= 0 <= high.
    """
    methods: dict[str, Callable[[jax.Array], tuple[jax.Array, jax.Array]]] = {
        "minmax": lambda part: _minmax(members(part, fmt)),
        "percentile": lambda part: _percentile(part, fmt, percentile),
        "mse": lambda part: _mse(part, fmt),
        "entropy": lambda part: _entropy(part, fmt),
    }
    # Both look beyond an output: nvfp4's scale of the tensor, and histograms of all outputs together.
    coupled = fmt.has_tensor_scale or clip == "entropy"
    return _in_chunks(methods[clip], w, fmt, chunk, split_outputs=not coupled)


def members(w: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns the weights of each scale along the last axis, float32 `[..., G, O, n]`.

    Blocks at the edges are filled up with zeros, which are in every range and have no rounding error.
    """
    *lead, D, F = w.shape
    G, columns = fmt.scale_shape(D, F)
    w = w.astype(jnp.float32)
    if fmt.granularity == "tensor":
        return w.reshape(*lead, 1, 1, D * F)
    if fmt.granularity != "block":
        return jnp.swapaxes(w.reshape(*lead, G, D // G, F), -1, -2)
    size = fmt.group
    w = jnp.pad(w, [(0, 0)] * len(lead) + [(0, -D % size), (0, -F % size)])
    w = jnp.swapaxes(w.reshape(*lead, G, size, columns, size), -2, -3)
    return w.reshape(*lead, G, columns, size * size)


def _member_counts(D: int, F: int, fmt: WeightFormat) -> np.ndarray:
    """Counts the weights of each scale without what fills blocks up: int `[G, O]`."""
    G, columns = fmt.scale_shape(D, F)
    rows, width = -(-D // G), -(-F // columns)
    if fmt.granularity == "block":
        rows = width = fmt.group
    tall = np.minimum(rows, D - rows * np.arange(G))
    wide = np.minimum(width, F - width * np.arange(columns))
    return tall[:, None] * wide[None, :]


def _in_chunks(
    method: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    w: jax.Array,
    fmt: WeightFormat,
    chunk: int,
    *,
    split_outputs: bool,
) -> tuple[jax.Array, jax.Array]:
    """Applies `method` to parts of at most `chunk` weights where it can: some matrices, or outputs of one."""
    *lead, D, F = w.shape
    count = math.prod(lead)
    if count * D * F <= chunk:
        return method(w)
    pieces = 1
    if split_outputs and fmt.granularity in ("channel", "group"):
        pieces = next(n for n in range(1, F + 1) if F % n == 0 and (D * F // n <= chunk or n == F))
    parts = jnp.moveaxis(w.reshape(count, D, pieces, F // pieces), 2, 1)
    parts = parts.reshape(count * pieces, D, F // pieces)
    ranges = jax.lax.map(method, parts, batch_size=max(1, chunk // (D * F // pieces)))

    def back(grid: jax.Array) -> jax.Array:
        G, columns = fmt.scale_shape(D, F)
        return jnp.moveaxis(grid.reshape(count, pieces, G, -1), 1, 2).reshape(*lead, G, columns)

    return back(ranges[0]), back(ranges[1])


def _minmax(groups: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.minimum(groups.min(-1), 0.0), jnp.maximum(groups.max(-1), 0.0)


def _within(groups: jax.Array, threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cuts the range down to a threshold on magnitudes. A threshold of zero would make a group of zeros of
    the few weights that are not, and leaves the range whole."""
    low, high = _minmax(groups)
    threshold = jnp.where(threshold > 0, threshold, jnp.inf)
    return jnp.maximum(low, -threshold), jnp.minimum(high, threshold)


def _percentile(w: jax.Array, fmt: WeightFormat, percentile: float) -> tuple[jax.Array, jax.Array]:
    groups = members(w, fmt)
    n = groups.shape[-1]
    counts = _member_counts(w.shape[-2], w.shape[-1], fmt)
    # What fills a block up is zero and so comes first: ranks count from the end.
    rank = (n - counts) + percentile / 100 * (counts - 1)
    below = np.clip(np.floor(rank).astype(np.int32), 0, n - 1)
    above = np.minimum(below + 1, n - 1)
    share = jnp.asarray(rank - below, jnp.float32)
    magnitudes = jnp.sort(jnp.abs(groups), axis=-1)

    def at(index: np.ndarray) -> jax.Array:
        place = jnp.broadcast_to(jnp.asarray(index)[..., None], (*groups.shape[:-1], 1))
        return jnp.take_along_axis(magnitudes, place, axis=-1)[..., 0]

    low, share = at(below), jnp.broadcast_to(share, groups.shape[:-1])
    return _within(groups, low + share * (at(above) - low))


def _mse(w: jax.Array, fmt: WeightFormat) -> tuple[jax.Array, jax.Array]:
    groups = members(w, fmt)
    low, high = _minmax(groups)
    keep = jnp.zeros(low.shape, bool)
    if fmt.has_tensor_scale:
        # The widest group sets the scale of the tensor, and with it every other group's; it stays, so that
        # what is tried for a group is what comes out.
        span = jnp.maximum(high, -low)
        keep = span == span.max(axis=(-2, -1), keepdims=True)

    def shrunk(factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        factor = jnp.where(keep, 1.0, factor)
        return low * factor, high * factor

    def attempt(best: tuple[jax.Array, jax.Array], factor: jax.Array):
        scales, zeros, tensor_scale = arithmetic.scales_from_range(*shrunk(factor), fmt)
        step, zero = (grid[..., None] for grid in arithmetic.step_and_zero(scales, zeros, tensor_scale, fmt))
        codes = arithmetic.round_to_codes(groups, step, zero, fmt)
        error = jnp.square(arithmetic.codes_to_values(codes, step, zero, fmt) - groups).sum(-1)
        return (jnp.where(error < best[0], error, best[0]), jnp.where(error < best[0], factor, best[1])), None

    factors = jnp.asarray(SHRINK_E8M0 if fmt.scale_dtype == "e8m0" else SHRINK, jnp.float32)
    start = (jnp.full(low.shape, jnp.inf, jnp.float32), jnp.ones(low.shape, jnp.float32))
    (_, factor), _ = jax.lax.scan(attempt, start, factors)
    return shrunk(factor)


def _entropy(w: jax.Array, fmt: WeightFormat) -> tuple[jax.Array, jax.Array]:
    groups = members(w, fmt)
    # Zeros that fill blocks up are no weights.
    real = members(jnp.ones(w.shape[-2:], jnp.float32), fmt) if fmt.granularity == "block" else None
    threshold = entropy.clipping_thresholds(groups, fmt, real)
    return _minmax(groups) if threshold is None else _within(groups, threshold)
