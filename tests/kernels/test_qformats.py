"""Weight formats: layouts, rounding, whole-array conversions in kernels, and the PTX that decodes codes."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.errors import KernelError
from pallas_kernels.qformats import (
    Format,
    QuantizedTensor,
    check_quantized,
    dequantize,
    quantize_rows,
    random_quantized,
    tile_codes,
    unpack_nibbles,
    untile_codes,
)
from pallas_kernels.quantized_grouped_matmul import decode
from pallas_kernels.quantized_grouped_matmul.convert import dequantize_pallas, quantize_rows_pallas
from tests.examples import slow_but
from tests.plain.kernel_quantizer import pack_nibbles, quantize

FORMATS = [
    Format("w8a16"),
    Format("w8a16", 32),
    Format("w8a16", 128),
    Format("w4a16", 32),
    Format("w4a16", 64, zeros=True),
    Format("w4a16", 128),
    Format("w4a16", 128, zeros=True),
    Format("w8a8"),
    Format("fp8"),
    Format("fp8", 128),
    Format("mxfp4", 32),
]
IDS = [f.name for f in FORMATS]

draw = jax.jit(random_quantized, static_argnums=(1, 2, 3))
"""`random_quantized`, compiled once for each shape and format."""


def test_nibbles_lie_as_documented(rng):
    """Byte r of a block of 32: input r low, input r + 32 high."""
    values = rng.integers(0, 16, (3, 192), dtype=np.uint8)
    packed = np.asarray(pack_nibbles(jnp.asarray(values)))
    for d in range(192):
        byte = packed[:, d // 64 * 32 + d % 32]
        assert ((byte >> (4 * (d % 64 >= 32))) & 15 == values[:, d]).all()
    np.testing.assert_array_equal(unpack_nibbles(jnp.asarray(packed)), values)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_tiles_lie_as_documented(rng, kind):
    """Block b of output f lies behind block b of output f - 1, and the way back loses nothing."""
    values = rng.integers(0, 256, (3, 70, 96), dtype=np.uint8)
    tiled = tile_codes(kind(values))
    assert tiled.shape == (3, 3, 70, 32)
    for block in range(3):
        np.testing.assert_array_equal(tiled[:, block], values[:, :, 32 * block : 32 * block + 32])
    np.testing.assert_array_equal(untile_codes(tiled), values)


@pytest.mark.parametrize("fmt", FORMATS[:-1], ids=IDS[:-1])
def test_quantizing_errs_by_half_a_step(rng, fmt):
    """And by nothing where the weights are multiples of a step."""
    w = jnp.asarray(rng.normal(size=(2, 256, 70)), jnp.float32)
    q = quantize(w, fmt)
    check_quantized("t", "w", q, "E D F", E=2, D=256, F=70)
    assert q.shape == (2, 256, 70)
    back = dequantize(q)
    scale = jnp.repeat(jnp.repeat(q.scales, fmt.scale_columns, axis=-1)[..., :70], fmt.group or 256, axis=-2)
    # e4m3 has three mantissa bits: half a last place is a sixteenth of the power of two below.
    step = jnp.maximum(jnp.abs(w) / 8, scale * 2.0**-9) if fmt.kind == "fp8" else scale
    # The zero point is rounded, too, and may push the ends of the range out by half a step.
    slack = 1.0 if fmt.zeros else 0.5
    assert (jnp.abs(back - w) <= step * slack * 1.0001).all()
    again = quantize(back, fmt)
    # With zeros the range may move by a step between the two.
    atol = float(scale.max()) * (1.01 if fmt.zeros else 0)
    np.testing.assert_allclose(dequantize(again), back, rtol=1e-6, atol=atol)


def test_quantizing_extremes():
    for fmt in (Format("w8a16", 32), Format("w4a16", 64, zeros=True), Format("w8a8"), Format("fp8", 128)):
        zero = quantize(jnp.zeros((128, 3)), fmt)
        assert (dequantize(zero) == 0).all() and jnp.isfinite(zero.scales).all()
        np.testing.assert_allclose(dequantize(quantize(jnp.full((128, 3), -2.0), fmt)), -2.0, rtol=1e-6)


def test_fp8_checkpoint(rng):
    """As DeepSeek's: weight [F, D] in float8_e4m3fn, weight_scale_inv [F/128, D/128]."""
    D, F = 300, 200
    weight = rng.normal(size=(F, D)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.5, 2, (2, 3)).astype(np.float32)
    want = weight.astype(np.float32) * np.repeat(np.repeat(scale, 128, 0), 128, 1)[:F, :D]
    values = jnp.asarray(weight.view(np.uint8))
    q = QuantizedTensor(values, jnp.asarray(scale.T), None, Format("fp8", 128))
    assert q.shape == (D, F)
    np.testing.assert_array_equal(dequantize(q), want.T)
    outputs = rng.uniform(0.5, 2, (F, 1)).astype(np.float32)
    q = QuantizedTensor(values, jnp.asarray(outputs.T), None, Format("fp8", 0))
    np.testing.assert_array_equal(dequantize(q), (weight.astype(np.float32) * outputs).T)


