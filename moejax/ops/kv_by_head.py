"""Keeps of a prompt, when it ends, the keys that each head attends to most (SnapKV, arXiv 2404.14469).

A layer's key head keeps as many keys as all others, but its own: they are moved into the first blocks behind
the sinks, and the blocks behind those are free. Keys have been rotated, so that it is all the same where they
lie. What is moved lies behind what it goes over, never before it.
"""

import jax
import jax.numpy as jnp

from moejax.core.scheduling import KvPolicyConfig
from moejax.ops.attention import LatentHeads
from moejax.ops.kv_segments import (
    ChunkPlan,
    Segment,
    Segments,
    each_array,
    load_blocks,
    put_block,
    segment_starts,
)
from moejax.ops.paged_attention import KEYS_PER_TURN, product, running_softmax


@jax.named_scope("kv_by_head")
def keep_by_head(
    q: jax.Array,
    segments: Segments,
    plan: ChunkPlan,
    policy: KvPolicyConfig,
    *,
    scale: float,
    sinks: jax.Array | None = None,
    latents: LatentHeads | None = None,
    after: jax.Array | None = None,
) -> Segments:
    """Moves the chosen keys and values of the prompts that end in this step.

    A head goes by the attention of the prompt's last `policy.observe` queries, summed over them and over the
    query heads that share it, each key by the most that one of the `policy.pooling` keys around it got.

    Args:
        q: `[T, H, Dh]`, rotated, the chunks'; with `latents` not absorbed yet.
        plan: whose `end_row`, `end_token` and `end_position` name the prompts.
        sinks: `[H]`, see `moejax.ops.attention.attention`.
        after: `[…, H, Dv]`, what has read the segments in this step.
    """
    assert plan.end_row is not None and plan.end_token is not None and plan.end_position is not None
    H, K, size = q.shape[1], segments[0].keys.shape[1], segments[0].block_size
    rows, tokens, ends = plan.end_row, plan.end_token, plan.end_position
    observe, first = policy.observe, -(-policy.sinks // size)
    width = plan.table.shape[1]
    room = min(policy.budget // size - first - 1, width)
    per_turn = min(max(1, KEYS_PER_TURN // size), width)
    keys_per_turn = per_turn * size
    table = jnp.pad(plan.table, ((0, 0), (0, -width % per_turn)))
    padded = jnp.pad(q * jnp.asarray(scale, q.dtype), ((observe, 0), (0, 0), (0, 0)))
    key = jnp.arange(table.shape[1] * size, dtype=jnp.int32)
    lowest = jnp.finfo(jnp.float32).min

    def one(i: jax.Array, segments: Segments) -> Segments:
        blocks, end = table[rows[i]], ends[i]
        part = jax.lax.dynamic_slice_in_dim(padded, tokens[i] + 1, observe)
        part = part if latents is None else latents.absorb(part)
        part = part.reshape(observe, K, H // K, -1).transpose(1, 2, 0, 3).reshape(K, H // K * observe, -1)
        position = jnp.tile(end - observe + jnp.arange(observe, dtype=jnp.int32), H // K)[:, None]

        def score(c: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Returns a turn's scores `[K, M, keys]`, and which of them count `[1, M, keys]`."""
            loaded = load_blocks(segments, jax.lax.dynamic_slice_in_dim(blocks, c * per_turn, per_turn))
            scores = product("kmd,kdb->kmb", part, loaded.keys, loaded.codes).astype(jnp.float32)
            scores = scores if loaded.key_scale is None else scores * loaded.key_scale[:, None, :]
            keys = jax.lax.dynamic_slice_in_dim(key, c * keys_per_turn, keys_per_turn)[None]
            return scores, ((keys <= position) & (position >= 0))[None]

        def add(c: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return running_softmax(carry, *score(c), None, lambda weights: weights[..., :0])  # no values

        turns, queries = (end - 1) // keys_per_turn + 1, part.shape[:2]
        empty = jnp.full((*queries, 1), lowest), jnp.zeros((*queries, 1)), jnp.zeros((*queries, 0))
        highest, total, _ = jax.lax.fori_loop(0, turns, add, empty)
        if sinks is not None:
            own = jnp.repeat(sinks.reshape(K, H // K).astype(jnp.float32), observe, axis=1)
            total += jnp.exp(own[..., None] - highest)
        total = jnp.where(total > 0, total, 1.0)

        def vote(c: jax.Array, votes: jax.Array) -> jax.Array:
            scores, seen = score(c)
            shares = jnp.where(seen, jnp.exp(scores - highest), 0.0) / total
            return jax.lax.dynamic_update_slice_in_dim(votes, shares.sum(axis=1), c * keys_per_turn, 1)

        votes = jax.lax.fori_loop(0, turns, vote, jnp.zeros((K, len(key))))
        last = jnp.maximum(end - policy.recent + 1, 0) // size
        may_go = (key >= first * size) & (key < last * size)
        around = (policy.pooling // 2, (policy.pooling - 1) // 2)
        pooled = jax.lax.reduce_window(
            jnp.where(may_go, votes, 0.0), 0.0, jax.lax.max, (1, policy.pooling), (1, 1), ((0, 0), around)
        )
        kept = policy.budget // size - first - (end // size + 1 - last)
        _, chosen = jax.lax.top_k(jnp.where(may_go, pooled, -1.0), room * size)
        chosen = jnp.where(jnp.arange(room * size) < kept * size, chosen, len(key) - 1)
        moved = _collected(segments, blocks, jnp.sort(chosen, axis=1))

        def put(j: jax.Array, segments: Segments) -> Segments:
            block = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, j, keepdims=False), moved)
            return put_block(segments, blocks[first + j], block)

        return jax.lax.fori_loop(0, kept, put, segments)

    begin = jnp.zeros((), jnp.int32)
    if after is not None:
        # Never true, but XLA does not know: unless the loop depends on who read the segments before, it
        # copies them, all of each (it drops optimization barriers before it looks).
        begin = (jnp.max(after[:, 0, 0]) > jnp.inf).astype(jnp.int32)
    return jax.lax.fori_loop(begin, jnp.sum(ends > 0, dtype=jnp.int32), one, segments)


def _collected(segments: Segments, table: jax.Array, places: jax.Array) -> Segment:
    """Returns blocks of the tokens at `places` `[K, n]` of a sequence, each head its own."""
    size = segments[0].block_size
    block, offset = table[places // size], places % size
    head = jnp.arange(len(places), dtype=jnp.int32)[:, None]

    def gather(axis: int, *pools: jax.Array) -> jax.Array:
        out: jax.Array | None = None
        for start, pool in zip(segment_starts(segments), pools, strict=True):
            local = jnp.clip(block - start, 0, pool.shape[0] - 1)
            got = pool[local, head, :, offset] if axis == 3 else pool[local, head, offset]
            here = jnp.expand_dims((block >= start), tuple(range(2, got.ndim)))
            out = got if out is None else jnp.where(here, got, out)
        assert out is not None
        out = jnp.swapaxes(out.reshape(len(places), -1, size, *out.shape[2:]), 0, 1)
        return jnp.swapaxes(out, 2, 3) if axis == 3 else out

    return each_array(gather, *segments)
