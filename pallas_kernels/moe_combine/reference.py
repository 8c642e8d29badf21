"""The contract of `moe_combine`."""

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import wide_type


def moe_combine_reference(y: jax.Array, slot_of: jax.Array) -> jax.Array:
    """Sums `out[t] = Σ_j y[slot_of[t, j]]`, j rising, in float32 (float64 if y is).

    Args:
        y: `[P, D]`, weighted already (the down projection does it); slot_of: int32 `[T, k]`.

    Returns:
        `[T, D]` in y's dtype. A slot outside `[0, P)` contributes nothing.
    """
    P, k = y.shape[0], slot_of.shape[1]
    total = jnp.zeros((slot_of.shape[0], y.shape[1]), wide_type(y.dtype))
    for j in range(k):
        slot = slot_of[:, j]
        filled = (slot >= 0) & (slot < P)
        row = y[jnp.clip(slot, 0, P - 1)].astype(total.dtype)
        total = total + jnp.where(filled[:, None], row, 0)
    return total.astype(y.dtype)
