"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.core.config import ModelConfig
from moejax.nn.linear import Linear
from moejax.nn.norm import RMSNorm
from moejax.nn.quantized import weight_of
from moejax.nn.rope import apply_rope, in_halves
from moejax.ops.attention import LatentHeads, LayerCache, attention
from moejax.quantization.arithmetic import dequantize
from moejax.quantization.formats import QTensor
from moejax.sharding.axes import SINGLE, Axes


class LatentAttention(nnx.Module):
    """Attention whose keys and values are projections of one latent a token, which is what a cache holds.

    Without a cache every head's keys and values are made of the latents (the plain form). With one, queries
    and outputs are brought to the latents instead (the absorbed form): all heads share one key, the rotated
    part and then the latent, whose latter part is also the value. Both are the same sums in another order,
    and a cache takes the plain form, too, for chunks of prompts where it costs less
    (`moejax.ops.paged_attention`). Every device of a mesh has the latents whole, and H heads of its own.
    """

    def __init__(self, config: ModelConfig, dtype: Any, kernels: str = "xla", axes: Axes = SINGLE) -> None:
        assert config.latent is not None
        latent, D, H = config.latent, config.hidden_size, config.num_heads
        scale, bias = config.initializer_range, config.qkv_bias
        eps = 1e-6  # of these two norms, whatever `rms_norm_eps` says (DeepSeek's and transformers' code)
        queries = H * config.head_dim
        rank = latent.q_rank
        self.q_proj = Linear((D, queries), ("embed", "heads"), dtype, scale=scale) if rank is None else None
        self.q_a_proj = (
            None if rank is None else Linear((D, rank), ("embed", None), dtype, bias=bias, scale=scale)
        )
        self.q_a_norm = None if rank is None else RMSNorm(rank, None, dtype, eps, kernels)
        self.q_b_proj = None if rank is None else Linear((rank, queries), (None, "heads"), dtype, scale=scale)
        shared = latent.kv_rank + latent.rope_dim
        self.kv_a_proj = Linear((D, shared), ("embed", None), dtype, bias=bias, scale=scale)
        self.kv_a_norm = RMSNorm(latent.kv_rank, None, dtype, eps, kernels)
        each = latent.nope_dim + latent.value_dim
        self.kv_b_proj = Linear((latent.kv_rank, H * each), (None, "heads"), dtype, scale=scale)
        self.o_proj = Linear(
            (H * latent.value_dim, D), ("heads", "embed"), dtype, bias=config.attention_out_bias, scale=scale,
            reduce=axes.tensor,
        )  # fmt: skip
        self.config = config
        self.latent = latent

    @jax.named_scope("qkv_projection")
    def project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Projects x `[B, T, D]` to queries with and without rotary embedding `[B, T, H, rope_dim or
        nope_dim]`, the shared key `[B, T, 1, rope_dim]` and the latent `[B, T, kv_rank]`, not rotated yet."""
        B, T, _ = x.shape
        if self.q_proj is not None:
            q = self.q_proj(x)
        else:
            assert self.q_a_proj is not None and self.q_a_norm is not None and self.q_b_proj is not None
            q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = q.reshape(B, T, -1, self.config.head_dim)
        nope, q_rope = q[..., : self.latent.nope_dim], q[..., self.latent.nope_dim :]
        shared = self.kv_a_proj(x)
        latent, k_rope = shared[..., : self.latent.kv_rank], shared[..., self.latent.kv_rank :]
        if self.config.rope.interleaved:
            q_rope, k_rope = (in_halves(x, self.latent.rope_dim) for x in (q_rope, k_rope))
        return q_rope, nope, k_rope[:, :, None], self.kv_a_norm(latent)

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attends x `[B, T, D]`; returns (`[B, T, D]`, updated cache), as `moejax.nn.attention.Attention`."""
        B, T, _ = x.shape
        scale = self.config.attention_scale
        q_rope, q_nope, k_rope, latent = self.project(x)
        if cache is None:
            with jax.named_scope("attention"):
                out = self._plain(q_rope, q_nope, k_rope, latent, rope, positions)
        else:
            with jax.named_scope("qkv_projection"):
                heads = self._heads(x.dtype)
                q = jnp.concatenate([q_rope, q_nope], axis=-1)
                k = jnp.concatenate([k_rope, latent[:, :, None]], axis=-1)
            with jax.named_scope("attention"):
                out, cache = cache.update_and_attend(
                    q, k, None, rope, positions, window=None, scale=scale, latents=heads
                )
        with jax.named_scope("output_projection"):
            return self.o_proj(out.reshape(B, T, -1)), cache

    def _plain(
        self,
        q_rope: jax.Array,
        q_nope: jax.Array,
        k_rope: jax.Array,
        latent: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
    ) -> jax.Array:
        """Attends by every head's own keys and values; returns `[B, T, H, value_dim]`."""
        B, T, H, _ = q_nope.shape
        made = self.kv_b_proj(latent).reshape(B, T, H, -1)
        k_nope, v = made[..., : self.latent.nope_dim], made[..., self.latent.nope_dim :]
        shared = jnp.broadcast_to(apply_rope(k_rope, *rope), (B, T, H, k_rope.shape[-1]))
        q = jnp.concatenate([apply_rope(q_rope, *rope), q_nope], axis=-1)
        k = jnp.concatenate([shared, k_nope], axis=-1)
        keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        return attention(q, keys, values, positions, scale=self.config.attention_scale)

    def _heads(self, dtype: Any) -> LatentHeads:
        """Returns what makes keys and values of latents."""
        weight = weight_of(self.kv_b_proj.kernel)
        whole = dequantize(weight, dtype) if isinstance(weight, QTensor) else weight
        each = self.latent.nope_dim + self.latent.value_dim
        return LatentHeads(whole.reshape(self.latent.kv_rank, -1, each), self.latent)