def test_mxfp4_is_of_e2m1_and_e8m0_numbers(rng):
    """All codes, in every place of a group; all exponents whose products are normal float32 numbers."""
    scales = rng.permutation(np.arange(2, 252, dtype=np.uint8)).reshape(125, 2)
    codes = np.stack([np.roll(np.arange(64) % 16, -i) for i in range(125)]).astype(np.uint8)
    packed = pack_nibbles(jnp.asarray(codes))
    q = QuantizedTensor(packed, jnp.asarray(scales.T), None, Format("mxfp4", 32))
    check_quantized("t", "w", q, "D F", D=64, F=125)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    powers = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32).repeat(32, axis=1)
    np.testing.assert_array_equal(dequantize(q).T, values * powers)


@pytest.mark.contract
@pytest.mark.parametrize("fmt", slow_but([FORMATS[i] for i in (1, 3, 6, 7, 9, 10)], FORMATS), ids=IDS)
def test_dequantize_in_a_kernel(rng, fmt):
    """Equal to the rounding of the product, which is exact before it: codes have 8 bits, scales 8."""
    shape = (2, 320 if fmt.kind == "fp8" else 384, 70)
    w = random_quantized(jax.random.key(int(rng.integers(1 << 30))), shape, fmt)
    dtype = jnp.bfloat16 if fmt.group == 128 else jnp.float32
    got = jax.jit(functools.partial(dequantize_pallas, dtype=dtype))(w)
    np.testing.assert_array_equal(got, dequantize(w, dtype))
    if fmt.packed:
        tiled = replace(w, values=tile_codes(w.values))
        check_quantized("t", "w", tiled, "E D F", E=2, D=384, F=70)
        np.testing.assert_array_equal(dequantize(tiled, dtype), dequantize(w, dtype))
        np.testing.assert_array_equal(dequantize_pallas(tiled, dtype), got)


def other_way(D: int) -> float:
    """What rounding an activation to the other of two codes may add to a sum of D products.

    Compiled kernels divide 127 by a row's maximum with an error of two last places, so that a value within
    about 1e-5 of a half may fall either way: one step, 1/127 of the maximum, in one of D terms.
    """
    return 2 / 127 / D**0.5 if jax.default_backend() == "gpu" else 0.0


@pytest.mark.contract
def test_rows_are_quantized_alike(rng):
    x = rng.normal(size=(9, 100)) * 10.0 ** rng.integers(-6, 6, (9, 1))
    x[3], x[4, 7], x[5, 0], x[6] = 0, np.nan, np.inf, 1e-38
    for dtype in (jnp.float32, jnp.bfloat16):
        rows = jnp.asarray(x, dtype)
        values, scale = jax.jit(quantize_rows)(rows)
        ours, our_scale = jax.jit(quantize_rows_pallas)(rows)
        np.testing.assert_array_equal(our_scale, scale)
        assert np.isnan(np.asarray(scale)).tolist() == [i in (4, 5) for i in range(9)]
        good = np.isfinite(np.asarray(scale))
        apart = np.abs(np.asarray(ours)[good].astype(int) - np.asarray(values)[good].astype(int))
        assert apart.max() <= (1 if other_way(1) else 0) and apart.sum() <= 3
        back = values.astype(jnp.float32) * scale[:, None]
        half = 0.5001 * np.abs(x[good]).max(axis=1, keepdims=True) / 127
        assert (np.abs(np.asarray(back)[good] - np.asarray(rows, np.float32)[good]) <= half + 1e-30).all()


