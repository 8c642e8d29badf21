"""Codes, scales, packing and whole weights: exact properties, and twins of numpy and of the GPU kernels."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from moejax.quantization import arithmetic as ar
from moejax.quantization import kernel_formats
from moejax.quantization.formats import QTensor, WeightFormat, parse_format
from pallas_kernels import qformats
from tests.plain.kernel_quantizer import pack_nibbles

NAMES = [
    "int8", "int8_asym", "int8_tensor", "int8_g64", "int4", "int4_tensor_asym", "int4_g32", "int4_g64_asym",
    "fp8", "fp8_e5m2", "fp8_block128", "int8_b32_asym", "mxfp4", "nvfp4",
]  # fmt: skip
FLOATS = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
}


def normal(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def all_codes(fmt: WeightFormat) -> np.ndarray:
    """Every code of a format that is a number, once."""
    if ar.is_integer(fmt):
        least, most = ar.code_range(fmt)
        return np.arange(least, most + 1).astype(fmt.code_dtype)
    if fmt.packed:
        return np.arange(16, dtype=np.uint8)
    codes = np.arange(256, dtype=np.uint8).view(fmt.code_dtype)
    return codes[np.isfinite(codes.astype(np.float32))]


def bits(x) -> np.ndarray:
    """So that -0 and 0, and NaNs, compare by what is stored."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


# --- Packing ------------------------------------------------------------------------------------------------


