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

A cache of latents (`moejax.nn.latent_attention`) is attended to as it lies, by queries that were brought to
the latents (the absorbed form). Long chunks cost less in the plain form: each turn makes all heads' keys and
values of its latents, once for all queries of the chunk. `moejax.perf.sizes.takes_plain_form` says which form
a chunk takes, and the step's plan tells the program, which has both where its chunk tokens can be so many.

Where a policy evicts keys (`Evicted`), all chunks take the absorbed form, and attention may be asked how
much of it each block got.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.core.config import LatentConfig
from moejax.core.scheduling import KvPolicyConfig
from moejax.ops.attention import LatentHeads
from moejax.ops.kv_segments import (
    ChunkPlan,
    DecodePlan,
    Segments,
    load_blocks,
    segment_starts,
    write_rows,
    write_runs,
)
from moejax.perf.sizes import PLAIN_KEYS, takes_plain_form
from moejax.quantization.kv import as_numbers, from_bits

# Keys that one turn of a chunk's loop attends to, at least one block.
KEYS_PER_TURN = 64
# Queries of a chunk in the plain form that a product takes at a time.
PLAIN_QUERIES = 128
# Codes that are widened at a time, at least one block: 2^16 floats stay in a core's cache.
CODES_AT_A_TIME = 1 << 16


class Evicted(NamedTuple):
    """What attention must be told where a policy evicts keys.

    Attributes:
        span: a query sees so many first and so many last keys; None: all that are there.
        blocks: of a sequence, whose shares of the attention are told; 0: they are not.
        by_head: what a prompt's heads keep when it ends (`moejax.ops.kv_by_head`); None: all.
    """

    span: tuple[int, int] | None = None
    blocks: int = 0
    by_head: KvPolicyConfig | None = None

    def hide(self, seen: jax.Array, key: jax.Array, query: jax.Array) -> jax.Array:
        """Returns which keys a query still sees, of their positions and its own."""
        return seen if self.span is None else seen & ((key < self.span[0]) | (key > query - self.span[1]))


ALL_KEPT = Evicted()


class AttentionPlan(NamedTuple):
    """Both halves of a flat batch: S decode places, then T chunk tokens (None: there are none). Where decodes
    have no owners, `chunk` says what all the S attend to."""

    decode: DecodePlan
    chunk: ChunkPlan | None


def tile_rows(tokens: int) -> int:
    """Queries per tile of a step with that many chunk tokens."""
    return max(1, min(tokens, 32))


