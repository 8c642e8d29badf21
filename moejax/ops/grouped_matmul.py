"""Expert products over block-aligned groups: the XLA implementation for CPU.

`jax.lax.ragged_dot` computes every expert on CPU (docs/log.md), so here a loop visits only the blocks in
use and reads only their experts' weights.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def grouped_swiglu_loop(
    rows: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    block_expert: jax.Array,
    block_start: jax.Array,
    num_blocks: jax.Array,
    *,
    block_rows: int,
    act: Callable[[jax.Array], jax.Array],
    transposed: bool = False,
) -> jax.Array:
    """`(act(x @ gate[e]) * (x @ up[e])) @ down[e]` for each block of rows and its expert e.

    Blocks must come in rising order of `block_start`: a block writes `block_rows` rows, of which those past
    its group's end are overwritten by the next group's first block.

    Args:
        rows: `[A, D]`, sorted by expert.
        gate, up: `[E, D, F]`; down: `[E, F, D]`; with `transposed`, each with its last two dimensions
            swapped. A single row's product then fuses with the slice: no copy of the matrix (docs/log.md).
        block_expert, block_start: int32 `[M]`; num_blocks: int32 scalar.

    Returns:
        `[A + block_rows, D]`; rows that belong to no group are undefined (finite).
    """
    A, D = rows.shape
    padded = jnp.pad(rows, ((0, block_rows), (0, 0)))

    def matrix(stack: jax.Array, expert: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_index_in_dim(stack, expert, 0, keepdims=False)
        return one.T if transposed else one

    def block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A block past the last one works on the padding rows.
        start = jnp.where(i < num_blocks, block_start[i], A)
        expert = block_expert[i]
        x = jax.lax.dynamic_slice(padded, (start, 0), (block_rows, D))
        w_gate, w_up, w_down = (matrix(stack, expert) for stack in (gate, up, down))
        return start, (act(x @ w_gate) * (x @ w_up)) @ w_down

    # Single rows go two at a time, which is faster at batch 16 and level below (docs/log.md).
    unroll = 2 if block_rows == 1 else 1

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        for start, y in [block(i * unroll + j) for j in range(unroll)]:
            out = jax.lax.dynamic_update_slice(out, y, (start, 0))
        return out

    iterations = (num_blocks + unroll - 1) // unroll
    return jax.lax.fori_loop(0, iterations, body, jnp.zeros((A + block_rows, D), rows.dtype))


def grouped_swiglu_ragged(
    rows: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    counts: jax.Array,
    *,
    act: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The same by `jax.lax.ragged_dot`: rows `[A, D]` sorted by expert, counts int32 `[E]` → `[A, D]`."""
    hidden = act(jax.lax.ragged_dot(rows, gate, counts)) * jax.lax.ragged_dot(rows, up, counts)
    return jax.lax.ragged_dot(hidden, down, counts)
