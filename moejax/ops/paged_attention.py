"""Attention over a paged key/value cache, in plain XLA: a flat batch of decodes and prompt chunks.

A layer's cache is segments (`moejax.cache.segments`) of blocks: keys `[n, K, Dh, bs]`, values `[n, K, bs,
Dh]`. Keys lie transposed because both products then run along the last axis. In a quantized cache these are
codes, with a scale for each token and head: a scale goes onto the score of its key, or onto the weight of its
value, and codes are widened a few blocks at a time, so that the cache never exists in floating point.

Decodes go block by block, not sequence by sequence: each block in use meets its owner's query where it lies,
and the softmax is put together afterwards. Collecting a sequence's blocks first would copy the cache, which
costs three to four times as much on CPU (docs/log.md). Chunks go tile by tile of one sequence's queries over
its blocks with a running softmax (FlashAttention-2, arXiv 2307.08691), and visit no block past the last query
nor before the window.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.ops.kv_segments import (
    ChunkPlan,
    DecodePlan,
    Segments,
    load_blocks,
    segment_starts,
    write_rows,
    write_runs,
)
from moejax.quantization.kv import from_bits

# Keys that one turn of a chunk's loop attends to, at least one block.
KEYS_PER_TURN = 64
# Codes that are widened at a time, at least one block: 2^16 floats stay in a core's cache.
CODES_AT_A_TIME = 1 << 16


class AttentionPlan(NamedTuple):
    """Both halves of a flat batch: S decode places, then T chunk tokens (None: there are none)."""

    decode: DecodePlan
    chunk: ChunkPlan | None


def tile_rows(tokens: int) -> int:
    """Queries per tile of a step with that many chunk tokens."""
    return max(1, min(tokens, 32))


def paged_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    segments: Segments,
    plan: AttentionPlan,
    *,
    window: int | None,
    scale: float,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Segments]:
    """Stores the batch's keys and values, then attends. Softmax in float32.

    Args:
        q: `[S + T, H, Dh]`; query heads h·G to h·G + G - 1 share key head h.
        k, v: `[S + T, K, Dh]`; without v a value is the last numbers of its key (`Segment.latent`).
        window: a query at p sees positions in (p - window, p]; None sees all up to p.
        sinks: `[H]`, see `moejax.ops.attention.attention`.

    Returns:
        `[S + T, H, Dv]` (places that compute nothing hold anything finite) and the updated segments.
    """
    S, K = plan.decode.position.shape[0], k.shape[1]
    H, Dh = q.shape[1:]
    Dv = segments[0].value_dim
    q = (q * jnp.asarray(scale, q.dtype)).reshape(-1, K, H // K, Dh)
    sinks = None if sinks is None else sinks.reshape(K, H // K).astype(jnp.float32)
    segments = write_rows(segments, k[:S], None if v is None else v[:S], plan.decode)
    if plan.chunk is None:
        return decode_attention(q, segments, plan.decode, window, sinks).reshape(-1, H, Dv), segments
    segments = write_runs(segments, k[S:], None if v is None else v[S:], plan.chunk)
    decoded = jax.lax.cond(
        jnp.any(plan.decode.position >= 0),
        lambda: decode_attention(q[:S], segments, plan.decode, window, sinks),
        lambda: jnp.zeros_like(q[:S, ..., :Dv]),
    )
    chunked = chunk_attention(q[S:], segments, plan.chunk, window, sinks)
    return jnp.concatenate([decoded, chunked]).reshape(-1, H, Dv), segments


def decode_attention(
    q: jax.Array, segments: Segments, plan: DecodePlan, window: int | None, sinks: jax.Array | None = None
) -> jax.Array:
    """Attends scaled q `[S, K, G, Dh]`, sinks `[K, G]`; returns `[S, K, G, Dv]`, 0 without a block."""
    S, K, G, Dh = q.shape
    Dv = segments[0].value_dim
    N, R = plan.owner.shape
    size = segments[0].block_size
    lowest = jnp.finfo(jnp.float32).min
    # Rows are picked and summed by products with 0 and 1: XLA:CPU gathers and scatters element by element.
    mine = plan.owner.reshape(1, N * R) == jnp.arange(S, dtype=jnp.int32)[:, None]
    select = mine.astype(jnp.float32)
    # [N, K, R·G, Dh]: the queries that each block meets.
    met = (mine.T.astype(q.dtype) @ _finite(q).reshape(S, K * G * Dh)).reshape(N, R, K, G, Dh)
    met = met.transpose(0, 2, 1, 3, 4).reshape(N, K, R * G, Dh)
    starts = segment_starts(segments)
    scores = [
        _block_products("nkmd,nkdb->nkmb", met[a : a + segment.num_blocks], segment.keys, segment.codes)
        for a, segment in zip(starts, segments, strict=True)
    ]
    whole = _joined(scores).astype(jnp.float32).reshape(N, K, R, G, size)
    if segments[0].quantized:
        whole = whole * _joined([segment.key_scale for segment in segments])[:, :, None, None, :]

    key = plan.logical[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None, :]
    last = jnp.where(plan.owner >= 0, plan.position[jnp.maximum(plan.owner, 0)], -1)
    seen = key[:, None, :] <= last[:, :, None]  # [N, R, bs]
    if window is not None:
        seen &= key[:, None, :] > last[:, :, None] - window
    seen = seen[:, None, :, None, :]
    whole = jnp.where(seen, whole, lowest)

    # The softmax of a row spans the blocks it owns: its maximum, sum and output are sums over blocks.
    highest = whole.max(axis=-1).transpose(0, 2, 1, 3).reshape(1, N * R, K, G)
    highest = jnp.max(jnp.where(mine[:, :, None, None], highest, lowest), axis=1)  # [S, K, G]
    shift = (
        (select.T @ _finite(highest).reshape(S, K * G)).reshape(N, R, K, G).transpose(0, 2, 1, 3)[..., None]
    )
    weights = jnp.where(seen, jnp.exp(whole - shift), 0.0)
    total = weights.sum(axis=-1).transpose(0, 2, 1, 3).reshape(N * R, K * G)
    total = (select @ _finite(total)).reshape(S, K, G, 1)
    if sinks is not None:
        total += jnp.exp(sinks[None] - highest)[..., None]

    if segments[0].quantized:
        scale = _joined([segment.row_scale for segment in segments])[:, :, None, None, :]
        parts = jnp.where(seen, weights * scale, 0.0).reshape(N, K, R * G, size)
    else:
        parts = weights.reshape(N, K, R * G, size).astype(q.dtype)
    out = [
        _block_products("nkmb,nkbd->nkmd", parts[a : a + segment.num_blocks], segment.rows, segment.codes)
        for a, segment in zip(starts, segments, strict=True)
    ]
    summed = _joined(out)
    summed = summed.reshape(N, K, R, G, Dv).transpose(0, 2, 1, 3, 4).reshape(N * R, K * G * Dv)
    summed = (select @ _finite(summed.astype(jnp.float32))).reshape(S, K, G, Dv)
    return (summed / jnp.where(total > 0, total, 1.0)).astype(q.dtype)


def _joined(parts: Sequence[Any]) -> jax.Array:
    """Returns the segments' arrays, one after another."""
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _product(equation: str, x: jax.Array, stored: jax.Array, codes: str | None) -> jax.Array:
    """Multiplies x by what a segment holds. Codes are multiplied in float32, or in x's bfloat16, which holds
    them exactly; their sums, which no scale has brought to size yet, are float32."""
    if codes is None:
        return jnp.einsum(equation, x, stored)
    wide = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    stored = from_bits(stored, codes).astype(wide)
    return jnp.einsum(equation, x.astype(wide), stored, preferred_element_type=jnp.float32)


