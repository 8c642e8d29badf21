"""Conversion of weights to codes and back, shared by every quantization method and every product.

Pure functions on arrays, vectorised over leading axes (experts), usable in and out of `jit` with the same
bits. Shapes: D inputs, F outputs; codes are `[..., F, D]`; scales, steps and zero points are grids
`[..., G, O]` (`moejax.quantization.formats`). They know nothing of how a range is found (`clipping`) or of
how the codes are chosen (`rtn`, `gptq`, ...).

A code stands for `(code - zero) · step`. `step` is computed from the *stored* scale, and codes are rounded
with it: what a scale loses in bfloat16, float8 or as a power of two shifts the grid of values, but adds no
error to a weight beyond half a step (or saturation, where the scale was rounded down).

    numbers           codes                        largest magnitude   zero
    int8              -127..127; asym. -128..127   127                 0; asym. -128..127
    int4              1..15; asym. 0..15           7                   8; asym. 0..15
    float8_e4m3fn     the numbers, saturated       448 (no infinity)   0
    float8_e5m2       the numbers, saturated       57344               0
    float4_e2m1fn     nibbles sign, 2 bits, 1 bit  6                   0

Why they are not qwix's: docs/decisions.md. The tests hold them beside `qwix.quantize` where both are defined.
"""

import functools
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from moejax.quantization.formats import QTensor, WeightFormat
from pallas_kernels import qformats
from pallas_kernels.fp8 import decode_e2m1, encode_e4m3, encode_e5m2

Array = TypeVar("Array", jax.Array, np.ndarray)

MOST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float4_e2m1fn": 6.0}
"""The largest magnitude of a symmetric format, in steps."""

_E8M0_BIAS = 127


def is_integer(fmt: WeightFormat) -> bool:
    """Codes are integers, evenly spaced."""
    return fmt.numbers.startswith("int")


def code_range(fmt: WeightFormat) -> tuple[int, int]:
    """Returns the least and largest code of an integer format, the offset of int4 included."""
    if fmt.numbers == "int4":
        return (1, 15) if fmt.symmetric else (0, 15)
    assert fmt.numbers == "int8", fmt
    return (-127, 127) if fmt.symmetric else (-128, 127)


# --- Packing ------------------------------------------------------------------------------------------------


