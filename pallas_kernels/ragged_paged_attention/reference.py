"""The contract of `ragged_paged_attention`.

Pages and block tables: PagedAttention (Kwon et al., arXiv 2309.06180). One flat token batch of decodes and
prompt chunks: the ragged paged attention of vLLM's and JAX's TPU backends. Sinks: gpt-oss. Values
within keys: the absorbed form of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import wide_type
from pallas_kernels.kv import dequantize_kv


def ragged_paged_attention_reference(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    block_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    *,
    scale: float,
    value_dim: int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    max_q_len: int | None = None,
    work_list: jax.Array | None = None,
) -> jax.Array:
    """Attends each token causally to its sequence's pages; softmax in float32 (float64 if q is).

    Args:
        q: `[T, H, Dh]`; rows `cu_q_lens[s]` to `cu_q_lens[s + 1]` are sequence s's, the last of them at
            position `kv_lens[s] - 1`. KV head of query head h: `h // (H // K)`.
        k_pages, v_pages: `[N, K, bs, Dh]`; with `k_scale`, `v_scale` `[N, K, bs]` where quantized
            (`pallas_kernels.kv`). Slots that no query may see are never used, whatever they hold.
            Without `v_pages` a value is the last `value_dim` numbers of its key, and has its scale.
        block_table: int32 `[S, M]`, the page of a sequence's tokens m·bs to (m + 1)·bs.
        kv_lens: int32 `[S]`, keys of a sequence, this step's tokens among them; 0 for an unused row.
        cu_q_lens: int32 `[S + 1]`, rising from 0; at most kv_lens[s] queries each, perhaps none;
            one query without keys gives 0.
        window: a query at position p sees keys p - window + 1 to p; None: 0 to p.
        soft_cap: scores become cap·tanh(score / cap), before masking.
        sinks: `[H]`, one more score in the softmax's denominator, with no value.
        max_q_len: no sequence has more queries; it changes no result, nor does `work_list`.

    Returns:
        `[T, H, Dh]` in q's dtype, or `[T, H, value_dim]`; 0 in rows without keys, and from `cu_q_lens[S]` on,
        which belong to no sequence.
    """
    if v_pages is None:
        assert value_dim is not None
        v_pages, v_scale = k_pages[..., -value_dim:], k_scale
    (T, H, Dh), (N, K, bs, _), (S, M) = q.shape, k_pages.shape, block_table.shape
    wide = wide_type(q.dtype)
    token = jnp.arange(T)
    seq = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], token, side="right"), S - 1)
    position = kv_lens[seq] - cu_q_lens[seq + 1] + token
    key = jnp.arange(M * bs)
    visible = key[None, :] <= position[:, None]
    if window is not None:
        visible &= key[None, :] > position[:, None] - window
    real = (token < cu_q_lens[S]) & (position >= 0)
    # A key that no query of the sequence sees may lie in a page that is not its own any more.
    needed = jnp.zeros((S, M * bs), bool).at[seq].max(visible & real[:, None])

    def of_sequences(pages: jax.Array, scales: jax.Array | None) -> jax.Array:
        """Returns keys or values `[S, K, M·bs, …]`, with zeros where nothing is needed."""
        blocks = jnp.clip(block_table, 0, N - 1)
        rows = dequantize_kv(pages[blocks], None if scales is None else scales[blocks]).astype(wide)
        rows = jnp.moveaxis(rows, 2, 1).reshape(S, K, M * bs, -1)
        return jnp.where(needed[:, None, :, None], rows, jnp.zeros_like(rows))

    k, v = of_sequences(k_pages, k_scale)[seq], of_sequences(v_pages, v_scale)[seq]
    grouped = q.astype(wide).reshape(T, K, H // K, Dh)
    scores = jnp.einsum("tkgd,tksd->tkgs", grouped, k, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf).reshape(T, H, M * bs)
    sink = jnp.full((T, H, 1), -jnp.inf, wide)
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(wide)[None, :, None], (T, H, 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    out = jnp.einsum("tkgs,tksd->tkgd", weights.reshape(T, K, H // K, M * bs), v, precision="highest")
    return jnp.where(real[:, None, None], out.reshape(T, H, -1), jnp.zeros((), wide)).astype(q.dtype)
