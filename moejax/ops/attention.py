"""Causal attention over keys whose slot number is their position, in plain XLA.

This is the contract that later paged and kernel implementations are held to.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

# Scores of more elements than this are computed for a part of the queries at a time: 2^26 floats are 256 MB.
MAX_SCORE_ELEMENTS = 1 << 26


class QkNorms(NamedTuple):
    """Weights `[Dh]` of the norms of each head of q and k, or `[H, Dh]` and `[K, Dh]` of those of all heads
    together, and their epsilon."""

    q: jax.Array
    k: jax.Array
    eps: float


class LayerCache(Protocol):
    """Interface of an attention layer to one layer's key/value cache.

    `normalizes`: it takes q and k before their norms, with these, because a kernel has both in one.
    """

    @property
    def normalizes(self) -> bool: ...

    def update_and_attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        *,
        window: int | None,
        scale: float,
        norms: QkNorms | None = None,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, "LayerCache"]:
        """Stores k and v `[B, T, K, Dh]`; returns q's output `[B, T, H, Dh]` and the updated cache.

        `sinks` as in `attention`.

        q and k come unrotated, with the tables `[B, T, R/2]` of their first R numbers, because a kernel
        rotates as it stores. Without v the values are the keys' last Dh - R numbers.
        """
        ...


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    *,
    window: int | None = None,
    scale: float,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes grouped-query attention; softmax in float32.

    Args:
        q: `[B, T, H, Dh]`; query heads h·G to h·G + G - 1 share key head h.
        k, v: `[B, K, S, Dh]`, v `[B, K, S, Dv]`; slot s holds the key of position s. Slots past a query's
            position are never seen, so they may hold anything finite.
        q_positions: int32 `[B, T]`.
        window: a query at p sees slots in (p - window, p]; None sees all up to p.
        scale: factor on q·k.
        sinks: `[H]`, a query head's further score in the softmax, with no value (arXiv 2309.17453).

    Returns:
        `[B, T, H, Dv]` in q's dtype.
    """
    B, T, H, _ = q.shape
    S = k.shape[2]
    if T > 1 and B * H * T * S > MAX_SCORE_ELEMENTS:
        chunk = max(1, MAX_SCORE_ELEMENTS // (B * H * S))
        return _chunked(q, k, v, q_positions, chunk, window=window, scale=scale, sinks=sinks)
    return _attention(q, k, v, q_positions, window=window, scale=scale, sinks=sinks)


def visible(q_positions: jax.Array, slots: jax.Array, window: int | None) -> jax.Array:
    """Returns bool `[B, T, S]`: whether the query at a position sees the key in a slot."""
    p = q_positions[:, :, None]
    slots = slots[None, None, :]
    seen = slots <= p
    return seen if window is None else seen & (slots > p - window)


def _attention(q, k, v, q_positions, *, window, scale, sinks):
    B, T, H, Dh = q.shape
    K, S = k.shape[1], k.shape[2]
    G = H // K
    # [B, K, G·T, Dh]: one matrix product per key head, no repeated keys.
    grouped = q.reshape(B, T, K, G, Dh).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, Dh)
    scores = jnp.einsum("bkmd,bksd->bkms", grouped * jnp.asarray(scale, q.dtype), k).astype(jnp.float32)
    mask = visible(q_positions, jnp.arange(S, dtype=jnp.int32), window)
    scores = scores.reshape(B, K, G, T, S)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if sinks is not None:
        # A sum of exponentials s becomes s + exp(sink): what keys have is s / (s + exp(sink)) of it.
        keys = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        weights *= jax.nn.sigmoid(keys - sinks.reshape(1, K, G, 1, 1).astype(jnp.float32))
    weights = weights.astype(q.dtype).reshape(B, K, G * T, S)
    out = jnp.einsum("bkms,bksd->bkmd", weights, v)
    return out.reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, H, -1)


def _chunked(q, k, v, q_positions, chunk, **options):
    """Computes the same in parts of `chunk` queries, so that the score matrix stays small."""
    B, T, H, Dh = q.shape
    parts = -(-T // chunk)
    pad = parts * chunk - T
    q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    q_positions = jnp.pad(q_positions, ((0, 0), (0, pad)))
    q = q.reshape(B, parts, chunk, H, Dh).swapaxes(0, 1)
    q_positions = q_positions.reshape(B, parts, chunk).swapaxes(0, 1)
    out = jax.lax.map(lambda part: _attention(part[0], k, v, part[1], **options), (q, q_positions))
    return out.swapaxes(0, 1).reshape(B, parts * chunk, H, -1)[:, :T]
