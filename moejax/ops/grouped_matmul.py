"""Expert products over block-aligned groups: the XLA implementation for CPU.

`jax.lax.ragged_dot` computes every expert on CPU (docs/log.md), so here a loop visits only the blocks in
use and reads only their experts' weights.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

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

    swiglu = functools.partial(_swiglu, gate, up, down, act=act, transposed=transposed)

    def block(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A block past the last one works on the padding rows.
        start = jnp.where(i < num_blocks, block_start[i], A)
        return start, swiglu(block_expert[i], jax.lax.dynamic_slice(padded, (start, 0), (block_rows, D)))

    unroll = _unroll(block_rows)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        for start, y in [block(i * unroll + j) for j in range(unroll)]:
            out = jax.lax.dynamic_update_slice(out, y, (start, 0))
        return out

    iterations = (num_blocks + unroll - 1) // unroll
    return jax.lax.fori_loop(0, iterations, body, jnp.zeros((A + block_rows, D), rows.dtype))


class FittedBlocks(Protocol):
    """Blocks of one height (`moejax.moe.permute.Blocks`): int32 `[M]` each, and an int32 scalar."""

    @property
    def expert(self) -> jax.Array: ...
    @property
    def start(self) -> jax.Array: ...
    @property
    def end(self) -> jax.Array: ...
    @property
    def num(self) -> jax.Array: ...


def grouped_swiglu_fitted(
    rows: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    single: FittedBlocks,
    blocks: Sequence[FittedBlocks],
    *,
    heights: tuple[int, ...],
    act: Callable[[jax.Array], jax.Array],
    transposed: bool = False,
) -> jax.Array:
    """The same over blocks fitted to each expert's rows: one loop for single rows and one a height.

    On CPU a block costs a copy of its expert's matrices out of the stack plus its rows, padding included, so
    that one height for all either reads a favoured expert many times or pads the others (docs/log.md).

    Args:
        rows: `[A, D]`, sorted by expert.
        gate, up, down, transposed: as for `grouped_swiglu_loop`.
        single, blocks: every row in one block at most, of one row or of the height in `heights`.

    Returns:
        `[A + the greatest height, D]`; rows that lie in no block are 0, but those past A undefined (finite).
    """
    A, D = rows.shape
    most = max((1, *heights))
    padded = jnp.pad(rows, ((0, most), (0, 0)))
    swiglu = functools.partial(_swiglu, gate, up, down, act=act, transposed=transposed)

    def loop(out: jax.Array, blocks: FittedBlocks, height: int) -> jax.Array:
        unroll = _unroll(height)

        def body(i: jax.Array, out: jax.Array) -> jax.Array:
            done = []
            for j in range(unroll):
                block = i * unroll + j
                start = jnp.where(block < blocks.num, blocks.start[block], A)
                x = jax.lax.dynamic_slice(padded, (start, 0), (height, D))
                done.append((start, blocks.end[block], swiglu(blocks.expert[block], x)))
            for start, end, y in done:
                if height > 1:
                    # Another height's loop may have written the rows past the expert's last.
                    own = (start + jnp.arange(height, dtype=jnp.int32) < end)[:, None]
                    y = jnp.where(own, y, jax.lax.dynamic_slice(out, (start, 0), (height, D)))
                out = jax.lax.dynamic_update_slice(out, y, (start, 0))
            return out

        return jax.lax.fori_loop(0, (blocks.num + unroll - 1) // unroll, body, out)

    out = loop(jnp.zeros((A + most, D), rows.dtype), single, 1)
    for group, height in zip(blocks, heights, strict=True):
        out = loop(out, group, height)
    return out


def _swiglu(
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    expert: jax.Array,
    x: jax.Array,
    *,
    act: Callable[[jax.Array], jax.Array],
    transposed: bool,
) -> jax.Array:
    """One expert of the stacks on x `[M, D]`. It slices first and transposes one expert, never the stack."""

    def matrix(stack: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_index_in_dim(stack, expert, 0, keepdims=False)
        return one.T if transposed else one

    return (act(x @ matrix(gate)) * (x @ matrix(up))) @ matrix(down)


def _unroll(block_rows: int) -> int:
    """Single rows go two at a time, which is faster at batch 16 and level below (docs/log.md)."""
    return 2 if block_rows == 1 else 1


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
