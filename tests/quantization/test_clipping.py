"""Ranges: what each method promises, against loops in numpy."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.quantization import arithmetic as ar
from moejax.quantization import clipping, entropy
from moejax.quantization.clipping import ranges
from moejax.quantization.formats import WeightFormat, parse_format
from moejax.quantization.rtn import round_to_nearest
from tests.examples import slow_but
from tests.quantization.test_arithmetic import NAMES

dequantize = jax.jit(ar.dequantize, static_argnums=1)
METHODS = ("minmax", "percentile", "mse", "entropy")


def heavy(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    """Student's t with four degrees of freedom: about what outliers in weights look like."""
    return jnp.asarray(np.random.default_rng(seed).standard_t(4, shape), jnp.float32)


def ranges_by_loop(w: np.ndarray, fmt: WeightFormat) -> dict[tuple[int, int], np.ndarray]:
    """The weights `[D, F]` of each scale."""
    D, F = w.shape
    G, columns = fmt.scale_shape(D, F)
    tall = {"tensor": D, "channel": D}.get(fmt.granularity, fmt.group)
    wide = {"tensor": F, "block": fmt.group}.get(fmt.granularity, 1)
    return {
        (g, o): w[g * tall : (g + 1) * tall, o * wide : (o + 1) * wide].ravel()
        for g in range(G)
        for o in range(columns)
    }


GRANULARITIES = ["int8_tensor", "int8", "int4_g32_asym", "int8_b48"]


@pytest.mark.parametrize("name", GRANULARITIES)
def test_minmax_and_percentile_are_those_of_each_range(name):
    """Blocks at the edges are not full; ranges always contain 0."""
    fmt, w = parse_format(name), heavy((2, 64, 50)).at[0, :32, 3].set(0.5)
    low, high = (np.asarray(x) for x in ranges(w, fmt))
    cut_low, cut_high = (np.asarray(x) for x in ranges(w, fmt, "percentile", 95.0))
    for e in range(2):
        for place, part in ranges_by_loop(np.asarray(w)[e], fmt).items():
            assert low[e][place] == min(part.min(), 0) and high[e][place] == max(part.max(), 0)
            limit = np.percentile(np.abs(part).astype(np.float64), 95)
            # One interpolation in float32.
            want = max(min(part.min(), 0), -limit), min(max(part.max(), 0), limit)
            np.testing.assert_allclose((cut_low[e][place], cut_high[e][place]), want, rtol=1e-6)


@hypothesis.given(st.floats(50, 100), st.floats(50, 100), st.integers(0, 100))
@hypothesis.settings(max_examples=5)
def test_ranges_widen_with_the_percentile(a, b, seed):
    fmt, w = parse_format("int4_g32"), heavy((64, 6), seed)
    (small, large), (least, most) = (ranges(w, fmt, "percentile", p) for p in sorted((a, b)))
    assert (np.asarray(least) <= np.asarray(small)).all() and (np.asarray(large) <= np.asarray(most)).all()


def test_the_hundredth_percentile_is_minmax():
    w = heavy((64, 6))
    for name in GRANULARITIES:
        for a, b in zip(
            ranges(w, parse_format(name)), ranges(w, parse_format(name), "percentile", 100.0), strict=True
        ):
            np.testing.assert_array_equal(a, b)


def test_a_percentile_of_zero_does_not_wipe_out_what_is_not():
    """One weight of a group is not zero; a scale for a range of zeros would make it one."""
    w = jnp.zeros((32, 2), jnp.float32).at[4, 1].set(0.25)
    for clip in METHODS:
        for name in ("int4_g32", "int8_tensor"):
            q = round_to_nearest(w, parse_format(name), clip=clip, percentile=90.0)
            # The scale's rounding, to bfloat16 for groups.
            np.testing.assert_allclose(dequantize(q, jnp.float32), w, rtol=2.0**-8)


@pytest.mark.parametrize("name", NAMES)
def test_mse_is_never_worse_than_minmax(name):
    """For each range by itself; what one scale of nvfp4's tensor couples included."""
    fmt, w = parse_format(name), heavy((2, 128, 70))

    def errors(clip: str) -> np.ndarray:
        off = dequantize(round_to_nearest(w, fmt, clip=clip), jnp.float32) - w
        return np.asarray(jnp.square(clipping.members(off, fmt)).sum(-1))

    minmax, mse = errors("minmax"), errors("mse")
    # Two sums of n squares in float32, in different orders.
    n = w.shape[-1] * w.shape[-2] / np.prod(fmt.scale_shape(*w.shape[-2:]))
    assert (mse <= minmax * (1 + n * 2.0**-23)).all()
    if fmt.bits == 4:
        assert mse.sum() < 0.97 * minmax.sum()


def test_mse_finds_the_least_error_of_its_grid():
    fmt, w = parse_format("int4"), heavy((128, 3))
    low, high = ranges(w, fmt, "mse")
    largest, x = np.abs(np.asarray(w)).max(0), np.asarray(w, np.float64)
    for o in range(3):
        found = []
        for factor in clipping.SHRINK:
            step = np.float64(largest[o] * factor / 7)
            found.append(np.square(np.clip(np.round(x[:, o] / step), -7, 7) * step - x[:, o]).sum())
        best = clipping.SHRINK[int(np.argmin(found))]
        got = max(-float(low[0, o]), float(high[0, o])) / largest[o]
        assert got == pytest.approx(best, rel=1e-6)


