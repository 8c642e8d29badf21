"""Sums that are left to the kernel which reads them: of experts' outputs, and of a product's parts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class RowSums(NamedTuple):
    """An array `[N, D]` that the kernel of the next norm is to add up from rows.

    Attributes:
        rows: `[P, D]`; or parts of a product `[S, N, D]`, whose sum is over S.
        slot_of: int32 `[N, k]`, rows of each sum; one outside `[0, P)` adds nothing. None for parts.
    """

    rows: jax.Array
    slot_of: jax.Array | None = None


Residual = jax.Array | RowSums | None
"""What the next norm adds to the array `[..., D]` beside it."""


def summed(residual: Any, x: jax.Array) -> Any:
    """Returns a residual as an array of x's shape: experts' sums are made, anything else is as it was."""
    if not isinstance(residual, RowSums):
        return residual
    rows = residual.rows.at[residual.slot_of].get(mode="fill", fill_value=0)
    return jnp.sum(rows, axis=1, dtype=jnp.float32).astype(x.dtype).reshape(x.shape)


def split_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Computes `x @ weight` in parts along D, x `[N, D]` and weight `[D, F]` → float32 `[S, N, F]`.

    A product of few rows has fewer tiles than a GPU has processors, so XLA splits D and launches another
    kernel for the sum over the parts ("split-K"). Here whoever reads the parts adds them up. S is 1, or where
    there are less than 128 tiles of 64 by 64 4 to 16, with at least 128 of D in each part; XLA does not
    split these once more (docs/log.md).
    """
    (N, D), F = x.shape, weight.shape[1]
    tiles, S = -(-N // 64) * -(-F // 64), 1
    while tiles < 128 and S < 16 and (S < 4 or S * tiles < 128) and D % (256 * S) == 0:
        S *= 2
    parts, dims = (x.reshape(N, S, D // S), weight.reshape(S, D // S, F)), (((2,), (1,)), ((1,), (0,)))
    return jax.lax.dot_general(*parts, dims, preferred_element_type=jnp.float32)
