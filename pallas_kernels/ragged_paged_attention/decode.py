"""Decode: one query a sequence. The context is split among programs, a second kernel puts the parts together;
a context that is not split is written by the first.

Flash-Decoding (Dao et al., 2023). The query heads of a KV head fill a tensor-core tile of 16 rows, so keys
and values are read once. A program's share follows from the sequence's real length, not the table's width.
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


def least_keys(pairs: int) -> int:
    """Returns the fewest keys of a split, for so many pairs of sequence and KV head.

    A split of fewer costs more to start and to put together than it saves, unless there are so few programs
    that most multiprocessors would have none: one sequence of 1,000 keys and 4 KV heads has 64, not 16.
    """
    return max(64, min(256, 8 * pairs))


def _share(a: Attention, tile: int, splits: int, keys: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the first key and tile, the tile past the last, and the tiles of each split."""
    first_key = jnp.int32(0) if a.window is None else jnp.maximum(keys - a.window, 0)
    first, past = jax.lax.div(first_key, jnp.int32(tile)), _ceil_div(keys, tile)
    per_split = jnp.maximum(_ceil_div(past - first, splits), max(1, least_keys(a.S * a.K) // tile))
    return first_key, first, past, per_split


def _ceil_div(x: jax.Array, n: int) -> jax.Array:
    return jax.lax.div(x + (n - 1), jnp.int32(n))


def _keys(
    a: Attention, program: jax.Array, lens_ref: Any, cu_ref: Any, padding: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns a program's sequence, its row of q, whether it has just that query, and over how many keys it
    decodes: 0 if it does not. Programs from S on, of which there are none without `padding`, have none."""
    seq = jnp.minimum(program, a.S - 1) if padding else program
    row = cu_ref[seq]
    single = cu_ref[seq + 1] - row == 1
    single = single & (program < a.S) if padding else single
    return seq, row, single, jnp.where(single, lens_ref[seq], 0)


def _split_kernel(*refs: Any, a: Attention, tile: int, splits: int) -> None:
    q_ref, k_ref, v_ref, table_ref, lens_ref, cu_ref, *rest = refs
    scales, rest = (rest[:2], rest[2:]) if a.quantized else ((None, None), rest)
    pool = Pool(k_ref, v_ref, table_ref, *scales)
    split, head, program = program_id(0), program_id(1), program_id(2)
    seq, token, single, keys = _keys(a, program, lens_ref, cu_ref, padding=splits == 1)
    first_key, first, past, per_split = _share(a, tile, splits, keys)
    begin = first + split * per_split
    end = jnp.minimum(begin + per_split, past)

    rows = max(16, next_power_of_2(a.G))
    row = jnp.arange(rows)
    used = (row < a.G) & (begin < end)
    at = head * a.G + row
    q, factor = load_queries(a, q_ref, jnp.full((rows,), token), at, used)

    def take(key: jax.Array, state: Any) -> Any:
        present = key < keys
        if a.window is not None:
            present &= key >= first_key
        return step(a, pool, q, factor, seq, head, key, present, present[None, :], state)

    state = over_tiles(begin, end, tile, take, start(a, rows))
    dim, mask = dims(a, used)
    if splits > 1:
        part_ref, lse_ref = rest
        part = values(a, state) * (1.0 / state.total)[:, None]
        store(part_ref.at[seq, at[:, None], split, dim[None, :]], part, mask=mask)
        store(lse_ref.at[seq, at, split], state.largest + jnp.log(state.total) * LOG2E, mask=used)
        return
    *sinks, out_ref = rest
    out = values(a, state) * (1.0 / with_sinks(state, sinks, at, used))[:, None]
    _, mask = dims(a, (row < a.G) & single)
    out = jnp.where(keys > 0, out, 0.0).astype(out_ref.dtype)
    store(out_ref.at[token, at[:, None], dim[None, :]], out, mask=mask)
    _zero_padding(a, out_ref, cu_ref, program, head * a.G, a.G)


def _zero_padding(a: Attention, out_ref: Any, cu_ref: Any, program: jax.Array, head: Any, count: int) -> None:
    """Writes zeros to `count` heads from `head` on, in rows past the last sequence: `PADDING_ROWS` of them by
    each program from S on."""

    @when(program >= a.S)
    def _() -> None:
        row = cu_ref[a.S] + (program - a.S) * PADDING_ROWS + jnp.arange(PADDING_ROWS)
        dim, mask = dims(a, row < a.T)
        zeros = jnp.zeros((PADDING_ROWS, a.Dp), out_ref.dtype)

        def one(g: jax.Array, _: None) -> None:
            store(out_ref.at[row[:, None], head + g, dim[None, :]], zeros, mask=mask)

        jax.lax.fori_loop(0, count, one, None)


def _reduce_kernel(*refs: Any, a: Attention, tile: int, splits: int) -> None:
    part_ref, lse_ref, lens_ref, cu_ref, *sinks, out_ref = refs
    program, head = program_id(0), program_id(1)
    seq, token, single, keys = _keys(a, program, lens_ref, cu_ref)
    _, first, past, per_split = _share(a, tile, splits, keys)
    split = jnp.arange(max(2, next_power_of_2(splits)))
    used = split * per_split < past - first
    lse = load(lse_ref.at[seq, head, split], mask=used, other=MASKED)
    dim, mask = dims(a, used)
    part = load(part_ref.at[seq, head, split[:, None], dim[None, :]], mask=mask, other=0.0)
    largest = jnp.max(lse, axis=0)
    if sinks:
        sink = sinks[0][head].astype(jnp.float32) * LOG2E
        largest = jnp.maximum(largest, sink)
    weight = jnp.exp2(lse - largest)
    total = jnp.sum(weight, axis=0)
    if sinks:
        total = total + jnp.exp2(sink - largest)
    out = jnp.where(keys > 0, jnp.sum(part * weight[:, None], axis=0) / total, 0.0)
    store(out_ref.at[token, head, dim], out.astype(out_ref.dtype), mask=(dim < a.Dh) & single)
    _zero_padding(a, out_ref, cu_ref, program, head, 1)


def reduce_warps(a: Attention, splits: int) -> int:
    """Returns the warps of the reduction, which holds a row's parts at once: at least 32 numbers a thread."""
    return max(1, min(8, next_power_of_2(splits) * a.Dp // 1024))


def decode(
    a: Attention,
    config: Config,
    q: jax.Array,
    pages: tuple[jax.Array, ...],
    block_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    scales: tuple[jax.Array, ...],
    sinks: tuple[jax.Array, ...],
    interpret: bool | None,
) -> jax.Array:
    """Writes `[T, H, Dh]`: rows of sequences with one query (0 without keys), 0 past the last; no others."""
    splits = config.splits
    static: dict[str, Any] = {"a": a, "tile": config.decode_tile, "splits": splits}
    output, padding = jax.ShapeDtypeStruct(q.shape, q.dtype), cdiv(a.T, PADDING_ROWS)
    parts = [
        jax.ShapeDtypeStruct((a.S, a.H, splits, a.Dh), jnp.float32),
        jax.ShapeDtypeStruct((a.S, a.H, splits), jnp.float32),
    ]
    attended = pallas_call(
        functools.partial(_split_kernel, **static),
        name="paged_decode",
        grid=(splits, a.K, a.S if splits > 1 else a.S + padding),
        out_shape=parts if splits > 1 else output,
        num_warps=config.decode_warps,
        num_stages=config.decode_stages,
        interpret=interpret,
    )(q, *pages, block_table, kv_lens, cu_q_lens, *scales, *(() if splits > 1 else sinks))
    if splits == 1:
        return attended
    return pallas_call(
        functools.partial(_reduce_kernel, **static),
        name="paged_decode_reduce",
        grid=(a.S + padding, a.H),
        out_shape=output,
        num_warps=reduce_warps(a, splits),
        num_stages=1,
        interpret=interpret,
    )(*attended, kv_lens, cu_q_lens, *sinks)
