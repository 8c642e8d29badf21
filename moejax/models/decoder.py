"""The one decoder: embedding, layers of attention and experts (or a dense MLP), norm, output projection.

Every family is a `ModelConfig`; there is no per-family module. Named scopes, here and below, say which layer
and which operation of `moejax.perf.operation_costs` an instruction of the compiled program belongs to, for
profiles; they change no program.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.core.parallel import ParallelConfig
from moejax.moe.layer import MoELayer, RoutingTrace
from moejax.moe.router import Replay, check_replay
from moejax.nn.attention import Attention
from moejax.nn.embedding import Embedding
from moejax.nn.latent_attention import LatentAttention
from moejax.nn.linear import Linear
from moejax.nn.linear_attention import LinearAttention, decay_share
from moejax.nn.lora import TokenSlots
from moejax.nn.mlp import GatedMLP
from moejax.nn.norm import RMSNorm, norm_of
from moejax.nn.param import initialize, num_params
from moejax.nn.rope import rope_tables
from moejax.ops.row_sums import Residual, summed
from moejax.sharding.axes import SINGLE, Axes, all_gather


class DecoderCache(Protocol):
    """Interface to a cache: a part for each layer (a `LayerCache`, or what `LinearAttention` takes), and the
    same cache with new parts."""

    def layer(self, index: int) -> Any: ...

    def with_layers(self, layers: list[Any]) -> Self: ...


Recorded = Sequence[Replay | RoutingTrace | None]
"""Choices that each layer's router repeats; None leaves a layer to its router."""


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each with its residual; with `post_norms` also a norm of each
    one's output.

    `rope` below is the model's `rope_tables`; of a layer with linear attention its `decay_share`.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        moe: MoeConfig,
        dtype: Any,
        kernels: str,
        parallel: ParallelConfig | None,
        axes: Axes,
    ) -> None:
        D, act, post = config.hidden_size, config.hidden_act, config.post_norms
        self.input_norm = norm_of(config, dtype, kernels)
        self.is_linear, self.is_local = not config.paged_layers[index], bool(config.sliding_windows[index])
        self.attention: Attention | LatentAttention | LinearAttention
        if self.is_linear:
            self.attention = LinearAttention(config, dtype, kernels, axes)
        elif config.latent is not None:
            self.attention = LatentAttention(config, dtype, kernels, axes)
        else:
            self.attention = Attention(config, config.sliding_windows[index], dtype, kernels, axes)
        self.attention_output_norm = norm_of(config, dtype, kernels) if post else None
        self.post_attention_norm = norm_of(config, dtype, kernels)
        sparse, hidden, scale = config.moe_layers[index], config.intermediate_size, config.initializer_range
        self.moe = MoELayer(config, moe, dtype, kernels, parallel, axes) if sparse else None
        self.mlp = (
            None if sparse else GatedMLP(D, hidden, act, dtype, scale, axes.tensor, bias=config.mlp_bias)
        )
        self.feed_forward_output_norm = norm_of(config, dtype, kernels) if post else None
        # Factors on the normed input (None: the residual is what came before the norm) and on the output.
        self.attention_factors: tuple[float | None, float] = (None, config.residual_multiplier)
        self.feed_forward_factors: tuple[float | None, float] = self.attention_factors
        if (normed := config.normed_residual) is not None:
            self.attention_factors = normed.linear_attention if self.is_linear else normed.attention
            self.feed_forward_factors = normed.feed_forward

    def __call__(self, x: jax.Array, *inputs: Any) -> tuple[jax.Array, Any, Any, RoutingTrace | None]:
        """Runs the layer as `run`, and makes the residual's own sums."""
        x, out, cache, trace = self.run(x, *inputs)
        return x, summed(out, x), cache, trace

    def run(
        self,
        x: jax.Array,
        residual: Residual,
        rope: Any,
        positions: jax.Array,
        valid: jax.Array | None,
        cache: Any,
        replay: Replay | None = None,
    ) -> tuple[jax.Array, Residual, Any, RoutingTrace | None]:
        """Maps x and residual `[B, T, D]`, whose sum comes in, to (x and residual whose sum goes out, updated
        cache layer, trace of an expert layer). The sum is left to the next norm, where a kernel does it."""
        x, attended, cache = self.attend(x, residual, rope, positions, cache)
        x, out, trace = self.feed_forward(x, attended, valid, replay)
        return x, out, cache, trace

    def attend(
        self,
        x: jax.Array,
        residual: Residual,
        rope: Any,
        positions: jax.Array,
        cache: Any,
    ) -> tuple[jax.Array, Any, Any]:
        """Runs the first half; returns (x and residual whose sum goes on, updated cache layer)."""
        normed, x = self.input_norm.add(x, residual)
        if not self.is_linear:
            rope = rope[-2:] if self.is_local else rope[:2]
        attended, cache = self.attention(normed, rope, positions, cache)
        return *_joined(x, normed, attended, self.attention_output_norm, self.attention_factors), cache

    def feed_forward(
        self, x: jax.Array, residual: Residual, valid: jax.Array | None, replay: Replay | None = None
    ) -> tuple[jax.Array, Residual, RoutingTrace | None]:
        """Runs the second half; returns (x and residual whose sum goes out, trace of an expert layer)."""
        normed, x = self.post_attention_norm.add(x, residual)
        trace = None
        if self.moe is not None:
            out, trace = self.moe(normed, valid, replay)
        else:
            assert self.mlp is not None
            with jax.named_scope("mlp"):
                out = self.mlp(normed)
        return *_joined(x, normed, out, self.feed_forward_output_norm, self.feed_forward_factors), trace


