"""Keys and values in 8 bits, with a scale for each token and key/value head.

A head's Dh numbers of a token become codes by one symmetric scale, its largest magnitude over the code's
(int8 127, float8_e4m3fn 448, float8_e5m2 57344). Keys are quantized as they are stored, rotated. The
arithmetic is that of the GPU kernels, `pallas_kernels.kv`, on every path; this is the library's name for it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv import KV_LARGEST, dequantize_kv, is_quantized, quantize_kv

__all__ = [
    "KV_FORMATS", "bits_dtype", "dequantize_kv", "from_bits", "is_quantized", "quantize_kv", "round_trip",
    "to_bits",
]  # fmt: skip

KV_FORMATS = tuple(KV_LARGEST)
"""Names of the dtypes that a cache may have beside the model's own."""


def bits_dtype(dtype: Any) -> Any:
    """Returns the dtype that stores codes outside of kernels: int8 for int8, uint8 for 8-bit floats.

    XLA:CPU moves 8-bit floats by way of float16: a loop that writes into an array converts all of it twice.
    """
    return jnp.dtype(jnp.int8 if jnp.dtype(dtype) == jnp.int8 else jnp.uint8)


def to_bits(codes: jax.Array) -> jax.Array:
    """Returns codes as `bits_dtype`."""
    return jax.lax.bitcast_convert_type(codes, bits_dtype(codes.dtype))


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """Returns codes of `dtype` again."""
    return jax.lax.bitcast_convert_type(bits, jnp.dtype(dtype))


def round_trip(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns x `[..., Dh]` after a trip through `dtype`: the plain twin of a quantized cache.

    x itself where `dtype` is not one of `KV_FORMATS`.
    """
    if not is_quantized(jnp.dtype(dtype)):
        return x
    return dequantize_kv(*quantize_kv(x, dtype)).astype(x.dtype)
