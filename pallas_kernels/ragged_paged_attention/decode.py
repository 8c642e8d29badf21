"""Decode: one query a sequence, or a few. Contexts are split among programs, a second kernel puts the parts
together; where none may be split, the first writes the result.

Flash-Decoding (Dao et al., 2023). The query heads of a KV head fill a tensor-core tile of 16 rows, or with a
few queries of 32, so keys and values are read once for them. Queries beyond these are other programs', which
come last. What a program reads is told by a work list of the real lengths (`pallas_kernels.work_list`), not
by the table's width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import cdiv, load, next_power_of_2, pallas_call, program_id, store, when
from pallas_kernels.ragged_paged_attention.tiles import (
    LOG2E,
    MASKED,
    Attention,
    Config,
    Pool,
    block_dims,
    dims,
    load_queries,
    over_tiles,
    start,
    step,
    values,
    with_sinks,
)

# Rows of q past the last sequence that one program fills with zeros.
PADDING_ROWS = 64


def _share(
    a: Attention, tile: int, queries: jax.Array, keys: jax.Array, splits: jax.Array | int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the first key and tile, the tile past the last, and the tiles of each of a context's splits."""
    first_key = jnp.int32(0) if a.window is None else jnp.maximum(keys - queries - (a.window - 1), 0)
    first, past = jax.lax.div(first_key, jnp.int32(tile)), _ceil_div(keys, tile)
    return first_key, first, past, jnp.maximum(_ceil_div(past - first, splits), 1)


def _ceil_div(x: jax.Array, n: jax.Array | int) -> jax.Array:
    return jax.lax.div(x + (n - 1), jnp.asarray(n, jnp.int32))


