"""Rounding to nearest into the layouts of `pallas_kernels.qformats`: the twin of the library's own."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.errors import check_that
from pallas_kernels.fp8 import MAX, encode_e4m3
from pallas_kernels.qformats import FP8_BLOCK, PACK, Format, QuantizedTensor, spread


def pack_nibbles(values: jax.Array) -> jax.Array:
    """Packs numbers below 16, `[..., D]`, as uint8 `[..., D/2]`."""
    *lead, D = values.shape
    blocks = values.astype(jnp.uint8).reshape(*lead, D // PACK, 2, PACK // 2)
    return (blocks[..., 0, :] | (blocks[..., 1, :] << jnp.uint8(4))).reshape(*lead, D // 2)


def quantize(w: jax.Array, fmt: Format, scale_dtype: Any = jnp.float32) -> QuantizedTensor:
    """Rounds to nearest. Symmetric formats map the largest magnitude of a group to the largest code.

    Raises:
        KernelError: D is not a multiple of the format's group or pack block.
    """
    *lead, D, F = w.shape
    check_that("quantize", "w", D % fmt.block == 0, f"D={D}", f"a multiple of {fmt.block} for {fmt.name}")
    wide = w.astype(jnp.float32)
    if fmt.kind == "fp8" and fmt.group:
        pad = [(0, 0)] * len(lead) + [(0, -D % FP8_BLOCK), (0, -F % FP8_BLOCK)]
        a, b = fmt.shapes(D, F)[1]
        blocks = jnp.pad(wide, pad).reshape(*lead, a, FP8_BLOCK, b, FP8_BLOCK)
        low, high = blocks.min(axis=(-3, -1)), blocks.max(axis=(-3, -1))
    else:
        groups = wide.reshape(*lead, fmt.shapes(D, F)[1][0], fmt.group or D, F)
        low, high = groups.min(axis=-2), groups.max(axis=-2)
    most = {"w4a16": 7.0, "fp8": MAX}.get(fmt.kind, 127.0)
    span = jnp.maximum(high, 0) - jnp.minimum(low, 0) if fmt.zeros else jnp.maximum(high, -low)
    # A group of zeros takes any scale.
    scales = jnp.where(span > 0, span / (15.0 if fmt.zeros else most), 1.0).astype(scale_dtype)
    step = scales.astype(jnp.float32)
    scaled = wide / spread(step, D, F, fmt)
    zeros = None
    if fmt.kind == "fp8":
        return QuantizedTensor(jnp.swapaxes(encode_e4m3(scaled), -1, -2), scales, None, fmt)
    if fmt.kind == "w4a16":
        point = jnp.clip(jnp.round(-jnp.minimum(low, 0) / step), 0, 15)
        zeros = point.astype(jnp.uint8) if fmt.zeros else None
        shift = spread(point, D, F, fmt) if fmt.zeros else 8.0
        nibbles = jnp.clip(jnp.round(scaled) + shift, 0, 15).astype(jnp.uint8)
        return QuantizedTensor(pack_nibbles(jnp.swapaxes(nibbles, -1, -2)), scales, zeros, fmt)
    values = jnp.clip(jnp.round(scaled), -127, 127).astype(jnp.int8)
    return QuantizedTensor(jnp.swapaxes(values, -1, -2), scales, None, fmt)
