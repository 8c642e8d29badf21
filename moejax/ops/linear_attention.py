"""Linear attention with a decay by head (lightning attention, arXiv 2401.04658), in plain XLA.

Of each head there is a state S, the sum of its keys times its values, which fades by the head's rate r:

    S[t] = exp(-r) S[t - 1] + k[t] v[t]ᵀ        o[t] = S[t]ᵀ q[t]

A block of tokens needs the state before it only once: what the block's own keys add is a masked product of
queries and keys, as in attention without a softmax. Everything is float32, whatever the model's dtype.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moejax.ops.kv_segments import ChunkPlan
from moejax.ops.paged_attention import AttentionPlan, tile_rows

# Tokens of a block where a call holds whole sequences.
BLOCK = 64


def attend_block(
    state: jax.Array, qkv: Sequence[jax.Array], rates: jax.Array, count: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Attends a block of consecutive tokens to the state before it and to each other.

    Args:
        state: `[H, Dh, Dh]`.
        qkv: queries, keys and values `[T, H, Dh]`.
        rates: `[H]`, of decay.
        count: real tokens, the first ones; the others' outputs mean nothing.

    Returns:
        `[T, H, Dh]` and the state after the block.
    """
    q, k, v = qkv
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

    def turn(states: jax.Array, block: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, states = jax.vmap(attend_block, (0, 0, None, None))(states, block, rates, size)
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
    copy_of: jax.Array | None,
    plan: AttentionPlan,
) -> tuple[jax.Array, jax.Array]:
    """Takes a flat batch's tokens into the states of their sequences, and attends to these.

    A sequence begins with zeros, whatever its slot holds. A row that has ended changes its own slot alone.

    Args:
        q, k, v: `[S + T, H, Dh]`.
        rates: `[H]`, of decay.
        states: float32 `[slots + 1, H, Dh, Dh]`.
        slot: int32 `[S]`, where each row's state is, the last one for padding.
        copy_of: int32 `[S]`, the row whose state after the step a row gets: a fork its parent's, others their
            own; None without chunks.

    Returns:
        `[S + T, H, Dh]` (places that compute nothing hold anything finite) and the updated states.
    """
    S = slot.shape[0]
    # With a place alone XLA would read it where it writes it, and copy all states first: there are two.
    more = max(2 - S, 0)
    slot = jnp.pad(slot, (0, more), constant_values=states.shape[0] - 1)
    position = jnp.pad(plan.decode.position, (0, more), constant_values=-1)[:, None, None, None]
    rows = [jnp.pad(x[:S], ((0, more), (0, 0), (0, 0))) for x in (q, k, v)]
    before = jnp.where(position > 0, states[slot], 0.0)
    after = jnp.exp(-rates)[None, :, None, None] * before + rows[1][..., None] * rows[2][:, :, None]
    out = jnp.einsum("shd,shde->she", rows[0], after)[:S]
    if plan.chunk is not None:
        assert copy_of is not None
        chunked, ends = _chunks(q[S:], k[S:], v[S:], rates, states, slot, plan.chunk)
        out = jnp.concatenate([out, chunked])
        after = jnp.where(position >= 0, after, ends[jnp.pad(copy_of, (0, more))])
    with jax.named_scope("kv_write"):
        return out, states.at[slot].set(after)


def _chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, rates: jax.Array, states: jax.Array, slot: jax.Array,
    plan: ChunkPlan,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Attends chunks, q, k, v `[T, H, Dh]`, tile by tile, those of a sequence in their order; returns their
    outputs and the states `[S, H, Dh, Dh]` after them, zeros of rows without a chunk."""
    T = q.shape[0]
    tile, counts = tile_rows(T), plan.tile_count
    assert counts is not None
    padded = [jnp.pad(x, ((0, tile), (0, 0), (0, 0))) for x in (q, k, v)]

    # What is written is not read in the loop, nor the other way round: XLA would copy it in each turn.
    def one_tile(t: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        state, ends, out = carry
        start, row, first = plan.tile_start[t], plan.tile_row[t], plan.tile_position[t]
        qkv = [jax.lax.dynamic_slice_in_dim(x, start, tile) for x in padded]
        stored = jax.lax.dynamic_index_in_dim(states, slot[row], keepdims=False)
        goes_on = (t > 0) & (row == plan.tile_row[jnp.maximum(t - 1, 0)])
        state = jnp.where(goes_on, state, jnp.where(first > 0, stored, 0.0))
        result, state = attend_block(state, qkv, rates, counts[t])
        ends = jax.lax.dynamic_update_index_in_dim(ends, state, row, 0)
        # Rows past the tile's count are overwritten by the next tile.
        return state, ends, jax.lax.dynamic_update_slice_in_dim(out, result, start, 0)

    empty = jnp.zeros((slot.shape[0], *states.shape[1:]))
    carry = empty[0], empty, jnp.zeros_like(padded[0])
    _, ends, out = jax.lax.fori_loop(0, plan.num_tiles[0], one_tile, carry)
    return out[:T], ends
