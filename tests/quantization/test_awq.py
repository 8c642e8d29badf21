"""AWQ: never worse than round-to-nearest in the output, by the errors that it searches with."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.quantization.arithmetic import dequantize, scales_from_range
from moejax.quantization.awq import (
    LEAST_FACTOR,
    NUM_FACTORS,
    _rounded,
    awq_round,
    best_scales,
    scale_errors,
    scales_at,
    search_clip,
)
from moejax.quantization.clipping import ranges
from moejax.quantization.formats import QTensor, parse_format
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
    errors = scale_errors([case.w], [case.gram], mean_abs(case), (fmt,), grid=10)
    np.testing.assert_allclose(errors[0], nearest, rtol=SUM_RTOL)
    s = best_scales(mean_abs(case), errors)
    scaled, gram = case.w * s[..., None], case.gram / (s[..., :, None] * s[..., None, :])

    def error(tensor: QTensor) -> jax.Array:
        return output_error(dequantize(tensor) - scaled, gram)

    unclipped = error(awq_round(scaled, gram, fmt, search=False))
    np.testing.assert_allclose(unclipped, errors.min(0), rtol=1e-3)
    rounded = awq_round(scaled, gram, fmt)
    clipped = error(rounded)
    assert (clipped <= (1 + SUM_RTOL) * unclipped).all()
    assert rounded.format == fmt
    # The error that is searched with is that of the outputs.
    np.testing.assert_allclose(
        measured(case, s, dequantize(rounded)), clipped, rtol=2e-2 if fmt.bits == 8 else 1e-3
    )
    if fmt.bits == 4:  # powers of two as scales (mxfp4) leave the least to find
        assert (clipped < (0.95 if name == "mxfp4" else 0.8) * nearest).all()


def test_experts_that_read_one_input_share_its_scales() -> None:
    """Errors are summed over experts and weights: the exponent with the least sum, here by hand."""
    case, other, fmt = calibrated(), calibrated(seed=1), parse_format("int4_g16")
    a = mean_abs(case).mean(0)
    weights, grams, formats = [case.w, other.w], [case.gram, case.gram], [fmt, parse_format("int8")]
    errors = scale_errors(weights, grams, a, tuple(formats), grid=4)
    assert errors.shape == (5,)
    sums = []
    for exponent in np.linspace(0, 1, 5, dtype=np.float32):
        s = scales_at(a, jnp.asarray(exponent))[None, :, None]
        total = 0.0
        for w, each in zip([case.w, other.w], formats, strict=True):
            back = dequantize(round_to_nearest(w * s, each)) / s
            total += float(output_error(back - w, case.gram).sum())
        sums.append(total)
    np.testing.assert_allclose(errors, sums, rtol=SUM_RTOL)
    assert np.argmin(errors) == np.argmin(sums)
    np.testing.assert_array_equal(best_scales(a, errors), scales_at(a, jnp.float32(np.argmin(sums) / 4)))


def test_an_experts_own_input_has_its_own_scales() -> None:
    case, fmt = calibrated(), parse_format("int4_g16")
    a = mean_abs(case)
    together = scale_errors([case.w], [case.gram], a, (fmt,))
    for e in range(3):
        alone = scale_errors([case.w[e]], [case.gram[e]], a[e], (fmt,))
        assert np.argmin(alone) == np.argmin(together[:, e])
        np.testing.assert_array_equal(best_scales(a[e], alone), best_scales(a, together)[e])


def test_errors_of_slices_add_up() -> None:
    case, fmt = calibrated((4,)), parse_format("int4_g16")
    a = mean_abs(case).mean(0)
    whole = scale_errors([case.w], [case.gram], a, (fmt,))
    parts = [scale_errors([case.w[s]], [case.gram[s]], a, (fmt,)) for s in (slice(0, 1), slice(1, 4))]
    np.testing.assert_allclose(parts[0] + parts[1], whole, rtol=SUM_RTOL)
    np.testing.assert_array_equal(best_scales(a, parts[0] + parts[1]), best_scales(a, whole))


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
    errors = scale_errors([case.w], [gram], a, (fmt,))
    assert (errors[:, 1] == 0.0).all()
    np.testing.assert_array_equal(best_scales(a, errors)[1], np.ones(64))
    rounded = awq_round(case.w, gram, fmt)
    nearest = round_to_nearest(case.w, fmt)
    np.testing.assert_array_equal(rounded.values[1], nearest.values[1])


@pytest.mark.parametrize("name", FORMATS)
def test_the_clip_search_never_adds_error(name: str) -> None:
    case, fmt = calibrated(D=72 if "b24" in name else 64), parse_format(name)
    low, high = search_clip(case.w, case.gram, fmt)
    whole_low, whole_high = ranges(case.w, fmt)
    assert low.shape == whole_low.shape
    assert (low >= whole_low).all() and (high <= whole_high).all() and (high >= 0.499 * whole_high).all()
    unclipped = error_of(round_to_nearest(case.w, fmt), case)
    clipped = output_error(_rounded(case.w, low, high, fmt) - case.w, case.gram)
    assert (clipped <= (1 + SUM_RTOL) * unclipped).all()
    if name.startswith("int4"):
        assert (clipped < unclipped).all()


@pytest.mark.parametrize("name", ["int4", "int4_tensor"])
def test_the_clip_search_finds_the_best_factor(name: str) -> None:
    """With one group an exhaustive search is easy."""
    case, fmt = calibrated(F=6), parse_format(name)
    found = search_clip(case.w, case.gram, fmt)
    low, high = ranges(case.w, fmt)
    errors = []
    for factor in np.linspace(1, LEAST_FACTOR, NUM_FACTORS, dtype=np.float32):
        error = _rounded(case.w, low * factor, high * factor, fmt) - case.w
        by_output = jnp.sum(error * (case.gram @ error), axis=1)
        errors.append(by_output if name == "int4" else by_output.sum(1, keepdims=True))
    best = jnp.stack(errors).min(0)
    error = output_error(_rounded(case.w, *found, fmt) - case.w, case.gram)
    np.testing.assert_allclose(error, best.sum(1), rtol=SUM_RTOL)


def test_blocks_at_the_edge() -> None:
    """Blocks of 24 in a weight of 64 × 40."""
    case, fmt = calibrated(), parse_format("float8_e4m3fn_b24")
    rounded = awq_round(case.w, case.gram, fmt)
    assert rounded.scales.shape == (3, 3, 2)
    searched = _rounded(case.w, *search_clip(case.w, case.gram, fmt), fmt)
    np.testing.assert_allclose(error_of(rounded, case), output_error(searched - case.w, case.gram), rtol=1e-2)


def test_without_search_it_is_round_to_nearest() -> None:
    case = calibrated()
    for fmt in map(parse_format, ("int4_g16_asym", "nvfp4")):
        for clip in ("minmax", "mse"):
            rounded = awq_round(case.w, case.gram, fmt, search=False, clip=clip)
            want = round_to_nearest(case.w, fmt, clip=clip)
            jax.tree.map(np.testing.assert_array_equal, rounded, want)


def test_ranges_become_the_stored_scales() -> None:
    case, fmt = calibrated(), parse_format("int4_g16")
    low, high = search_clip(case.w, case.gram, fmt)
    rounded = awq_round(case.w, case.gram, fmt)
    np.testing.assert_array_equal(rounded.scales, scales_from_range(low, high, fmt)[0])


def test_bad_input() -> None:
    case = calibrated()
    reordered = dataclasses.replace(parse_format("int4_g16"), indexed=True)
    for call in (
        lambda: awq_round(case.w, case.gram, reordered),
        lambda: scale_errors([case.w], [case.gram], mean_abs(case), (reordered,)),
        lambda: search_clip(case.w, case.gram, reordered),
    ):
        with pytest.raises(ConfigError, match="awq: int4_g16_indexed: inputs are not reordered"):
            call()
    with pytest.raises(ConfigError, match="groups of 48 do not divide its 64 inputs"):
        awq_round(case.w, case.gram, parse_format("int4_g48"))
    with pytest.raises(ConfigError, match="awq: int8_a8static needs an input_scale"):
        awq_round(case.w, case.gram, parse_format("w8a8_static"))
