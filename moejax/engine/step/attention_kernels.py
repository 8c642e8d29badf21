"""Tells the GPU kernels of a step: block tables, lengths, where each token is stored, and which parts of
contexts decode attention's programs read.

The batch's S places for decodes come first among the sequences, then S for chunks:

    sequence        0 … S-1                        S … 2S-1
    queries         one each                       a chunk's tokens, or none
    block table     row i                          row i - S

Places without a decode are the last of the S. In a step without chunks they have no query, and their rows
are past the last sequence; before chunks' tokens they keep their row, as sequences of one query and no keys,
for which the kernels write zeros.

In a tile every token is a sequence of its own.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moejax.engine.scheduling.plan import StepPlan
from moejax.engine.step.limits import Limits, StepKey
from moejax.engine.step.tables import BlockTables
from moejax.ops.kernel_attention import KernelPlan
from pallas_kernels.work_list import decoded_keys, fixed_parts, make_work_list, most_splits

BLANK = {"slot_mapping": -1}
"""Values other than 0 of a plan that attends to nothing."""


def shapes(key: StepKey, limits: Limits) -> dict[str, tuple[int, ...]]:
    """Fields of the buffer: those of `KernelPlan`, but that a row's block table is there once."""
    S, T = key.rows, key.tokens
    sequences = 2 * S if T else S
    splits = most_splits(S, limits.kv_heads, limits.context)
    splits = fixed_parts(S, limits.context)[0] if key.tiled else splits
    own = {"tile_row": (S,)} if key.tiled else {}
    return own | {
        "slot_mapping": (S + T,),
        "table": (S, limits.table_width),
        "kv_lens": (sequences,),
        "cu_q_lens": (sequences + 1,),
        "work_list": (2 * sequences + splits,),
    }


def unpack(take: Callable[[str], jax.Array], key: StepKey, limits: Limits) -> KernelPlan:
    """Returns the plan's arrays, inside a trace."""
    table = take("table")
    table = table[take("tile_row")] if key.tiled else table
    table = jnp.concatenate([table, table]) if key.tokens else table
    kv_lens, cu_q_lens, work_list = (take(name) for name in ("kv_lens", "cu_q_lens", "work_list"))
    decode_only = not key.tokens
    return KernelPlan(take("slot_mapping"), table, kv_lens, cu_q_lens, work_list, decode_only)


def fill(
    views: dict[str, np.ndarray], plan: StepPlan, key: StepKey, limits: Limits, tables: BlockTables
) -> None:
    """Writes the plan's fields."""
    if key.tiled:
        return _fill_tile(views, plan, limits, tables)
    size, S, D = limits.block_size, key.rows, len(plan.decodes)
    slots, table, kv_lens = views["slot_mapping"], views["table"], views["kv_lens"]
    slots[:] = -1
    q_lens = np.zeros(len(kv_lens), np.int32)
    q_lens[: S if key.tokens else D] = 1
    for i, (sequence, position) in enumerate(zip(plan.decodes, plan.positions, strict=True)):
        blocks = tables.of(sequence)
        table[i, : len(blocks)] = np.maximum(blocks, 0)  # of what a window has left behind, any
        kv_lens[i] = position + 1
        # Rows that have ended are computed as padding and store nothing.
        if i < D - plan.idle:
            slots[i] = blocks[position // size] * size + position % size
    start, row = S, D
    for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
        blocks = tables.of(chunk.sequence)
        table[row, : len(blocks)] = np.maximum(blocks, 0)
        positions = np.arange(chunk.start, chunk.start + chunk.count)
        slots[start : start + chunk.count] = np.asarray(blocks)[positions // size] * size + positions % size
        kv_lens[S + row], q_lens[S + row] = chunk.start + chunk.count, chunk.count
        start, row = start + chunk.count, row + 1 + len(forks)
    views["cu_q_lens"][1:] = np.cumsum(q_lens)
    items, queries = views["work_list"], limits.queries
    keys = decoded_keys(q_lens, kv_lens, limits.kv_heads, limits.context, queries=queries)
    items[:] = make_work_list(keys, len(items) - 2 * len(keys))


def _fill_tile(views: dict[str, np.ndarray], plan: StepPlan, limits: Limits, tables: BlockTables) -> None:
    """Fills in each token's block table, keys and slot."""
    size, placed, table, row_of = limits.block_size, plan.placed(), views["table"], views["tile_row"]
    names = ("slot_mapping", "kv_lens", "cu_q_lens", "work_list")
    slots, kv_lens, ends, items = (views[name] for name in names)
    slots[:] = -1
    for i, (row, sequence, position) in enumerate(placed):
        blocks = tables.of(sequence)
        table[row, : len(blocks)] = np.maximum(blocks, 0)  # of what a window has left behind, any
        row_of[i], kv_lens[i] = row, position + 1
        slots[i] = blocks[position // size] * size + position % size
    ends[1:] = np.minimum(np.arange(1, len(ends)), len(placed))
    splits, each = fixed_parts(len(kv_lens), limits.context)
    items[:] = make_work_list(np.minimum(kv_lens, limits.context), splits, each=each)
