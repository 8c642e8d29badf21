"""Lightning attention (arXiv 2401.04658) as in MiniMax-01 (arXiv 2501.08313, §2.2)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.core.config import ModelConfig
from moejax.nn.activation import activation
from moejax.nn.linear import Linear
from moejax.nn.norm import RMSNorm
from moejax.ops.linear_attention import linear_attention
from moejax.sharding.axes import SINGLE, Axes, index


def decay_share(config: ModelConfig, layer: int) -> jax.Array:
    """Returns float32 `[]`: the share of its head's rate that a layer's decay has, less in deeper layers.

    It is handed to the layer, not kept in it, so that equal layers are traced once (`Decoder.run`).
    """
    return jnp.float32(1.0 - layer / (config.num_layers - 1 + 1e-5) + 1e-5)


class LinearAttention(nnx.Module):
    """Attention to a state of fixed size in place of keys and values, without positions.

    One projection makes each head's query, key and value, `hidden_act` of which counts; the outputs of all
    heads are normalised together and gated by the sigmoid of a further projection. On a mesh each device has
    H heads of its own.
    """

    def __init__(self, config: ModelConfig, dtype: Any, kernels: str = "xla", axes: Axes = SINGLE) -> None:
        D, inner, scale = config.hidden_size, config.num_heads * config.head_dim, config.initializer_range
        self.qkv_proj = Linear((D, 3 * inner), ("embed", "heads"), dtype, scale=scale)
        self.output_gate = Linear((D, inner), ("embed", "heads"), dtype, scale=scale)
        # Whatever `rms_norm_eps` says, as in MiniMax's and transformers' code.
        self.norm = RMSNorm(inner, "heads", dtype, 1e-6, kernels, axes.tensor)
        self.out_proj = Linear((inner, D), ("heads", "embed"), dtype, scale=scale, reduce=axes.tensor)
        self.config = config
        self.axes = axes

    def rates(self, share: jax.Array) -> jax.Array:
        """Returns float32 `[H]`: how fast each head here forgets, in a layer of that `decay_share`."""
        heads = self.config.num_heads
        whole = jnp.asarray(2.0 ** (-8.0 / heads * np.arange(1, heads + 1)), jnp.float32)
        here = heads // self.axes.size(self.axes.tensor)
        return share * jax.lax.dynamic_slice_in_dim(whole, here * index(self.axes.tensor), here)

    def __call__(
        self, x: jax.Array, share: jax.Array, positions: jax.Array, cache: Any = None
    ) -> tuple[jax.Array, Any]:
        """Attends x `[B, T, D]` in a layer of that `decay_share`; returns (`[B, T, D]`, updated cache).

        Without a cache (`moejax.cache.pool.StateLayer`) the call holds each sequence whole, from position 0.
        """
        B, T, _ = x.shape
        with jax.named_scope("qkv_projection"):
            qkv = activation(self.config.hidden_act)(self.qkv_proj(x)).astype(jnp.float32)
            q, k, v = jnp.split(qkv.reshape(B, T, -1, 3 * self.config.head_dim), 3, axis=-1)
            gate = jax.nn.sigmoid(self.output_gate(x))
        with jax.named_scope("attention"):
            if cache is None:
                out = linear_attention(q, k, v, self.rates(share))
            else:
                out, cache = cache.update_and_attend(q, k, v, self.rates(share), positions)
            out = out.reshape(B, T, -1).astype(x.dtype)
        with jax.named_scope("output_projection"):
            return self.out_proj(gate * self.norm(out)), cache
