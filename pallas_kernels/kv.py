"""Formats of key/value pages, shared by `rope_kv_write`, which writes them, and `ragged_paged_attention`.

A pool is `[N, K, bs, Dh]`: page, KV head, slot, dimension. Quantized pools come with a float32 scale per
token and KV head, `[N, K, bs]`: value = stored * scale. The functions here are the contract, in plain jnp.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import FLOATS, wide_type
from pallas_kernels.errors import check_that

KV_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int4": 7.0}
"""Quantized pools by dtype name: the stored magnitude that a row's largest element is scaled to. The kernels
take none of four bits (`KV_DTYPES`)."""

KV_DTYPES = (*FLOATS, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
"""Every dtype a pool may have; floating-point ones are stored as they are, without scales."""


def is_quantized(dtype: Any) -> bool:
    """Returns whether pools of that dtype come with scales."""
    return str(jnp.dtype(dtype)) in KV_LARGEST


def check_pool_size(op: str, pages: jax.Array) -> None:
    """Raises KernelError for `k_pages` that Pallas would index with too few bits.

    It counts elements in 32 signed bits up to 4 GiB and in 64 above, so that one-byte elements alone can be
    too many for 32.
    """
    fits = pages.size <= 2**31 or pages.size * pages.dtype.itemsize > 2**32
    got = f"{pages.size} elements of {pages.dtype}"
    check_that(op, "k_pages", fits, got, "at most 2^31 of one byte, or more than 2^32")


def quantize_kv(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Quantizes symmetrically with one scale per row: per token and KV head.

    Args:
        x: `[..., Dh]`, floating; computed in float32 (float64 if x is).
        dtype: int8 or int4 (rounded to nearest, ties to even), float8_e4m3fn or float8_e5m2 (likewise, by
            XLA).

    Returns:
        `[..., Dh]` in `dtype`, and the scale `[...]`, float32 (float64 if x is): the row's largest magnitude
        over `KV_LARGEST[dtype]`; 1 where that is no normal number, so a row of zeros is stored as zeros.
    """
    wide = x.astype(wide_type(x.dtype))
    largest = KV_LARGEST[str(jnp.dtype(dtype))]
    scale = jnp.max(jnp.abs(wide), axis=-1) / largest
    scale = jnp.where(scale < jnp.finfo(wide.dtype).tiny, jnp.ones_like(scale), scale)
    stored = jnp.clip(wide / scale[..., None], -largest, largest)
    if jnp.issubdtype(dtype, jnp.integer):
        stored = jnp.round(stored)
    return stored.astype(dtype), scale


def dequantize_kv(values: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns `values * scale[..., None]` in float32 (float64 if either is); unquantized values only widen.

    Args:
        values: `[..., Dh]` of any of `KV_DTYPES`, or float64; scale: `[...]` or None.
    """
    if scale is None:
        return values.astype(wide_type(values.dtype))
    wide = wide_type(values.dtype, scale.dtype)
    return values.astype(wide) * scale.astype(wide)[..., None]