def _joined(
    x: jax.Array, normed: jax.Array, out: Any, norm: RMSNorm | None, factors: tuple[float | None, float]
) -> tuple[jax.Array, Any]:
    """Returns the two whose sum goes on after attention or feed-forward: of the stream, x or what it was
    normalised to, and of the output."""
    alpha, beta = factors
    return x if alpha is None else _scaled(normed, alpha), _scaled(out if norm is None else norm(out), beta)


def _scaled(x: Any, factor: float) -> Any:
    return x if factor == 1.0 else (factor * x.astype(jnp.float32)).astype(x.dtype)


def told_of(config: ModelConfig, layer: int, rope: tuple[jax.Array, ...]) -> Any:
    """Returns what a layer takes as `rope`, given the model's `rope_tables`."""
    return rope if config.paged_layers[layer] else decay_share(config, layer)


def _traced_once() -> Callable[..., Any]:
    """Returns a function that calls a layer with its inputs, inside a trace, and traces and lowers layers
    that are equal (all but their arrays' values) only once: 48 layers take no longer than two.

    XLA inlines the calls, and puts each one's named scope before its instructions', so that the program and
    its names are those of layers that are called one by one. The function is to be asked for anew in each
    trace, since a layer may trace otherwise by more than its arguments, the default backend for example.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def decoder_layer(graph: Any, state: Any, *inputs: Any) -> Any:
        return nnx.merge(graph, state).run(*inputs)

    return lambda layer, *inputs: decoder_layer(*nnx.split(layer), *inputs)


class Decoder(nnx.Module):
    """A causal language model with expert layers.

    Built abstract (shapes only); `seed` fills it at random, `moejax.checkpoint` from files.

    `kernels` names the implementation of GPU kernels for norms and router ("xla" for none); the experts' is
    `moe.grouped_matmul`, attention's the cache's.

    With `parallel` and the `axes` of its mesh the declared shapes are still the whole model's, but a call
    must come from within `shard_map`, where every device has its part of the weights
    (`moejax.sharding.rules`). A vocabulary that does not divide by the devices is padded with zeros, of which
    logits show nothing.

    With `layers` it is a pipeline stage: these layers only, under their paths in the whole model, the
    embedding where they are the first ones and norm and output projection where they are the last (with tied
    embeddings the last stage has a table of its own). A stage cannot be called; it has `run`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        moe: MoeConfig | None = None,
        kernels: str = "xla",
        seed: int | None = None,
        parallel: ParallelConfig | None = None,
        axes: Axes = SINGLE,
        layers: range | None = None,
    ) -> None:
        dtype = jnp.dtype(config.dtype)
        moe = moe or MoeConfig()
        scale, tied, D = config.initializer_range, config.tie_word_embeddings, config.hidden_size
        every = range(config.num_layers)
        self.stage = every if layers is None else layers
        self.is_first, self.is_last = self.stage[0] == 0, self.stage[-1] == every[-1]
        table = self.is_first or (self.is_last and tied)
        V, padding = config.vocab_size, -config.vocab_size % axes.size(axes.tensor)
        self.embedding = Embedding(V, D, dtype, scale, axes.tensor, padding) if table else None
        modules = {str(i): DecoderLayer(config, i, moe, dtype, kernels, parallel, axes) for i in self.stage}
        # A list's paths count from 0, a stage's from its first layer on.
        self.layers = nnx.List(modules.values()) if self.stage == every else nnx.Dict(modules)
        self.norm = norm_of(config, dtype, kernels) if self.is_last else None
        self.lm_head = (
            Linear((D, V), ("embed", "vocab"), dtype, bias=config.lm_head_bias, scale=scale, padding=padding)
            if self.is_last and not tied
            else None
        )
        self.token_slots: TokenSlots | None = nnx.data(None)
        self.config = config
        self.axes = axes
        if seed is not None:
            initialize(self, seed)

    @jax.named_scope("embedding")
    def embed(self, tokens: jax.Array) -> jax.Array:
        """Maps int32 `[...]` to `[..., D]`, what the first layer takes."""
        assert self.embedding is not None, "only the first stage embeds tokens"
        x, multiplier = self.embedding(tokens), self.config.embedding_multiplier
        # Rounded to the weights' dtype first, as Gemma was trained.
        return x if multiplier == 1.0 else x * jnp.asarray(multiplier, x.dtype)

    def run(
        self,
        x: jax.Array,
        positions: jax.Array,
        *,
        valid: jax.Array | None = None,
        cache: DecoderCache | None = None,
        rope_lens: jax.Array | None = None,
        routing: Recorded | None = None,
        adapters: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, tuple[RoutingTrace | None, ...]]:
        """Runs all layers that are here, and the final norm where they are the last ones.

        Args:
            x: `[B, T, D]`, the embedded tokens or what the stage before has returned.
            positions: int32 `[B, T]`.
            valid: bool `[B, T]`, False for padding, which then visits no expert. None: all are real.
            cache: where keys and values are kept, this stage's layers counted from 0; None attends within
                this call only.
            rope_lens: int32 `[B]`, sequence length that `dynamic` rotary scaling goes by; None: one past the
                row's last real position.
            routing: what each layer's router is to choose again, `[B, T, k]` (the traces of an earlier call,
                or `Replay`s); one entry a layer of this stage. A trace of the same call gives the same bits.
            adapters: int32 `[B·T]`, the slot of each token's adapter (`moejax.nn.lora`); None: no token has
                one.

        Returns:
            (`[B, T, D]`, updated cache, one trace per layer, None for dense layers). Before the last stage
            the first is the sum of the last layer's output and its residual: the next stage's first norm
            would begin with that sum, in the same precision, so that one array travels and nothing is rounded
            otherwise.

        Raises:
            ConfigError: `routing` is not these layers' or these tokens'.
        """
        if adapters is not None:
            assert self.token_slots is not None, "the model has no slots"
            self.token_slots.set_value(adapters)
        if rope_lens is None:
            last = positions if valid is None else jnp.where(valid, positions, -1)
            rope_lens = jnp.max(last, axis=1) + 1
        rope = rope_tables(self.config, positions, rope_lens)
        residual: Residual = None
        parts, traces = [], []
        replays = self._replays(routing, x.shape[:2])
        run_layer = _traced_once() if isinstance(x, jax.core.Tracer) else DecoderLayer.run
        for i, (number, layer) in enumerate(zip(self.stage, self.in_order(), strict=True)):
            part = None if cache is None else cache.layer(i)
            with jax.named_scope(f"layer_{number}"):
                told = told_of(self.config, number, rope)
                inputs = x, residual, told, positions, valid, part, replays[i]
                x, residual, part, trace = run_layer(layer, *inputs)
            traces.append(trace)
            parts.append(part)
        if cache is not None:
            cache = cache.with_layers(parts)
        out = x + summed(residual, x) if self.norm is None else self.norm.add(x, residual)[0]
        return out, cache, tuple(traces)

    def _replays(self, routing: Recorded | None, tokens: tuple[int, ...]) -> list[Replay | None]:
        """Returns the replayed routing of each layer that is here.

        Raises:
            ConfigError: see `run`.
        """
        layers = self.in_order()
        if routing is None:
            return [None] * len(layers)
        if len(routing) != len(layers):
            raise ConfigError(f"routing: {len(routing)} entries for {len(layers)} layers; give one a layer")
        replays: list[Replay | None] = []
        for number, layer, recorded in zip(self.stage, layers, routing, strict=True):
            if recorded is None:
                replays.append(None)
            elif layer.moe is None:
                raise ConfigError(f"routing: layer {number} is dense and has no router; give None")
            else:
                replay = Replay(recorded.ids, recorded.weights)
                sizes = layer.moe.router.top_k, layer.moe.num_experts
                replays.append(check_replay(f"layer {number}", replay, tokens, *sizes))
        return replays

    def __repr__(self) -> str:
        config, count = self.config, len(self.stage)
        experts = f"{config.num_experts} experts (top-{config.num_experts_per_tok})"
        experts = experts if any(config.moe_layers) else "no experts"
        return f"<Decoder {config.family}: {count} layers, {experts}, {num_params(self):,} parameters>"

    def in_order(self) -> list[DecoderLayer]:
        """Returns the layers that are here."""
        if isinstance(self.layers, nnx.List):
            return list(self.layers)
        return [self.layers[str(i)] for i in self.stage]

    @jax.named_scope("lm_head")
    def logits(self, x: jax.Array) -> jax.Array:
        """Maps `[..., D]` to float32 `[..., V]`."""
        if self.lm_head is None:
            assert self.embedding is not None, "only the last stage has logits"
            logits = self.embedding.attend(x)
        else:
            logits = all_gather(self.lm_head(x), self.axes.tensor, axis=-1)
        logits = logits[..., : self.config.vocab_size].astype(jnp.float32)
        if self.config.logits_scaling != 1.0:
            logits = logits / self.config.logits_scaling
        cap = self.config.logits_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        valid: jax.Array | None = None,
        routing: Recorded | None = None,
        return_routing: bool = False,
    ) -> Any:
        """Returns logits of whole sequences: int32 `[B, T]` → float32 `[B, T, V]`.

        With `return_routing`, `(logits, traces)` where traces has a `RoutingTrace` per layer, or None for a
        dense layer. `routing` as in `run`.
        """
        tokens = jnp.asarray(tokens, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        x, _, traces = self.run(self.embed(tokens), positions, valid=valid, routing=routing)
        logits = self.logits(x)
        return (logits, traces) if return_routing else logits
