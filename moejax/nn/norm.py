"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.nn.param import ParamSpec, declare


class RMSNorm(nnx.Module):
    """Normalises the last axis; statistics in float32, result in x's dtype."""

    def __init__(self, dim: int, axis: str | None, dtype: Any, eps: float) -> None:
        self.scale = declare(ParamSpec((dim,), (axis,), dtype, "ones"))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., dim]` → `[..., dim]`."""
        x32 = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        # Rounded to x's dtype before the scale, as Hugging Face does it.
        normed = (x32 * jax.lax.rsqrt(variance + self.eps)).astype(x.dtype)
        return jnp.broadcast_to(self.scale[...], x.shape) * normed
