"""Expert products over block-aligned groups: the XLA implementation for CPU.

`jax.lax.ragged_dot` computes every expert on CPU (docs/log.md), so here a loop visits only the blocks in
use and reads only their experts' weights.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.ops.expert_stack import Stack
from moejax.ops.quantized_matmul import activation_codes
from moejax.quantization.formats import QTensor
from moejax.sharding.axes import Names

Slots = jax.Array | None
"""Int32, which adapter each row has, `[A]` or a part of it; None where there are none."""

Product = Callable[[jax.Array, jax.Array, Slots], jax.Array]
"""Rows `[M, ·]` of one expert, which, and the rows' slots `[M]` → `[M, ·]`."""

Gated = Callable[[jax.Array, jax.Array], jax.Array]
"""Gate and up `[..., F]` → the hidden numbers `[..., F]`."""


def _swiglu(
    run: Callable[[jax.Array, Product, int], jax.Array],
    rows: jax.Array,
    gate: Stack,
    up: Stack,
    down: Stack,
    act: Gated,
    split: Names,
) -> jax.Array:
    """Computes the expert layer by `run(rows, product, width)`, which applies a product block by block.

    Where the hidden rows are rounded with scales over several devices, the devices meet between two runs:
    never within one, whose length is each device's own.
    """
    down_q = down.weight

    @jax.named_scope("experts_gate_up")
    def hidden(x: jax.Array, expert: jax.Array, slots: Slots) -> jax.Array:
        return act(gate.times(x, expert, slots), up.times(x, expert, slots))

    def whole(x: jax.Array, expert: jax.Array, slots: Slots) -> jax.Array:
        middle = hidden(x, expert, slots)
        with jax.named_scope("experts_down"):
            return down.times(middle, expert, slots)

    if not (split and isinstance(down_q, QTensor) and down_q.format.activations == "dynamic"):
        return run(rows, whole, rows.shape[1])
    middle = run(rows, hidden, gate.outputs)
    with jax.named_scope("experts_down"):
        codes, scale = activation_codes(middle[: rows.shape[0]], down_q, split)
        out = run(codes.astype(rows.dtype), down.without_activations().times, rows.shape[1])
    scale = jnp.pad(scale, ((0, out.shape[0] - scale.shape[0]), (0, 0)))
    return (out.astype(jnp.float32) * scale).astype(rows.dtype)


_NO_SLOT = 2**31 - 1


class Blocks(NamedTuple):
    """Blocks of one height, by rising first row (`moejax.moe.permute` makes them).

    Attributes:
        expert: int32 `[M]`: of each block, M the static most number of blocks.
        start: int32 `[M]`: first sorted row of each block.
        end: int32 `[M]`: one past the last row of the block's expert; the block's rows from there on are not
            its own.
        num: int32 scalar: blocks in use; those past it are to be skipped.
    """

    expert: jax.Array
    start: jax.Array
    end: jax.Array
    num: jax.Array


def grouped_swiglu_blocks(
    rows: jax.Array,
    gate: Stack,
    up: Stack,
    down: Stack,
    single: Blocks,
    blocks: Sequence[Blocks],
    *,
    heights: tuple[int, ...],
    act: Gated,
    split: Names = (),
    slots: Slots = None,
) -> jax.Array:
    """Computes `act(x @ gate[e], x @ up[e]) @ down[e]` for each block of rows and its expert e.

    There is one loop for single rows and one a height, which visit the blocks in use only.

    On CPU a block costs a copy of its expert's matrices out of the stack plus its rows, padding included, so
    that one height for all either reads a favoured expert many times or pads the others (docs/log.md).

    Args:
        rows: `[A, D]`, sorted by expert.
        gate, up: `[E, D, F]`; down: `[E, F, D]`. Where they are stored transposed a single row's product
            fuses with the slice: no copy of the matrix (docs/log.md). Of quantized ones a single expert at a
            time is decoded.
        single, blocks: every row in one block at most, of one row or of the height in `heights`.
        split: mesh axes that F is split over.
        slots: of the rows, sorted as they are.

    Returns:
        `[A + some, D]`; rows that lie in no block are 0, but those past A undefined (finite).
    """
    A = rows.shape[0]
    most = max((1, *heights))

    def run(rows: jax.Array, product: Product, width: int) -> jax.Array:
        padded = jnp.pad(rows, ((0, most), (0, 0)))
        theirs = None if slots is None else jnp.pad(slots, (0, most), constant_values=_NO_SLOT)
        out = jnp.zeros((A + most, width), rows.dtype)
        for group, height in zip((single, *blocks), (1, *heights), strict=True):
            if group.expert.shape[0]:
                out = _block_loop(padded, theirs, A, product, group, height, out)
        return out

    if not heights and not (split and down.quantizes_rows):
        by_rows = gate.by_rows and up.by_rows and down.by_rows
        together = rows_together(A, gate.elements) if by_rows else (_unroll(1),)
        return _single_rows(rows, gate, up, down, single, together, act=act, slots=slots)
    return _swiglu(run, rows, gate, up, down, act, split)


