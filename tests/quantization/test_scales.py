"""Scales and zero points of ranges: their dtypes, their limits, zeros, powers of two, two levels."""

import math

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.quantization import arithmetic as ar
from moejax.quantization.formats import WeightFormat, parse_format
from tests.quantization.test_arithmetic import NAMES, bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("numbers", ["int4", "int8", "float8_e4m3fn"])
def test_scales_are_the_range_over_the_largest_code_in_their_dtype(dtype, numbers):
    fmt = WeightFormat(numbers, "group", 64, scale_dtype=dtype)
    high = jnp.asarray([[0.3, 5.0, 0.0]], jnp.float32)
    low = jnp.asarray([[-0.7, -1.0, 0.0]], jnp.float32)
    scales, zeros, tensor_scale = ar.scales_from_range(low, high, fmt)
    assert zeros is None and tensor_scale is None and scales.dtype == dtype
    want = np.float32([0.7, 5.0, ar.MOST[numbers]]) / np.float32(ar.MOST[numbers])
    np.testing.assert_array_equal(np.asarray(scales)[0], want.astype(scales.dtype))
    step, _ = ar.step_and_zero(scales, None, None, fmt)
    np.testing.assert_array_equal(np.asarray(step), np.asarray(scales).astype(np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scales_stay_normal_numbers_of_their_dtype(dtype):
    """Weights beyond 65504 · 7, or below the least normal number: large ones saturate, none becomes NaN."""
    fmt = WeightFormat("int4", "group", 64, scale_dtype=dtype)
    info = jnp.finfo(dtype)
    high = jnp.asarray([[1e-44, 1e-36, 1e-9, 1e9, 3e38]], jnp.float32)
    scales, _, _ = ar.scales_from_range(-high, high, fmt)
    step, zero = ar.step_and_zero(scales, None, None, fmt)
    assert (np.asarray(step) >= float(info.tiny)).all() and (np.asarray(step) <= float(info.max)).all()
    codes = ar.round_to_codes(high, step, zero, fmt)
    values = np.asarray(ar.codes_to_values(codes, step, zero, fmt))
    assert np.isfinite(values).all()
    if dtype == "float16":
        assert np.asarray(codes)[0].tolist() == [8, 8, 8, 15, 15]
    else:
        np.testing.assert_allclose(values[0, 1:], np.asarray(high)[0, 1:], rtol=2 * float(info.eps))


@pytest.mark.parametrize(
    "name", [*NAMES, "int4_g64_asym_sf16", "float8_e4m3fn_g32_se8m0", "int8_g32_asym_se8m0"]
)
def test_groups_of_zeros_take_scale_one(name):
    fmt = parse_format(name)
    for low, high in ((0.0, 0.0), (-0.0, 0.0)):
        grid = jnp.asarray([[low, -1.0]], jnp.float32), jnp.asarray([[high, 1.0]], jnp.float32)
        scales, zeros, tensor_scale = ar.scales_from_range(*grid, fmt)
        one = np.asarray(scales)[0, 0]
        assert one == (127 if fmt.scale_dtype == "e8m0" else 1)
        step, zero = ar.step_and_zero(scales, zeros, tensor_scale, fmt)
        codes = ar.round_to_codes(jnp.zeros((1, 2), jnp.float32), step, zero, fmt)
        assert (np.asarray(ar.codes_to_values(codes, step, zero, fmt)) == 0).all()


def test_a_tensor_of_zeros_in_nvfp4():
    fmt = parse_format("nvfp4")
    zeros = jnp.zeros((2, 3), jnp.float32)
    scales, _, tensor_scale = ar.scales_from_range(zeros, zeros, fmt)
    assert (np.asarray(scales).astype(np.float32) == 1).all() and float(tensor_scale[0, 0]) == 1


@pytest.mark.parametrize(("numbers", "largest"), [("float4_e2m1fn", 2), ("float8_e4m3fn", 8), ("int8", 6)])
def test_e8m0_exponents(numbers, largest):
    """floor(log2 of the largest magnitude) less that of the largest code, around every power of two."""
    fmt = WeightFormat(numbers, "group", 32, scale_dtype="e8m0")
    powers = np.ldexp(np.float32(1), np.arange(-115, 127)).astype(np.float32)
    high = np.concatenate([powers, np.nextafter(powers, np.float32(0)), np.float32(1.75) * powers])[None]
    scales, _, _ = ar.scales_from_range(jnp.asarray(-high), jnp.asarray(high), fmt)
    assert scales.dtype == jnp.uint8
    want = np.array([math.floor(math.log2(float(h))) - largest + 127 for h in high[0]])
    np.testing.assert_array_equal(np.asarray(scales)[0], np.clip(want, 1, 254))


def test_e8m0_bytes_are_powers_of_two():
    fmt = parse_format("mxfp4")
    step, _ = ar.step_and_zero(jnp.arange(256, dtype=jnp.uint8)[None], None, None, fmt)
    want = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    # Compared by bits: 2^-127 is subnormal, and a comparison may flush it.
    finite = ~np.isnan(want)
    np.testing.assert_array_equal(bits(step)[0][finite], bits(want)[finite])
    assert np.isnan(np.asarray(step)[0, 255])


def test_nvfp4_scales_count_in_units_of_the_tensors():
    """tensor scale = largest / (448 · 6), block scale = largest of the block / 6 / tensor scale, in e4m3."""
    largest = np.abs(np.random.default_rng(0).standard_normal((4, 5))).astype(np.float32)
    largest[0, 0] = 1e-7
    scales, _, tensor_scale = ar.scales_from_range(
        jnp.asarray(-largest), jnp.asarray(largest), parse_format("nvfp4")
    )
    np.testing.assert_allclose(tensor_scale, largest.max(keepdims=True) / (448 * 6), rtol=2**-22)
    want = (largest / 6 / np.asarray(tensor_scale)).clip(2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(bits(scales), bits(want))
    assert float(scales.max()) == 448 and float(scales[0, 0]) == 2.0**-9


@hypothesis.given(st.floats(-100, 100, width=32), st.floats(-100, 100, width=32), st.sampled_from(NAMES))
@hypothesis.settings(max_examples=25)
def test_zero_is_a_code_of_every_range(a, b, name):
    """Also where the range does not contain it."""
    fmt = parse_format(name)
    low, high = (jnp.full((1, 1), x, jnp.float32) for x in sorted((a, b)))
    scales, zeros, tensor_scale = ar.scales_from_range(low, high, fmt)
    step, zero = ar.step_and_zero(scales, zeros, tensor_scale, fmt)
    code = ar.round_to_codes(jnp.zeros((1, 1), jnp.float32), step, zero, fmt)
    assert float(ar.codes_to_values(code, step, zero, fmt)[0, 0]) == 0