def emulate(body: str, register: np.ndarray) -> np.ndarray:
    """What a packed decoder makes of uint32 registers: their four codes as 16-bit patterns, `[n, 4]`."""
    values = {"$2": register.astype(np.uint64)}

    def read(text):
        text = text.strip()
        return values[text] if text in values else np.uint64(int(text, 0))

    def halves(kind, *operands):
        pairs = [np.broadcast_to(v, register.shape).astype(np.uint32).view(np.uint16) for v in operands]
        return [p.view(kind).astype(np.float64) for p in pairs]

    def pack(kind, result):
        return result.astype(np.float32).astype(kind).view(np.uint16).view(np.uint32).astype(np.uint64)

    for line in filter(None, (part.strip() for part in body.split(";"))):
        op, operands = line.split(None, 1)
        out, *args = (a.strip() for a in operands.split(","))
        a = [read(arg) for arg in args]
        if op == "mov.b32":
            values[out] = a[0] + np.zeros_like(values["$2"])
        elif op == "and.b32":
            values[out] = a[0] & a[1]
        elif op == "shr.u32":
            values[out] = a[0] >> a[1]
        elif op == "shl.b32":
            values[out] = a[0] << a[1] & np.uint64(0xFFFFFFFF)
        elif op == "prmt.b32":
            both, selector = a[0] | (a[1] << np.uint64(32)), int(args[2], 0)
            pick = [(both >> np.uint64(8 * (selector >> (4 * i) & 7))) & np.uint64(255) for i in range(4)]
            values[out] = sum(byte << np.uint64(8 * i) for i, byte in enumerate(pick))
        elif op == "lop3.b32":
            table = {0xEA: lambda x, y, z: (x & y) | z, 0xBE: lambda x, y, z: (x ^ y) | z}
            values[out] = table[int(args[3], 0)](*a[:3])
        else:
            kind = ml_dtypes.bfloat16 if "bf16" in op else np.float16
            x, y, *z = halves(kind, *a)
            name = op.partition(".")[0]
            values[out] = pack(kind, x - y if name == "sub" else x * y + (z[0] if name == "fma" else 0.0))
    return np.stack([values[r] >> np.uint64(s) & np.uint64(0xFFFF) for r in ("$0", "$1") for s in (0, 16)], 1)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_ptx_decoders(name):
    """The instructions compiled kernels decode with, emulated: every code in every place of a register."""
    codes = np.stack([np.roll(np.arange(256), -i) for i in range(4)], 1).astype(np.uint8)
    registers = codes.view(np.uint32)[:, 0]
    kind = np.dtype(getattr(ml_dtypes, name, np.float16))

    def run(body):
        return emulate(body, registers).astype(np.uint16).view(kind).astype(np.float64)

    np.testing.assert_array_equal(run(decode.INT8[name]), codes.view(np.int8))
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(run(decode.E4M3[name])[finite], want[finite])
    base = 128 if name == "bfloat16" else 1024
    for high in (False, True):
        got = run(decode.NIBBLE[name].replace("{shift}", decode._SHIFT if high else ""))
        nibbles = codes >> 4 if high else codes & 15
        np.testing.assert_array_equal(got - base, nibbles)
        got = run(decode.E2M1[name].replace("{shift}", "" if high else decode._SHIFT_LEFT))
        numbers = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        np.testing.assert_array_equal(got, numbers * decode.E2M1_UNIT[name])


def test_bad_formats():
    with pytest.raises(ValueError, match=r"no format 'w4a16' with group 16; known: w8a16: group 0, 32"):
        Format("w4a16", 16)
    with pytest.raises(ValueError, match="no format 'w2'"):
        Format("w2")
    with pytest.raises(ValueError, match="w8a16 has no zero points"):
        Format("w8a16", 32, zeros=True)
    with pytest.raises(KernelError, match="quantize: w: got D=96, expected a multiple of 64 for w4a16_g32"):
        quantize(jnp.zeros((96, 4)), Format("w4a16", 32))


@pytest.mark.parametrize(
    "change,message",
    [
        ({"values": jnp.zeros((8, 64), jnp.int8)}, "f: w.values: got int8, expected uint8"),
        (
            {"values": jnp.zeros((2, 8, 64), jnp.uint8)},
            r"f: w.values: got shape \[2, 8, 64\], expected 2 dim",
        ),
        ({"values": jnp.zeros((8, 48), jnp.uint8)}, "f: w: got D=96, expected a multiple of 64"),
        ({"values": jnp.zeros((0, 64), jnp.uint8)}, "at least one element along F"),
        ({"scales": jnp.zeros((1, 8))}, r"f: w.scales: got shape \[1, 8\], expected \[2, 8\] with 2=2"),
        ({"scales": jnp.zeros((2, 8), jnp.int32)}, "f: w.scales: got int32, expected bfloat16"),
        ({"zeros": None}, "f: w.zeros: got NoneType, expected an array"),
        ({"zeros": jnp.zeros((2, 8), jnp.int8)}, "f: w.zeros: got int8, expected uint8"),
        ({"zeros": jnp.zeros((2, 7), jnp.uint8)}, "f: w.zeros: got shape"),
        ({"format": Format("mxfp4", 32), "zeros": None}, "f: w.scales: got float32, expected uint8"),
    ],
)
def test_bad_tensors(change, message):
    parts = {
        "values": jnp.zeros((8, 64), jnp.uint8),
        "scales": jnp.zeros((2, 8)),
        "zeros": jnp.zeros((2, 8), jnp.uint8),
    }
    fmt = Format("w4a16", 64, zeros=True)
    check_quantized("f", "w", QuantizedTensor(**parts, format=fmt), "D F")
    with pytest.raises(KernelError, match=message):
        check_quantized("f", "w", QuantizedTensor(**({**parts, "format": fmt} | change)), "D F")
    with pytest.raises(KernelError, match=r"expected \[D F\] with D=64"):
        check_quantized("f", "w", QuantizedTensor(**parts, format=fmt), "D F", D=64)
