"""The contracts of `quantized_grouped_matmul` and `quantized_grouped_swiglu`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import wide_type
from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.grouped_swiglu.reference import grouped_swiglu_reference
from pallas_kernels.groups import Activation
from pallas_kernels.qformats import Format, QuantizedTensor, dequantize, quantize_rows


def as_multiplied(x: jax.Array, x_scale: jax.Array | None, fmt: Format, wide: Any) -> jax.Array:
    """Returns x as the product sees it: for `w8a8` rounded to eight bits, or that given as int8."""
    if fmt.kind != "w8a8":
        return x.astype(wide)
    values, scale = quantize_rows(x) if x_scale is None else (x, x_scale)
    return values.astype(wide) * scale[:, None].astype(wide)


def quantized_grouped_matmul_reference(
    x: jax.Array,
    w: QuantizedTensor,
    rows: jax.Array,
    block_expert: jax.Array,
    num_blocks: jax.Array,
    *,
    block_m: int,
    bias: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    x_scale: jax.Array | None = None,
    out_dtype: Any = None,
) -> jax.Array:
    """Computes `grouped_matmul` of the dequantized weights; for `w8a8` of the dequantized activations, too.

    Args:
        x: `[R, D]`; for `w8a8` also int8, then with x_scale float32 `[R]`.
        w: `[E, D, F]`; see `pallas_kernels.qformats`.
        rows, block_expert, num_blocks, block_m, bias, row_scale: as of `grouped_matmul`.
        out_dtype: None: x's, float32 if that is int8.
    """
    wide, out = dtypes(x, out_dtype, w.scales)
    x, matrix = as_multiplied(x, x_scale, w.format, wide), dequantize(w, wide)
    options: dict[str, Any] = {"block_m": block_m, "bias": bias, "row_scale": row_scale, "out_dtype": out}
    return grouped_matmul_reference(x, matrix, rows, block_expert, num_blocks, **options)


def quantized_grouped_swiglu_reference(
    x: jax.Array,
    gate: QuantizedTensor,
    up: QuantizedTensor,
    rows: jax.Array,
    block_expert: jax.Array,
    num_blocks: jax.Array,
    *,
    block_m: int,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    activation: Activation = "silu",
    x_scale: jax.Array | None = None,
    out_dtype: Any = None,
) -> jax.Array:
    """Computes `grouped_swiglu` of the dequantized weights (and activations); arguments as above."""
    wide, out = dtypes(x, out_dtype, gate.scales)
    x = as_multiplied(x, x_scale, gate.format, wide)
    return grouped_swiglu_reference(
        x,
        dequantize(gate, wide),
        dequantize(up, wide),
        rows,
        block_expert,
        num_blocks,
        block_m=block_m,
        gate_bias=gate_bias,
        up_bias=up_bias,
        activation=activation,
    ).astype(out)


def dtypes(x: jax.Array, out_dtype: Any, scales: jax.Array) -> tuple[Any, Any]:
    """Dtypes to compute in and to return."""
    integer = jnp.issubdtype(x.dtype, jnp.integer)
    wide = wide_type(scales.dtype if integer else x.dtype)
    return wide, out_dtype or (wide if integer else x.dtype)