def test_mse_of_powers_of_two_may_widen():
    """Nothing but 7s in mxfp4: the rule of OCP MX saturates them at 6; twice the scale has 8."""
    w = jnp.full((32, 1), 7.0, jnp.float32)
    w = w.at[:16].set(0.5)
    assert float(dequantize(round_to_nearest(w, parse_format("mxfp4")), jnp.float32)[31, 0]) == 6
    w = jnp.full((32, 1), 7.9, jnp.float32)
    assert float(dequantize(round_to_nearest(w, parse_format("mxfp4"), clip="mse"), jnp.float32)[31, 0]) == 8


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "clip"),
    slow_but(
        [("int4_g32_asym", "percentile"), ("int4_g32_asym", "entropy")],
        [(name, clip) for name in ("int4_g32_asym", "fp8_block128", "nvfp4") for clip in METHODS],
    ),
)
def test_chunks_do_not_change_a_range(name, clip):
    """Matrices one by one, and outputs apart where nothing joins them; the last chunk may be smaller."""
    fmt, w = parse_format(name), heavy((3, 64, 96))
    whole = ranges(w, fmt, clip)
    # Root mean squares may be summed in another order.
    n = 64 * 96 / np.prod(fmt.scale_shape(64, 96)) if clip == "entropy" else 0
    for chunk in (1000, 64 * 96 * 2):
        for a, b in zip(whole, ranges(w, fmt, clip, chunk=chunk), strict=True):
            np.testing.assert_allclose(a, b, rtol=n * 2.0**-24, atol=0)


@pytest.mark.parametrize("clip", METHODS)
def test_ranges_lie_within_those_of_the_weights(clip):
    for name in ("int8", "int4_g32_asym", "fp8_block128"):
        fmt, w = parse_format(name), heavy((2, 64, 30))
        (low, high), (least, most) = ranges(w, fmt, clip), ranges(w, fmt)
        assert low.shape == (2, *fmt.scale_shape(64, 30)) and low.dtype == jnp.float32
        assert (np.asarray(least) <= np.asarray(low)).all() and (np.asarray(high) <= np.asarray(most)).all()
        assert (np.asarray(low) <= 0).all() and (np.asarray(high) >= 0).all()


# --- Entropy ------------------------------------------------------------------------------------------------


def divergence_by_loop(w: np.ndarray, most: int, bins: int, i: int) -> float:
    """Of the histogram cut at bin i from itself rounded, in float64, less what chance gives."""
    counts, _ = np.histogram(np.abs(w) / np.abs(w).max(), bins, (0, 1))
    p = counts[:i].astype(np.float64)
    p[-1] += counts[i:].sum()
    code = np.round((np.arange(i) + 0.5) * most / i)
    q, chance = np.zeros(i), 0.0
    for c in range(most + 1):
        cell = (code == c) & (p > 0)
        if cell.any():
            q[cell] = max(counts[:i][code == c].sum(), 0.5) / cell.sum()
            chance += (cell.sum() - 1) / (2 * w.size)
    p, q, some = p / p.sum(), q / counts[:i].sum(), p > 0
    return float((p[some] * np.log(p[some] / q[some])).sum()) - chance


def test_entropy_finds_the_least_divergence():
    """The threshold it takes is within float32's rounding of the best that the definition gives."""
    fmt, w = parse_format("int4_tensor"), heavy((128, 64))
    low, high = ranges(w, fmt, "entropy")
    x, bins = np.asarray(w).ravel(), 1024
    largest = np.abs(x).max()
    taken = round(float(max(-low[0, 0], high[0, 0]) / largest * bins))
    least = min(
        divergence_by_loop(x, 7, bins, int(i))
        for i in np.unique(np.linspace(32, bins, entropy.CANDIDATES).round())
    )
    # Sums of bins terms of size log(bins) / bins at most, in float32.
    assert divergence_by_loop(x, 7, bins, taken) <= least + bins * 2.0**-24 * np.log(bins)
    assert 0.1 < taken / bins < 0.6


def test_entropy_cuts_tails_and_nothing_else():
    fmt = parse_format("int4_tensor")
    even = jnp.asarray(np.random.default_rng(0).uniform(-1, 1, (128, 64)), jnp.float32)
    low, high = ranges(even, fmt, "entropy")
    assert max(-float(low[0, 0]), float(high[0, 0])) > 0.97
    outlier = even.at[0, 0].set(40.0)
    low, high = ranges(outlier, fmt, "entropy")
    assert 0.9 < float(high[0, 0]) < 4
    minmax, cut = (round_to_nearest(outlier, fmt, clip=clip) for clip in ("minmax", "entropy"))
    inside = (slice(1, None), slice(None))
    errors = [float(jnp.square(dequantize(q, jnp.float32) - outlier)[inside].mean()) for q in (minmax, cut)]
    assert errors[1] < errors[0] / 20


@pytest.mark.parametrize("name", ["int4_g32_asym", "fp8_block128", "fp8_e5m2", "nvfp4"])
def test_entropy_of_every_format(name):
    """Few weights a range: their histograms are taken together, and the cut is one of standard deviations."""
    fmt, w = parse_format(name), heavy((2, 256, 128)) * jnp.asarray([[[1.0]], [[50.0]]])
    low, high = ranges(w, fmt, "entropy")
    assert np.isfinite(low).all() and np.isfinite(high).all()
    mean_square = np.square(
        np.asarray(dequantize(round_to_nearest(w, fmt, clip="entropy"), jnp.float32) - w)
    ).mean((1, 2))
    minmax = np.square(np.asarray(dequantize(round_to_nearest(w, fmt), jnp.float32) - w)).mean((1, 2))
    assert (mean_square < 2 * minmax).all()


def test_too_few_weights_for_a_histogram_are_not_cut():
    w = heavy((16, 8))
    for name in ("int4", "int8_tensor", "int4_g16_asym", "fp8"):
        for a, b in zip(ranges(w, parse_format(name), "entropy"), ranges(w, parse_format(name)), strict=True):
            np.testing.assert_array_equal(a, b)
