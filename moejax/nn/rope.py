"""Rotary position embedding with the context extensions that the supported families use.

Frequencies are computed on the host in float32 by the formulas that Hugging Face follows, so that long
positions rotate by the same angles there and here. Only `dynamic` and `longrope` depend on the sequence at
run time.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.core.config import ModelConfig, RopeConfig, yarn_mscale


def inverse_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Returns float32 `[Dh/2]`: theta^(-2i/Dh)."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return (np.float32(1.0) / np.float32(theta) ** exponent).astype(np.float32)


def _yarn(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Applies YaRN (arXiv 2309.00071, §3.2-3.4): interpolates slow dimensions, keeps fast ones, or blends."""
    original = rope.original_max_position_embeddings
    assert original is not None

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1).astype(np.float32)
    keep = 1 - ramp
    plain = inverse_frequencies(head_dim, rope.theta)
    freqs = (plain / np.float32(rope.factor)) * (1 - keep) + plain * keep

    if rope.attention_factor is not None:
        attention = rope.attention_factor
    elif rope.mscale and rope.mscale_all_dim:
        attention = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    else:
        attention = yarn_mscale(rope.factor)
    return freqs.astype(np.float32), attention


def _llama3(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Applies Llama 3.1's rule: divides long wavelengths by the factor, keeps short ones, blends between."""
    original = rope.original_max_position_embeddings
    assert original is not None
    plain = inverse_frequencies(head_dim, rope.theta)
    wavelength = 2 * math.pi / plain
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    freqs = np.where(wavelength > longest, plain / rope.factor, plain)
    return np.where((wavelength >= shortest) & (wavelength <= longest), blended, freqs).astype(np.float32)


def _longrope(rope: RopeConfig, head_dim: int, long: bool) -> tuple[np.ndarray, float]:
    """Applies LongRoPE (arXiv 2402.13753, §3): each frequency has a divisor, which was searched for."""
    factors, attention = (
        (rope.long_factor, rope.long_mscale) if long else (rope.short_factor, rope.short_mscale)
    )
    original = rope.original_max_position_embeddings
    assert original is not None
    if attention is None:
        attention = rope.attention_factor
    if attention is None:
        attention = math.sqrt(1 + math.log(rope.factor) / math.log(original)) if rope.factor > 1 else 1.0
    return inverse_frequencies(head_dim, rope.theta) / np.asarray(factors, np.float32), attention


def rope_frequencies(config: ModelConfig, rope: RopeConfig | None = None) -> tuple[np.ndarray, float]:
    """Returns frequencies float32 `[R/2]`, R the numbers that are rotated, and the factor on cos and sin, of
    sequences too short for `dynamic` and `longrope` to change them; `rope` is the model's unless given."""
    rope, head_dim = rope or config.rope, config.rotary_dim
    if rope.kind == "linear":
        return inverse_frequencies(head_dim, rope.theta) / np.float32(rope.factor), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    if rope.kind == "llama3":
        return _llama3(rope, head_dim), 1.0
    if rope.kind == "longrope":
        return _longrope(rope, head_dim, long=False)
    return inverse_frequencies(head_dim, rope.theta), 1.0


@jax.named_scope("rope")
def rope_tables(config: ModelConfig, positions: jax.Array, seq_lens: jax.Array) -> tuple[jax.Array, ...]:
    """Returns cos and sin, float32 `[B, T, R/2]`, R the numbers of a head that are rotated; where there is a
    `local_rope` then those of layers with a window.

    Args:
        positions: int32 `[B, T]`.
        seq_lens: int32 `[B]`, tokens each sequence has after this call. `dynamic` NTK scaling takes its
            base from it once it passes `max_position_embeddings`, and `longrope` other factors past the
            original length; keys already cached keep the angles that they were written with, as in Hugging
            Face.
    """
    tables: list[jax.Array] = []
    for rope in (config.rope, config.local_rope):
        if rope is None:
            continue
        freqs: Any
        factor: Any
        freqs, factor = rope_frequencies(config, rope)
        freqs = freqs[None, None]
        if rope.kind == "dynamic":
            freqs = _dynamic(config, rope, seq_lens)[:, None, :]
        if rope.kind == "longrope":
            assert rope.original_max_position_embeddings is not None
            long = (seq_lens > rope.original_max_position_embeddings)[:, None, None]
            of_long, factor_of_long = _longrope(rope, config.rotary_dim, long=True)
            freqs, factor = (
                jnp.where(long, of_long[None, None], freqs),
                jnp.where(long, factor_of_long, factor),
            )
        angles = positions.astype(jnp.float32)[..., None] * freqs
        tables += [jnp.cos(angles) * factor, jnp.sin(angles) * factor]
    # Without the barrier XLA:CPU computes the sines anew in every layer and head: 15 ms of a 100 ms prefill.
    return jax.lax.optimization_barrier(tuple(tables))


def _dynamic(config: ModelConfig, rope: RopeConfig, seq_lens: jax.Array) -> jax.Array:
    """Returns float32 `[B, R/2]`: NTK-aware base that grows with the sequence."""
    dim, longest, factor = config.rotary_dim, config.max_position_embeddings, rope.factor
    length = jnp.maximum(seq_lens, longest).astype(jnp.float32)
    base = rope.theta * ((factor * length / longest) - (factor - 1)) ** (dim / (dim - 2))
    exponent = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    return 1.0 / base[:, None] ** exponent[None, :]


@jax.named_scope("rope")
def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first R numbers of `[B, T, heads, Dh]` by `[B, T, R/2]` tables, pairing i with i + R/2."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None, :].astype(x.dtype), sin[:, :, None, :].astype(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def in_halves(x: jax.Array, rotated: int) -> jax.Array:
    """Puts numbers 0, 2, 4, … of the last axis's first `rotated` before 1, 3, 5, …: `apply_rope` then turns
    interleaved pairs. Queries and keys in the same order have the same product."""
    return jnp.concatenate([x[..., :rotated:2], x[..., 1:rotated:2], x[..., rotated:]], axis=-1)
