"""Round to nearest: error bounds, and the same codes and scales as the GPU kernels' and qwix's quantizers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.quantization import arithmetic as ar
from moejax.quantization.formats import QTensor, parse_format
from moejax.quantization.kernel_formats import to_kernel
from moejax.quantization.rtn import round_to_nearest
from tests.plain.kernel_quantizer import quantize
from tests.quantization.test_arithmetic import NAMES, bits, normal

dequantize = jax.jit(ar.dequantize, static_argnums=1)


def codes_of(q: QTensor) -> np.ndarray:
    """Unpacked, `[..., D, F]`."""
    codes = ar.unpack(q.values, q.pack) if q.format.packed else q.values
    return np.asarray(codes).swapaxes(-1, -2)


def steps_of(q: QTensor) -> np.ndarray:
    """One for each weight, `[..., D, F]`."""
    step, _ = ar.step_and_zero(q.scales, q.zeros, q.tensor_scale, q.format)
    return np.asarray(ar.spread(step, q.format, *q.shape[-2:])).swapaxes(-1, -2)


# --- Errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, "int4_g32_sf16", "float8_e4m3fn_g32_se8m0", "int8_g32_asym_se8m0"])
def test_weights_move_by_half_a_step_at_most(name):
    """Half the distance of two codes; and what a scale, rounded down to its dtype, leaves beyond the last."""
    fmt, w = parse_format(name), normal((2, 128, 70)) * 0.02 + 0.003
    q = round_to_nearest(w, fmt)
    assert q.shape == w.shape and q.nbytes * 8 == fmt.bits_held(w.shape)
    for attribute, part in fmt.parts(w.shape).items():
        held = getattr(q, attribute)
        assert (held.shape, held.dtype) == (part.shape, part.dtype), attribute
    step, w = steps_of(q), np.asarray(w)
    error = np.abs(np.asarray(dequantize(q, jnp.float32)) - w)
    ulps = 8 * np.finfo(np.float32).eps * np.abs(w)
    if ar.is_integer(fmt):
        rounded_down = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "e8m0": 0}
        least, most = ar.code_range(fmt)
        inside = 0.5 + (most - least) * rounded_down[fmt.scale_dtype]
        if fmt.scale_dtype == "e8m0":  # 128/127 of the 255 steps that there are codes for
            inside += 255 / 127
        bound = inside * step
    else:
        mantissa = {"float8_e4m3fn": 3, "float8_e5m2": 2, "float4_e2m1fn": 1}[fmt.numbers]
        least = {"float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16, "float4_e2m1fn": 0.5}[fmt.numbers]
        bound = np.maximum(np.abs(w) * 2.0 ** -(mantissa + 1), step * least / 2)
        if fmt.scale_dtype == "e8m0":
            bound = np.maximum(bound, np.abs(w) - ar.MOST[fmt.numbers] * step)
    assert (error <= bound + ulps).all(), (error / bound).max()


def test_mxfp4_saturates_above_six():
    """OCP MX takes the exponent of the largest magnitude: 7 has 4's, whose codes end at 6; 8 has the next."""
    w = jnp.asarray(np.array([[7.0, 8.0, 6.0]] + [[1.0] * 3] * 31, np.float32))
    q = round_to_nearest(w, parse_format("mxfp4"))
    np.testing.assert_array_equal(q.scales, [[127, 128, 127]])
    np.testing.assert_array_equal(dequantize(q, jnp.float32)[0], [6, 8, 6])


def test_weights_that_are_codes_stay():
    w = jnp.asarray(np.random.default_rng(0).integers(-7, 8, (128, 20)) * 0.25, jnp.float32)
    w = w.at[0].set(1.75).at[64].set(-1.75)
    q = round_to_nearest(w, parse_format("int4_g64"))
    np.testing.assert_array_equal(dequantize(q, jnp.float32), w)
    for name in ("int4_g64", "int8", "fp8_block128"):
        q = round_to_nearest(w, parse_format(name))
        again = round_to_nearest(dequantize(q, jnp.float32), q.format)
        np.testing.assert_array_equal(bits(again.values), bits(q.values))


