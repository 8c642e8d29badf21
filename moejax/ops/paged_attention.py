"""Attention over a paged key/value cache, in plain XLA: a flat batch of decodes and prompt chunks.

A layer's cache is slabs (`moejax.cache.slabs`) of blocks: keys `[n, K, Dh, bs]`, values `[n, K, bs, Dh]`.
Keys lie transposed because both products then run along the last axis.

Decodes go block by block, not sequence by sequence: each block in use meets its owner's query where it lies,
and the softmax is put together afterwards. Collecting a sequence's blocks first would copy the cache, which
costs three to four times as much on CPU (docs/log.md). Chunks go tile by tile of one sequence's queries over
its blocks with a running softmax (FlashAttention-2, arXiv 2307.08691), and visit no block past the last query
nor before the window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Slab = tuple[jax.Array, jax.Array]
Slabs = tuple[Slab, ...]

# Keys that one turn of a chunk's loop attends to, at least one block.
KEYS_PER_TURN = 64


class DecodePlan(NamedTuple):
    """S rows that decode at most one token each, and the N blocks that are read.

    Attributes:
        position: int32 `[S]`; -1 for a row that does not decode.
        owner: int32 `[N, R]`, rows that a block belongs to; -1 for none.
        logical: int32 `[N]`, a block's place in its sequence.
        write_row, write_block, write_offset: int32 `[S]`, by slab: the row whose key and value go into
            `offset` of the slab's `block`.
        write_ends: int32 `[Z]`: writes [write_ends[z - 1], write_ends[z]) are slab z's.
    """

    position: jax.Array
    owner: jax.Array
    logical: jax.Array
    write_row: jax.Array
    write_block: jax.Array
    write_offset: jax.Array
    write_ends: jax.Array


class ChunkPlan(NamedTuple):
    """T tokens of several sequences' chunks, one after another.

    Attributes:
        tile_start, tile_row, tile_position, tile_count: int32: a tile's first token among the T, its row of
            `table`, its first position and its tokens; rising by start.
        num_tiles: int32 `[1]`.
        table: int32 `[S, M]`, block tables.
        run_start, run_block, run_offset, run_count: int32, by slab: tokens from `start` go into the slab's
            `block` from `offset` on.
        run_ends: int32 `[Z]`, as `write_ends`.
    """

    tile_start: jax.Array
    tile_row: jax.Array
    tile_position: jax.Array
    tile_count: jax.Array
    num_tiles: jax.Array
    table: jax.Array
    run_start: jax.Array
    run_block: jax.Array
    run_offset: jax.Array
    run_count: jax.Array
    run_ends: jax.Array


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
    v: jax.Array,
    slabs: Slabs,
    plan: AttentionPlan,
    *,
    window: int | None,
    scale: float,
) -> tuple[jax.Array, Slabs]:
    """Stores the batch's keys and values, then attends. Softmax in float32.

    Args:
        q: `[S + T, H, Dh]`; query heads h·G to h·G + G - 1 share key head h.
        k, v: `[S + T, K, Dh]`.
        window: a query at p sees positions in (p - window, p]; None sees all up to p.

    Returns:
        `[S + T, H, Dh]` (places that compute nothing hold anything finite) and the updated slabs.
    """
    S, K = plan.decode.position.shape[0], k.shape[1]
    H, Dh = q.shape[1:]
    q = (q * jnp.asarray(scale, q.dtype)).reshape(-1, K, H // K, Dh)
    slabs = write_rows(slabs, k[:S], v[:S], plan.decode)
    if plan.chunk is None:
        return decode_attention(q, slabs, plan.decode, window).reshape(-1, H, Dh), slabs
    slabs = write_runs(slabs, k[S:], v[S:], plan.chunk)
    decoded = jax.lax.cond(
        jnp.any(plan.decode.position >= 0),
        lambda: decode_attention(q[:S], slabs, plan.decode, window),
        lambda: jnp.zeros_like(q[:S]),
    )
    chunked = chunk_attention(q[S:], slabs, plan.chunk, window)
    return jnp.concatenate([decoded, chunked]).reshape(-1, H, Dh), slabs


def write_rows(slabs: Slabs, k: jax.Array, v: jax.Array, plan: DecodePlan) -> Slabs:
    """Stores single tokens, k and v `[S, K, Dh]`, in place."""

    def body(i: jax.Array, slab: Slab) -> Slab:
        keys, values = slab
        row, block, offset = plan.write_row[i], plan.write_block[i], plan.write_offset[i]
        new_k = jax.lax.dynamic_slice_in_dim(k, row, 1).astype(keys.dtype)[..., None]
        new_v = jax.lax.dynamic_slice_in_dim(v, row, 1).astype(values.dtype)[:, :, None]
        return (
            jax.lax.dynamic_update_slice(keys, new_k, (block, 0, 0, offset)),
            jax.lax.dynamic_update_slice(values, new_v, (block, 0, offset, 0)),
        )

    return _each_slab(slabs, plan.write_ends, body)


def write_runs(slabs: Slabs, k: jax.Array, v: jax.Array, plan: ChunkPlan) -> Slabs:
    """Stores the chunks' tokens, k and v `[T, K, Dh]`, a block at a time, in place."""
    size = slabs[0][0].shape[3]
    # A slice of a block's length that starts at `start - offset` puts every token at its own offset.
    k, v = (jnp.pad(x, ((size, size), (0, 0), (0, 0))) for x in (k, v))
    offsets = jnp.arange(size, dtype=jnp.int32)

    def body(i: jax.Array, slab: Slab) -> Slab:
        keys, values = slab
        block, offset = plan.run_block[i], plan.run_offset[i]
        first = plan.run_start[i] - offset + size
        mine = (offsets >= offset) & (offsets < offset + plan.run_count[i])
        new_k = jax.lax.dynamic_slice_in_dim(k, first, size).astype(keys.dtype).transpose(1, 2, 0)
        new_v = jax.lax.dynamic_slice_in_dim(v, first, size).astype(values.dtype).transpose(1, 0, 2)
        old_k = jax.lax.dynamic_index_in_dim(keys, block, keepdims=False)
        old_v = jax.lax.dynamic_index_in_dim(values, block, keepdims=False)
        new_k = jnp.where(mine[None, None, :], new_k, old_k)
        new_v = jnp.where(mine[None, :, None], new_v, old_v)
        return (
            jax.lax.dynamic_update_slice(keys, new_k[None], (block, 0, 0, 0)),
            jax.lax.dynamic_update_slice(values, new_v[None], (block, 0, 0, 0)),
        )

    return _each_slab(slabs, plan.run_ends, body)


