"""From a token's list of experts to an expert's list of tokens, cut into blocks of equal height.

    assignments (token-major)   t0e2 t0e0 t1e2 t1e1 …
    sorted by expert            e0: t0 | e1: t1 | e2: t0 t1 | …      (stable: token order within an expert)
    blocks of `block_rows`      each block belongs to one expert; a short last block is padded

`block_expert` maps a block to its expert, so that a kernel or loop needs one weight matrix a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.moe.router import expert_counts


class BlockPlan(NamedTuple):
    """Where each assignment's row stands.

    Attributes:
        order: int32 `[A]`, A = N·k: assignment at each sorted position.
        row_of: int32 `[A]`: sorted position of each assignment (the inverse of `order`).
        counts: int32 `[E]`: rows per expert.
        block_expert: int32 `[M]`: expert of each block, M the static most number of blocks.
        block_start: int32 `[M]`: first sorted row of each block.
        num_blocks: int32 scalar: blocks in use; those past it are to be skipped.
    """

    order: jax.Array
    row_of: jax.Array
    counts: jax.Array
    block_expert: jax.Array
    block_start: jax.Array
    num_blocks: jax.Array


def max_blocks(assignments: int, num_experts: int, block_rows: int) -> int:
    """The most blocks that A assignments can need: each expert may leave one block part empty."""
    return min(assignments, assignments // block_rows + min(num_experts, assignments))


def plan_blocks(ids: jax.Array, num_experts: int, block_rows: int) -> BlockPlan:
    """Sorts assignments by expert. ids int32 `[N, k]`; ids equal to E come last and get no block."""
    flat = ids.reshape(-1)
    A = flat.shape[0]
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    row_of = jnp.zeros(A, jnp.int32).at[order].set(jnp.arange(A, dtype=jnp.int32), unique_indices=True)
    counts = expert_counts(flat, num_experts)
    blocks = (counts + block_rows - 1) // block_rows
    last_block = jnp.cumsum(blocks)
    first_row = jnp.cumsum(counts) - counts
    index = jnp.arange(max_blocks(A, num_experts, block_rows), dtype=jnp.int32)
    # The expert of block i is the number of experts whose blocks all come before i.
    expert = jnp.sum(index[:, None] >= last_block[None, :], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, num_experts - 1)
    within = index - (last_block - blocks)[expert]
    return BlockPlan(order, row_of, counts, expert, first_row[expert] + within * block_rows, last_block[-1])


def combine(rows: jax.Array, plan: BlockPlan, weights: jax.Array) -> jax.Array:
    """Weighted sum of each token's expert outputs, in the token's own expert order (so deterministic).

    rows `[≥ A, D]` in sorted order, weights `[N, k]` → `[N, D]`. Rows of assignments that were not made
    may hold anything: they are masked, not only multiplied by 0.
    """
    N, k = weights.shape
    picked = rows[plan.row_of].reshape(N, k, -1)
    made = (weights != 0)[..., None]
    return jnp.sum(jnp.where(made, picked, 0) * weights[..., None].astype(rows.dtype), axis=1)
