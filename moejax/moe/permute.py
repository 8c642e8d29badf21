"""Conversion of tokens' lists of experts to experts' lists of tokens, cut into blocks.

    assignments (token-major)   t0e2 t0e0 t1e2 t1e1 …
    sorted by expert            e0: t0 | e1: t1 | e2: t0 t1 | …      (stable: token order within an expert)
    blocks                      each block belongs to one expert; one that is not full is padded

A loop thus needs one weight matrix a block. Blocks have one height, or several, of which the least holds an
expert's rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.moe.router import expert_counts
from moejax.ops.grouped_matmul import Blocks


class BlockPlan(NamedTuple):
    """Positions of the assignments' rows, and the blocks of each height.

    Attributes:
        order: int32 `[A]`, A = N·k: assignment at each sorted position.
        row_of: int32 `[A]`: sorted position of each assignment (the inverse of `order`).
        counts, first: int32 `[E]`: rows per expert, and the first of them.
        single: the blocks of one row.
        blocks: those of each of the plan's heights.
    """

    order: jax.Array
    row_of: jax.Array
    counts: jax.Array
    first: jax.Array
    single: Blocks
    blocks: tuple[Blocks, ...]


def plan_blocks(
    ids: jax.Array, num_experts: int, singles: int, heights: tuple[int, ...], skip: int = 0
) -> BlockPlan:
    """Sorts assignments by expert and covers each expert's rows with blocks of one or more heights.

    An expert's rows fill blocks of the greatest height; what is left goes one row at a time if it is at most
    `singles` rows, else into one block, the lowest that holds it.

    Args:
        ids: int32 `[N, k]`; those equal to E come last and get no block.
        singles: 0 with one height: blocks of equal height.
        heights: rising, above `singles`; with none, every row goes alone.
        skip: rows of each expert that lie in no block, its first ones.
    """
    order, row_of, totals = sort_by_expert(ids, num_experts)
    A, firsts = order.shape[0], jnp.cumsum(totals) - totals
    counts, first = totals, firsts
    if skip:
        counts, first = jnp.maximum(totals - skip, 0), firsts + jnp.minimum(totals, skip)
    if not heights:
        return BlockPlan(order, row_of, totals, firsts, _lay(counts, first, counts, 1, A), ())
    top = heights[-1]
    whole = counts // top
    rest = counts - whole * top
    tail = first + whole * top  # where an expert's rest begins
    alone = jnp.where(rest <= singles, rest, 0)
    single = _lay(alone, tail, rest, 1, min(A, num_experts * singles))
    blocks = []
    for below, height in zip((singles, *heights), heights, strict=False):
        mine = ((rest > below) & (rest <= height)).astype(jnp.int32)
        most = min(num_experts, A // (below + 1))
        if height == top:
            # The rest of an expert follows its whole blocks.
            blocks.append(_lay(whole + mine, first, counts, height, min(A, A // height + most)))
        else:
            blocks.append(_lay(mine, tail, rest, height, most))
    return BlockPlan(order, row_of, totals, firsts, single, tuple(blocks))


def sort_by_expert(ids: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `order`, `row_of` and `counts`, see `BlockPlan`."""
    flat = ids.reshape(-1)
    A = flat.shape[0]
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    row_of = jnp.zeros(A, jnp.int32).at[order].set(jnp.arange(A, dtype=jnp.int32), unique_indices=True)
    return order, row_of, expert_counts(flat, num_experts)


def _lay(blocks: jax.Array, first: jax.Array, rows: jax.Array, height: int, most: int) -> Blocks:
    """Lays `Blocks`, M = `most`, from experts' numbers of blocks, first rows and rows, int32 `[E]` each."""
    last_block = jnp.cumsum(blocks)
    index = jnp.arange(most, dtype=jnp.int32)
    # The expert of block i is the number of experts whose blocks all come before i: their ends, counted.
    ends = jnp.zeros(most + 1, jnp.int32).at[jnp.minimum(last_block, most)].add(1)
    expert = jnp.minimum(jnp.cumsum(ends)[:most], blocks.shape[0] - 1)
    within = index - (last_block - blocks)[expert]
    return Blocks(expert, first[expert] + within * height, (first + rows)[expert], last_block[-1])


def combine(rows: jax.Array, plan: BlockPlan, weights: jax.Array) -> jax.Array:
    """Sums each token's weighted expert outputs, in the token's own expert order (so deterministic).

    rows `[≥ A, D]` in sorted order, weights `[N, k]` → `[N, D]`. Rows of assignments that were not made
    may hold anything: they are masked, not only multiplied by 0.
    """
    N, k = weights.shape
    picked = rows[plan.row_of].reshape(N, k, -1)
    ran = (weights != 0)[..., None]
    return jnp.sum(jnp.where(ran, picked, 0) * weights[..., None].astype(rows.dtype), axis=1)
