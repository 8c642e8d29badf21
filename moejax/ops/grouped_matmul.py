"""Expert products over block-aligned groups: the XLA implementation for CPU.

`jax.lax.ragged_dot` computes every expert on CPU (docs/log.md), so here a loop visits only the blocks in
use and reads only their experts' weights.
"""

import functools
import math
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
        `[A + some, D]`; rows that lie in no block are 0, but those past A undefined (finite).
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

    if not heights:
        together = rows_together(A, math.prod(gate.shape[1:])) if transposed else (_unroll(1),)
        return _single_rows(rows, gate, up, down, single, together, act=act, transposed=transposed)
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

    gate, up, down = (_matrix(stack, expert, transposed) for stack in (gate, up, down))
    return (act(x @ gate) * (x @ up)) @ down


def _matrix(stack: jax.Array, expert: jax.Array, transposed: bool) -> jax.Array:
    """One expert's matrix as a product's right operand."""
    one = jax.lax.dynamic_index_in_dim(stack, expert, 0, keepdims=False)
    return one.T if transposed else one


def _single_rows(
    rows: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    single: FittedBlocks,
    together: tuple[int, ...],
    *,
    act: Callable[[jax.Array], jax.Array],
    transposed: bool,
) -> jax.Array:
    """`grouped_swiglu_fitted` where every row goes alone: row i of `[A, D]` is block i.

    A turn takes several rows through all gates, then all ups, then all downs. The cores share each row's
    product, and where that is small, meeting at its end costs as much as the product; products that do not
    wait for each other overlap. The barriers keep a stage's results alive until its end: otherwise
    XLA lets one lie where another was, and they run one by one (docs/log.md).

    Args:
        together: rows a turn, falling: as many turns of each as are full, and of the last what is left.

    Returns:
        `[A + the greatest of together, D]`; a row past the last block is 0.
    """
    A, D = rows.shape
    widest = together[0]
    padded = jnp.pad(rows, ((0, 1), (0, 0)))
    barrier = jax.lax.optimization_barrier
    out, done = jnp.zeros((A + widest, D), rows.dtype), jnp.zeros((), jnp.int32)

    def turn(first: jax.Array, width: int, out: jax.Array) -> jax.Array:
        # A row past the last one works on the padding row, and is 0.
        places = [first + j for j in range(width)]
        experts = [single.expert[place] for place in places]
        starts = [jnp.where(place < single.num, place, A) for place in places]
        block = [jax.lax.dynamic_slice(padded, (start, 0), (1, D)) for start in starts]

        def stage(block: list[jax.Array], stack: jax.Array) -> list[jax.Array]:
            pairs = zip(block, experts, strict=True)
            return list(barrier([x @ _matrix(stack, expert, transposed) for x, expert in pairs]))

        hidden = act(jnp.concatenate(stage(block, gate))) * jnp.concatenate(stage(block, up))
        hidden = barrier(hidden)
        y = jnp.concatenate(stage([hidden[j : j + 1] for j in range(width)], down))
        return jax.lax.dynamic_update_slice(out, y, (first, 0))

    for width in together:
        left = single.num - done
        turns = (left + width - 1) // width if width == together[-1] else left // width
        first = done

        def body(i: jax.Array, out: jax.Array, first: jax.Array = first, width: int = width) -> jax.Array:
            return turn(first + i * width, width, out)

        out = jax.lax.fori_loop(0, turns, body, out)
        done = done + turns * width
    return out


def rows_together(rows: int, elements: int) -> tuple[int, ...]:
    """For `_single_rows`: how many of at most `rows` rows a turn takes, by the elements of one matrix.

    Each row of a turn costs compilation, and a greater matrix takes its time anyway: 24 % less for 2^17
    elements, 9 for 2^19, 4 for 3 * 2^19 (docs/log.md).
    """
    widest = [width for width in (16, 8) if width <= rows and elements <= 1 << 19]
    return (*widest[:1], _unroll(1))


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
