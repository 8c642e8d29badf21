"""Prompt chunks: tiles of one sequence's queries, all heads of a KV head together, over its pages.

FlashAttention-2 (Dao, arXiv 2307.08691) with the query heads of a group packed into the rows of a tile, so
keys and values are read once for all of them. Tiles of keys that no row sees are not visited.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import pallas_call, program_id, store
from pallas_kernels.ragged_paged_attention.tiles import (
    Attention,
    Config,
    Pool,
    dims,
    load_queries,
    over_tiles,
    start,
    step,
    values,
    with_sinks,
)


def query_tiles(
    cu_q_lens: jax.Array, work_list: jax.Array, T: int, tile_q: int
) -> tuple[jax.Array, jax.Array]:
    """Returns each program's queries: int32 `[tiles]` twice, sequence and its first query; -1 for no work.

    Sequences with one query, or with parts in the work list, are not among them. A sequence's last tile comes
    first: it has the most keys.
    """
    S = cu_q_lens.shape[0] - 1
    q_lens, parts = jnp.diff(cu_q_lens), jnp.diff(work_list[: S + 1])
    tiles = jnp.where((q_lens > 1) & (parts == 0), (q_lens + tile_q - 1) // tile_q, 0)
    past = jnp.cumsum(tiles)
    program = jnp.arange(max(1, T // tile_q + min(S, T // 2)), dtype=jnp.int32)
    seq = jnp.sum((past[None, :] <= program[:, None]).astype(jnp.int32), axis=1)
    real, seq = seq < S, jnp.minimum(seq, S - 1)
    first = (past[seq] - 1 - program) * tile_q
    return seq, jnp.where(real, first, -1).astype(jnp.int32)


def _chunk_kernel(*refs: Any, a: Attention, rows: int, tile: int) -> None:
    q_ref, k_ref, v_ref, table_ref, lens_ref, cu_ref, seq_ref, first_ref, _, *rest, out_ref = refs
    scales, sinks = (rest[:2], rest[2:]) if a.quantized else ((None, None), rest)
    pool = Pool(k_ref, v_ref, table_ref, *scales)
    tile_q = rows // a.G
    head, seq, first = program_id(1), seq_ref[program_id(0)], first_ref[program_id(0)]
    begin, past = cu_ref[seq], cu_ref[seq + 1]
    count = jnp.where(first >= 0, jnp.minimum(tile_q, past - begin - first), 0)
    # Positions of the tile's queries: `low` to `high`, that one excluded.
    low = jnp.where(count > 0, lens_ref[seq] - (past - begin) + first, 0)
    high = low + count

    row = jnp.arange(rows)
    query = jax.lax.div(row, jnp.int32(a.G))
    at = head * a.G + jax.lax.rem(row, jnp.int32(a.G))
    token, position = begin + first + query, low + query
    used = query < count
    q, factor = load_queries(a, q_ref, token, at, used)

    lowest = jnp.int32(0) if a.window is None else jnp.maximum(low - (a.window - 1), 0)

    def at_edge(key: jax.Array, state: Any) -> Any:
        present = key < high
        visible = key[None, :] <= position[:, None]
        if a.window is not None:
            present &= key >= lowest
            visible &= key[None, :] > position[:, None] - a.window
        return step(a, pool, q, factor, seq, head, key, present, visible, state)

    def inside(key: jax.Array, state: Any) -> Any:
        return step(a, pool, q, factor, seq, head, key, None, None, state)

    # Tiles `full` to `past_full`, which all rows see whole, need no masks; those before and after them do.
    begin_tile, end_tile = (jax.lax.div(key, jnp.int32(tile)) for key in (lowest, high + (tile - 1)))
    full, past_full = begin_tile, jax.lax.div(low + 1, jnp.int32(tile))
    if a.window is not None:
        full = jax.lax.div(jnp.maximum(high - a.window, 0) + (tile - 1), jnp.int32(tile))
        full = jnp.minimum(jnp.maximum(full, begin_tile), past_full)
    state = start(a, rows)
    if a.latent is None:  # a latent's 64 rows leave no registers for a second loop
        state = over_tiles(full, past_full, tile, inside, state)
    else:
        full = past_full = begin_tile
    # One loop for both edges: a third copy of the step would take registers that there are not.
    state = over_tiles(begin_tile, end_tile, tile, at_edge, state, skip=(full, past_full))

    out = values(a, state) * (1.0 / with_sinks(state, sinks, at, used))[:, None]
    dim, mask = dims(a, used)
    store(out_ref.at[token[:, None], at[:, None], dim[None, :]], out.astype(out_ref.dtype), mask=mask)


def chunks(
    a: Attention,
    config: Config,
    q: jax.Array,
    pages: tuple[jax.Array, ...],
    block_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    work_list: jax.Array,
    scales: tuple[jax.Array, ...],
    sinks: tuple[jax.Array, ...],
    out: jax.Array,
    interpret: bool | None,
) -> jax.Array:
    """Returns `out` with the rows of the sequences that `decode` leaves written."""
    seq, first = query_tiles(cu_q_lens, work_list, a.T, config.rows // a.G)
    return pallas_call(
        functools.partial(_chunk_kernel, a=a, rows=config.rows, tile=config.tile),
        name="paged_chunk",
        grid=(seq.shape[0], a.K),
        out_shape=jax.ShapeDtypeStruct(out.shape, q.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
        input_output_aliases={8: 0},
    )(q, *pages, block_table, kv_lens, cu_q_lens, seq, first, out, *scales, *sinks)
