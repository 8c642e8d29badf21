"""e4m3 numbers by integer arithmetic: sm_80 has no conversion, and Triton refuses to emulate one. And e2m1.

Usable inside kernels and outside. e4m3 is sign, four exponent bits (bias 7), three mantissa bits; there is no
infinity, `0x7f` and `0xff` are NaN, the largest is 448 (Micikevicius et al., arXiv 2209.05433).
"""

from typing import Any

import jax
import jax.numpy as jnp

MAX = 448.0

_LEAST_NORMAL = 2.0**-6


def decode_e4m3(bits: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    """Returns the values of uint8 codes in `dtype` (bfloat16, float16 or wider); exact.

    The seven magnitude bits go to where a 16-bit float has exponent and mantissa, the exponent re-biased by
    addition. A subnormal code m then reads as v = (1 + m/8) 2^-7 in place of m 2^-9 = 2v - 2^-6; for every
    other code 2v - 2^-6 >= v, so the smaller of both is right for all. No subnormal number is ever an
    operand: XLA's CPU code flushes those.
    """
    half = jnp.float16 if jnp.dtype(dtype) == jnp.float16 else jnp.bfloat16
    mantissa, bias = (10, 15) if half == jnp.float16 else (7, 127)
    wide = bits.astype(jnp.uint16)
    magnitude = wide & jnp.uint16(0x7F)
    code = (magnitude << jnp.uint16(mantissa - 3)) + jnp.uint16((bias - 7) << mantissa)
    v = jax.lax.bitcast_convert_type(code, half)
    v = jnp.minimum(v, v * jnp.asarray(2.0, half) - jnp.asarray(_LEAST_NORMAL, half))
    sign = (wide & jnp.uint16(0x80)) << jnp.uint16(8)
    value = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(v, jnp.uint16) | sign, half)
    return jnp.where(magnitude == jnp.uint16(0x7F), jnp.asarray(jnp.nan, half), value).astype(dtype)


def decode_e2m1(nibbles: jax.Array) -> jax.Array:
    """Returns float32 values; exact. The eight magnitudes lie on the greatest of three lines."""
    m = (nibbles & jnp.uint8(7)).astype(jnp.float32)
    value = jnp.maximum(jnp.maximum(0.5 * m, m - 2.0), 2.0 * m - 8.0)
    return jnp.where(nibbles >= jnp.uint8(8), -value, value)


def encode_e4m3(x: jax.Array) -> jax.Array:
    """Returns uint8 codes of the nearest e4m3 numbers (ties to even), saturating at ±448; NaN stays NaN."""
    return _encode(x, MAX, mantissa=3, bias=7)


def encode_e5m2(x: jax.Array) -> jax.Array:
    """Returns uint8 codes of the nearest e5m2 numbers (ties to even), saturating at ±57344; NaN stays NaN."""
    return _encode(x, 57344.0, mantissa=2, bias=15)


def _encode(x: jax.Array, largest: float, mantissa: int, bias: int) -> jax.Array:
    x = x.astype(jnp.float32)
    word = jax.lax.bitcast_convert_type(x, jnp.int32)
    a = jnp.minimum(jnp.abs(x), largest)
    bits = jax.lax.bitcast_convert_type(a, jnp.int32)
    # Add half of the last kept place, less one where that place is even; a carry moves the exponent.
    cut = 23 - mantissa
    normal = ((bits + ((1 << cut - 1) - 1) + ((bits >> cut) & 1)) >> cut) - (127 - bias << mantissa)
    # This power of two has its last place at the least subnormal: the addition rounds, the low bits count.
    power = 24 - bias - mantissa
    small = jax.lax.bitcast_convert_type(a + 2.0**power, jnp.int32) - (127 + power << 23)
    code = jnp.where(a < 2.0 ** (1 - bias), small, normal)
    code = jnp.where(x != x, 0x7F, code)
    return (code | ((word >> 24) & 0x80)).astype(jnp.uint8)
