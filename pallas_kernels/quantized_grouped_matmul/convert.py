"""Whole arrays converted: weights to floating point for products of many rows, activations to int8."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import (
    both,
    cdiv,
    load,
    next_power_of_2,
    pallas_call,
    program_id,
    should_interpret,
    store,
)
from pallas_kernels.qformats import QuantizedTensor
from pallas_kernels.quantized_grouped_matmul.tiles import Weight, pieces

_BLOCK_N, _BLOCK_K = 64, 128

# Adding it to a number below 2^22 rounds that to an integer, halves to even; the low bits then count.
_ROUNDER, _ROUNDER_BITS = 1.5 * 2.0**23, 0x4B400000


def _dequantize(*args: Any, w: QuantizedTensor, ptx: bool) -> None:
    values, scales, *zeros, out_ref = args
    D, F = w.shape[-2:]
    lead = (program_id(2),) if len(w.shape) == 3 else ()
    place = (lead, program_id(1) * _BLOCK_N, _BLOCK_N, _BLOCK_K, D, F, ptx)
    weight = Weight(w.format, values, scales, zeros[0] if zeros else None, *place)
    step, kept = program_id(0), dict[int, jax.Array]()
    out, inside = weight.outputs()
    for group in pieces(w.format, _BLOCK_K):
        k = step * _BLOCK_K + group[0].offset
        scale = weight.scale(k)
        scale = scale[0][:, None] if scale.ndim else scale
        for piece in group:
            tile = weight.tile(step, piece, kept, jnp.bfloat16).astype(jnp.float32) * scale
            at = step * _BLOCK_K + piece.offset + jnp.arange(piece.size)
            existing = None if inside is None else inside[:, None]
            mask = both((at < D)[None, :] if D % _BLOCK_K else None, existing)
            store(out_ref.at[(*lead, at[None, :], out[:, None])], tile.astype(out_ref.dtype), mask=mask)


def dequantize_pallas(w: QuantizedTensor, dtype: Any, *, interpret: bool | None = None) -> jax.Array:
    """Returns `[..., D, F]`, at most one leading axis; see `pallas_kernels.qformats.dequantize`."""
    arrays = [w.values, w.scales] + ([] if w.zeros is None else [w.zeros])
    *lead, D, F = w.shape
    return pallas_call(
        functools.partial(_dequantize, w=w, ptx=not should_interpret(interpret)),
        name=f"dequantize_{w.format.name}",
        grid=(cdiv(D, _BLOCK_K), cdiv(F, _BLOCK_N), *lead),
        out_shape=jax.ShapeDtypeStruct(w.shape, dtype),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(*arrays)


def _quantize_rows(x_ref: Any, values_ref: Any, scale_ref: Any, *, D: int) -> None:
    row, at = program_id(0), jnp.arange(_pad(D))
    mask = at < D
    x = load(x_ref.at[row, at], mask=mask, other=0.0).astype(jnp.float32)
    size = jnp.abs(x)
    most = jnp.max(size)
    # A maximum may drop NaN (it does on GPUs), a comparison does not.
    wild = jnp.max(jnp.where(size < jnp.inf, 0.0, 1.0))
    inverse = jnp.where(most > 0, 127.0 / jnp.maximum(most, 1e-30), 0.0)
    bits = jax.lax.bitcast_convert_type(jnp.clip(x * inverse, -127.0, 127.0) + _ROUNDER, jnp.int32)
    store(values_ref.at[row, at], (bits - _ROUNDER_BITS).astype(jnp.int8), mask=mask)
    store(scale_ref.at[row], jnp.where(wild > 0, jnp.nan, most * (1.0 / 127.0)))


def _pad(width: int) -> int:
    return max(32, next_power_of_2(width))


def quantize_rows_pallas(x: jax.Array, *, interpret: bool | None = None) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.qformats.quantize_rows`; a program has a row in its registers.

    On a GPU the one division is not correctly rounded: a value within a millionth of a half may go either
    way.
    """
    R, D = x.shape
    shapes = [jax.ShapeDtypeStruct((R, D), jnp.int8), jax.ShapeDtypeStruct((R,), jnp.float32)]
    return tuple(
        pallas_call(
            functools.partial(_quantize_rows, D=D),
            name="quantize_rows",
            grid=(R,),
            out_shape=shapes,
            num_warps=max(1, min(8, _pad(D) // (32 * 16))),
            num_stages=1,
            interpret=interpret,
        )(x)
    )
