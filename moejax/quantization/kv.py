"""Keys and values in 8 bits, or in 4, with a scale for each token and key/value head.

A head's Dh numbers of a token become codes by one symmetric scale, its largest magnitude over the code's
(int8 127, float8_e4m3fn 448, float8_e5m2 57344, int4 7). Keys are quantized as they are stored, rotated. The
arithmetic is that of the GPU kernels, `pallas_kernels.kv`, on every path; this is the library's name for it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv import KV_LARGEST, dequantize_kv, is_quantized, quantize_kv

__all__ = [
    "KV_FORMATS", "as_numbers", "bits_dtype", "codes_in_byte", "dequantize_kv", "from_bits", "is_quantized",
    "quantize_kv", "round_trip", "to_bits",
]  # fmt: skip

KV_FORMATS = tuple(KV_LARGEST)
"""Names of the dtypes that a cache may have beside the model's own."""


def bits_dtype(dtype: Any) -> Any:
    """Returns the dtype that stores numbers outside of kernels: int8 for integers, uint8 for 8-bit floats,
    uint16 for bfloat16.

    XLA:CPU moves floats this short by way of longer ones: a loop that reads or writes slices of an array
    converts all of it.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.dtype(jnp.int8)
    return jnp.dtype(jnp.uint8 if jnp.dtype(dtype).itemsize == 1 else jnp.uint16)


def codes_in_byte(dtype: Any) -> int:
    """Returns how many codes a number of `bits_dtype` has."""
    return 2 if jnp.dtype(dtype) == jnp.int4 else 1


def to_bits(codes: jax.Array) -> jax.Array:
    """Returns codes `[..., Dh]` as `bits_dtype`; int4 as `[..., Dh / 2]`, whose upper four bits are of the
    second half."""
    if codes.dtype != jnp.int4:
        return jax.lax.bitcast_convert_type(codes, bits_dtype(codes.dtype))
    lower, upper = jnp.split(codes.astype(jnp.int8), 2, axis=-1)
    return (lower & jnp.int8(15)) | (upper << jnp.int8(4))


def from_bits(bits: jax.Array, dtype: Any, axis: int = -1) -> jax.Array:
    """Returns codes of `dtype` again, those of int4 as int8; `axis` is that of Dh."""
    if jnp.dtype(dtype) != jnp.int4:
        return jax.lax.bitcast_convert_type(bits, jnp.dtype(dtype))
    four = jnp.int8(4)
    return jnp.concatenate([(bits << four) >> four, bits >> four], axis=axis)


def as_numbers(stored: jax.Array) -> jax.Array:
    """Returns bfloat16 that lies as `bits_dtype`, and all else as it is."""
    return from_bits(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored


def round_trip(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns x `[..., Dh]` after a trip through `dtype`: the plain twin of a quantized cache.

    x itself where `dtype` is not one of `KV_FORMATS`.
    """
    if not is_quantized(jnp.dtype(dtype)):
        return x
    return dequantize_kv(*quantize_kv(x, dtype)).astype(x.dtype)
