"""Tells the GPU kernels of a step: block tables, lengths, and where each token is stored.

The batch's S places for decodes come first among the sequences, then S for chunks:

    sequence        0 … S-1                        S … 2S-1
    queries         one each                       a chunk's tokens, or none
    block table     row i                          row i - S

Places without a decode are the last of the S. In a step without chunks they have no query, and their rows
are past the last sequence; before chunks' tokens they keep their row, as sequences of one query and no keys,
for which the kernels write zeros.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from moejax.cache.segments import SegmentLayout
from moejax.engine.scheduling.plan import StepPlan
from moejax.engine.step.limits import Limits, StepKey
from moejax.ops.kernel_attention import KernelPlan

BLANK = {"slot_mapping": -1}
"""Values other than 0 of a plan that attends to nothing."""


def shapes(key: StepKey, limits: Limits) -> dict[str, tuple[int, ...]]:
    """Fields of the buffer. `chunk_kv_len` and `chunk_count` are by row, 0 for a row without a chunk."""
    S, T = key.rows, key.tokens
    fields: dict[str, tuple[int, ...]] = {
        "slot_mapping": (S + T,),
        "table": (S, limits.table_width),
        "kv_len": (S,),
    }
    if T:
        fields |= {"chunk_kv_len": (S,), "chunk_count": (S,)}
    return fields


def unpack(take: Callable[[str], jax.Array], key: StepKey) -> KernelPlan:
    """Returns the plan's arrays, inside a trace."""
    S = key.rows
    table, kv_lens = take("table"), take("kv_len")
    if not key.tokens:
        cu_q_lens = jnp.minimum(jnp.arange(S + 1, dtype=jnp.int32), jnp.sum(kv_lens > 0, dtype=jnp.int32))
    else:
        cu_q_lens = jnp.arange(S + 1, dtype=jnp.int32)
        ends = S + jnp.cumsum(take("chunk_count"), dtype=jnp.int32)
        table = jnp.concatenate([table, table])
        kv_lens = jnp.concatenate([kv_lens, take("chunk_kv_len")])
        cu_q_lens = jnp.concatenate([cu_q_lens, ends])
    return KernelPlan(take("slot_mapping"), table, kv_lens, cu_q_lens, decode_only=not key.tokens)


def fill(
    views: dict[str, np.ndarray],
    plan: StepPlan,
    key: StepKey,
    limits: Limits,
    segments: SegmentLayout,
    block_ids: np.ndarray,
    counts: list[int],
) -> None:
    """Writes the plan's fields; the arguments are as in `attention_xla.fill`."""
    size, S = limits.block_size, key.rows
    slots, table, kv_len = views["slot_mapping"], views["table"], views["kv_len"]
    slots[:] = -1
    for i, (sequence, position) in enumerate(zip(plan.decodes, plan.positions, strict=True)):
        table[i, : len(sequence.blocks)] = sequence.blocks
        kv_len[i] = position + 1
        # Rows that have ended are computed as padding and store nothing.
        if i < len(plan.decodes) - plan.idle:
            slots[i] = sequence.blocks[position // size] * size + position % size
    start, row = S, len(plan.decodes)
    for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
        blocks = chunk.sequence.blocks
        table[row, : len(blocks)] = blocks
        positions = np.arange(chunk.start, chunk.start + chunk.count)
        slots[start : start + chunk.count] = np.asarray(blocks)[positions // size] * size + positions % size
        views["chunk_kv_len"][row] = chunk.start + chunk.count
        views["chunk_count"][row] = chunk.count
        start, row = start + chunk.count, row + 1 + len(forks)
