"""Clipping by entropy: the threshold at which rounding changes the distribution of magnitudes least.

The histogram of magnitudes is cut at a threshold, what lies beyond added to its last bin; rounding to the
format's codes spreads each code's weights evenly over the bins of that code that had any. The threshold with
the least Kullback-Leibler divergence of the second from the first wins (S. Migacz, "8-bit inference with
TensorRT", GTC 2017). There they are activations, of which there are many; a scale's own weights are few:

- the bins of a code differ by chance too, the more of them the more, which would favour low thresholds; what
  chance alone is expected to give, (bins - codes) / 2n with n weights (as of a likelihood-ratio test), is
  subtracted;
- a histogram has at least 8 weights a bin, and at least 8 bins a code, to tell rounding from none. Where a
  range has too few weights for that, all groups of an output are taken together, or else all of the matrix,
  each weight in units of its own range's root mean square, and so is the threshold. (Not in units of the
  largest: each range's own would pile up at 1.) Where those are too few as well, nothing is cut;
- a code that no weight below the threshold has, though some above do, counts as half a weight: one outlier
  alone is no infinite divergence.

An asymmetric format is taken to use half its codes on either side.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from moejax.quantization.formats import WeightFormat

BINS = 2048
"""At most; fewer where there are fewer weights."""
PER_BIN = 8
PER_CODE = 8
CANDIDATES = 128


def clipping_thresholds(
    groups: jax.Array, fmt: WeightFormat, real: jax.Array | None = None
) -> jax.Array | None:
    """Returns the threshold of each range; it may lie above the range's largest magnitude.

    Args:
        groups: float32 `[..., G, O, n]`, the weights of each range.
        real: `[G, O, n]`, 0 where `groups` is filled up with what is no weight.

    Returns:
        float32 `[..., G, O]`, 0 for a range of zeros; None: too few weights.
    """
    *lead, G, columns, n = groups.shape
    together = next((t for t, count in enumerate((n, G * n, G * columns * n)) if _bins(count, fmt)), None)
    if together is None:
        return None
    weight = jnp.broadcast_to(jnp.ones((), jnp.float32) if real is None else real, groups.shape)
    unit = jnp.sqrt(jnp.square(groups).sum(-1) / weight.sum(-1))
    relative = jnp.abs(groups) / jnp.where(unit > 0, unit, 1.0)[..., None]
    if together == 1:
        relative, weight = jnp.swapaxes(relative, -2, -3), jnp.swapaxes(weight, -2, -3)
    grid = ((G, columns), (1, columns), (1, 1))[together]
    rows = math.prod(lead) * math.prod(grid)
    bins = _bins(groups.size // rows, fmt)
    relative, weight = relative.reshape(rows, -1), weight.reshape(rows, -1)
    largest = relative.max(-1)
    share = relative / jnp.where(largest > 0, largest, 1.0)[:, None]
    thresholds = _least_divergence(_histogram(share, weight, bins), fmt) * largest
    return thresholds.reshape(*lead, *grid) * unit


def _bins(count: int, fmt: WeightFormat) -> int:
    """Returns the number of bins of a histogram of `count` weights; 0 where they are too few for one."""
    bins = min(BINS, 1 << max(0, (count // PER_BIN).bit_length() - 1))
    return bins if bins >= PER_CODE * _magnitudes(fmt)[0].size else 0


def _magnitudes(fmt: WeightFormat) -> tuple[np.ndarray, float]:
    """Returns the magnitudes of all codes in steps, ascending, and the magnitude that the threshold is."""
    if fmt.numbers in ("int8", "int4"):
        codes = np.arange(2 ** (fmt.bits - 1), dtype=np.float32)
        return codes, codes[-1] + (0.0 if fmt.symmetric else 0.5)
    if fmt.numbers == "float4_e2m1fn":
        codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    else:
        bits = np.arange(128, dtype=np.uint8).view(fmt.code_dtype).astype(np.float32)
        codes = bits[np.isfinite(bits)]
    return codes, float(codes[-1])


def _histogram(share: jax.Array, weight: jax.Array, bins: int) -> jax.Array:
    """Counts weights by magnitude: shares in 0..1 `[R, n]` → float32 `[R, bins]`."""
    rows = share.shape[0]
    place = jnp.minimum((share * bins).astype(jnp.int32), bins - 1)
    place = place + jnp.arange(rows, dtype=jnp.int32)[:, None] * bins
    empty = jnp.zeros(rows * bins, jnp.float32)
    return empty.at[place.reshape(-1)].add(weight.reshape(-1)).reshape(rows, bins)


def _cells(bins: int, fmt: WeightFormat) -> tuple[np.ndarray, np.ndarray]:
    """Thresholds in bins, falling `[C]`, and where the bins of every code begin, `[C, codes + 1]`."""
    codes, most = _magnitudes(fmt)
    least = max(codes.size, bins // 32)
    thresholds = np.unique(np.linspace(least, bins, CANDIDATES).round().astype(np.int32))[::-1]
    middles = (codes[1:] + codes[:-1]) / 2
    starts = []
    for i in thresholds:
        code = np.searchsorted(middles, (np.arange(i) + 0.5) * (most / i), side="right")
        starts.append(np.searchsorted(code, np.arange(codes.size + 1)))
    return thresholds, np.array(starts, np.int32)


def _least_divergence(counts: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns the best threshold of each histogram `[R, bins]` as a share of all its bins, `[R]`.

    Σ p log(p / q) needs, of every code, only three sums over its bins: of p, of p log p, and how many have a
    weight. All come from running sums, at a cost of codes rather than bins.
    """
    rows, bins = counts.shape
    thresholds, starts = _cells(bins, fmt)
    total = counts.sum(-1, keepdims=True)
    p = counts / total

    def running(x: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.zeros((rows, 1), jnp.float32), jnp.cumsum(x, axis=-1)], axis=-1)

    sums = running(p), running(_entropy_term(p)), running((p > 0).astype(jnp.float32))

    def attempt(best: tuple[jax.Array, jax.Array], case: tuple[jax.Array, jax.Array]):
        i, start = case
        mass, filled = (jnp.diff(s[:, start], axis=-1) for s in (sums[0], sums[2]))
        kept, last = sums[0][:, i], p[:, i - 1]
        cut = jnp.where(i < bins, jnp.maximum(1.0 - kept, 0.0), 0.0)
        # What is cut joins the last bin, in the cell of the largest code that has bins.
        in_last = ((start[:-1] <= i - 1) & (i - 1 < start[1:])).astype(jnp.float32)[None]
        filled = filled + in_last * ((last == 0) & (cut > 0)).astype(jnp.float32)[:, None]
        whole = mass + in_last * cut[:, None]
        q = jnp.maximum(mass, 0.5 / total) / jnp.maximum(filled, 1.0) / kept[:, None]
        cross = jnp.where(whole > 0, whole * jnp.log(q), 0.0).sum(-1)
        chance = jnp.maximum(filled - 1.0, 0.0).sum(-1) / (2.0 * total[:, 0])
        divergence = sums[1][:, i - 1] + _entropy_term(last + cut) - cross - chance
        better = divergence < best[0]
        share = i.astype(jnp.float32) / bins
        return (jnp.where(better, divergence, best[0]), jnp.where(better, share, best[1])), None

    start = jnp.full(rows, jnp.inf, jnp.float32), jnp.ones(rows, jnp.float32)
    (_, share), _ = jax.lax.scan(attempt, start, (jnp.asarray(thresholds), jnp.asarray(starts)))
    return share


def _entropy_term(p: jax.Array) -> jax.Array:
    return jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0)
