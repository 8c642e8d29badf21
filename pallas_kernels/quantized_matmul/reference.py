"""The contract of `quantized_matmul`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.qformats import QuantizedTensor, dequantize
from pallas_kernels.quantized_grouped_matmul.reference import as_multiplied, dtypes


def quantized_matmul_reference(
    x: jax.Array, w: QuantizedTensor, *, x_scale: jax.Array | None = None, out_dtype: Any = None
) -> jax.Array:
    """Computes `x @ dequantize(w)`, for `w8a8` of dequantized activations, in float32 (float64 if x is).

    Args:
        x: `[T, D]`; for `w8a8` also int8, then with x_scale float32 `[T]`.
        w: `[D, F]`; see `pallas_kernels.qformats`.
        out_dtype: None: x's, float32 if that is int8.

    Returns:
        `[T, F]`.
    """
    wide, out = dtypes(x, out_dtype, w.scales)
    x, matrix = as_multiplied(x, x_scale, w.format, wide), dequantize(w, wide)
    return jnp.matmul(x, matrix, precision="highest", preferred_element_type=wide).astype(out)