def _each_slab(slabs: Slabs, ends: jax.Array, body) -> Slabs:
    """Runs `body(i, slab)` for each slab's own writes."""
    done, start = [], jnp.zeros((), jnp.int32)
    for z, slab in enumerate(slabs):
        done.append(jax.lax.fori_loop(start, ends[z], body, slab))
        start = ends[z]
    return tuple(done)


def decode_attention(q: jax.Array, slabs: Slabs, plan: DecodePlan, window: int | None) -> jax.Array:
    """q `[S, K, G, Dh]`, already scaled → `[S, K, G, Dh]`. Rows that own no block give 0."""
    S, K, G, Dh = q.shape
    N, R = plan.owner.shape
    size = slabs[0][0].shape[3]
    lowest = jnp.finfo(jnp.float32).min
    # Rows are picked and summed by products with 0 and 1: XLA:CPU gathers and scatters element by element.
    mine = plan.owner.reshape(1, N * R) == jnp.arange(S, dtype=jnp.int32)[:, None]
    select = mine.astype(jnp.float32)
    # [N, K, R·G, Dh]: the queries that each block meets.
    met = (mine.T.astype(q.dtype) @ _finite(q).reshape(S, K * G * Dh)).reshape(N, R, K, G, Dh)
    met = met.transpose(0, 2, 1, 3, 4).reshape(N, K, R * G, Dh)
    starts = _starts(slabs)
    scores = [
        jnp.einsum("nkmd,nkdb->nkmb", met[a : a + keys.shape[0]], keys)
        for a, (keys, _) in zip(starts, slabs, strict=True)
    ]
    whole = jnp.concatenate(scores) if len(scores) > 1 else scores[0]
    whole = whole.astype(jnp.float32).reshape(N, K, R, G, size)

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

    parts = weights.reshape(N, K, R * G, size).astype(q.dtype)
    out = [
        jnp.einsum("nkmb,nkbd->nkmd", parts[a : a + values.shape[0]], values)
        for a, (_, values) in zip(starts, slabs, strict=True)
    ]
    summed = jnp.concatenate(out) if len(out) > 1 else out[0]
    summed = summed.reshape(N, K, R, G, Dh).transpose(0, 2, 1, 3, 4).reshape(N * R, K * G * Dh)
    summed = (select @ _finite(summed.astype(jnp.float32))).reshape(S, K, G, Dh)
    return (summed / jnp.where(total > 0, total, 1.0)).astype(q.dtype)


