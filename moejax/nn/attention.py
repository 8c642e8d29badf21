"""Grouped-query attention (Ainslie et al., arXiv 2305.13245) with the families' variations."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.core.config import ModelConfig
from moejax.nn.linear import Linear
from moejax.nn.norm import RMSNorm
from moejax.nn.param import ParamSpec, declare
from moejax.nn.rope import apply_rope, in_halves
from moejax.ops.attention import LayerCache, QkNorms, attention
from moejax.ops.row_sums import RowSums, split_product
from moejax.sharding.axes import SINGLE, Axes


class Attention(nnx.Module):
    """Projections, optional query/key norm, rotary embedding, attention, output projection.

    `qk_norm="head"` normalises each head's Dh (Qwen3), `"projection"` the whole projection before it is
    split into heads (OLMoE), `"rotated"` each head's Dh after rotary embedding (Hunyuan). `clip_qkv`
    bounds the projections' absolute values (OLMoE). `sinks` are logits `[H]` without values. On a mesh each
    device has H and K heads of its own, fewer than the configuration's.
    """

    def __init__(
        self,
        config: ModelConfig,
        window: int | None,
        dtype: Any,
        kernels: str = "xla",
        axes: Axes = SINGLE,
    ) -> None:
        D, H, K, Dh = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        scale, bias = config.initializer_range, config.qkv_bias
        self.q_proj = Linear((D, H * Dh), ("embed", "heads"), dtype, bias=bias, scale=scale)
        self.k_proj = Linear((D, K * Dh), ("embed", "kv_heads"), dtype, bias=bias, scale=scale)
        self.v_proj = Linear((D, K * Dh), ("embed", "kv_heads"), dtype, bias=bias, scale=scale)
        out_bias, reduce = config.attention_out_bias, axes.tensor
        self.o_proj = Linear(
            (H * Dh, D), ("heads", "embed"), dtype, bias=out_bias, scale=scale, reduce=reduce
        )
        # NNX fixes at the first assignment whether an attribute holds data, so each is assigned once.
        q_dim, k_dim, q_axis, k_axis = H * Dh, K * Dh, "heads", "kv_heads"
        q_split, k_split = axes.tensor, axes.kv
        assert config.qk_norm != "rotated" or not config.rope.interleaved, "weights would need its order"
        if config.qk_norm in ("head", "rotated"):
            q_dim, k_dim, q_axis, k_axis = Dh, Dh, "head_dim", "head_dim"
            q_split = k_split = ()
        has_norm, eps = config.qk_norm != "none", config.rms_norm_eps
        offset = config.norm == "rms_unit_offset"
        self.q_norm = RMSNorm(q_dim, q_axis, dtype, eps, kernels, q_split, offset) if has_norm else None
        self.k_norm = RMSNorm(k_dim, k_axis, dtype, eps, kernels, k_split, offset) if has_norm else None
        sinks = ParamSpec((H,), ("heads",), dtype, "normal", scale)
        self.sinks = declare(sinks) if config.attention_sinks else None
        # What is clipped, split over devices, reordered, rotated or scaled by more than the weight is not a
        # kernel's to normalise on the way.
        whole = config.qk_norm == "head" or (config.clip_qkv is None and not q_split and not k_split)
        turned = config.qk_norm == "rotated" or config.rope.interleaved
        self.hands_on_norms = has_norm and whole and not turned and not offset
        self.config = config
        self.window = window
        self.splits_output = kernels != "xla" and not out_bias and not reduce and config.plain_residual

    @jax.named_scope("qkv_projection")
    def project(self, x: jax.Array, normalize: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Projects x `[B, T, D]` to q `[B, T, H, Dh]`, k and v `[B, T, K, Dh]`, not rotated yet; norms are
        left out unless `normalize`."""
        config = self.config
        B, T, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if config.qk_norm == "projection" and normalize:
            assert self.q_norm is not None and self.k_norm is not None
            q, k = self.q_norm(q), self.k_norm(k)
        if config.clip_qkv is not None:
            q, k, v = (jnp.clip(t, -config.clip_qkv, config.clip_qkv) for t in (q, k, v))
        q, k, v = (t.reshape(B, T, -1, config.head_dim) for t in (q, k, v))
        if config.qk_norm == "head" and normalize:
            assert self.q_norm is not None and self.k_norm is not None
            q, k = self.q_norm(q), self.k_norm(k)
        if config.rope.interleaved:
            q, k = (in_halves(t, config.rotary_dim) for t in (q, k))
        return q, k, v

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array | RowSums, LayerCache | None]:
        """Attends x `[B, T, D]`; returns (`[B, T, D]`, updated cache).

        Without a cache the call holds each sequence whole, from position 0. With one, GPU kernels and few
        tokens, the first is `RowSums`, the parts of the output projection.
        """
        B, T, _ = x.shape
        scale = self.config.attention_scale
        norms = None
        sinks = None if self.sinks is None else self.sinks[...]
        if self.hands_on_norms and cache is not None and cache.normalizes:
            assert self.q_norm is not None and self.k_norm is not None
            shape = (-1, self.config.head_dim) if self.config.qk_norm == "projection" else (-1,)
            q_scale, k_scale = (norm.scale[...].reshape(shape) for norm in (self.q_norm, self.k_norm))
            norms = QkNorms(q_scale, k_scale, self.q_norm.eps)
        q, k, v = self.project(x, normalize=norms is None)
        if self.config.qk_norm == "rotated":
            assert self.q_norm is not None and self.k_norm is not None
            q, k = self.q_norm(apply_rope(q, *rope)), self.k_norm(apply_rope(k, *rope))
            rope = (rope[0][..., :0], rope[1][..., :0])  # nothing is left to be rotated
        with jax.named_scope("attention"):
            if cache is None:
                q, k = apply_rope(q, *rope), apply_rope(k, *rope)
                keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
                out = attention(q, keys, values, positions, window=self.window, scale=scale, sinks=sinks)
            else:
                options: dict[str, Any] = {"window": self.window, "scale": scale, "norms": norms}
                out, cache = cache.update_and_attend(q, k, v, rope, positions, **options, sinks=sinks)
        with jax.named_scope("output_projection"):
            out = out.reshape(B, T, -1)
            last = self.o_proj
            splits = self.splits_output and cache is not None and last.lora is None
            if splits and isinstance(last.kernel, nnx.Param):
                parts = split_product(out.reshape(B * T, -1), last.kernel[...])
                if len(parts) > 1:
                    return RowSums(parts), cache
            return self.o_proj(out), cache
