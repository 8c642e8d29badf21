"""The compiled steps over the contiguous cache: pure functions of (weight leaves, cache, state).

Weights go in as a flat list of leaves: splitting the module once and calling with leaves costs 0.1 ms a
step where `nnx.jit` costs 6 (docs/log.md).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.cache.contiguous import ContiguousCache, ContiguousView, empty_cache
from moejax.engine.step.sampler import Sampled, SamplerMode, SamplingArrays, mark_seen, sample
from moejax.models.decoder import Decoder
from moejax.moe.layer import RoutingTrace

# Logits of at most this many elements exist at a time while scoring: 2^24 floats are 64 MB.
MAX_LOGIT_ELEMENTS = 1 << 24


class StepState(NamedTuple):
    """What one decode step hands the next, all on the device and donated.

    Attributes:
        tokens: int32 `[B]`, each row's newest token, not yet in the cache.
        positions: int32 `[B]`, the slot where that token goes.
        steps: int32 `[B]`, tokens generated so far.
        seen: bool `[B, V]`, or `[B, 0]` where no row has a repetition penalty.
    """

    tokens: jax.Array
    positions: jax.Array
    steps: jax.Array
    seen: jax.Array


class StepOutput(NamedTuple):
    """What the host reads after a step. Only where routing is recorded: counts int32 `[L, E]`, and overflow
    int32 `[2]`, the assignments dropped and rerouted (non-zero only under `capacity`)."""

    sampled: Sampled
    counts: jax.Array | None
    overflow: jax.Array | None = None


class ModelFunctions:
    """A model split into weight leaves and pure step functions.

    Args:
        kv_cache: dtype whose rounding keys and values go through (`moejax.core.quant.QuantConfig`).
    """

    def __init__(self, model: Decoder, kv_cache: str = "auto") -> None:
        self._kv_cache = kv_cache
        self.graphdef, state = nnx.split(model)
        self.leaves, self.treedef = jax.tree.flatten(state)
        self.config = model.config

    def merge(self, leaves: Sequence[jax.Array]) -> Decoder:
        """The module again, inside a trace."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    def prefill(
        self,
        leaves: Sequence[jax.Array],
        cache: ContiguousCache,
        tokens: jax.Array,
        lengths: jax.Array,
        seen: jax.Array,
        arrays: SamplingArrays,
        *,
        mode: SamplerMode,
        record: bool,
    ) -> tuple[ContiguousCache, StepState, StepOutput]:
        """Whole prompts, right-padded: tokens int32 `[B, T]`, lengths int32 `[B]` (0 for a padding row).

        Fills the cache's first T slots and samples each row's first token.
        """
        model = self.merge(leaves)
        B, T = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None, :], (B, T))
        valid = positions < lengths[:, None]
        view = ContiguousView(cache, "prefill", self._kv_cache)
        x, view, traces = model.hidden(tokens, positions, valid=valid, cache=view)
        last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        steps = jnp.zeros_like(lengths)
        out, seen = _sample(model, last, arrays, steps, seen, mode)
        state = StepState(out.tokens, lengths, steps + 1, seen)
        return view.cache, state, _step_output(out, traces, self.config.num_experts, record)

    def decode(
        self,
        leaves: Sequence[jax.Array],
        cache: ContiguousCache,
        state: StepState,
        active: jax.Array,
        arrays: SamplingArrays,
        *,
        mode: SamplerMode,
        record: bool,
    ) -> tuple[ContiguousCache, StepState, StepOutput]:
        """One token a row. Rows that are not `active` (bool `[B]`) visit no expert and stay in place."""
        model = self.merge(leaves)
        tokens, positions = state.tokens[:, None], state.positions[:, None]
        valid = active[:, None]
        view = ContiguousView(cache, "decode", self._kv_cache)
        x, view, traces = model.hidden(tokens, positions, valid=valid, cache=view)
        out, seen = _sample(model, x[:, 0], arrays, state.steps, state.seen, mode)
        # An inactive row writes again where it wrote before, so it never runs past its last slot.
        moved = active.astype(jnp.int32)
        state = StepState(out.tokens, state.positions + moved, state.steps + moved, seen)
        return view.cache, state, _step_output(out, traces, self.config.num_experts, record)

    def score(self, leaves: Sequence[jax.Array], tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """float32 `[B, T - 1]`: log p(token t | tokens < t); entries past a row's length are undefined."""
        model = self.merge(leaves)
        B, T = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None, :], (B, T))
        cache = None
        if self._kv_cache != "auto":
            stored = empty_cache(self.config, B, T, jnp.dtype(self.config.dtype))
            cache = ContiguousView(stored, "prefill", self._kv_cache)
        x, _, _ = model.hidden(tokens, positions, valid=positions < lengths[:, None], cache=cache)
        flat = x[:, :-1].reshape(B * (T - 1), -1)
        targets = tokens[:, 1:].reshape(-1)
        return token_logprobs(model, flat, targets).reshape(B, T - 1)


def _sample(
    model: Decoder,
    x: jax.Array,
    arrays: SamplingArrays,
    steps: jax.Array,
    seen: jax.Array,
    mode: SamplerMode,
) -> tuple[Sampled, jax.Array]:
    """x `[B, D]` → sampled tokens and the updated `seen`."""
    out = sample(model.logits(x), arrays, steps, seen if mode.penalty else None, mode)
    return out, mark_seen(seen, out.tokens) if mode.penalty else seen


def _step_output(
    sampled: Sampled, traces: tuple[RoutingTrace | None, ...], num_experts: int, record: bool
) -> StepOutput:
    return StepOutput(sampled, *routing_counts(traces, num_experts)) if record else StepOutput(sampled, None)


def routing_counts(traces: tuple[RoutingTrace | None, ...], num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Assignments int32 `[L, E]`, a dense layer's row being 0, and int32 `[2]`: dropped, rerouted."""
    found = [trace for trace in traces if trace is not None]
    zero, none = jnp.zeros((), jnp.int32), jnp.zeros(num_experts, jnp.int32)
    overflow = jnp.stack([sum((t.dropped for t in found), zero), sum((t.rerouted for t in found), zero)])
    return jnp.stack([none if trace is None else trace.counts for trace in traces]), overflow


@jax.named_scope("sampling")
def token_logprobs(model: Decoder, x: jax.Array, targets: jax.Array) -> jax.Array:
    """x `[N, D]`, targets int32 `[N]` → float32 `[N]`, in parts so that `[N, V]` never exists whole."""
    N = x.shape[0]
    part = max(1, min(N, MAX_LOGIT_ELEMENTS // model.config.vocab_size))
    parts = -(-N // part)
    x = jnp.pad(x, ((0, parts * part - N), (0, 0))).reshape(parts, part, -1)
    targets = jnp.pad(targets, (0, parts * part - N)).reshape(parts, part)

    def one(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        logprobs = jax.nn.log_softmax(model.logits(args[0]), axis=-1)
        return jnp.take_along_axis(logprobs, args[1][:, None], axis=1)[:, 0]

    return jax.lax.map(one, (x, targets)).reshape(-1)[:N]


def shapes_of(tree: Any) -> Any:
    """The same tree with shapes and dtypes only."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
