"""A mixture-of-experts layer: router, experts, optional shared expert."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.core.config import ModelConfig
from moejax.core.moe import MoeConfig
from moejax.core.parallel import ParallelConfig
from moejax.moe.expert_parallel import choose_exchange, dispatch_experts
from moejax.moe.experts import Experts, ExpertsOutput
from moejax.moe.replicas import ReplicaTable
from moejax.moe.router import Replay, Router, Routing, expert_counts
from moejax.nn.linear import Linear
from moejax.nn.mlp import GatedMLP
from moejax.ops.row_sums import RowSums, summed
from moejax.sharding.axes import SINGLE, Axes, psum


class RoutingTrace(NamedTuple):
    """Record of one layer's router in one call.

    Attributes:
        ids: int32 `[B, T, k]`, experts that ran, by falling router probability; E where none did (padding,
            or dropped by `capacity`). A rerouted assignment keeps its place. What an exchange drops for lack
            of room is in `dropped` only: the sender does not learn which of its assignments it was.
        weights: float32 `[B, T, k]`.
        logits: float32 `[B, T, E]`.
        counts: int32 `[E]`, assignments that each expert ran.
        dropped, rerouted: int32 scalars; non-zero only under `capacity`, or with `exchange_capacity`.
    """

    ids: jax.Array
    weights: jax.Array
    logits: jax.Array
    counts: jax.Array
    dropped: jax.Array
    rerouted: jax.Array


class MoELayer(nnx.Module):
    """Routed experts, plus a shared expert where the config has one, Qwen2-MoE's scaled by a sigmoid gate.

    On a mesh (`parallel` and its `axes`) a device runs the experts that it holds: on the tokens that all see,
    or on those that an exchange brings (`moejax.moe.expert_parallel`).
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoeConfig,
        dtype: Any,
        kernels: str = "xla",
        parallel: ParallelConfig | None = None,
        axes: Axes = SINGLE,
    ) -> None:
        D, E, scale = config.hidden_size, config.num_experts, config.initializer_range
        self.parallel, self.axes = parallel or ParallelConfig(), axes
        extra = self.parallel.redundant_experts
        self.router = Router(config, dtype, kernels, moe.routing)
        hidden = config.shared_expert_intermediate_size
        # To the next norm's kernel, unless a shared expert or other devices add something first.
        leaves_sums = kernels != "xla" and not (hidden or extra or axes.expert or axes.tensor)
        leaves_sums = leaves_sums and config.plain_residual
        self.experts = Experts(config, moe.expert_layout, dtype, E + extra, axes.tp, leaves_sums)
        self.replicas = ReplicaTable(E, extra) if extra or axes.expert else None
        split, act = axes.tensor, config.hidden_act
        self.shared_expert = GatedMLP(D, hidden, act, dtype, scale, split=split) if hidden else None
        gated = hidden and config.shared_expert_gate
        self.shared_gate = Linear((D, 1), ("embed", None), dtype, scale=scale) if gated else None
        self.moe = moe
        self.num_experts = E

    def __call__(
        self, x: jax.Array, valid: jax.Array | None = None, replay: Replay | None = None
    ) -> tuple[jax.Array | RowSums, RoutingTrace]:
        """Runs the layer on x `[B, T, D]`, valid bool `[B, T]`; returns (`[B, T, D]`, trace). With kernels
        alone on one device the first is `RowSums`.

        An unused trace costs nothing: under `jit` what is not returned is not computed.

        Args:
            replay: run these experts with these weights. Under `capacity` nothing is rerouted then, and what
                finds no room is dropped and counted; what was recorded there finds room.
        """
        B, T, D = x.shape
        flat, moe = x.reshape(B * T, D), self.moe
        if replay is not None:
            replay = jax.tree.map(lambda part: part.reshape(B * T, -1), replay)
            moe = dataclasses.replace(moe, overflow="drop")
        routing = self.router(flat, None if valid is None else valid.reshape(-1), replay)
        if self.replicas is not None:
            output = self._spread(flat, routing)
        else:
            output = self.experts(flat, routing, moe, self.router)
            if replay is not None and replay.beside is not None:
                output = output._replace(out=summed(output.out, flat) + replay.beside)
            if self.shared_expert is not None:
                output = output._replace(out=output.out + self._shared(flat))
        with jax.named_scope("experts_dispatch"):
            out = psum(output.out, self.axes.tensor)
        ids, weights, logits = output.routing
        trace = RoutingTrace(
            ids.reshape(B, T, -1),
            weights.reshape(B, T, -1),
            logits.reshape(B, T, -1),
            expert_counts(ids, self.num_experts),
            output.dropped,
            output.rerouted,
        )
        return out if isinstance(out, RowSums) else out.reshape(B, T, D), trace

    @jax.named_scope("shared_expert")
    def _shared(self, x: jax.Array) -> jax.Array:
        """Maps x `[n, D]` to `[n, D]`; where its hidden dimension is split, this device's part of the sum."""
        assert self.shared_expert is not None
        shared = self.shared_expert(x)
        return shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x)) * shared

    @jax.named_scope("experts_dispatch")
    def _spread(self, x: jax.Array, routing: Routing) -> ExpertsOutput:
        """Maps x `[N, D]` to the sum over the experts' devices; those along `axes.tensor` are still apart."""
        assert self.replicas is not None
        physical = self.replicas(routing.ids)

        def run(rows: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
            local = Routing(ids, weights, jnp.zeros((rows.shape[0], 0)))
            return self.experts(rows, local, self.moe).out

        tokens, hidden = x.shape
        method = choose_exchange(
            self.parallel.exchange,
            tokens=tokens,
            hidden=hidden,
            itemsize=x.dtype.itemsize,
            top_k=routing.ids.shape[1],
            axes=self.axes,
            platform=jax.default_backend(),
            num_local=self.experts.num_experts,
        )
        overlap = self.shared_expert is not None and self.parallel.overlap_shared
        out, dropped = dispatch_experts(
            x,
            physical,
            routing.weights,
            run,
            num_local=self.experts.num_experts,
            axes=self.axes,
            method=method.value,
            capacity=self.parallel.exchange_capacity,
            microbatches=self.parallel.dispatch_microbatches,
            shared=self._shared if overlap else None,
        )
        if self.shared_expert is not None and not overlap:
            # The plain order: the shared expert waits for the routed ones.
            x, out = jax.lax.optimization_barrier((x, out))
            out = out + self._shared(x)
        return ExpertsOutput(out, routing, dropped, jnp.zeros((), jnp.int32))