@pytest.mark.parametrize("name", ["int8_tensor", "int4_g64_asym", "fp8_block128", "mxfp4", "nvfp4"])
def test_leading_axes_are_matrices_one_by_one(name):
    fmt, w = parse_format(name), normal((2, 2, 128, 20))
    whole = round_to_nearest(w, fmt)
    for e in range(2):
        one = round_to_nearest(w[e, 1], fmt)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b)[e, 1])


@pytest.mark.parametrize("name", ["int4_g64_asym", "fp8_block128", "nvfp4"])
def test_compiled_and_eager_agree_bit_for_bit(name):
    fmt, w = parse_format(name), normal((2, 64, 40))
    rounded = round_to_nearest(w, fmt)
    with jax.disable_jit():
        eager = round_to_nearest(w, fmt)
    inside = jax.jit(functools.partial(round_to_nearest, fmt=fmt))(w)
    for a, b, c in zip(*(jax.tree.leaves(q) for q in (rounded, eager, inside)), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))
        np.testing.assert_array_equal(bits(a), bits(c))


def test_weights_of_16_bits_are_rounded_in_32():
    w = normal((64, 8)).astype(jnp.bfloat16)
    for name in ("int8", "int4_g32_asym", "nvfp4"):
        a, b = (round_to_nearest(x, parse_format(name)) for x in (w, w.astype(jnp.float32)))
        np.testing.assert_array_equal(a.values, b.values)


def test_an_indexed_format_has_the_groups_of_inputs_in_order():
    fmt, w = parse_format("int4_g32_asym"), normal((2, 96, 8))
    plain = round_to_nearest(w, fmt)
    indexed = round_to_nearest(w, dataclasses.replace(fmt, indexed=True))
    np.testing.assert_array_equal(indexed.group_index, np.broadcast_to(np.arange(96) // 32, (2, 96)))
    np.testing.assert_array_equal(dequantize(indexed, jnp.float32), dequantize(plain, jnp.float32))


def test_static_activations_start_with_scale_one():
    q = round_to_nearest(normal((3, 16, 8)), parse_format("w8a8_static"))
    np.testing.assert_array_equal(q.input_scale, np.ones((3, 1), np.float32))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="groups of 64 do not divide its 96 inputs; use 32 or 16"):
        round_to_nearest(normal((96, 8)), parse_format("int4_g64"))
    with pytest.raises(ConfigError, match="even number of inputs"):
        round_to_nearest(normal((15, 8)), parse_format("int4"))


# --- The kernels' quantizer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["int8", "int8_g32", "w8a8", "int4_g32", "int4_g64_asym", "int4_g128_sf16", "fp8", "fp8_block128"]
)
def test_minmax_is_the_kernels_quantizer(name):
    """Codes, scales and zero points, bit for bit."""
    w = normal((2, 128, 70)).at[0, :, 3].set(0)
    q = to_kernel(round_to_nearest(w, parse_format(name)))
    want = quantize(w, q.format, q.scales.dtype)
    for a, b in zip(jax.tree.leaves(q), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b))


# --- qwix ---------------------------------------------------------------------------------------------------


def by_qwix(w: jax.Array, qtype, group: int = 0, calibration: str = "absmax"):
    import qwix

    return qwix.quantize(
        w,
        qtype,
        channelwise_axes=(1,),
        tiled_axes={0: group} if group else {},
        calibration_method=calibration,
    )


def same_codes(q: QTensor, want: np.ndarray, w: jax.Array) -> None:
    """Equal but where the two ways of computing a scale, an ulp apart, fall on both sides of a tie."""
    ours, want = codes_of(q).astype(np.float32), want.astype(np.float32)
    scaled = np.asarray(w) / steps_of(q)
    near = np.abs(np.abs(scaled - np.trunc(scaled)) - 0.5) < 1e-4
    np.testing.assert_array_equal(ours[~near], want[~near])
    assert np.abs(ours - want).max() <= 1 and near.mean() < 0.01