def _block_loop(
    padded: jax.Array, slots: Slots, A: int, product: Product, blocks: Blocks, height: int, out: jax.Array
) -> jax.Array:
    """Runs the blocks of one height: `padded` `[A + some, ·]`, and slots, → `out` with their rows written."""
    unroll = _unroll(height)

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        products = []
        for j in range(unroll):
            block = i * unroll + j
            start = jnp.where(block < blocks.num, blocks.start[block], A)
            x = jax.lax.dynamic_slice(padded, (start, 0), (height, padded.shape[1]))
            own = None if slots is None else jax.lax.dynamic_slice(slots, (start,), (height,))
            products.append((start, blocks.end[block], product(x, blocks.expert[block], own)))
        for start, end, y in products:
            if height > 1:
                # Another height's loop may have written the rows past the expert's last.
                in_expert = (start + jnp.arange(height, dtype=jnp.int32) < end)[:, None]
                y = jnp.where(in_expert, y, jax.lax.dynamic_slice(out, (start, 0), (height, out.shape[1])))
            out = jax.lax.dynamic_update_slice(out, y, (start, 0))
        return out

    return jax.lax.fori_loop(0, (blocks.num + unroll - 1) // unroll, body, out)


def _single_rows(
    rows: jax.Array,
    gate: Stack,
    up: Stack,
    down: Stack,
    single: Blocks,
    together: tuple[int, ...],
    *,
    act: Gated,
    slots: Slots,
) -> jax.Array:
    """Computes `grouped_swiglu_blocks` with every row alone: row i of `[A, D]` is block i.

    A turn takes several rows through all gates, then all ups, then all downs. The cores share each row's
    product, and where that is small, meeting at its end costs as much as the product; products that do not
    wait for each other overlap. The barriers keep a stage's results alive until its end; without them half
    of the gain is lost, presumably because one result then lies where another was (docs/log.md).

    Args:
        together: rows a turn, falling: as many turns of each as are full, and of the last what is left.

    Returns:
        `[A + the greatest of together, D]`; a row past the last block is 0.
    """
    A, D = rows.shape
    widest = together[0]
    padded = jnp.pad(rows, ((0, 1), (0, 0)))
    theirs = None if slots is None else jnp.pad(slots, (0, 1), constant_values=_NO_SLOT)
    barrier = jax.lax.optimization_barrier
    out, done = jnp.zeros((A + widest, D), rows.dtype), jnp.zeros((), jnp.int32)

    def turn(first: jax.Array, width: int, out: jax.Array) -> jax.Array:
        # A row past the last one works on the padding row, and is 0.
        places = [first + j for j in range(width)]
        experts = [single.expert[place] for place in places]
        starts = [jnp.where(place < single.num, place, A) for place in places]
        block = [jax.lax.dynamic_slice(padded, (start, 0), (1, D)) for start in starts]

        own = None if theirs is None else theirs[jnp.stack(starts)]

        def stage(block: list[jax.Array], stack: Stack) -> jax.Array:
            pairs = zip(block, experts, strict=True)
            y = jnp.concatenate(barrier([stack.times(x, expert) for x, expert in pairs]))
            if own is None:
                return y
            return stack.add_each(y, jnp.concatenate(block), jnp.stack(experts), own)

        with jax.named_scope("experts_gate_up"):
            hidden = barrier(act(stage(block, gate), stage(block, up)))
        with jax.named_scope("experts_down"):
            y = stage([hidden[j : j + 1] for j in range(width)], down)
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
    """Returns how many of at most `rows` rows a turn of `_single_rows` takes, by the elements of one matrix.

    Each row of a turn costs compilation, and a greater matrix takes its time anyway: 24 % less for 2^17
    elements, 9 for 2^19, 4 for 3 * 2^19 (docs/log.md).
    """
    widest = [width for width in (16, 8) if width <= rows and elements <= 1 << 19]
    return (*widest[:1], _unroll(1))


def _unroll(block_rows: int) -> int:
    """Counts a turn's blocks: single rows go by twos, faster at batch 16 and level below (docs/log.md)."""
    return 2 if block_rows == 1 else 1


def grouped_swiglu_ragged(
    rows: jax.Array,
    gate: Stack,
    up: Stack,
    down: Stack,
    counts: jax.Array,
    *,
    act: Gated,
    split: Names = (),
    slots: Slots = None,
) -> jax.Array:
    """Computes the same by `jax.lax.ragged_dot`, from rows `[A, D]` sorted by expert and counts int32 `[E]`.

    Quantized stacks are dequantized whole, in the rows' dtype.
    """
    A, E = rows.shape[0], counts.shape[0]
    expert = jnp.zeros((), jnp.int32)
    if any(stack.quantizes_rows or stack.bias is not None for stack in (gate, up, down)):
        # Rows past the last expert's are nobody's.
        expert = jnp.repeat(jnp.arange(E, dtype=jnp.int32), counts, total_repeat_length=A)

    def product(x: jax.Array, stack: Stack, split: Names = ()) -> jax.Array:
        y = jax.lax.ragged_dot(stack.rounded(x, expert, split), stack.matrix(x.dtype), counts)
        y = y if slots is None else y + stack.added(x, counts, slots)
        return y if stack.bias is None else y + stack.bias[expert]

    with jax.named_scope("experts_gate_up"):
        hidden = act(product(rows, gate), product(rows, up))
    with jax.named_scope("experts_down"):
        return product(hidden, down, split)
