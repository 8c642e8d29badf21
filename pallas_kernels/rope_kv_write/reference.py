"""The contract of `rope_kv_write`: RoPE (arXiv 2104.09864) into pages (Kwon et al., arXiv 2309.06180)."""

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import wide_type
from pallas_kernels.kv import is_quantized, quantize_kv
from pallas_kernels.rms_norm.reference import rms_norm_reference

Written = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]


def rope_kv_write_reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array | None,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
) -> Written:
    """Normalises q and k, rotates them by each token's angles, stores k and v in each token's slot.

    Args:
        q: `[T, H, Dh]`; k, v: `[T, K, Dh]`. Without v, `v_pages` and `v_scale` only keys are stored: latents
            (DeepSeek-V2, arXiv 2405.04434, §2.1), which hold their values.
        cos, sin: `[T, R/2]`; the first R dimensions of a head are rotated, i with i + R/2 (Hugging Face's
            "rotate half"), the others stay. A model's factor on cos and sin is in them
            (`moejax.nn.rope.rope_tables`, reshaped to tokens).
        k_pages, v_pages: `[N, K, bs, Dh]`, any of `kv.KV_DTYPES`.
        slot_mapping: int32 `[T]`, page * bs + place in the page; negative: a padding token, which stores
            nothing. Slots past the pool store nothing either; two tokens of one slot leave either's data or
            a mixture.
        k_scale, v_scale: float32 `[N, K, bs]` where pages are quantized, see `kv.quantize_kv`.
        q_norm, k_norm: `[Dh]`, weights of a root-mean-square norm of each head before its rotation, as
            `rms_norm_reference` has it; or `[H, Dh]` and `[K, Dh]`, of all heads of a token together (OLMoE);
            None: no norm.

    Returns:
        The rotated q in its dtype, for all tokens, padding too; and pages and scales with only the given
        slots changed. All is computed in float32 (float64 if q is) and rounded once, when it is stored;
        where there are norms also before and after their weight, to q's dtype.
    """
    N, _, bs, _ = k_pages.shape
    if q_norm is not None and k_norm is not None:
        q, k = (_normalise(x, weight, eps) for x, weight in ((q, q_norm), (k, k_norm)))
    q_rotated = _rotate(q, cos, sin).astype(q.dtype)
    # A slot past the end is dropped; a negative one would count from the end.
    slots = jnp.where(slot_mapping < 0, N * bs, slot_mapping)
    k_pages, k_scale = _put(_rotate(k, cos, sin), k_pages, k_scale, slots)
    if v is not None and v_pages is not None:
        v_pages, v_scale = _put(v.astype(wide_type(v.dtype)), v_pages, v_scale, slots)
    return q_rotated, k_pages, v_pages, k_scale, v_scale


def _normalise(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return rms_norm_reference(x.reshape(-1, weight.size), weight.reshape(-1), eps=eps)[0].reshape(x.shape)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = cos.shape[-1]
    wide = x.astype(wide_type(x.dtype))
    cos, sin = cos[:, None, :].astype(wide.dtype), sin[:, None, :].astype(wide.dtype)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _put(
    rows: jax.Array, pages: jax.Array, scales: jax.Array | None, slots: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Stores `[T, K, Dh]` in pages `[N, K, bs, Dh]`."""
    bs = pages.shape[2]
    page, place = slots // bs, slots % bs
    if is_quantized(pages.dtype) and scales is not None:
        rows, scale = quantize_kv(rows, pages.dtype)
        scales = scales.at[page, :, place].set(scale.astype(scales.dtype), mode="drop")
    return pages.at[page, :, place].set(rows.astype(pages.dtype), mode="drop"), scales