@pytest.mark.parametrize(
    ("name", "qtype", "group"),
    [("int8", jnp.int8, 0), ("int8_g32_sf32", jnp.int8, 32), ("int4", jnp.int4, 0)],
)
def test_symmetric_integers_are_qwix_with_a_range_of_whole_steps(name, qtype, group):
    """qwix divides a range into 2·127.5 steps where the kernels have 2·127; widened by that, it is equal."""
    w, offset = normal((128, 40)), 8 if name == "int4" else 0
    q = round_to_nearest(w, parse_format(name))
    most = ar.MOST[q.format.numbers]
    theirs = by_qwix(w, qtype, group, f"absmax,{(most + 0.5) / most}")
    np.testing.assert_allclose(q.scales, theirs.scale, rtol=4 * np.finfo(np.float32).eps)
    same_codes(q, np.asarray(theirs.qvalue).astype(np.int32) + offset, w)


@pytest.mark.parametrize(
    ("name", "qtype", "group"),
    [("int8_asym", jnp.int8, 0), ("int8_g32_asym_sf32", jnp.int8, 32), ("int4_g32_asym_sf32", jnp.int4, 32)],
)
def test_asymmetric_integers_are_qwix(name, qtype, group):
    """Its 4-bit codes are -8..7 where ours are 0..15."""
    w, offset = normal((128, 40)) + 0.5, 8 if name.startswith("int4") else 0
    q, theirs = round_to_nearest(w, parse_format(name)), by_qwix(w, qtype, group, "minmax")
    np.testing.assert_array_equal(q.scales, theirs.scale)
    np.testing.assert_array_equal(
        np.asarray(q.zeros).astype(np.int32) - offset, theirs.zero_point.astype(jnp.int32)
    )
    same_codes(q, np.asarray(theirs.qvalue).astype(np.int32) + offset, w)


@pytest.mark.parametrize(("name", "group"), [("fp8", 0), ("fp8_e5m2", 0), ("float8_e4m3fn_g32_sf32", 32)])
def test_float8_is_qwix(name, group):
    w = normal((128, 40)).at[:, 3].set(0)
    q = round_to_nearest(w, parse_format(name))
    theirs = by_qwix(w, jnp.dtype(q.format.numbers), group)
    np.testing.assert_array_equal(q.scales, theirs.scale)
    np.testing.assert_array_equal(bits(codes_of(q)), bits(theirs.qvalue))


def float4_values(q: QTensor) -> np.ndarray:
    return np.asarray(ar.decode_e2m1(jnp.asarray(codes_of(q))))


@pytest.mark.optimized
def test_mxfp4_is_qwix_where_neither_saturates():
    """qwix takes the least power of two that avoids saturation. The rule of OCP MX takes half of that where
    the largest magnitude is more than 6/4 of a power of two, and saturates."""
    w = normal((128, 40))
    q, theirs = round_to_nearest(w, parse_format("mxfp4")), by_qwix(w, "mxfp4", 32)
    ours = np.ldexp(np.float32(1), np.asarray(q.scales).astype(np.int32) - 127)
    groups = np.abs(np.asarray(w)).reshape(4, 32, 40).max(1)
    saturates = np.frexp(groups)[0] * 2 > 1.5
    assert 0 < saturates.mean() < 1
    np.testing.assert_array_equal(np.asarray(theirs.scale), np.where(saturates, 2 * ours, ours))
    same = ~np.repeat(saturates, 32, 0)
    np.testing.assert_array_equal(float4_values(q)[same], np.asarray(theirs.qvalue.astype(jnp.float32))[same])


@pytest.mark.optimized
def test_nvfp4_is_qwix_where_the_tensors_scale_is_one():
    """qwix has no scale of the tensor."""
    w = normal((128, 40)) * 100
    w = w.at[0, 0].set(448.0 * 6)
    q, theirs = round_to_nearest(w, parse_format("nvfp4")), by_qwix(w, "nvfp4", 16)
    assert float(q.tensor_scale[0, 0]) == 1
    np.testing.assert_array_equal(q.scales.astype(jnp.float32), theirs.scale)
    np.testing.assert_array_equal(float4_values(q), theirs.qvalue.astype(jnp.float32))
