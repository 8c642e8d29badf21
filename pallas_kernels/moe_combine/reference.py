"""The contract of `moe_combine`."""

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import wide_type


def moe_combine_reference(y: jax.Array, slot_of: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Sums `out[t] = Σ_j weights[t, j] · y[slot_of[t, j]]`, j rising, in float32 (float64 if y is).

    Args:
        y: `[P, D]`; slot_of: int32 `[T, k]`; weights: float32 `[T, k]`, None for ones.

    Returns:
        `[T, D]` in y's dtype. A slot outside `[0, P)` contributes nothing, whatever its weight.
    """
    P, k = y.shape[0], slot_of.shape[1]
    wide = wide_type(y.dtype)
    total = jnp.zeros((slot_of.shape[0], y.shape[1]), wide)
    for j in range(k):
        slot = slot_of[:, j]
        filled = (slot >= 0) & (slot < P)
        row = y[jnp.clip(slot, 0, P - 1)].astype(wide)
        if weights is not None:
            row = row * weights[:, j, None].astype(wide)
        total = total + jnp.where(filled[:, None], row, 0)
    return total.astype(y.dtype)
