"""The one decoder: embedding, layers of attention and experts (or a dense MLP), norm, output projection.

Every family is a `ModelConfig`; there is no per-family module.
"""

from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.core.config import ModelConfig, MoeConfig
from moejax.moe.layer import MoELayer, RoutingTrace
from moejax.nn.attention import Attention
from moejax.nn.embedding import Embedding
from moejax.nn.linear import Linear
from moejax.nn.mlp import GatedMLP
from moejax.nn.norm import RMSNorm
from moejax.nn.param import initialize
from moejax.nn.rope import rope_tables
from moejax.ops.attention import LayerCache


class DecoderCache(Protocol):
    """What a decoder needs of a key/value cache: a part for each layer, and itself again with new parts."""

    def layer(self, index: int) -> LayerCache: ...

    def with_layers(self, layers: list[Any]) -> Self: ...


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, config: ModelConfig, index: int, moe: MoeConfig, dtype: Any, kernels: str) -> None:
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(D, "embed", dtype, eps, kernels)
        self.attention = Attention(config, config.sliding_windows[index], dtype, kernels)
        self.post_attention_norm = RMSNorm(D, "embed", dtype, eps, kernels)
        sparse, hidden, scale = config.moe_layers[index], config.intermediate_size, config.initializer_range
        self.moe = MoELayer(config, moe, dtype, kernels) if sparse else None
        self.mlp = None if sparse else GatedMLP(D, hidden, config.hidden_act, dtype, scale)

    def __call__(
        self,
        x: jax.Array,
        residual: jax.Array | None,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        valid: jax.Array | None,
        cache: Any,
    ) -> tuple[jax.Array, jax.Array, Any, RoutingTrace | None]:
        """x and residual `[B, T, D]`, whose sum comes in → (x and residual whose sum goes out, updated cache
        layer, trace of an expert layer). The sum is left to the next norm, where a kernel does it."""
        normed, x = self.input_norm.add(x, residual)
        attended, cache = self.attention(normed, rope, positions, cache)
        normed, x = self.post_attention_norm.add(x, attended)
        if self.moe is not None:
            out, trace = self.moe(normed, valid)
            return x, out, cache, trace
        assert self.mlp is not None
        return x, self.mlp(normed), cache, None


class Decoder(nnx.Module):
    """A causal language model with expert layers.

    Built abstract (shapes only); `seed` fills it at random, `moejax.checkpoint` from files.

    `kernels` names the implementation of GPU kernels for norms and router ("xla" for none); the experts' is
    `moe.grouped_matmul`, attention's the cache's.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        moe: MoeConfig | None = None,
        kernels: str = "xla",
        seed: int | None = None,
    ) -> None:
        dtype = jnp.dtype(config.dtype)
        moe = moe or MoeConfig()
        scale = config.initializer_range
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype, scale)
        layers = range(config.num_layers)
        self.layers = nnx.List([DecoderLayer(config, i, moe, dtype, kernels) for i in layers])
        self.norm = RMSNorm(config.hidden_size, "embed", dtype, config.rms_norm_eps, kernels)
        shape, tied = (config.hidden_size, config.vocab_size), config.tie_word_embeddings
        self.lm_head = None if tied else Linear(shape, ("embed", "vocab"), dtype, scale=scale)
        self.config = config
        if seed is not None:
            initialize(self, seed)

    def hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        *,
        valid: jax.Array | None = None,
        cache: DecoderCache | None = None,
        rope_lens: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, tuple[RoutingTrace | None, ...]]:
        """The final norm's output.

        Args:
            tokens, positions: int32 `[B, T]`.
            valid: bool `[B, T]`, False for padding, which then visits no expert. None: all are real.
            cache: where keys and values are kept; None attends within this call only.
            rope_lens: int32 `[B]`, sequence length that `dynamic` rotary scaling goes by; None: one past the
                row's last real position.

        Returns:
            (`[B, T, D]`, updated cache, one trace per layer, None for dense layers).
        """
        if rope_lens is None:
            last = positions if valid is None else jnp.where(valid, positions, -1)
            rope_lens = jnp.max(last, axis=1) + 1
        rope = rope_tables(self.config, positions, rope_lens)
        x = self.embedding(tokens)
        residual = None
        parts, traces = [], []
        for i, layer in enumerate(self.layers):
            part = None if cache is None else cache.layer(i)
            x, residual, part, trace = layer(x, residual, rope, positions, valid, part)
            traces.append(trace)
            parts.append(part)
        if cache is not None:
            cache = cache.with_layers(parts)
        return self.norm.add(x, residual)[0], cache, tuple(traces)

    def logits(self, x: jax.Array) -> jax.Array:
        """`[..., D]` → float32 `[..., V]`."""
        out = self.embedding.attend(x) if self.lm_head is None else self.lm_head(x)
        return out.astype(jnp.float32)

    def __call__(
        self, tokens: jax.Array, *, valid: jax.Array | None = None, return_routing: bool = False
    ) -> Any:
        """Logits of whole sequences: int32 `[B, T]` → float32 `[B, T, V]`.

        With `return_routing`, `(logits, traces)` where traces has a `RoutingTrace` per layer, or None for a
        dense layer.
        """
        tokens = jnp.asarray(tokens, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        x, _, traces = self.hidden(tokens, positions, valid=valid)
        logits = self.logits(x)
        return (logits, traces) if return_routing else logits
