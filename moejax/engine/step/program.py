"""The compiled step over the paged cache: a pure function of (weight leaves, device state, one buffer)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.cache.pool import PagedCache, Pages, States
from moejax.core.moe import Product, TunedMoe
from moejax.core.scheduling import SpeculationConfig
from moejax.engine.step.batch import Batch, unpack
from moejax.engine.step.functions import ModelFunctions, routing_counts, token_logprobs
from moejax.engine.step.limits import FOLLOWS, Limits, StepKey
from moejax.engine.step.sampler import Sampled, add_biases, sample
from moejax.models.decoder import Decoder, DecoderLayer
from moejax.moe.layer import RoutingTrace
from moejax.moe.router import Replay
from moejax.ops.paged_attention import Evicted
from moejax.routing.capture import id_dtype
from moejax.sharding.pipeline import stage_config
from moejax.sharding.spmd import SingleDevice


class DeviceState(NamedTuple):
    """The state that a step hands the next, all donated.

    Attributes:
        pages: the segments that the step reads and writes.
        states: of the layers with linear attention.
        last: int32 `[slots + 1]`, the token that each slot sampled last; the last place is scratch. Where
            drafts are made on the device, as many places follow for the slots' first drafts, and so on.
        seen: int32 `[slots + 1, V]`, twice the times that a slot's output has each token, and 1 more if its
            prompt has it; None in a step without penalties.
        hidden: `[places of last, D]`, what an MTP layer put out beside each draft; None of other models.
    """

    pages: Pages
    states: States
    last: jax.Array
    seen: jax.Array | None
    hidden: jax.Array | None = None


class PagedOutput(NamedTuple):
    """The arrays that a step gives. The host reads all but `x`.

    Attributes:
        sampled: of the rows `[S]`; None from a pipeline stage before the last, as `prompt_logprobs` is.
        counts, overflow: int32 `[L, E]` and `[2]`, where routing is recorded; of a stage's own layers.
        prompt_logprobs: of the `[T]` tokens that follow the chunks', where they are asked for.
        captured: of the S + T tokens, where routing is captured; None also of a stage without experts.
        x: `[S + T, D]`, what the next stage takes, by group, or what an MTP layer continues; else None.
        decoded: int32 `[S]`, what the rows decoded, where the host does not know their drafts yet.
        mass: float32 `[S, blocks]`, the attention that each row's queries gave the blocks of its sequence,
            where a policy goes by it; mean over heads, and over layers that have all of them.
    """

    sampled: Sampled | None
    counts: jax.Array | None
    overflow: jax.Array | None
    prompt_logprobs: Sampled | None
    captured: "Captured | None" = None
    x: jax.Array | None = None
    decoded: jax.Array | None = None
    mass: jax.Array | None = None


class Captured(NamedTuple):
    """Each token's choice in the layers with experts: ids uint8 or uint16 and weights float32 `[N, L, k]`."""

    ids: jax.Array
    weights: jax.Array


