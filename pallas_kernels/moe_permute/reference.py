"""The contract of `moe_permute`."""

import jax
import jax.numpy as jnp

from pallas_kernels.groups import Permutation, padded_rows


def moe_permute_reference(
    ids: jax.Array, *, num_experts: int, block_m: int, weights: jax.Array | None = None
) -> Permutation:
    """Sorts assignments stably by expert, each expert's rows from a multiple of `block_m` on.

    Args:
        ids: int32 `[T, k]`, experts; an id outside `[0, num_experts)` gets no slot.
        weights: floating `[T, k]`, which travel along.

    Returns:
        See `Permutation`.
    """
    T, k = ids.shape
    A, E = T * k, num_experts
    P = padded_rows(A, E, block_m)
    flat = ids.reshape(A)
    local = (flat >= 0) & (flat < E)
    key = jnp.where(local, flat, E)
    counts = jnp.zeros(E, jnp.int32).at[key].add(1, mode="drop")
    padded = (counts + block_m - 1) // block_m * block_m
    ends = jnp.cumsum(padded)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    # Sorted position → slot: each expert's rows shift by what the experts before it are padded.
    shift = (ends - padded) - (jnp.cumsum(counts) - counts)
    slot = jnp.where(local[order], jnp.arange(A) + shift[jnp.minimum(key[order], E - 1)], P)
    first = jnp.arange(P // block_m) * block_m
    expert = jnp.searchsorted(ends, first, side="right")
    assignment = jnp.full(P, A, jnp.int32).at[slot].set(order, mode="drop")
    filled = assignment < A
    if weights is not None:
        flat_weights = weights.reshape(A)[jnp.minimum(assignment, A - 1)]
        weights = jnp.where(filled, flat_weights, jnp.zeros_like(flat_weights))
    return Permutation(
        row_assignment=assignment,
        block_expert=jnp.where(first < ends[-1], expert, 0).astype(jnp.int32),
        num_blocks=(ends[-1:] // block_m).astype(jnp.int32),
        counts=counts.astype(jnp.int32),
        slot_of=jnp.zeros(A, jnp.int32).at[order].set(slot.astype(jnp.int32)).reshape(T, k),
        tokens=assignment // k,
        slots=jnp.where(filled, jnp.arange(P, dtype=jnp.int32), P),
        weights=weights,
    )