def _keys(
    a: Attention, program: jax.Array, lens_ref: Any, cu_ref: Any, work_ref: Any, padding: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns a program's sequence, its first row of q, how many queries it decodes from there on, and over
    how many keys: 0 if it does not. Programs from S on, of which there are none without `padding`, do not."""
    seq = jnp.minimum(program, a.S - 1) if padding else program
    row = cu_ref[seq]
    queries = cu_ref[seq + 1] - row
    decoded = queries == 1
    if a.queries > 1:
        decoded |= work_ref[seq + 1] > work_ref[seq]
    decoded = decoded & (program < a.S) if padding else decoded
    return seq, row, jnp.where(decoded, queries, 0), jnp.where(decoded, lens_ref[seq], 0)


def _parts(work_ref: Any, seq: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the number of a sequence's first part, and how many it has; at least 1."""
    first = work_ref[seq]
    return first, jnp.maximum(work_ref[seq + 1] - first, 1)


def _split_kernel(*refs: Any, a: Attention, tile: int) -> None:
    q_ref, k_ref, v_ref, table_ref, lens_ref, cu_ref, *rest = refs
    scales, rest = (rest[:2], rest[2:]) if a.quantized else ((None, None), rest)
    pool = Pool(k_ref, v_ref, table_ref, *scales)
    part, head = program_id(0), program_id(1)
    work_ref: Any = None
    if a.needs_work_list:
        work_ref, *rest = rest
    if a.splits > 1:
        program = work_ref[a.S + 1 + part]
        first_part, splits = _parts(work_ref, program)
        split = part - first_part
    else:
        program, split, splits = part, jnp.int32(0), jnp.int32(1)
    seq, token, queries, keys = _keys(a, program, lens_ref, cu_ref, work_ref, padding=a.splits == 1)
    first_key, first, past, per_split = _share(a, tile, queries, keys, splits)
    # Parts beyond a sequence's own begin behind its last tile.
    begin = first + split * per_split
    end = jnp.minimum(begin + per_split, past)
    turn = program_id(2) if a.turns > 1 else 0
    if a.turns > 1:
        end = jnp.where(turn * a.per_turn < queries, end, begin)

    rows = max(16, next_power_of_2(a.per_turn * a.G))
    row = jnp.arange(rows)
    at = head * a.G + jax.lax.rem(row, jnp.int32(a.G))
    query = jax.lax.div(row, jnp.int32(a.G)) + turn * a.per_turn
    mine = (query < queries) & (row < a.per_turn * a.G)
    used = mine & (begin < end)
    q, factor = load_queries(a, q_ref, token + query, at, used)
    position = keys - queries + query

    def take(key: jax.Array, state: Any) -> Any:
        present = key < keys
        if a.window is not None:
            present &= key >= first_key
        visible = present[None, :]
        if a.queries > 1:
            visible = key[None, :] <= position[:, None]
            if a.window is not None:
                visible &= key[None, :] > position[:, None] - a.window
        return step(a, pool, q, factor, seq, head, key, present, visible, state)

    state = over_tiles(begin, end, tile, take, start(a, rows))
    dim, mask = dims(a, used)
    if a.splits > 1:
        part_ref, lse_ref = rest
        value = values(a, state) * (1.0 / state.total)[:, None]
        store(part_ref.at[part, query[:, None], at[:, None], dim[None, :]], value, mask=mask)
        store(lse_ref.at[part, query, at], state.largest + jnp.log(state.total) * LOG2E, mask=used)
        return
    *sinks, out_ref = rest
    out = values(a, state) * (1.0 / with_sinks(state, sinks, at, used))[:, None]
    _, mask = dims(a, mine)
    out = jnp.where(keys > 0, out, 0.0).astype(out_ref.dtype)
    store(out_ref.at[(token + query)[:, None], at[:, None], dim[None, :]], out, mask=mask)
    _zero_padding(a, out_ref, cu_ref, jnp.where(turn == 0, program, 0), head * a.G, a.G)


def _zero_padding(a: Attention, out_ref: Any, cu_ref: Any, program: jax.Array, head: Any, count: int) -> None:
    """Writes zeros to `count` heads from `head` on, in rows past the last sequence: `PADDING_ROWS` of them by
    each program from S on."""

    @when(program >= a.S)
    def _() -> None:
        row = cu_ref[a.S] + (program - a.S) * PADDING_ROWS + jnp.arange(PADDING_ROWS)
        zeros = jnp.zeros((PADDING_ROWS, a.Dp // a.blocks), out_ref.dtype)

        def one(i: jax.Array, _: None) -> None:
            split = jnp.int32(a.blocks)
            g, block = (i, 0) if a.blocks == 1 else (jax.lax.div(i, split), jax.lax.rem(i, split))
            dim, mask = block_dims(a, row < a.T, block)
            store(out_ref.at[row[:, None], head + g, dim[None, :]], zeros, mask=mask)

        jax.lax.fori_loop(0, count * a.blocks, one, None)


def _reduce_kernel(*refs: Any, a: Attention, tile: int) -> None:
    part_ref, lse_ref, lens_ref, cu_ref, work_ref, *sinks, out_ref = refs
    program, head = program_id(0), program_id(1)
    seq, token, queries, keys = _keys(a, program, lens_ref, cu_ref, work_ref)
    first_part, splits = _parts(work_ref, seq)
    _, first, past, per_split = _share(a, tile, queries, keys, splits)
    split = jnp.arange(next_power_of_2(a.splits))
    used = split * per_split < past - first
    block = program_id(2) if a.blocks > 1 else 0
    dim, mask = block_dims(a, used, block)

    def one(query: jax.Array, _: None) -> None:
        lse = load(lse_ref.at[first_part + split, query, head], mask=used, other=MASKED)
        at = part_ref.at[(first_part + split)[:, None], query, head, dim[None, :]]
        part = load(at, mask=mask, other=0.0)
        largest = jnp.max(lse, axis=0)
        if sinks:
            sink = sinks[0][head].astype(jnp.float32) * LOG2E
            largest = jnp.maximum(largest, sink)
        weight = jnp.exp2(lse - largest)
        total = jnp.sum(weight, axis=0)
        if sinks:
            total = total + jnp.exp2(sink - largest)
        out = jnp.where(keys > 0, jnp.sum(part * weight[:, None], axis=0) / total, 0.0)
        store(out_ref.at[token + query, head, dim], out.astype(out_ref.dtype), mask=dim < a.Dv)

    jax.lax.fori_loop(0, queries, one, None)
    if a.blocks > 1:
        program = jnp.where(block == 0, program, 0)
    _zero_padding(a, out_ref, cu_ref, program, head, 1)


def reduce_warps(a: Attention) -> int:
    """Returns the warps of the reduction, which holds a row's parts at once: at least 32 numbers a thread."""
    return max(1, min(8, next_power_of_2(a.splits) * a.Dp // a.blocks // 1024))


def decode(
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
    interpret: bool | None,
) -> jax.Array:
    """Writes `[T, H, Dv]`: rows of sequences with one query (0 without keys) and of those with parts in the
    work list, 0 past the last; no others."""
    static: dict[str, Any] = {"a": a, "tile": config.decode_tile}
    output, padding = jax.ShapeDtypeStruct((a.T, a.H, a.Dv), q.dtype), cdiv(a.T, PADDING_ROWS)
    W, split = a.S - 1 + a.splits, a.splits > 1
    parts = [
        jax.ShapeDtypeStruct((W, a.queries, a.H, a.Dv), jnp.float32),
        jax.ShapeDtypeStruct((W, a.queries, a.H), jnp.float32),
    ]
    attended = pallas_call(
        functools.partial(_split_kernel, **static),
        name="paged_decode",
        grid=(W if split else W + padding, a.K, a.turns),
        out_shape=parts if split else output,
        num_warps=config.decode_warps,
        num_stages=config.decode_stages,
        interpret=interpret,
    )(
        *(q, *pages, block_table, kv_lens, cu_q_lens, *scales),
        *((work_list,) if a.needs_work_list else ()),
        *(() if split else sinks),
    )
    if not split:
        return attended
    return pallas_call(
        functools.partial(_reduce_kernel, **static),
        name="paged_decode_reduce",
        grid=(a.S + padding, a.H, *((a.blocks,) if a.blocks > 1 else ())),
        out_shape=output,
        num_warps=reduce_warps(a),
        num_stages=1,
        interpret=interpret,
    )(*attended, kv_lens, cu_q_lens, work_list, *sinks)