class PagedFunctions(ModelFunctions):
    """A model, or a pipeline stage of it, split into weight leaves and the step. `config` is that of the
    layers that are here, `whole` the model's."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model)
        self.whole = model.config
        self.config = stage_config(model.config, model.stage)
        self.is_first, self.is_last = model.is_first, model.is_last

    def step(
        self,
        leaves: Sequence[jax.Array],
        state: DeviceState,
        buffer: jax.Array,
        given: jax.Array | None = None,
        *,
        key: StepKey,
        limits: Limits,
        place: SingleDevice,
    ) -> tuple[DeviceState, PagedOutput]:
        """Computes one token of each decoding row and all chunk tokens, in one pass of the model.

        On a mesh (`place`) this is a device's part: its group's state and buffer. The output is all groups'.

        Args:
            state: the last stage's is whole; the others' has pages and states only, None for the rest.
            given: what the stage before gave, `[S + T, D]`; the first stage's is `last`, int32 `[slots + 1]`,
                as the last stage has it after the steps that this one's rows depend on. None: one stage.
        """
        batch = unpack(buffer, key, limits)
        model = self.merge(leaves)
        if key.draft:
            assert limits.drafter is not None
            reduce_model(model, limits.drafter)
        if key.tiled:
            separate_rows(model.in_order(), key.rows)
        if self.is_first:
            token = decoded_tokens(batch, state.last if given is None else given)
            x = model.embed(flat_tokens(batch, token))
        else:
            assert given is not None
            x = given
        replay = None if key.draft else batch.replay
        x, state, traces, mass = self.compute(model, x, batch, state, replay, limits)
        if key.draft:
            if key.draft != FOLLOWS:
                state, *_ = finish(model, x, batch, token, state, key)
            return state, PagedOutput(None, None, None, None)
        counts = overflow = None
        if key.record:
            counts, overflow = (place.sum_groups(x) for x in routing_counts(traces, self.config.num_experts))
        captured = capture(traces, self.config.num_experts) if limits.capture else None
        captured = place.gather_groups(captured)
        if not self.is_last:
            return state, PagedOutput(None, counts, overflow, None, captured, x[:, 0])
        if not self.is_first:
            token = decoded_tokens(batch, state.last)
        state, *told = finish(model, x, batch, token, state, key)
        sampled, prompt = place.gather_groups(told)
        decoded = place.gather_groups(token) if limits.drafter and not key.tokens else None
        left = x[:, 0] if limits.mtp else None
        return state, PagedOutput(sampled, counts, overflow, prompt, captured, left, decoded, mass)

    def compute(
        self,
        model: Decoder,
        x: jax.Array,
        batch: Batch,
        state: DeviceState,
        replay: Replay | None,
        limits: Limits,
    ) -> tuple[jax.Array, DeviceState, tuple[RoutingTrace | None, ...], jax.Array | None]:
        """Runs the model's layers on x `[S + T, D]`; returns (x `[S + T, 1, D]`, the state with what they
        keep of it, their traces, see `PagedOutput.mass`)."""
        slots, plans = (batch.slot, batch.seen_as), (batch.attention, batch.window)
        kinds, L = self.config.cache_kinds(limits.window)[: len(model.stage)], len(model.stage)
        pages = tuple(segment[:L] for segment in state.pages)
        policy = limits.kv_policy
        told = limits.table_width if policy.weighs else 0
        evicted = Evicted(policy.span, told, policy if policy.by_head else None)
        cache = PagedCache(pages, state.states[:L], *slots, *plans, kinds, limits.kernels, evicted)
        x, cache, traces = run_layers(model, x[:, None], batch, cache, replay)
        pages = tuple(new + old[L:] for new, old in zip(cache.pages, state.pages, strict=True))
        state, mass = state._replace(pages=pages, states=cache.states + state.states[L:]), None
        if cache.mass is not None:
            mass = cache.mass / (self.config.num_heads * kinds.count("blocks"))
        return x, state, traces, mass


@jax.named_scope("inputs")
def decoded_tokens(batch: Batch, last: jax.Array) -> jax.Array:
    """Returns int32 `[S]`: what each row decodes."""
    return known_tokens(batch.token, last)


def known_tokens(tokens: jax.Array, last: jax.Array) -> jax.Array:
    """Returns int32 `[S]`: tokens known to the host, or -1 - i for what `last` has at i."""
    return jnp.where(tokens >= 0, tokens, last[jnp.maximum(-1 - tokens, 0)])


def reduce_model(model: Decoder, drafter: SpeculationConfig) -> None:
    """Leaves out, inside a trace, what drafts are made without: experts of each token, or the last layers."""
    if drafter.method == "self_layers":
        model.stage = range(drafter.layers or -(-len(model.stage) // 2))
        model.layers = nnx.List(model.in_order()[: len(model.stage)])
    for layer in model.in_order() if drafter.method == "self_experts" else ():
        if layer.moe is not None:
            layer.moe.router.top_k = drafter.experts or -(-layer.moe.router.top_k // 2)


def separate_rows(layers: Sequence[DecoderLayer], tokens: int) -> None:
    """Has experts compute each row by itself, inside a trace: what it shares a product with depends on what
    else is in the batch. GPU kernels' tiles give a row the same wherever it lies in one."""
    each = [Product(tokens, "blocks_uniform", 1)]
    for layer in layers:
        if layer.moe is not None and layer.moe.moe.grouped_matmul != "pallas_triton":
            layer.moe.moe = TunedMoe.of(layer.moe.moe, layer.moe.moe.expert_layout, each)


@jax.named_scope("inputs")
def flat_tokens(batch: Batch, token: jax.Array) -> jax.Array:
    """Returns int32 `[S + T]`: the rows' tokens, then the chunks'."""
    return token if batch.chunk_token is None else jnp.concatenate([token, batch.chunk_token])


def run_layers(
    model: Decoder, x: jax.Array, batch: Batch, cache: PagedCache, replay: Replay | None
) -> tuple[jax.Array, PagedCache, tuple[RoutingTrace | None, ...]]:
    """Runs the model's layers (of a pipeline stage: its own) over the flat batch: x `[S + T, 1, D]` → (the
    same, updated cache, traces)."""
    positions = batch.position
    if batch.chunk_position is not None:
        positions = jnp.concatenate([positions, batch.chunk_position])
    return model.run(
        x,
        jnp.maximum(positions, 0)[:, None],
        valid=(positions >= 0)[:, None],
        cache=cache,
        rope_lens=batch.rope_len,
        routing=None if replay is None else replayed(model, replay),
        adapters=batch.adapter,
    )


