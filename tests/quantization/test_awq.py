"""AWQ: never worse than round-to-nearest in the output, and what it reports is what it does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.quantization.arithmetic import dequantize, scales_from_range
from moejax.quantization.awq import (
    _rounded,
    awq_round,
    best_scales,
    scale_errors,
    scale_gram,
    scales_at,
    search_clip,
    search_scales,
)
from moejax.quantization.clipping import ranges
from moejax.quantization.formats import parse_format
from moejax.quantization.output_error import output_error
from moejax.quantization.rtn import round_to_nearest
from tests.quantization.calibrated import FORMATS, Calibrated, calibrated, error_of

# Errors are sums of some thousand positive products in float32.
SUM_RTOL = 1e-4


def mean_abs(case: Calibrated) -> jax.Array:
    return jnp.abs(case.x).mean(-2)


def measured(case: Calibrated, scales: jax.Array, scaled: jax.Array) -> jax.Array:
    """‖x W - (x / s) Q‖² with the activations themselves, `[*lead]`; Q is `scaled`."""
    difference = case.x @ case.w - (case.x / scales[..., None, :]) @ scaled
    return jnp.sum(jnp.square(difference), axis=(-2, -1))


@pytest.mark.parametrize("name", FORMATS)
def test_never_worse_than_round_to_nearest(name: str) -> None:
    case, fmt = calibrated(), parse_format(name)
    nearest = error_of(round_to_nearest(case.w, fmt), case)
    found = search_scales([case.w], [case.gram], mean_abs(case), [fmt], grid=10)
    np.testing.assert_allclose(found.unscaled_error, nearest, rtol=SUM_RTOL)
    assert (found.error <= found.unscaled_error).all()
    s = found.scales
    rounded = awq_round(case.w * s[..., None], scale_gram(case.gram, s), fmt)
    assert (rounded.error <= rounded.unclipped_error).all()
    np.testing.assert_allclose(rounded.unclipped_error, found.error, rtol=1e-3)
    assert rounded.tensor.format == fmt
    # The reported error is that of the outputs.
    np.testing.assert_allclose(
        measured(case, s, dequantize(rounded.tensor)), rounded.error, rtol=2e-2 if fmt.bits == 8 else 1e-3
    )
    if fmt.bits == 4:  # powers of two as scales (mxfp4) leave the least to find
        assert (rounded.error < (0.95 if name == "mxfp4" else 0.8) * nearest).all()


def test_experts_that_read_one_input_share_its_scales() -> None:
    """Errors are summed over experts and weights: the exponent with the least sum, here by hand."""
    case, other, fmt = calibrated(), calibrated(seed=1), parse_format("int4_g16")
    a = mean_abs(case).mean(0)
    weights, grams, formats = [case.w, other.w], [case.gram, case.gram], [fmt, parse_format("int8")]
    found = search_scales(weights, grams, a, formats, grid=4)
    assert found.scales.shape == (64,) and found.error.shape == ()
    sums = []
    for exponent in np.linspace(0, 1, 5, dtype=np.float32):
        s = scales_at(a, jnp.asarray(exponent))[None, :, None]
        total = 0.0
        for w, each in zip([case.w, other.w], formats, strict=True):
            back = dequantize(round_to_nearest(w * s, each)) / s
            total += float(output_error(back - w, case.gram).sum())
        sums.append(total)
    assert float(found.exponent) == np.argmin(sums) / 4
    np.testing.assert_allclose(found.error, min(sums), rtol=SUM_RTOL)
    np.testing.assert_allclose(found.unscaled_error, sums[0], rtol=SUM_RTOL)


def test_an_experts_own_input_has_its_own_scales() -> None:
    case, fmt = calibrated(), parse_format("int4_g16")
    together = search_scales([case.w], [case.gram], mean_abs(case), [fmt])
    for e in range(3):
        alone = search_scales([case.w[e]], [case.gram[e]], mean_abs(case)[e], [fmt])
        assert float(alone.exponent) == float(together.exponent[e])
        np.testing.assert_array_equal(alone.scales, together.scales[e])


def test_errors_of_slices_add_up() -> None:
    case, fmt = calibrated((4,)), parse_format("int4_g16")
    a = mean_abs(case).mean(0)
    whole = search_scales([case.w], [case.gram], a, [fmt])
    parts = [scale_errors([case.w[s]], [case.gram[s]], a, [fmt]) for s in (slice(0, 1), slice(1, 4))]
    found = best_scales(a, parts[0] + parts[1])
    np.testing.assert_array_equal(found.scales, whole.scales)
    np.testing.assert_allclose(found.error, whole.error, rtol=SUM_RTOL)


def test_scales_are_normalised_and_leave_unseen_inputs() -> None:
    a = jnp.abs(calibrated().x[0, 0]) + 0.1
    np.testing.assert_allclose(scales_at(a, jnp.float32(0)), 1.0)
    s = scales_at(a, jnp.float32(0.5))
    np.testing.assert_allclose(s, np.sqrt(a) / np.sqrt(np.sqrt(a.max() * a.min())), rtol=1e-5)
    np.testing.assert_allclose(s.max() * s.min(), 1.0, rtol=1e-5)
    unseen = scales_at(a.at[3].set(0.0), jnp.float32(0.5))
    assert float(unseen[3]) == 1.0
    np.testing.assert_allclose(jnp.delete(unseen, 3) / jnp.delete(s, 3), unseen[0] / s[0], rtol=1e-5)
    # One input that is almost never seen does not decide the scales of the others.
    rare = scales_at(a.at[3].set(1e-30), jnp.float32(1.0))
    assert float(rare.max() / rare.min()) <= 1.001e4
    np.testing.assert_array_equal(scales_at(jnp.zeros(8), jnp.float32(1)), np.ones(8))
    tied = scales_at(jnp.repeat(a[:32], 2), jnp.float32(0.5))
    np.testing.assert_array_equal(tied[::2], tied[1::2])


def test_an_expert_without_tokens_is_left_alone() -> None:
    case, fmt = calibrated(), parse_format("int4_g16")
    gram, a = case.gram.at[1].set(0.0), mean_abs(case).at[1].set(0.0)
    found = search_scales([case.w], [gram], a, [fmt])
    assert float(found.exponent[1]) == 0.0 and float(found.error[1]) == 0.0
    np.testing.assert_array_equal(found.scales[1], np.ones(64))
    rounded = awq_round(case.w, gram, fmt)
    nearest = round_to_nearest(case.w, fmt)
    np.testing.assert_array_equal(rounded.tensor.values[1], nearest.values[1])


@pytest.mark.parametrize("name", FORMATS)
def test_the_clip_search_never_adds_error(name: str) -> None:
    case, fmt = calibrated(D=72 if "b24" in name else 64), parse_format(name)
    found = search_clip(case.w, case.gram, fmt)
    low, high = ranges(case.w, fmt)
    assert found.low.shape == low.shape
    assert (found.low >= low).all() and (found.high <= high).all() and (found.high >= 0.499 * high).all()
    np.testing.assert_allclose(
        found.unclipped_error, error_of(round_to_nearest(case.w, fmt), case), rtol=SUM_RTOL
    )
    assert (found.error <= found.unclipped_error).all()
    np.testing.assert_allclose(
        output_error(_rounded(case.w, found.low, found.high, fmt) - case.w, case.gram),
        found.error,
        rtol=SUM_RTOL,
    )
    if name.startswith("int4"):
        assert (found.error < found.unclipped_error).all()


@pytest.mark.parametrize("name", ["int4", "int4_tensor"])
def test_the_clip_search_finds_the_best_factor(name: str) -> None:
    """With one group an exhaustive search is easy."""
    case, fmt = calibrated(F=6), parse_format(name)
    found = search_clip(case.w, case.gram, fmt, steps=5, least=0.5)
    low, high = ranges(case.w, fmt)
    errors = []
    for factor in np.linspace(1, 0.5, 6, dtype=np.float32):
        error = _rounded(case.w, low * factor, high * factor, fmt) - case.w
        by_output = jnp.sum(error * (case.gram @ error), axis=1)
        errors.append(by_output if name == "int4" else by_output.sum(1, keepdims=True))
    best = jnp.stack(errors).min(0)
    np.testing.assert_allclose(found.error, best.sum(1), rtol=SUM_RTOL)


def test_blocks_at_the_edge() -> None:
    """Blocks of 24 in a weight of 64 × 40."""
    case, fmt = calibrated(), parse_format("float8_e4m3fn_b24")
    found = awq_round(case.w, case.gram, fmt)
    assert found.tensor.scales.shape == (3, 3, 2)
    np.testing.assert_allclose(error_of(found.tensor, case), found.error, rtol=1e-2)


def test_without_search_it_is_round_to_nearest() -> None:
    case = calibrated()
    for fmt in map(parse_format, ("int4_g16_asym", "nvfp4")):
        for clip in ("minmax", "mse"):
            found = awq_round(case.w, case.gram, fmt, search=False, clip=clip)
            want = round_to_nearest(case.w, fmt, clip=clip)
            jax.tree.map(np.testing.assert_array_equal, found.tensor, want)
            np.testing.assert_array_equal(found.error, found.unclipped_error)


def test_ranges_become_the_stored_scales() -> None:
    case, fmt = calibrated(), parse_format("int4_g16")
    clip = search_clip(case.w, case.gram, fmt)
    found = awq_round(case.w, case.gram, fmt)
    np.testing.assert_array_equal(found.tensor.scales, scales_from_range(clip.low, clip.high, fmt)[0])


def test_bad_input() -> None:
    case = calibrated()
    reordered = dataclasses.replace(parse_format("int4_g16"), indexed=True)
    for call in (
        lambda: awq_round(case.w, case.gram, reordered),
        lambda: search_scales([case.w], [case.gram], mean_abs(case), [reordered]),
        lambda: search_clip(case.w, case.gram, reordered),
    ):
        with pytest.raises(ConfigError, match="awq: int4_g16_indexed: inputs are not reordered"):
            call()
    with pytest.raises(ConfigError, match="groups of 48 do not divide its 64 inputs"):
        awq_round(case.w, case.gram, parse_format("int4_g48"))
    with pytest.raises(ConfigError, match="awq: int8_a8static needs an input_scale"):
        awq_round(case.w, case.gram, parse_format("w8a8_static"))
