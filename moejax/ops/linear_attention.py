"""Linear attention with a decay by head (lightning attention, arXiv 2401.04658), in plain XLA.

Of each head there is a state S, the sum of its keys times its values, which fades by the head's rate r:

    S[t] = exp(-r) S[t - 1] + k[t] v[t]ᵀ        o[t] = S[t]ᵀ q[t]

A block of tokens needs the state before it only once: what the block's own keys add is a masked product of
queries and keys, as in attention without a softmax. Everything is float32, whatever the model's dtype.
"""

import jax
import jax.numpy as jnp

from moejax.ops.kv_segments import ChunkPlan
from moejax.ops.paged_attention import AttentionPlan, tile_rows

# Tokens of a block where a call holds whole sequences.
BLOCK = 64


def attend_block(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, rates: jax.Array, count: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Attends a block of consecutive tokens to the state before it and to each other.

    Args:
        state: `[H, Dh, Dh]`.
        q, k, v: `[T, H, Dh]`, of which the first `count` tokens are real; the others' outputs mean nothing.
        rates: `[H]`, of decay.

    Returns:
        `[T, H, Dh]` and the state after the block.
    """
    token = jnp.arange(q.shape[0], dtype=jnp.int32)
    k, v = (jnp.where((token < count)[:, None, None], x, 0.0) for x in (k, v))

    def decay(steps: jax.Array) -> jax.Array:
        """Maps int32 `[...]` to `[..., H]`; 0 where steps are negative."""
        fading = jnp.exp(jnp.einsum("...,h->...h", -jnp.maximum(steps, 0).astype(jnp.float32), rates))
        return jnp.where(steps[..., None] >= 0, fading, 0.0)

    pairs = jnp.einsum("thd,shd->tsh", q, k) * decay(token[:, None] - token[None, :])
    out = jnp.einsum("tsh,she->the", pairs, v)
    out += jnp.einsum("thd,hde->the", q * decay(token + 1)[..., None], state)
    added = jnp.einsum("thd,the->hde", k * decay(count - 1 - token)[..., None], v)
    return out, decay(jnp.asarray(count, jnp.int32))[:, None, None] * state + added


def linear_attention(q: jax.Array, k: jax.Array, v: jax.Array, rates: jax.Array) -> jax.Array:
    """Attends whole sequences from position 0 on, block by block: q, k, v `[B, T, H, Dh]` → the same."""
    B, T, H, Dh = q.shape
    size = min(T, BLOCK)

    def blocks(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
        return padded.reshape(B, -1, size, H, Dh).swapaxes(0, 1)

    def turn(states: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        out, states = jax.vmap(lambda *one: attend_block(*one, rates, size))(states, *block)
        return states, out

    _, out = jax.lax.scan(turn, jnp.zeros((B, H, Dh, Dh)), tuple(map(blocks, (q, k, v))))
    return out.swapaxes(0, 1).reshape(B, -1, H, Dh)[:, :T]


def state_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rates: jax.Array,
    states: jax.Array,
    slot: jax.Array,
    plan: AttentionPlan,
) -> tuple[jax.Array, jax.Array]:
    """Takes a flat batch's tokens into the states of their sequences, and attends to these.

    A sequence begins with zeros, whatever its slot holds. Rows that decode nothing change the last slot only.

    Args:
        q, k, v: `[S + T, H, Dh]`.
        rates: `[H]`, of decay.
        states: float32 `[slots + 1, H, Dh, Dh]`.
        slot: int32 `[S]`, of each row.

    Returns:
        `[S + T, H, Dh]` (places that compute nothing hold anything finite) and the updated states.
    """
    position = plan.decode.position
    S = position.shape[0]
    before = jnp.where((position > 0)[:, None, None, None], states[slot], 0.0)
    after = jnp.exp(-rates)[None, :, None, None] * before + k[:S, :, :, None] * v[:S, :, None, :]
    states = states.at[jnp.where(position >= 0, slot, states.shape[0] - 1)].set(after)
    out = jnp.einsum("shd,shde->she", q[:S], after)
    if plan.chunk is None:
        return out, states
    chunked, states = _chunks(q[S:], k[S:], v[S:], rates, states, slot, plan.chunk)
    return jnp.concatenate([out, chunked]), states


def _chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, rates: jax.Array, states: jax.Array, slot: jax.Array,
    plan: ChunkPlan,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Does so for chunks, q, k, v `[T, H, Dh]`: tile by tile, those of a sequence in their order."""
    T = q.shape[0]
    tile = tile_rows(T)
    padded = [jnp.pad(x, ((0, tile), (0, 0), (0, 0))) for x in (q, k, v)]

    def one_tile(t: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, out = carry
        start, place = plan.tile_start[t], slot[plan.tile_row[t]]
        parts = [jax.lax.dynamic_slice_in_dim(x, start, tile) for x in padded]
        before = jax.lax.dynamic_index_in_dim(states, place, keepdims=False)
        before = jnp.where(plan.tile_position[t] > 0, before, 0.0)
        result, after = attend_block(before, *parts, rates, plan.tile_count[t])
        states = jax.lax.dynamic_update_index_in_dim(states, after, place, 0)
        # Rows past the tile's count are overwritten by the next tile.
        return states, jax.lax.dynamic_update_slice_in_dim(out, result, start, 0)

    states, out = jax.lax.fori_loop(0, plan.num_tiles[0], one_tile, (states, jnp.zeros_like(padded[0])))
    return out[:T], states


def copy_states(
    states: tuple[jax.Array | None, ...], slot: jax.Array, copy_of: jax.Array
) -> tuple[jax.Array | None, ...]:
    """Gives row i of S what row `copy_of[i]` has, of each layer's states `[slots + 1, …]`; slot, copy_of int32
    `[S]`, a row's own number where it keeps what it has."""
    S = slot.shape[0]

    def one(i: jax.Array, states: tuple[jax.Array | None, ...]) -> tuple[jax.Array | None, ...]:
        def copied(x: jax.Array) -> jax.Array:
            source = jax.lax.dynamic_index_in_dim(x, slot[copy_of[i]], keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(x, source, slot[i], 0)

        return jax.tree.map(copied, states)

    forked = jnp.any(copy_of != jnp.arange(S, dtype=jnp.int32))
    return jax.lax.fori_loop(0, jnp.where(forked, S, 0), one, states)