@hypothesis.given(st.integers(1, 3), st.sampled_from([2, 8, 64]), st.integers(1, 4), st.integers(0, 2**16))
@hypothesis.settings(max_examples=8)
def test_packing_is_exact(rows, piece, pieces, seed):
    codes = np.random.default_rng(seed).integers(0, 16, (rows, piece * pieces)).astype(np.uint8)
    packed = np.asarray(ar.pack(jnp.asarray(codes), piece))
    assert packed.dtype == np.uint8 and packed.shape == (rows, piece * pieces // 2)
    for d in range(piece * pieces):
        start, place = d // piece * piece, d % piece
        byte = packed[:, start // 2 + place % (piece // 2)]
        assert (byte >> (4 * (place >= piece // 2)) & 15 == codes[:, d]).all()
    np.testing.assert_array_equal(ar.unpack(jnp.asarray(packed), piece), codes)


def test_packed_bytes_are_those_of_the_kernels():
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 16, (3, 192)), jnp.uint8)
    np.testing.assert_array_equal(ar.pack(codes, 64), pack_nibbles(codes))


# --- Numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", FLOATS)
def test_float_codes_round_as_ieee_says(numbers):
    """To nearest, ties to even, saturating; every tie and its neighbours, and magnitudes of all sizes."""
    dtype = FLOATS[numbers]
    most = float(ml_dtypes.finfo(dtype).max)
    assert most == ar.MOST[numbers]
    codes = np.arange(8 if numbers == "float4_e2m1fn" else 128, dtype=np.uint8)
    values = codes.view(dtype).astype(np.float32)
    values = values[np.isfinite(values)]
    ties = (values[1:] + values[:-1]) / 2
    rng = np.random.default_rng(0)
    many = np.ldexp(rng.uniform(1, 2, 5000), rng.integers(-18, 18, 5000)).astype(np.float32)
    x = np.concatenate(
        [values, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9)), many]
    )
    x = np.concatenate([x, -x]).astype(np.float32)
    got = np.asarray(jax.jit(ar.encode, static_argnums=1)(jnp.asarray(x), numbers))
    want = np.clip(x, -most, most).astype(dtype)
    np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("numbers", FLOATS)
def test_what_is_too_large_saturates(numbers):
    """float8_e4m3fn has no infinity, and a cast would make NaN of what is too large."""
    got = ar.encode(jnp.asarray([1e30, -1e30, jnp.inf, -jnp.inf], jnp.float32), numbers)
    values = ar.decode_e2m1(got) if numbers == "float4_e2m1fn" else got.astype(jnp.float32)
    np.testing.assert_array_equal(values, np.array([1, -1, 1, -1]) * ar.MOST[numbers])


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("numbers", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_as_bits_has_all_values(numbers, compile):
    bits = np.arange(256, dtype=np.uint8)
    decode = functools.partial(ar.decode_float8, numbers=numbers)
    got = np.asarray((jax.jit(decode) if compile else decode)(bits))
    np.testing.assert_array_equal(got, bits.view(numbers).astype(np.float32))


def test_float4_values():
    values = np.asarray(ar.decode_e2m1(jnp.arange(16, dtype=jnp.uint8)))
    want = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(bits(values), bits(want))


@pytest.mark.parametrize("name", NAMES)
def test_values_of_codes_round_back_to_the_codes(name):
    fmt = parse_format(name)
    codes = jnp.asarray(all_codes(fmt))[:, None]
    step = jnp.asarray([[1.0, 0.37, 3e-5, 7e4]], jnp.float32)
    middle = 8.0 if fmt.numbers == "int4" else 0.0
    for zero in (middle,) if fmt.symmetric else (middle, middle - 3, middle + 7):
        grid = jnp.full_like(step, zero)
        values = ar.codes_to_values(codes, step, grid, fmt)
        assert values.dtype == jnp.float32
        again = ar.round_to_codes(values, step, grid, fmt)
        assert again.dtype == fmt.code_dtype
        want = jnp.broadcast_to(codes, again.shape)
        np.testing.assert_array_equal(bits(again), bits(want))


# --- Whole weights ------------------------------------------------------------------------------------------


def spread_by_loop(grid: np.ndarray, fmt: WeightFormat, D: int, F: int, group_index=None) -> np.ndarray:
    """`[F, D]` from `[G, O]`."""
    out = np.empty((F, D), grid.dtype)
    for f in range(F):
        for d in range(D):
            g = {"tensor": 0, "channel": 0}.get(fmt.granularity)
            g = d // fmt.group if g is None else g
            g = group_index[d] if group_index is not None else g
            o = {"tensor": 0, "block": f // max(fmt.group, 1)}.get(fmt.granularity, f)
            out[f, d] = grid[g, o]
    return out


@pytest.mark.parametrize(
    "name", ["int8_tensor", "int8", "int4_g16", "fp8_block128", "int8_b16", "int4_g16_indexed"]
)
def test_spread(name):
    fmt, D, F = parse_format(name), 48, 36
    rng = np.random.default_rng(0)
    grid = rng.standard_normal((2, *fmt.scale_shape(D, F))).astype(np.float32)
    index = rng.integers(0, grid.shape[-2], (2, D)).astype(np.int32) if fmt.indexed else None
    got = ar.spread(jnp.asarray(grid), fmt, D, F, None if index is None else jnp.asarray(index))
    for e in range(2):
        want = spread_by_loop(grid[e], fmt, D, F, None if index is None else index[e])
        np.testing.assert_array_equal(got[e], want)


def random_tensor(
    fmt: WeightFormat, lead: tuple[int, ...], D: int, F: int, seed: int = 0
) -> tuple[QTensor, tuple]:
    """Any codes at all with any scales; and the codes, unpacked."""
    rng = np.random.default_rng(seed)
    codes = jnp.asarray(rng.choice(all_codes(fmt), (*lead, F, D)))
    high = jnp.asarray(rng.uniform(0.1, 2, (*lead, *fmt.scale_shape(D, F))), jnp.float32)
    low = jnp.asarray(-rng.uniform(0.1, 2, high.shape), jnp.float32)
    index = None
    if fmt.indexed:
        index = jnp.asarray(np.broadcast_to(rng.permutation(D) // fmt.group, (*lead, D)), jnp.int32)
    return _tensor(codes, low, high, index, fmt)


@functools.partial(jax.jit, static_argnums=4)
def _tensor(codes, low, high, index, fmt):
    scales, zeros, tensor_scale = ar.scales_from_range(low, high, fmt)
    q = ar.assemble(codes, scales, zeros, fmt, tensor_scale=tensor_scale, group_index=index)
    return q, (codes, *ar.step_and_zero(scales, zeros, tensor_scale, fmt))


dequantize = jax.jit(ar.dequantize, static_argnums=1)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def by_definition(codes, step, zero, fmt, D, F, index):
    """`[..., F, D]`, by the functions that say what a code stands for."""
    step, zero = (ar.spread(grid, fmt, D, F, index) for grid in (step, zero))
    return ar.codes_to_values(codes, step, zero, fmt)


@pytest.mark.parametrize(
    ("name", "D"),
    [
        *((name, 128) for name in (*NAMES, "int4_g32_indexed", "int4_g32_asym_indexed")),
        *(
            (name, 96)
            for name in ("int4", "int4_g32", "int4_g32_asym_indexed", "fp8_block128", "mxfp4", "nvfp4")
        ),
    ],
)
def test_dequantizing_is_what_each_code_stands_for(name, D):
    """Bit for bit; D = 96 packs pairs. Inputs in the middle of a block, outputs at its edge."""
    fmt, F = parse_format(name), 70
    q, (codes, step, zero) = random_tensor(fmt, (2,), D, F)
    assert q.shape == (2, D, F) and q.nbytes * 8 == fmt.bits_held(q.shape)
    for attribute, part in fmt.parts(q.shape).items():
        held = getattr(q, attribute)
        assert (held.shape, held.dtype) == (part.shape, part.dtype), attribute
    want = np.asarray(by_definition(codes, step, zero, fmt, D, F, q.group_index)).swapaxes(-1, -2)
    np.testing.assert_array_equal(dequantize(q, jnp.float32), want)
    half = dequantize(q, jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, want.astype(jnp.bfloat16))


@pytest.mark.parametrize("name", ["int8_asym", "int4_g32_indexed", "fp8_block128", "nvfp4", "mxfp4"])
def test_leading_axes_are_matrices_one_by_one(name):
    q, _ = random_tensor(parse_format(name), (2, 3), 128, 20)
    whole = np.asarray(dequantize(q, jnp.float32))
    for e in range(2):
        for f in range(3):
            one = jax.tree.map(lambda a, e=e, f=f: a[e, f], q)
            np.testing.assert_array_equal(dequantize(one, jnp.float32), whole[e, f])


def test_a_part_of_the_inputs_dequantizes_alone():
    """A device's part of a weight whose inputs are split: whole pieces and whole groups."""
    fmt = parse_format("int4_g64_asym")
    q, _ = random_tensor(fmt, (), 256, 20)
    part = dataclasses.replace(q, values=q.values[:, 64:128], scales=q.scales[2:], zeros=q.zeros[2:])
    assert part.shape == (128, 20)
    np.testing.assert_array_equal(dequantize(part, jnp.float32), dequantize(q, jnp.float32)[128:])


# --- Kernels ------------------------------------------------------------------------------------------------

IN_KERNELS = {
    "int8": "w8a16", "int8_g32": "w8a16_g32", "int8_g128": "w8a16_g128", "w8a8": "w8a8", "fp8": "fp8",
    "fp8_block128": "fp8_g128", "int4_g32": "w4a16_g32", "int4_g64_asym": "w4a16_g64z",
    "int4_g128_sf16": "w4a16_g128", "mxfp4": "mxfp4_g32",
}  # fmt: skip


@pytest.mark.parametrize("name", IN_KERNELS)
def test_the_kernels_read_the_same_weight(name):
    """Their dequantization of the same arrays gives the same bits."""
    fmt = parse_format(name)
    q, _ = random_tensor(fmt, (2,), 256, 70)
    kernel = kernel_formats.to_kernel(q)
    assert kernel_formats.why_no_kernel(fmt, 256) is None and kernel.format.name == IN_KERNELS[name]
    qformats.check_quantized("test", "w", kernel, "E D F")
    np.testing.assert_array_equal(qformats.dequantize(kernel), dequantize(q, jnp.float32))
    assert sum(array.nbytes for array in jax.tree.leaves(kernel)) == q.nbytes


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("int8_asym", "no kernel with zero points for int8"),
        ("int8_tensor", "no kernel with one scale for the tensor"),
        ("int4", "no kernel for channel scales of all inputs; known: 32, 64, 128"),
        ("int4_g16", "no kernel for group scales of 16"),
        ("int8_b128", "no kernel for block scales of 128"),
        ("float8_e4m3fn_g128", "no kernel for group scales of 128; known: per channel, 128"),
        ("int4_g32_indexed", "no kernel with a group index"),
        ("int8_g32_se8m0", "no kernel with e8m0 scales"),
        ("fp8_a8", "no kernel for float8_e4m3fn with dynamic activation scales"),
        ("fp8_e5m2", "no kernel for float8_e5m2"),
        ("float4_e2m1fn_g32_sbf16", "no kernel with bfloat16 scales"),
        ("nvfp4", "no kernel with float8_e4m3fn scales"),
    ],
)
def test_what_the_kernels_have_not_is_said(name, reason):
    fmt = parse_format(name)
    assert reason in kernel_formats.why_no_kernel(fmt, 256)
    q, _ = random_tensor(fmt, (), 256, 4)
    assert kernel_formats.to_kernel(q) is None


def test_kernels_need_stacks_below_2_gib():
    """DeepSeek-V3's 256 experts of 7168 x 2048: in 8 bits too many codes for 32-bit offsets, in 4 not."""
    size = 256 * 7168 * 2048
    assert kernel_formats.why_no_kernel(parse_format("int8"), 7168, size // 2) is None
    assert kernel_formats.why_no_kernel(parse_format("int4_g32"), 7168, size) is None
    why = kernel_formats.why_no_kernel(parse_format("int8"), 7168, size)
    assert why is not None and "3758096384 bytes of codes on a device" in why


def test_kernels_need_whole_pieces():
    fmt = parse_format("int4_g32")
    assert "a multiple of 64, here 96" in kernel_formats.why_no_kernel(fmt, 96)
    q, _ = random_tensor(fmt, (), 96, 4)
    assert kernel_formats.to_kernel(q) is None


# --- Activations --------------------------------------------------------------------------------------------


def test_dynamic_int8_activations_are_the_kernels():
    x = normal((5, 32)).astype(jnp.bfloat16).at[3].set(0)
    codes, scale = ar.quantize_activations(x, parse_format("w8a8"))
    want, want_scale = qformats.quantize_rows(x)
    np.testing.assert_array_equal(codes, want)
    np.testing.assert_array_equal(scale, want_scale[:, None])
    assert scale.dtype == jnp.float32 and float(scale[3, 0]) == 0 and not np.asarray(codes[3]).any()


@pytest.mark.parametrize("numbers", ["float8_e4m3fn", "float8_e5m2"])
def test_dynamic_float8_activations(numbers):
    fmt = WeightFormat(numbers, activations="dynamic")
    x = (normal((2, 5, 32)) * 1e-3).at[1, 3].set(0).at[0, 0, 0].set(jnp.inf)
    codes, scale = ar.quantize_activations(x, fmt)
    assert codes.dtype == numbers and scale.shape == (2, 5, 1)
    assert np.isnan(float(scale[0, 0, 0])) and float(scale[1, 3, 0]) == 0
    back, x = (np.asarray(a).reshape(10, 32)[1:] for a in (codes.astype(jnp.float32) * scale, x))
    # Half a unit in the last place, or of the least subnormal number; and two roundings of the scale.
    info = jnp.finfo(numbers)
    half = np.maximum(
        np.abs(x) * float(info.eps) / 2,
        np.asarray(scale).reshape(10, 1)[1:] * float(info.smallest_subnormal) / 2,
    )
    assert (np.abs(back - x) <= half + np.abs(x) * 2**-21).all()
    assert (
        np.abs(np.asarray(codes).astype(np.float32)).reshape(10, 32)[1:].max(-1)[:7] == ar.MOST[numbers]
    ).all()


@pytest.mark.parametrize(
    ("lead", "shape"), [((), (4, 8)), ((), (2, 4, 8)), ((2,), (2, 4, 8)), ((4,), (4, 8))]
)
def test_static_activations_take_the_given_scale(lead, shape):
    """`input_scale` `[*lead, 1]`; what does not fit saturates."""
    x = normal(shape).at[..., 0].set(1e4)
    scale = jnp.asarray(np.random.default_rng(1).uniform(0.01, 0.02, (*lead, 1)), jnp.float32)
    codes, got = ar.quantize_activations(x, parse_format("w8a8_static"), scale)
    wide = np.asarray(scale).reshape(*lead, *(1,) * (len(shape) - len(lead)))
    want = np.clip(np.round(np.asarray(x) / wide), -127, 127)
    np.testing.assert_array_equal(codes, want)
    np.testing.assert_array_equal(got, np.broadcast_to(wide, (*shape[:-1], 1)))
    fp8, _ = ar.quantize_activations(x, parse_format("float8_e4m3fn_a8static"), scale)
    assert (np.asarray(fp8[..., 0]).astype(np.float32) == 448).all()