def has_plain_chunks(tokens: int, latent: LatentConfig) -> bool:
    """Tells whether a step with that many chunk tokens can have a chunk in the plain form."""
    return bool(takes_plain_form(latent, tokens, -(-tokens // PLAIN_KEYS) * PLAIN_KEYS))


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
    latents: LatentHeads | None = None,
    evicted: Evicted = ALL_KEPT,
) -> tuple[jax.Array, Segments, jax.Array | None]:
    """Stores the batch's keys and values, then attends. Softmax in float32.

    Args:
        q: `[S + T, H, Dh]`; query heads h·G to h·G + G - 1 share key head h.
        k, v: `[S + T, K, Dh]`; without v a value is the last numbers of its key (`Segment.latent`).
        window: a query at p sees positions in (p - window, p]; None sees all up to p.
        sinks: `[H]`, see `moejax.ops.attention.attention`.
        latents: where k are latents; then q and what is returned are `[S + T, H, rope_dim + nope_dim]` and
            `[S + T, H, value_dim]`.
        evicted: what a policy has evicted.

    Returns:
        `[S + T, H, Dv]` (places that compute nothing hold anything finite), the updated segments, and where
        `evicted` asks for it float32 `[S, blocks]`, the attention that each row's queries gave each block of
        their sequence, summed over heads.
    """
    S, K = plan.decode.position.shape[0], k.shape[1]
    (N, H, _), chunk = q.shape, plan.chunk
    q = q * jnp.asarray(scale, q.dtype)
    sinks = None if sinks is None else sinks.reshape(K, H // K).astype(jnp.float32)
    segments = write_rows(segments, k[:S], None if v is None else v[:S], plan.decode)
    alone = plan.decode.owner is None
    if chunk is not None and not alone:
        segments = write_runs(segments, k[S:], None if v is None else v[S:], chunk)

    def attend(half: Callable[..., Any], q: jax.Array, plan: DecodePlan | ChunkPlan) -> Any:
        q = q if latents is None else latents.absorb(q)
        out, mass = half(q.reshape(len(q), K, H // K, -1), segments, plan, window, sinks, evicted)
        out = out.reshape(len(q), H, -1)
        return out if latents is None else latents.values(out), mass

    if chunk is None:
        out, mass = attend(decode_attention, q, plan.decode)
        return out, segments, mass
    if alone:
        out, mass = attend(chunk_attention, q, chunk)
        return out, segments, mass
    decodes = jnp.any(plan.decode.position >= 0)
    decoded, mass = _where_any(decodes, lambda: attend(decode_attention, q[:S], plan.decode))
    if latents is not None and has_plain_chunks(N - S, latents.config) and evicted == ALL_KEPT:
        tiled, _ = _where_any(chunk.num_tiles[0] > 0, lambda: attend(chunk_attention, q[S:], chunk))
        chunked = plain_chunk_attention(q[S:], segments, chunk, latents, tiled)
    else:
        chunked, more = attend(chunk_attention, q[S:], chunk)
        mass = None if mass is None else mass + more
    return jnp.concatenate([decoded, chunked]), segments, mass


def _where_any(some: jax.Array, compute: Callable[[], Any]) -> Any:
    """Computes where there are some, and returns zeros where there is none."""
    like = jax.eval_shape(compute)
    return jax.lax.cond(some, compute, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like))


def decode_attention(
    q: jax.Array, segments: Segments, plan: DecodePlan, window: int | None, sinks: jax.Array | None = None,
    evicted: Evicted = ALL_KEPT,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Attends scaled q `[S, K, G, Dh]`, sinks `[K, G]`; returns `[S, K, G, Dv]`, 0 without a block, and what
    `paged_attention` tells of blocks."""
    assert plan.owner is not None and plan.logical is not None
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
    seen = evicted.hide(seen, key[:, None, :], last[:, :, None])
    seen = seen[:, None, :, None, :]
    whole = jnp.where(seen, whole, lowest)

    # The softmax of a row spans the blocks it owns: its maximum, sum and output are sums over blocks.
    highest = whole.max(axis=-1).transpose(0, 2, 1, 3).reshape(1, N * R, K, G)
    highest = jnp.max(jnp.where(mine[:, :, None, None], highest, lowest), axis=1)  # [S, K, G]
    shift = (
        (select.T @ _finite(highest).reshape(S, K * G)).reshape(N, R, K, G).transpose(0, 2, 1, 3)[..., None]
    )
    weights = jnp.where(seen, jnp.exp(whole - shift), 0.0)
    each = _finite(weights.sum(axis=-1).transpose(0, 2, 1, 3).reshape(N * R, K * G))
    total = (select @ each).reshape(S, K, G, 1)
    if sinks is not None:
        total += jnp.exp(sinks[None] - highest)[..., None]
    mass = None
    if evicted.blocks:
        shares = (each * (select.T @ (1.0 / jnp.where(total > 0, total, 1.0)).reshape(S, K * G))).sum(axis=1)
        place = jnp.repeat(plan.logical, R)[:, None] == jnp.arange(evicted.blocks, dtype=jnp.int32)[None]
        mass = (select * shares[None]) @ place.astype(jnp.float32)

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
    return (summed / jnp.where(total > 0, total, 1.0)).astype(q.dtype), mass


def _joined(parts: Sequence[Any]) -> jax.Array:
    """Returns the segments' arrays, one after another."""
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def product(equation: str, x: jax.Array, stored: jax.Array, codes: str | None) -> jax.Array:
    """Multiplies x by what a segment holds. Codes are multiplied in float32, or in x's bfloat16, which holds
    them exactly; their sums, which no scale has brought to size yet, are float32."""
    if codes is None:
        return jnp.einsum(equation, x, as_numbers(stored))
    dims = equation.partition("->")[0].partition(",")[2]
    stored = from_bits(stored, codes, dims.find("d")).astype(_wide(x))
    return jnp.einsum(equation, x.astype(_wide(x)), stored, preferred_element_type=jnp.float32)


def _wide(x: jax.Array) -> Any:
    """Returns the dtype that codes are multiplied in."""
    return jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32


def _block_products(equation: str, x: jax.Array, stored: jax.Array, codes: str | None) -> jax.Array:
    """Computes `product` for each of n blocks, x and stored `[n, …]`; codes a few blocks at a time."""
    n, at_a_time = stored.shape[0], max(1, CODES_AT_A_TIME // (stored.size // stored.shape[0]))
    if codes is None or n <= at_a_time:
        return product(equation, x, stored, codes)

    def turn(i: jax.Array, out: jax.Array) -> jax.Array:
        # The last turn goes back over some of what the one before has done.
        start = jnp.minimum(i * at_a_time, n - at_a_time)
        x_part, part = (jax.lax.dynamic_slice_in_dim(a, start, at_a_time) for a in (x, stored))
        return jax.lax.dynamic_update_slice_in_dim(out, product(equation, x_part, part, codes), start, 0)

    like = jax.eval_shape(lambda: product(equation, x, stored, codes))
    return jax.lax.fori_loop(0, -(-n // at_a_time), turn, jnp.zeros(like.shape, like.dtype))


def _finite(x: jax.Array) -> jax.Array:
    """Puts 0 for what is not finite, so that a sequence gone wrong stays alone with it: 0 · NaN is NaN.
    Its own residual stream keeps the NaN."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def chunk_attention(
    q: jax.Array, segments: Segments, plan: ChunkPlan, window: int | None, sinks: jax.Array | None = None,
    evicted: Evicted = ALL_KEPT,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Attends scaled q `[T, K, G, Dh]`, sinks `[K, G]`; returns `[T, K, G, Dv]`, and what `paged_attention`
    tells of blocks, of queries from `plan.weigh_from` on."""
    T, K, G, Dh = q.shape
    Dv = segments[0].value_dim
    tile = 1 if plan.tile_count is None else tile_rows(T)
    size = segments[0].block_size
    per_turn = min(max(1, KEYS_PER_TURN // size), plan.table.shape[1])
    keys_per_turn = per_turn * size
    lowest = jnp.finfo(jnp.float32).min
    table = jnp.pad(plan.table, ((0, 0), (0, -plan.table.shape[1] % per_turn)))
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0), (0, 0)))
    kept = None  # where blocks are evicted one by one, the last query that sees each
    if plan.last_query is not None:
        kept = jnp.pad(plan.last_query, ((0, 0), (0, table.shape[1] - plan.table.shape[1])))
    # Whole turns of keys that every query sees as the first ones.
    first_turns = -(-evicted.span[0] // keys_per_turn) if evicted.span else 0

    def one_tile(t: jax.Array, carry: tuple[jax.Array, jax.Array | None]) -> Any:
        out, mass = carry
        start, first = plan.tile_start[t], plan.tile_position[t]
        part = jax.lax.dynamic_slice_in_dim(padded, start, tile)
        part = part.transpose(1, 2, 0, 3).reshape(K, G * tile, Dh)
        position = jnp.tile(first + jnp.arange(tile, dtype=jnp.int32), G)[:, None]

        def score(c: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
            """Returns a turn's blocks, its scores `[K, G·tile, keys]`, and which of them count."""
            at = (plan.tile_row[t], c * per_turn)
            loaded = load_blocks(segments, jax.lax.dynamic_slice(table, at, (1, per_turn))[0])
            scores = product("kmd,kdb->kmb", part, loaded.keys, loaded.codes).astype(jnp.float32)
            if loaded.key_scale is not None:
                scores = scores * loaded.key_scale[:, None, :]
            key = c * keys_per_turn + jnp.arange(keys_per_turn, dtype=jnp.int32)[None, :]
            seen = key <= position
            if window is not None:
                seen &= key > position - window
            if kept is not None:
                seen &= position <= jnp.repeat(jax.lax.dynamic_slice(kept, at, (1, per_turn)), size, axis=1)
            return loaded, scores, evicted.hide(seen, key, position)

        def turn(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            loaded, scores, seen = score(i + jnp.where(i < first_turns, 0, skipped))

            def sums(weights: jax.Array) -> jax.Array:
                weights = weights.astype(q.dtype) if loaded.codes is None else weights
                return product("kmb,kbd->kmd", weights, loaded.rows, loaded.codes)

            return running_softmax(carry, scores, seen[None], loaded.row_scale, sums)

        begin, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        if evicted.span is not None:
            last_turns = jnp.maximum(first - evicted.span[1] + 1, 0) // keys_per_turn
            skipped = jnp.maximum(last_turns - first_turns, 0)
        elif window is not None:
            begin = jnp.maximum(first - window + 1, 0) // keys_per_turn
        count = 1 if plan.tile_count is None else plan.tile_count[t]
        end = (first + count - 1) // keys_per_turn + 1
        empty = (
            jnp.full((K, G * tile, 1), lowest),
            jnp.zeros((K, G * tile, 1)),
            jnp.zeros((K, G * tile, Dv)),
        )
        highest, total, summed = jax.lax.fori_loop(begin, end - skipped, turn, empty)
        if sinks is not None:
            total += jnp.exp(jnp.repeat(sinks, tile, axis=1)[..., None] - highest)
        result = (summed / jnp.where(total > 0, total, 1.0)).astype(q.dtype)
        result = result.reshape(K, G, tile, Dv).transpose(2, 0, 1, 3)
        # Rows past the tile's count are overwritten by the next tile.
        out = jax.lax.dynamic_update_slice_in_dim(out, result, start, 0)
        if mass is None:
            return out, None
        assert plan.weigh_from is not None
        weigh_from = plan.weigh_from[plan.tile_row[t]]
        told = (position >= weigh_from) & (position < first + count)

        def weigh(c: jax.Array, mass: jax.Array) -> jax.Array:
            _, scores, seen = score(c)
            shares = jnp.where((seen & told)[None], jnp.exp(scores - highest), 0.0)
            shares = _finite(shares / jnp.where(total > 0, total, 1.0))
            each = shares.reshape(K * G * tile, per_turn, size).sum(axis=(0, 2))[None]
            at = (plan.tile_row[t], c * per_turn)
            return jax.lax.dynamic_update_slice(
                mass, each + jax.lax.dynamic_slice(mass, at, (1, per_turn)), at
            )

        return out, jax.lax.fori_loop(jnp.where(first + count > weigh_from, 0, end), end, weigh, mass)

    mass = jnp.zeros(table.shape, jnp.float32) if evicted.blocks else None
    empty = jnp.zeros_like(padded[..., :Dv]), mass
    out, mass = jax.lax.fori_loop(0, plan.num_tiles[0], one_tile, empty)
    return out[:T], None if mass is None else mass[:, : evicted.blocks]


def running_softmax(
    old: Sequence[jax.Array], scores: jax.Array, seen: jax.Array, scales: jax.Array | None,
    sums: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Goes on with M softmaxes by P keys: highest scores and sums of weights `[K, M, 1]`, of values
    `[K, M, Dv]`.

    Args:
        scores, seen: `[K, M, P]`.
        scales: of the values, `[K, P]`.
        sums: from weights to sums of values `[K, M, Dv]`.
    """
    highest, total, summed = old
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    new = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - new), 0.0)
    shrink = jnp.exp(highest - new)
    total = total * shrink + weights.sum(axis=-1, keepdims=True)
    weights = weights if scales is None else jnp.where(seen, weights * scales[:, None], 0.0)
    return new, total, summed * shrink + sums(weights).astype(jnp.float32)


def plain_chunk_attention(
    q: jax.Array, segments: Segments, plan: ChunkPlan, latents: LatentHeads, others: jax.Array
) -> jax.Array:
    """Attends scaled q `[T, H, rope_dim + nope_dim]` of whole chunks to keys and values made of latents;
    returns `[T, H, value_dim]`, for the other chunks' queries what `others` has.

    The outer loop goes over keys, which are made once, and the inner one over queries, all of whose running
    softmaxes are kept.
    """
    counts = plan.tile_count
    assert counts is not None
    T, H, _ = q.shape
    rope, nope = latents.config.rope_dim, latents.config.nope_dim
    rank, _, each = latents.weight.shape
    weight = latents.weight.reshape(rank, H * each)
    wide = _wide(q) if segments[0].quantized else q.dtype
    size, queries = segments[0].block_size, min(PLAIN_QUERIES, T)
    per_turn = min(max(1, PLAIN_KEYS // size), plan.table.shape[1])
    keys_per_turn = per_turn * size
    lowest = jnp.finfo(jnp.float32).min
    table = jnp.pad(plan.table, ((0, 0), (0, -plan.table.shape[1] % per_turn)))
    by_head = jnp.pad(q.transpose(1, 0, 2), ((0, 0), (0, queries), (0, 0)))
    key_of, query_of = (jnp.arange(n, dtype=jnp.int32) for n in (keys_per_turn, queries))

    def one_chunk(t: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        start, first, count = plan.tile_start[t], plan.tile_position[t], counts[t]

        def turn(c: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            blocks = jax.lax.dynamic_slice(table, (plan.tile_row[t], c * per_turn), (1, per_turn))[0]
            loaded = load_blocks(segments, blocks)
            key, codes, scales = c * keys_per_turn + key_of[None], loaded.codes, loaded.key_scale
            # Places past the chunk hold anything, of which nothing may come into values.
            stored = jnp.where(key < first + count, loaded.keys[0], jnp.zeros((), loaded.keys.dtype))
            with jax.named_scope("qkv_projection"):
                made = product("rm,rb->mb", weight, stored[rope:], codes).astype(wide)
                made = made.reshape(H, each, keys_per_turn)
            rotated = stored[:rope]
            rotated = as_numbers(rotated) if codes is None else from_bits(rotated, codes).astype(wide)
            rotated = jnp.broadcast_to(rotated, (H, rope, keys_per_turn))
            keys, values = jnp.concatenate([rotated, made[:, :nope]], axis=1), made[:, nope:]

            def attend(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                at = start + i * queries
                part, *old = (jax.lax.dynamic_slice_in_dim(x, at, queries, 1) for x in (by_head, *state))
                scores = jnp.einsum("hmd,hdb->hmb", part.astype(wide), keys).astype(jnp.float32)
                scores = scores if scales is None else scores * scales[:, None]
                place = i * queries + query_of[:, None]
                seen = ((key <= first + place) & (place < count))[None]
                updated = running_softmax(
                    old, scores, seen, scales, lambda x: jnp.einsum("hmb,hvb->hmv", x.astype(wide), values)
                )
                both = zip(state, updated, strict=True)
                return tuple(jax.lax.dynamic_update_slice_in_dim(x, part, at, 1) for x, part in both)

            # Queries before the turn's first key see none of it.
            begin = jnp.maximum(c * keys_per_turn - first, 0) // queries
            return jax.lax.fori_loop(begin, (count - 1) // queries + 1, attend, state)

        return jax.lax.fori_loop(0, (first + count - 1) // keys_per_turn + 1, turn, state)

    places = (H, T + queries)
    empty = jnp.full((*places, 1), lowest), jnp.zeros((*places, 1)), jnp.zeros((*places, each - nope))
    _, total, summed = jax.lax.fori_loop(plan.num_tiles[0], plan.num_tiles[1], one_chunk, empty)
    total, summed = total[:, :T].transpose(1, 0, 2), summed[:, :T].transpose(1, 0, 2)
    # Every query sees itself, so that its sum is not 0.
    return jnp.where(total > 0, (summed / jnp.where(total > 0, total, 1.0)).astype(q.dtype), others)