def pack(codes: Array, piece: int) -> Array:
    """Returns codes below 16, `[..., D]`, two a byte: uint8 `[..., D/2]`; numpy's of numpy's.

    Args:
        piece: inputs of a piece of bytes (`WeightFormat.pack`), an even divisor of D.
    """
    *lead, D = codes.shape
    assert piece % 2 == 0 and D % piece == 0, (D, piece)
    halves = codes.astype(np.uint8).reshape(*lead, D // piece, 2, piece // 2)
    return (halves[..., 0, :] | (halves[..., 1, :] << np.uint8(4))).reshape(*lead, D // 2)


def unpack(packed: Array, piece: int) -> Array:
    """Inverts `pack`: uint8 `[..., D]`."""
    *lead, half = packed.shape
    pieces = packed.reshape(*lead, 2 * half // piece, piece // 2)
    concatenate: Any = jnp.concatenate if isinstance(packed, jax.Array) else np.concatenate
    both = concatenate([pieces & np.uint8(15), pieces >> np.uint8(4)], axis=-1)
    return both.reshape(*lead, 2 * half)


# --- 2:4 sparsity -------------------------------------------------------------------------------------------


def two_of_four(score: jax.Array) -> jax.Array:
    """Returns `QTensor.kept` of the two highest of every four scores `[..., F, D]`, first of equal ones."""
    best = jnp.sort(jax.lax.top_k(score.reshape(*score.shape[:-1], -1, 4), 2)[1], axis=-1).astype(jnp.uint8)
    return pack(best[..., 0] | (best[..., 1] << jnp.uint8(2)), 2)


def _places(kept: jax.Array) -> jax.Array:
    """Maps `[..., D/8]` to the places of the two in each four, rising: `[..., D/4, 2]`."""
    nibbles = unpack(kept, 2)
    return jnp.stack([nibbles & jnp.uint8(3), nibbles >> jnp.uint8(2)], axis=-1)


def only_kept(codes: jax.Array, kept: jax.Array) -> jax.Array:
    """Takes the kept ones of codes `[..., D]`: `[..., D/2]`."""
    places = _places(kept)
    fours = codes.reshape(*places.shape[:-1], 4)
    return jnp.take_along_axis(fours, places.astype(jnp.int32), axis=-1).reshape(*codes.shape[:-1], -1)


def with_zeros(codes: jax.Array, kept: jax.Array) -> jax.Array:
    """Inverts `only_kept`, with zeros for the others."""
    places = _places(kept)
    pairs, four = codes.reshape(places.shape), jnp.arange(4, dtype=jnp.uint8)
    four, zero = four.reshape(*(1,) * (places.ndim - 1), 4), jnp.zeros((), codes.dtype)
    second = jnp.where(four == places[..., 1:], pairs[..., 1:], zero)
    return jnp.where(four == places[..., :1], pairs[..., :1], second).reshape(*codes.shape[:-1], -1)


# --- float4_e2m1fn ------------------------------------------------------------------------------------------


def encode_e2m1(x: jax.Array) -> jax.Array:
    """Encodes x as uint8 nibbles: the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives, saturating.

    Ties go to the even code: a magnitude is as many codes from zero as it exceeds midpoints, and a midpoint
    itself counts where the code below it is odd.
    """
    a = jnp.abs(x)
    above = [a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0]
    magnitude = sum((passed.astype(jnp.uint8) for passed in above), jnp.zeros(x.shape, jnp.uint8))
    return magnitude | (jnp.signbit(x).astype(jnp.uint8) << jnp.uint8(3))


# --- Scales -------------------------------------------------------------------------------------------------


def _store(scale: jax.Array, dtype: Any) -> jax.Array:
    """Rounds a positive float32 scale to `dtype`, within its normal numbers (CPUs flush subnormal ones)."""
    info = jnp.finfo(dtype)
    least, most = float(info.tiny), float(info.max)
    return jnp.clip(scale, least, most).astype(dtype)


def _power_of_two(most: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns e8m0's biased exponents, floor(log2 most) - floor(log2 largest code), by OCP MX v1.0 (6.3).

    Magnitudes between the largest code and the next power of two saturate (in mxfp4, 6 to 8). Exponents stay
    in 1..254: 0 would be a subnormal float32, 255 is NaN.
    """
    bits = jax.lax.bitcast_convert_type(most, jnp.int32)
    largest = int(MOST[fmt.numbers]).bit_length() - 1
    biased = jnp.clip((bits >> 23) - largest, 1, 254)
    return jnp.where(most > 0, biased, _E8M0_BIAS).astype(jnp.uint8)


def _block_scales(scale: jax.Array, some: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns nvfp4's e4m3 scales in units of the tensor's float32 scale, which maps the greatest to 448.

    Args:
        some: where a group has a weight but zeros; only such groups count.
    """
    greatest = jnp.max(jnp.where(some, scale, 0.0), axis=(-2, -1), keepdims=True)
    # A reciprocal, because checkpoints store the number that scales are divided by; at least 2^-126.
    divisor = jnp.minimum(_store(MOST["float8_e4m3fn"] / greatest, jnp.float32), 2.0**126)
    tensor_scale = 1.0 / divisor
    tensor_scale = jnp.where(greatest > 0, tensor_scale, 1.0)
    least = 2.0**-9  # the least e4m3 number: a step of 0 would make NaNs of weights
    units = jnp.where(some, jnp.clip(scale / tensor_scale, least, MOST["float8_e4m3fn"]), 1.0)
    return jax.lax.bitcast_convert_type(encode_e4m3(units), jnp.float8_e4m3fn), tensor_scale


def scales_from_range(
    low: jax.Array, high: jax.Array, fmt: WeightFormat
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns scales, zero points and tensor scale, in their stored dtypes, that cover ranges of weights.

    A symmetric format maps the greater of |low| and |high| to its largest code (e8m0: see `_power_of_two`);
    an asymmetric one maps [min(low, 0), max(high, 0)] to all its codes, so that 0 is always a code. A group
    of zeros takes scale 1. Scales beyond their dtype take its least normal or its largest number.

    Args:
        low, high: float32 `[..., G, O]`, finite.

    Returns:
        scales `[..., G, O]`; zeros `[..., G, O]` or None; tensor scale float32 `[..., 1, 1]` or None.
    """
    low, high = jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
    levels = float(2**fmt.bits - 1)
    span = jnp.maximum(high, -low) if fmt.symmetric else high - low
    tensor_scale = None
    if fmt.scale_dtype == "e8m0":
        scales = _power_of_two(span if fmt.symmetric else span / levels * MOST[fmt.numbers], fmt)
    else:
        scale = jnp.where(span > 0, span / (MOST[fmt.numbers] if fmt.symmetric else levels), 1.0)
        if fmt.has_tensor_scale:
            scales, tensor_scale = _block_scales(scale, span > 0)
        else:
            scales = _store(scale, jnp.dtype(fmt.scale_dtype))
    if fmt.symmetric:
        return scales, None, tensor_scale
    step = _step(scales, tensor_scale, fmt)
    least, most = code_range(fmt)
    zeros = jnp.clip(jnp.round(-low / step) + least, least, most)
    return scales, zeros.astype(jnp.uint8 if fmt.numbers == "int4" else jnp.int8), tensor_scale


def _step(scales: jax.Array, tensor_scale: jax.Array | None, fmt: WeightFormat) -> jax.Array:
    if fmt.scale_dtype == "e8m0":
        wide = scales.astype(jnp.int32)
        # 0 is 2^-127, whose float32 bits are those of a subnormal number; 255 is NaN.
        bits = jnp.where(wide == 0, 0x00400000, jnp.where(wide == 255, 0x7FC00000, wide << 23))
        return jax.lax.bitcast_convert_type(bits, jnp.float32)
    if fmt.scale_dtype == "float8_e4m3fn":
        assert tensor_scale is not None, fmt
        return scales.astype(jnp.float32) * tensor_scale
    return scales.astype(jnp.float32)


def step_and_zero(
    scales: jax.Array, zeros: jax.Array | None, tensor_scale: jax.Array | None, fmt: WeightFormat
) -> tuple[jax.Array, jax.Array]:
    """Returns float32 `step` and `zero` of the codes, both `[..., G, O]`, from the stored arrays.

    `zero` is 8 for symmetric int4, whose codes are stored with that offset, and 0 where there is none.
    """
    step = _step(scales, tensor_scale, fmt)
    if zeros is not None:
        return step, zeros.astype(jnp.float32)
    return step, jnp.full_like(step, 8.0 if fmt.numbers == "int4" else 0.0)


# --- Codes --------------------------------------------------------------------------------------------------


def decode_float8(bits: jax.Array, numbers: str) -> jax.Array:
    """Returns the float32 values of float8 numbers that are kept as their bits, uint8; exact.

    By float16, which has e5m2's exponents and, but for a factor of 256, e4m3's: vectors of it become float32
    in one instruction, and subnormal numbers are not flushed on the way.
    """
    wide = bits.astype(jnp.uint16)
    if numbers == "float8_e5m2":
        return jax.lax.bitcast_convert_type(wide << 8, jnp.float16).astype(jnp.float32)
    magnitude = wide & 0x7F
    half = jax.lax.bitcast_convert_type(((wide & 0x80) << 8) | (magnitude << 7), jnp.float16)
    return jnp.where(magnitude == 0x7F, jnp.nan, half.astype(jnp.float32) * 256.0)


def _values(codes: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns the float32 value of each code, in steps, zero point not yet subtracted."""
    if fmt.numbers == "float4_e2m1fn":
        return decode_e2m1(codes)
    kept_as_bits = codes.dtype == jnp.uint8 and fmt.numbers.startswith("float8")
    return decode_float8(codes, fmt.numbers) if kept_as_bits else codes.astype(jnp.float32)


def round_to_codes(w: jax.Array, step: jax.Array, zero: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Returns the nearest codes, ties to even, saturating; unpacked, in the dtype of `fmt.code_dtype`.

    Args:
        w, step, zero: float32, of shapes that broadcast against each other. w must be finite.
    """
    scaled = w / step
    if is_integer(fmt):
        least, most = code_range(fmt)
        return jnp.clip(jnp.round(scaled) + zero, least, most).astype(fmt.code_dtype)
    return encode(scaled, fmt.numbers)


def encode(x: jax.Array, numbers: str) -> jax.Array:
    """Rounds float32 to float8 numbers (or float4 nibbles), nearest, ties to even, saturating.

    By integer arithmetic: compilers differ in how often they round on the way from float32 to float8.
    """
    if numbers == "float4_e2m1fn":
        return encode_e2m1(x)
    bits = encode_e4m3(x) if numbers == "float8_e4m3fn" else encode_e5m2(x)
    return jax.lax.bitcast_convert_type(bits, jnp.dtype(numbers))


def codes_to_values(codes: jax.Array, step: jax.Array, zero: jax.Array, fmt: WeightFormat) -> jax.Array:
    """Computes `(code - zero) · step` in float32 for unpacked codes; the arrays broadcast."""
    values = _values(codes, fmt)
    if fmt.numbers == "int4" or not fmt.symmetric:
        values = values - zero
    return values * step


def spread(
    grid: jax.Array, fmt: WeightFormat, D: int, F: int, group_index: jax.Array | None = None
) -> jax.Array:
    """Spreads a grid `[..., G, O]` to one number for each weight: `[..., F, D]`.

    Args:
        group_index: int32 `[..., D]`, of indexed formats.
    """
    *lead, G, O = grid.shape  # noqa: E741
    if group_index is not None:
        # Rows of the grid are contiguous; a gather along the last axis would fetch number by number.
        take = functools.partial(jnp.take, axis=0)
        for _ in lead:
            take = jax.vmap(take)
        return jnp.swapaxes(take(grid, group_index), -1, -2)
    grid = jnp.swapaxes(grid, -1, -2)
    if fmt.granularity == "block":
        grid = jnp.broadcast_to(grid[..., :, None, :, None], (*lead, O, fmt.group, G, fmt.group))
        return grid.reshape(*lead, O * fmt.group, G * fmt.group)[..., :F, :D]
    return jnp.broadcast_to(grid[..., None], (*lead, F, G, D // G)).reshape(*lead, F, D)


# --- Whole weights ------------------------------------------------------------------------------------------


def assemble(
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    fmt: WeightFormat,
    *,
    tensor_scale: jax.Array | None = None,
    group_index: jax.Array | None = None,
    input_scale: jax.Array | None = None,
) -> QTensor:
    """Returns a `QTensor` from unpacked codes `[..., F, D]` and the arrays of `scales_from_range`; packs."""
    piece = fmt.pack(codes.shape[-1])
    values = pack(codes, piece) if fmt.packed else codes
    return QTensor(values, scales, zeros, tensor_scale, group_index, input_scale, fmt, piece)


def round_in_ranges(
    w: jax.Array, low: jax.Array, high: jax.Array, fmt: WeightFormat, *, input_scale: jax.Array | None = None
) -> QTensor:
    """Rounds each weight of `[..., D, F]` to the nearest code of its scale, which covers its range.

    Args:
        low, high: float32 `[..., G, O]`, ranges by place.
        input_scale: float32 `[..., 1]`, of static activations.
    """
    D, F = w.shape[-2:]
    scales, zeros, tensor_scale = scales_from_range(low, high, fmt)
    step, zero = step_and_zero(scales, zeros, tensor_scale, fmt)
    rows = jnp.swapaxes(w.astype(jnp.float32), -1, -2)
    codes = round_to_codes(rows, spread(step, fmt, D, F), spread(zero, fmt, D, F), fmt)
    index = None
    if fmt.indexed:
        index = jnp.broadcast_to(jnp.arange(D, dtype=jnp.int32) // fmt.group, (*w.shape[:-2], D))
    return assemble(
        codes, scales, zeros, fmt, tensor_scale=tensor_scale, group_index=index, input_scale=input_scale
    )


def unpacked_codes(q: QTensor) -> jax.Array:
    """Returns all codes `[..., F, D]`, however they are stored; zeros where a sparse weight has none."""
    values = qformats.untile_codes(q.values) if q.values.ndim > q.scales.ndim else q.values
    codes = unpack(values, q.pack) if q.format.packed else values
    return codes if q.kept is None else with_zeros(codes, q.kept)


def dequantize_stored(q: QTensor, dtype: Any = jnp.float32) -> jax.Array:
    """Returns the weight as it lies in memory, `[..., F, D]` in `dtype`; computed in float32.

    Scales meet the codes by reshapes and broadcasts alone (no gather but by a group index), which a compiler
    fuses into one pass over the codes. Packed ones meet them in runs of half a piece, as they come out of the
    bytes: XLA's CPU code is then two to ten times as fast as with the whole rows that channel scales have.
    """
    fmt = q.format
    *lead, D, F = q.shape
    codes = unpacked_codes(q)
    step, zero = step_and_zero(q.scales, q.zeros, q.tensor_scale, fmt)
    if fmt.granularity == "block" or q.group_index is not None:
        step, zero = (spread(grid, fmt, D, F, q.group_index) for grid in (step, zero))
        return codes_to_values(codes, step, zero, fmt).astype(dtype)
    G, columns = step.shape[-2:]
    run = math.gcd(D // G, q.pack // 2) if fmt.packed and q.pack > 2 else D // G
    inner, inner_grid = [G, D // G // run, run], [G, 1, 1]
    if 1 in inner[:2]:  # An axis of one between the others costs as much as no runs.
        inner, inner_grid = [max(inner[:2]), run], [G, 1]
    step, zero = (jnp.swapaxes(grid, -1, -2).reshape(*lead, columns, *inner_grid) for grid in (step, zero))
    weight = codes_to_values(codes.reshape(*lead, F, *inner), step, zero, fmt)
    return weight.astype(dtype).reshape(*lead, F, D)


def dequantize(q: QTensor, dtype: Any = jnp.float32) -> jax.Array:
    """Returns the weight, `[..., D, F]` in `dtype`; computed in float32."""
    return jnp.swapaxes(dequantize_stored(q, dtype), -1, -2)


# --- Activations --------------------------------------------------------------------------------------------


def quantize_activations(
    x: jax.Array, fmt: WeightFormat, input_scale: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns codes `[..., D]` in the weight's numbers and float32 scales `[..., 1]`: x ≈ codes · scales.

    Dynamic: each row's largest magnitude becomes the largest code; a row of zeros has scale 0. int8 as
    `pallas_kernels.qformats.quantize_rows` does it, bit for bit. Rows that are not finite have scale NaN.
    Static: with the given scale, saturating.

    Args:
        x: of any floating dtype; computed in float32.
        input_scale: for "static"; `[..., 1]` of x's rank, or of fewer axes, which are then x's first ones
            (a weight's own `input_scale` `[1]`, or `[E, 1]` for x `[E, T, D]`).
    """
    assert fmt.activations != "none", fmt
    wide, most = x.astype(jnp.float32), MOST[fmt.numbers]
    if fmt.activations == "static":
        assert input_scale is not None, fmt
        lead = input_scale.shape[:-1]
        scale = input_scale.astype(jnp.float32).reshape(*lead, *(1,) * (x.ndim - len(lead)))
        scaled, scale = wide / scale, jnp.broadcast_to(scale, (*x.shape[:-1], 1))
        if is_integer(fmt):
            return jnp.clip(jnp.round(scaled), -most, most).astype(jnp.int8), scale
    elif is_integer(fmt):
        codes, scale = qformats.quantize_rows(x)
        return codes, scale[..., None]
    else:
        largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
        scaled = wide * jnp.where(largest > 0, most / jnp.maximum(largest, 1e-30), 0.0)
        scale = jnp.where(jnp.isfinite(largest), largest * (1.0 / most), jnp.nan)
    return encode(scaled, fmt.numbers), scale