def _finite(x: jax.Array) -> jax.Array:
    """0 for what is not finite, so that a sequence gone wrong stays alone with it: 0 · NaN is NaN. Its own
    residual stream keeps the NaN."""
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def chunk_attention(q: jax.Array, slabs: Slabs, plan: ChunkPlan, window: int | None) -> jax.Array:
    """q `[T, K, G, Dh]`, already scaled → `[T, K, G, Dh]`."""
    T, K, G, Dh = q.shape
    tile = tile_rows(T)
    size = slabs[0][0].shape[3]
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
            keys, values = _load(slabs, blocks)
            scores = jnp.einsum("kmd,kdb->kmb", part, keys).astype(jnp.float32)
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
            product = jnp.einsum("kmb,kbd->kmd", weights.astype(q.dtype), values)
            return new, total, summed * shrink + product.astype(jnp.float32)

        begin = jnp.zeros((), jnp.int32)
        if window is not None:
            begin = jnp.maximum(first - window + 1, 0) // keys_per_turn
        end = (first + plan.tile_count[t] - 1) // keys_per_turn + 1
        empty = (
            jnp.full((K, G * tile, 1), lowest),
            jnp.zeros((K, G * tile, 1)),
            jnp.zeros((K, G * tile, Dh)),
        )
        _, total, summed = jax.lax.fori_loop(begin, end, turn, empty)
        result = (summed / jnp.where(total > 0, total, 1.0)).astype(q.dtype)
        result = result.reshape(K, G, tile, Dh).transpose(2, 0, 1, 3)
        # Rows past the tile's count are overwritten by the next tile.
        return jax.lax.dynamic_update_slice_in_dim(out, result, start, 0)

    return jax.lax.fori_loop(0, plan.num_tiles[0], one_tile, jnp.zeros_like(padded))[:T]


def _load(slabs: Slabs, blocks: jax.Array) -> Slab:
    """Keys `[K, Dh, P·bs]` and values `[K, P·bs, Dh]` of P blocks, copied out of their slabs."""
    ends = [a + keys.shape[0] for a, (keys, _) in zip(_starts(slabs), slabs, strict=True)]

    def one(block: jax.Array) -> Slab:
        def from_slab(z: int):
            def read() -> Slab:
                local = block - _starts(slabs)[z]
                keys, values = slabs[z]
                return (
                    jax.lax.dynamic_index_in_dim(keys, local, keepdims=False),
                    jax.lax.dynamic_index_in_dim(values, local, keepdims=False),
                )

            return read

        if len(slabs) == 1:
            return from_slab(0)()
        slab = sum((block >= end).astype(jnp.int32) for end in ends[:-1])
        return jax.lax.switch(slab, [from_slab(z) for z in range(len(slabs))])

    found = [one(blocks[i]) for i in range(blocks.shape[0])]
    keys = jnp.concatenate([k for k, _ in found], axis=2)
    values = jnp.concatenate([v for _, v in found], axis=1)
    return keys, values


def _starts(slabs: Slabs) -> list[int]:
    """First block of each slab."""
    starts, total = [], 0
    for keys, _ in slabs:
        starts.append(total)
        total += keys.shape[0]
    return starts


def copy_blocks(slabs: Slabs, source: jax.Array, destination: jax.Array, count: jax.Array) -> Slabs:
    """Copies blocks one after another, source and destination int32 `[C]`, the first `count` of them."""
    starts = _starts(slabs)

    def body(i: jax.Array, slabs: Slabs) -> Slabs:
        keys, values = _load(slabs, source[i][None])
        done = []
        for start, (k, v) in zip(starts, slabs, strict=True):
            local = destination[i] - start
            inside = (local >= 0) & (local < k.shape[0])
            at = jnp.where(inside, local, 0)
            old_k = jax.lax.dynamic_index_in_dim(k, at, keepdims=False)
            old_v = jax.lax.dynamic_index_in_dim(v, at, keepdims=False)
            new_k, new_v = jnp.where(inside, keys, old_k), jnp.where(inside, values, old_v)
            done.append(
                (
                    jax.lax.dynamic_update_slice(k, new_k[None], (at, 0, 0, 0)),
                    jax.lax.dynamic_update_slice(v, new_v[None], (at, 0, 0, 0)),
                )
            )
        return tuple(done)

    return jax.lax.fori_loop(0, count, body, slabs)
