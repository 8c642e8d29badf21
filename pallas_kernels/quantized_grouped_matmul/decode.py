"""Codes to 16-bit floats inside a kernel, four at a time: exact, and few instructions each.

A decode step reads a weight once and may spend four to nine instructions on it before these, not memory, set
the pace. What the compiler makes of the same arithmetic in jnp takes two to three times as many, so compiled
kernels use PTX on packed pairs. Interpreted ones use jnp; tests compare both with an emulation of the PTX.

Numbers are built by putting code bits under a fixed exponent: 128 in bfloat16 (1024 in float16) has a last
place of 1, so its low mantissa bits count. `0xea` is the lookup table of `(a & b) | c`, `0xbe` that of `(a ^
b) | c`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import inline_ptx
from pallas_kernels.fp8 import decode_e2m1, decode_e4m3

# Four bytes of $2 to the low bytes of two registers' four half-words; and to their high bytes.
_LOW = "prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;"
_HIGH = "prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;"

NIBBLE = {
    # 128 + n
    "bfloat16": _LOW + "{shift} mov.b32 m, 0x43004300;"
    "lop3.b32 $0, a, 0x000f000f, m, 0xea; lop3.b32 $1, b, 0x000f000f, m, 0xea;",
    # 1024 + n
    "float16": _LOW + "{shift} mov.b32 m, 0x64006400;"
    "lop3.b32 $0, a, 0x000f000f, m, 0xea; lop3.b32 $1, b, 0x000f000f, m, 0xea;",
}
_SHIFT = "shr.u32 a, a, 4; shr.u32 b, b, 4;"

INT8 = {
    # (128 + low seven bits) - (128 or, with the sign bit, 256)
    "bfloat16": _LOW + "mov.b32 m, 0x43004300;"
    "lop3.b32 s, a, 0x00800080, m, 0xea; lop3.b32 t, b, 0x00800080, m, 0xea;"
    "lop3.b32 a, a, 0x007f007f, m, 0xea; lop3.b32 b, b, 0x007f007f, m, 0xea;"
    "mov.b32 m, 0xbf80bf80; fma.rn.bf16x2 $0, s, m, a; fma.rn.bf16x2 $1, t, m, b;",
    # (1024 + code + 128) - 1152, the addition of 128 being a flip of the sign bit
    "float16": _LOW + "mov.b32 m, 0x64006400; mov.b32 s, 0x00800080;"
    "lop3.b32 a, a, s, m, 0xbe; lop3.b32 b, b, s, m, 0xbe;"
    "mov.b32 m, 0x64806480; sub.f16x2 $0, a, m; sub.f16x2 $1, b, m;",
}

E4M3 = {
    # Exponent and mantissa bits in place, the bias corrected by a product with 2^120 (2^8), subnormals too.
    "bfloat16": _HIGH + "and.b32 s, a, 0x80008000; and.b32 t, b, 0x80008000;"
    "shr.u32 a, a, 4; shr.u32 b, b, 4;"
    "lop3.b32 a, a, 0x07f007f0, s, 0xea; lop3.b32 b, b, 0x07f007f0, t, 0xea;"
    "mov.b32 s, 0x7b807b80; mov.b32 t, 0x80008000;"
    "fma.rn.bf16x2 $0, a, s, t; fma.rn.bf16x2 $1, b, s, t;",
    "float16": _HIGH + "and.b32 s, a, 0x80008000; and.b32 t, b, 0x80008000;"
    "shr.u32 a, a, 1; shr.u32 b, b, 1;"
    "lop3.b32 a, a, 0x3f803f80, s, 0xea; lop3.b32 b, b, 0x3f803f80, t, 0xea;"
    "mov.b32 s, 0x5c005c00; mul.f16x2 $0, a, s; mul.f16x2 $1, b, s;",
}

E2M1 = {
    # Sign, exponent and mantissa bits in place: the number times `E2M1_UNIT`, subnormals too.
    "bfloat16": _HIGH + "{shift} and.b32 s, a, 0x80008000; and.b32 t, b, 0x80008000;"
    "shr.u32 a, a, 6; shr.u32 b, b, 6;"
    "lop3.b32 $0, a, 0x01c001c0, s, 0xea; lop3.b32 $1, b, 0x01c001c0, t, 0xea;",
    "float16": _HIGH + "{shift} and.b32 s, a, 0x80008000; and.b32 t, b, 0x80008000;"
    "shr.u32 a, a, 3; shr.u32 b, b, 3;"
    "lop3.b32 $0, a, 0x0e000e00, s, 0xea; lop3.b32 $1, b, 0x0e000e00, t, 0xea;",
}
E2M1_UNIT = {"bfloat16": 2.0**-126, "float16": 2.0**-14}
_SHIFT_LEFT = "shl.b32 a, a, 4; shl.b32 b, b, 4;"


def _half(dtype: Any) -> Any:
    return jnp.float16 if jnp.dtype(dtype) == jnp.float16 else jnp.bfloat16


def _packed(body: str, codes: jax.Array, half: Any) -> jax.Array:
    text = "{ .reg .b32 a, b, s, t, m; " + body + " }"
    return inline_ptx(text, codes, constraints="=r,=r,r", pack=4, dtype=half)


def decode_fp8(codes: jax.Array, dtype: Any, ptx: bool) -> jax.Array:
    """Decodes finite e4m3 bits."""
    half = _half(dtype)
    value = _packed(E4M3[jnp.dtype(half).name], codes, half) if ptx else decode_e4m3(codes, half)
    return value.astype(dtype)


def decode_int8(codes: jax.Array, dtype: Any, ptx: bool) -> jax.Array:
    """Decodes int8."""
    half = _half(dtype)
    value = _packed(INT8[jnp.dtype(half).name], codes, half) if ptx else codes.astype(half)
    return value.astype(dtype)


def decode_nibbles(codes: jax.Array, high: bool, zero: jax.Array | None, dtype: Any, ptx: bool) -> jax.Array:
    """Returns the low or the high nibbles, less `zero` (uint8, broadcast; None: 8)."""
    half = _half(dtype)
    base, number = (0x6400, 1024) if half == jnp.float16 else (0x4300, 128)

    def biased(n: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(n.astype(jnp.uint16) | jnp.uint16(base), half)

    if ptx:
        body = NIBBLE[jnp.dtype(half).name].replace("{shift}", _SHIFT if high else "")
        value = _packed(body, codes, half)
    else:
        value = biased((codes >> jnp.uint8(4)) if high else (codes & jnp.uint8(15)))
    less = jnp.asarray(number + 8, half) if zero is None else biased(zero)
    return (value - less).astype(dtype)


def decode_fp4(codes: jax.Array, high: bool, dtype: Any, ptx: bool, *, raw: bool = False) -> jax.Array:
    """Decodes the low or the high nibbles as e2m1 numbers; with `raw` PTX gives them times `E2M1_UNIT`, for
    a caller that multiplies them anyway."""
    if not ptx:
        return decode_e2m1((codes >> jnp.uint8(4)) if high else (codes & jnp.uint8(15))).astype(dtype)
    half = _half(dtype)
    name = jnp.dtype(half).name
    value = _packed(E2M1[name].replace("{shift}", "" if high else _SHIFT_LEFT), codes, half)
    return (value if raw else value * jnp.asarray(1 / E2M1_UNIT[name], half)).astype(dtype)
