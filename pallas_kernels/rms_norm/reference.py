"""The contract of `rms_norm` (Zhang and Sennrich, arXiv 1910.07467), layer normalisation (Ba et al., arXiv
1607.06450) among it."""

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import wide_type
from pallas_kernels.moe_combine.reference import moe_combine_reference


def rms_norm_reference(
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    slot_of: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float,
    kind: str = "rms",
) -> tuple[jax.Array, jax.Array]:
    """Computes `s = x + residual`, `s / sqrt(mean(s²) + eps) · weight`; float32 statistics (float64 if x is).

    Args:
        x: `[T, D]`; weight: `[D]`.
        kind: "rms"; "rms_unit_offset", where 1 + weight stands for the weight (Gemma); or "layer", where the
            mean of s is taken off it first, and bias `[D]`, if there is one, added last.
        residual: `[T, D]`; or its parts `[k, T, D]`; or, with slot_of int32 `[T, k]`, what
            `moe_combine_reference` makes it from. Such sums are rounded to x's dtype first.

    Returns:
        The normalised `[T, D]` and s, both in x's dtype. The mean is of the sum as rounded to x's dtype,
        which is what the next layer adds to; the quotient is rounded before the weight, as in Hugging Face's
        modules. The other kinds are rounded after the weight and the bias.
    """
    if residual is not None and slot_of is not None:
        residual = moe_combine_reference(residual.astype(wide_type(residual.dtype)), slot_of)
    elif residual is not None and residual.ndim == 3:
        residual = residual.sum(0, dtype=wide_type(residual.dtype))
    total = x if residual is None else x + residual.astype(x.dtype)
    wide = total.astype(wide_type(x.dtype))
    if kind == "layer":
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if kind == "rms":
        return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)[None, :], total
    weight = weight.astype(wide.dtype) + jnp.asarray(kind == "rms_unit_offset", wide.dtype)
    shift = jnp.zeros((), wide.dtype) if bias is None else bias.astype(wide.dtype)[None, :]
    return (wide * scale * weight[None, :] + shift).astype(x.dtype), total
