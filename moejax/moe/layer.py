"""A mixture-of-experts layer: router, experts, optional shared expert."""

from typing import Any, NamedTuple

import jax
from flax import nnx

from moejax.core.config import ModelConfig, MoeConfig
from moejax.moe.experts import Experts
from moejax.moe.router import Router, expert_counts
from moejax.nn.linear import Linear
from moejax.nn.mlp import GatedMLP


class RoutingTrace(NamedTuple):
    """What one layer's router did in one call.

    Attributes:
        ids: int32 `[B, T, k]`, experts that ran, by falling router probability; E where none did (padding,
            or dropped). A rerouted assignment keeps its place.
        weights: float32 `[B, T, k]`.
        logits: float32 `[B, T, E]`.
        counts: int32 `[E]`, assignments that each expert ran.
        dropped, rerouted: int32 scalars; non-zero only under `capacity`.
    """

    ids: jax.Array
    weights: jax.Array
    logits: jax.Array
    counts: jax.Array
    dropped: jax.Array
    rerouted: jax.Array


class MoELayer(nnx.Module):
    """Routed experts, plus Qwen2-MoE's shared expert scaled by a sigmoid gate where the config has one."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, dtype: Any, kernels: str = "xla") -> None:
        D, E, scale = config.hidden_size, config.num_experts, config.initializer_range
        top_k, normalize = config.num_experts_per_tok, config.norm_topk_prob
        self.router = Router(D, E, top_k, normalize, dtype, scale, kernels)
        self.experts = Experts(config, moe.expert_layout, dtype)
        hidden = config.shared_expert_intermediate_size
        self.shared_expert = GatedMLP(D, hidden, config.hidden_act, dtype, scale) if hidden else None
        self.shared_gate = Linear((D, 1), ("embed", None), dtype, scale=scale) if hidden else None
        self.moe = moe

    def __call__(self, x: jax.Array, valid: jax.Array | None = None) -> tuple[jax.Array, RoutingTrace]:
        """x `[B, T, D]`, valid bool `[B, T]` → (`[B, T, D]`, trace).

        An unused trace costs nothing: under `jit` what is not returned is not computed.
        """
        B, T, D = x.shape
        flat = x.reshape(B * T, D)
        routing = self.router(flat, None if valid is None else valid.reshape(-1))
        done = self.experts(flat, routing, self.moe)
        out = done.out
        if self.shared_expert is not None and self.shared_gate is not None:
            out = out + jax.nn.sigmoid(self.shared_gate(flat)) * self.shared_expert(flat)
        ids, weights, logits = done.routing
        trace = RoutingTrace(
            ids.reshape(B, T, -1),
            weights.reshape(B, T, -1),
            logits.reshape(B, T, -1),
            expert_counts(ids, self.experts.num_experts),
            done.dropped,
            done.rerouted,
        )
        return out.reshape(B, T, D), trace