def _block_products(equation: str, x: jax.Array, stored: jax.Array, codes: str | None) -> jax.Array:
    """Computes `_product` for each of n blocks, x and stored `[n, …]`; codes a few blocks at a time."""
    n, at_a_time = stored.shape[0], max(1, CODES_AT_A_TIME // (stored.size // stored.shape[0]))
    if codes is None or n <= at_a_time:
        return _product(equation, x, stored, codes)

    def turn(i: jax.Array, out: jax.Array) -> jax.Array:
        # The last turn goes back over some of what the one before has done.
        start = jnp.minimum(i * at_a_time, n - at_a_time)
        x_part, part = (jax.lax.dynamic_slice_in_dim(a, start, at_a_time) for a in (x, stored))
        return jax.lax.dynamic_update_slice_in_dim(out, _product(equation, x_part, part, codes), start, 0)

    like = jax.eval_shape(lambda: _product(equation, x, stored, codes))
    return jax.lax.fori_loop(0, -(-n // at_a_time), turn, jnp.zeros(like.shape, like.dtype))


def _finite(x: jax.Array) -> jax.Array:
    """Puts 0 for what is not finite, so that a sequence gone wrong stays alone with it: 0 · NaN is NaN.
    Its own residual stream keeps the NaN."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def chunk_attention(
    q: jax.Array, segments: Segments, plan: ChunkPlan, window: int | None, sinks: jax.Array | None = None
) -> jax.Array:
    """Attends scaled q `[T, K, G, Dh]`, sinks `[K, G]`; returns `[T, K, G, Dv]`."""
    T, K, G, Dh = q.shape
    Dv = segments[0].value_dim
    tile = tile_rows(T)
    size = segments[0].block_size
    per_turn = min(max(1, KEYS_PER_TURN // size), plan.table.shape[1])
    keys_per_turn = per_turn * size
    lowest = jnp.finfo(jnp.float32).min
    table = jnp.pad(plan.table, ((0, 0), (0, -plan.table.shape[1] % per_turn)))
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0), (0, 0)))

    def one_tile(t: jax.Array, out: jax.Array) -> jax.Array:
        start, first = plan.tile_start[t], plan.tile_position[t]
        part = jax.lax.dynamic_slice_in_dim(padded, start, tile)
        part = part.transpose(1, 2, 0, 3).reshape(K, G * tile, Dh)
        position = jnp.tile(first + jnp.arange(tile, dtype=jnp.int32), G)[:, None]

        def turn(c: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, total, summed = carry
            blocks = jax.lax.dynamic_slice(table, (plan.tile_row[t], c * per_turn), (1, per_turn))[0]
            loaded = load_blocks(segments, blocks)
            scores = _product("kmd,kdb->kmb", part, loaded.keys, loaded.codes).astype(jnp.float32)
            if loaded.key_scale is not None:
                scores = scores * loaded.key_scale[:, None, :]
            key = c * keys_per_turn + jnp.arange(keys_per_turn, dtype=jnp.int32)[None, :]
            seen = key <= position
            if window is not None:
                seen &= key > position - window
            seen = seen[None]
            scores = jnp.where(seen, scores, lowest)
            new = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
            weights = jnp.where(seen, jnp.exp(scores - new), 0.0)
            shrink = jnp.exp(highest - new)
            total = total * shrink + weights.sum(axis=-1, keepdims=True)
            if loaded.row_scale is None:
                weights = weights.astype(q.dtype)
            else:
                weights = jnp.where(seen, weights * loaded.row_scale[:, None, :], 0.0)
            product = _product("kmb,kbd->kmd", weights, loaded.rows, loaded.codes)
            return new, total, summed * shrink + product.astype(jnp.float32)

        begin = jnp.zeros((), jnp.int32)
        if window is not None:
            begin = jnp.maximum(first - window + 1, 0) // keys_per_turn
        end = (first + plan.tile_count[t] - 1) // keys_per_turn + 1
        empty = (
            jnp.full((K, G * tile, 1), lowest),
            jnp.zeros((K, G * tile, 1)),
            jnp.zeros((K, G * tile, Dv)),
        )
        highest, total, summed = jax.lax.fori_loop(begin, end, turn, empty)
        if sinks is not None:
            total += jnp.exp(jnp.repeat(sinks, tile, axis=1)[..., None] - highest)
        result = (summed / jnp.where(total > 0, total, 1.0)).astype(q.dtype)
        result = result.reshape(K, G, tile, Dv).transpose(2, 0, 1, 3)
        # Rows past the tile's count are overwritten by the next tile.
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, 0)

    return jax.lax.fori_loop(0, plan.num_tiles[0], one_tile, jnp.zeros_like(padded[..., :Dv]))[:T]