def capture(traces: Sequence[RoutingTrace | None], num_experts: int) -> Captured | None:
    """Returns the experts that these layers chose; None where no layer has any."""
    sparse = [trace for trace in traces if trace is not None]
    if not sparse:
        return None
    ids = jnp.stack([trace.ids[:, 0] for trace in sparse], axis=1)
    return Captured(ids.astype(id_dtype(num_experts)), jnp.stack([t.weights[:, 0] for t in sparse], axis=1))


def replayed(model: Decoder, whole: Replay) -> list[Replay | None]:
    """Maps `[S + T, L, k]` of the whole model to `[S + T, 1, k]` of each layer here, None of a dense one."""
    assert whole.weights is not None
    by_layer: list[Replay | None] = []
    for layer in model.stage:
        place = sum(model.config.moe_layers[:layer])
        sparse = model.config.moe_layers[layer]
        parts = (whole.ids[:, place, None], whole.weights[:, place, None]) if sparse else None
        by_layer.append(None if parts is None else Replay(*parts))
    return by_layer


def finish(
    model: Decoder, x: jax.Array, batch: Batch, token: jax.Array, state: DeviceState, key: StepKey
) -> tuple[DeviceState, Sampled, Sampled | None]:
    """Samples the rows and scores the chunks: final `[S + T, 1, D]`, decoded tokens `[S]` → (state, sampled
    rows, log-probabilities of the chunks' next tokens where they are asked for)."""
    x = x[:, 0]
    rows, seen = None, state.seen
    if key.mode.penalty:
        assert state.seen is not None
        rows = _seen_rows(batch, token, state.seen)
        seen = state.seen.at[batch.slot].set(rows)
    logits, biased = model.logits(x[batch.logit]), None
    if key.tiled:  # as all modes' programs have them
        logits = jax.lax.optimization_barrier(logits)
    if batch.bias_token is not None:
        assert batch.bias_value is not None and batch.bias_if is not None
        biased = add_biases(logits, batch.bias_token, batch.bias_value, batch.bias_if, token)
    draft = batch.draft
    if draft is not None:
        draft = jnp.where(draft == -1, -1, known_tokens(draft, state.last))
    sampled = sample(logits, batch.sampling, batch.step, rows, key.mode, biased, draft, batch.mask)
    prompt = None
    if key.prompt_logprobs >= 0:
        assert batch.target is not None
        scored = x if key.tiled else x[key.rows :]
        prompt = token_logprobs(model, scored, batch.target, key.prompt_logprobs)
    return state._replace(last=_remember(state.last, batch, sampled.tokens), seen=seen), sampled, prompt


@jax.named_scope("sampling")
def _seen_rows(batch: Batch, token: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns int32 `[S, V]`: what each row has seen, this step's tokens included, see `DeviceState`."""
    assert batch.fresh is not None and batch.seen_as is not None and batch.prompt_len is not None
    rows = jnp.where((batch.fresh == 0)[:, None], seen[batch.slot], 0)
    S = rows.shape[0]
    place, position, tokens = jnp.arange(S, dtype=jnp.int32), batch.position, token
    if batch.chunk_row is not None and batch.chunk_token is None:
        place = batch.chunk_row
    elif batch.chunk_row is not None:
        assert batch.chunk_position is not None and batch.chunk_token is not None
        place = jnp.concatenate([place, batch.chunk_row])
        position = jnp.concatenate([position, batch.chunk_position])
        tokens = jnp.concatenate([tokens, batch.chunk_token])
    prompt_len = batch.prompt_len[jnp.minimum(place, S - 1)]
    # What is no token of the prompt, or of the output, marks past the end, which drops it.
    in_prompt = jnp.where((position >= 0) & (position < prompt_len), place, S)
    in_output = jnp.where(position >= prompt_len, place, S)
    rows = rows.at[in_prompt, tokens].max(1, mode="drop").at[in_output, tokens].add(2, mode="drop")
    return rows[batch.seen_as]


@jax.named_scope("sampling")
def _remember(last: jax.Array, batch: Batch, tokens: jax.Array) -> jax.Array:
    """Returns `last` with the tokens of the rows that sampled.

    By comparison, not by scatter, which XLA:CPU runs element by element.
    """
    slots = jnp.arange(last.shape[0], dtype=jnp.int32)[:, None]
    hit = (batch.slot[None, :] == slots) & (batch.sample != 0)[None, :]
    new = jnp.max(jnp.where(hit, tokens[None, :], -1), axis=1)
    return jnp.where(new >= 0, new, last)
