"""Products of rows with a dense matrix, in the form that XLA's CPU code is fast at (docs/log.md)."""

import math
from typing import Any

import jax
import jax.numpy as jnp

_LONGEST_ROW = 4096
"""Numbers from which XLA:CPU multiplies one row by rows number by number, ten times slower."""


def dot(x: jax.Array, weight: jax.Array, dtype: Any = None) -> jax.Array:
    """Multiplies x `[..., D]` by `[D, F]` of the same dtype to `[..., F]` of `dtype` (None: x's).

    A weight `[E, D, F]` multiplies x `[E, ..., D]`.
    """
    out = jnp.dtype(dtype or x.dtype)
    if x.dtype != jnp.bfloat16 or jax.default_backend() != "cpu":
        return jnp.matmul(x, weight, preferred_element_type=None if out == x.dtype else out)
    # XLA:CPU has a product of bfloat16 that gives float32, for two rows and more; its other products of
    # bfloat16 write the weight down in float32 first.
    alone = weight.ndim == 2 and math.prod(x.shape[:-1]) == 1
    rows = jnp.broadcast_to(x.reshape(1, -1), (2, x.shape[-1])) if alone else x
    y = jnp.matmul(rows, weight, preferred_element_type=jnp.float32).astype(out)
    return y[0].reshape(*x.shape[:-1], -1) if alone else y


def dot_by_rows(x: jax.Array, stored: jax.Array, dtype: Any = None) -> jax.Array:
    """Multiplies x `[..., D]` by stored `[F, D]` of the same dtype to `[..., F]` of `dtype` (None: x's)."""
    D = x.shape[-1]
    if D < _LONGEST_ROW or math.prod(x.shape[:-1]) > 1 or jax.default_backend() != "cpu":
        # On CPU a vector's product in this form takes half the time of the contraction of the last axes.
        return jnp.matmul(x, stored.T, preferred_element_type=dtype)
    pieces = -(-D // (_LONGEST_ROW - 64))
    length = -(-D // pieces // 64) * 64
    parts = [
        jnp.matmul(x[..., i : i + length], stored[:, i : i + length].T, preferred_element_type=jnp.float32)
        for i in range(0, D, length)
    ]
    # Without the barriers the products are one again.
    first, *others = (jax.lax.optimization_barrier(part) for part in parts)
    return sum(others, first).astype(dtype or x.dtype)
