"""The contract of `flash_attention`: softmax attention with the full score matrix."""

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import wide_type


def flash_attention_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    lengths: jax.Array | None = None,
    q_offset: int | None = None,
) -> jax.Array:
    """Computes grouped-query attention; scores and softmax in float32 (float64 if q is).

    Args:
        q: `[B, Tq, H, Dh]`; query heads h·G to h·G + G - 1, G = H / K, share key head h.
        k, v: `[B, Tk, K, Dh]`; key j stands at position j. All that is no padding must be finite: a masked
            key's weight is 0, and 0 times a NaN value would be NaN.
        scale: factor on q·k.
        causal: a query sees keys up to its own position.
        window: with `causal`: a query at p sees positions in (p - window, p].
        soft_cap: scores become soft_cap * tanh(score / soft_cap), before masking (Gemma 2, arXiv 2408.00118).
        sinks: float32 `[H]`, a logit per head that counts in the denominator only; unscaled and uncapped
            (gpt-oss; arXiv 2309.17453 describes the need).
        lengths: int32 `[B]`: positions from lengths[b] on are padding. Such keys and values are not read
            (they may be NaN), such queries give 0. None: Tk.
        q_offset: position of query 0. None: Tk - Tq, which aligns the queries with the end of the keys, as a
            chunk of a prefill stands.

    Returns:
        `[B, Tq, H, Dh]` in q's dtype; 0 for a query that sees no key.
    """
    B, Tq, H, Dh = q.shape
    Tk, K = k.shape[1:3]
    wide = wide_type(q.dtype)
    lengths = jnp.full(B, Tk, jnp.int32) if lengths is None else lengths.astype(jnp.int32)
    position = jnp.arange(Tq, dtype=jnp.int32) + (Tk - Tq if q_offset is None else q_offset)
    key = jnp.arange(Tk, dtype=jnp.int32)
    seen = jnp.ones((Tq, Tk), bool)
    if causal:
        seen = seen & (key[None, :] <= position[:, None])
    if window is not None:
        seen = seen & (key[None, :] > position[:, None] - window)
    real = key[None, :] < lengths[:, None]
    seen = seen[None] & real[:, None, :] & (position[None, :] < lengths[:, None])[:, :, None]

    k, v = (jnp.where(real[:, :, None, None], x.astype(wide), 0) for x in (k, v))
    grouped = q.reshape(B, Tq, K, H // K, Dh).astype(wide)
    scores = jnp.einsum("bikgd,bjkd->bkgij", grouped, k) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    largest = scores.max(-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(wide).reshape(1, K, -1, 1, 1)
        largest = jnp.maximum(largest, sink)
    largest = jnp.where(largest == -jnp.inf, 0, largest)  # a finite shift
    weights = jnp.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - largest)
    weights = weights / jnp.where(total == 0, 1, total)
    return jnp.einsum("bkgij,bjkd->bikgd", weights, v).reshape(q.shape).astype(q.dtype)
