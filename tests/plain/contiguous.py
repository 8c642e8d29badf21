"""The plain generation loop: one padded batch from prefill to the last token, over a contiguous cache.

Small and slow to admit (a batch ends with its longest row), it is the oracle that a paged, continuously
batched engine is compared with. Shapes are rounded up to buckets so that few programs are compiled.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.engine.requests.api import Logprob, SamplingParams
from moejax.engine.routing.expert_counts import RoutingRecord
from moejax.engine.step.functions import ModelFunctions, routing_counts, shapes_of, token_logprobs
from moejax.engine.step.ledger import CompileLedger
from moejax.engine.step.sampler import (
    Sampled,
    SamplerMode,
    SamplingArrays,
    read_logprobs,
    sample,
    sampler_mode,
    sampling_values,
)
from moejax.models.decoder import Decoder
from moejax.moe.layer import RoutingTrace
from tests.plain.contiguous_cache import ContiguousCache, ContiguousView, empty_cache


class StepState(NamedTuple):
    """What one decode step hands the next, all on the device and donated.

    Attributes:
        tokens: int32 `[B]`, each row's newest token, not yet in the cache.
        positions: int32 `[B]`, the slot where that token goes.
        steps: int32 `[B]`, tokens generated so far.
        seen: int32 `[B, V]` as in `DeviceState`, or `[B, 0]` where no row has a repetition penalty.
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


class PrefillKey(NamedTuple):
    """Shape bucket and options of a compiled prefill."""

    batch: int
    tokens: int
    slots: int
    mode: SamplerMode
    record: bool


class DecodeKey(NamedTuple):
    """Shape bucket and options of a compiled decode step."""

    batch: int
    slots: int
    mode: SamplerMode
    record: bool


class ScoreKey(NamedTuple):
    """Shape bucket of a compiled scoring pass."""

    batch: int
    tokens: int


class Row(NamedTuple):
    """One sample of one request: its prompt, parameters and the seed of its random stream."""

    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    max_tokens: int


class RowStep(NamedTuple):
    """A row's new token, with its log-probability where the row asked for it."""

    row: int
    token: int
    logprob: Logprob | None


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def token_bucket(n: int) -> int:
    """Prompt lengths compile in steps of 16 to 128, of 64 to 512, of 256 beyond."""
    return round_up(n, 16 if n <= 128 else 64 if n <= 512 else 256)


def slot_bucket(n: int) -> int:
    """Cache lengths compile in steps of 64 to 512, of 256 beyond."""
    return round_up(n, 64 if n <= 512 else 256)


def batch_bucket(n: int) -> int:
    """Batches compile at powers of two."""
    return 1 << (n - 1).bit_length()


class ContiguousFunctions(ModelFunctions):
    """The model's steps over the contiguous cache: pure functions of (weight leaves, cache, state).

    Args:
        kv_cache: dtype whose rounding keys and values go through (`moejax.core.quant.QuantConfig`).
    """

    def __init__(self, model: Decoder, kv_cache: str = "auto") -> None:
        super().__init__(model)
        self._kv_cache = kv_cache

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
        x, view, traces = model.run(model.embed(tokens), positions, valid=valid, cache=view)
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
        x, view, traces = model.run(model.embed(tokens), positions, valid=valid, cache=view)
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
        x, _, _ = model.run(model.embed(tokens), positions, valid=positions < lengths[:, None], cache=cache)
        flat = x[:, :-1].reshape(B * (T - 1), -1)
        targets = tokens[:, 1:].reshape(-1)
        return token_logprobs(model, flat, targets).logprob.reshape(B, T - 1)


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


def sampling_arrays(params: Sequence[SamplingParams], seeds: Sequence[int]) -> SamplingArrays:
    """`sampling_values` on the device."""
    return SamplingArrays(**{k: jnp.asarray(v) for k, v in sampling_values(params, seeds).items()})


@jax.named_scope("sampling")
def mark_seen(seen: jax.Array, tokens: jax.Array) -> jax.Array:
    """Adds each row's new token to `seen` `[B, V]`."""
    return seen.at[jnp.arange(tokens.shape[0]), tokens].add(2)


def initial_seen(prompts: Sequence[Sequence[int]], rows: int, vocab_size: int) -> np.ndarray:
    """bool `[rows, V]`: the tokens of each prompt."""
    seen = np.zeros((rows, vocab_size), np.int32)
    for row, prompt in enumerate(prompts):
        seen[row, np.asarray(prompt, np.int64)] = 1
    return seen


class ContiguousEngine:
    """Runs batches of rows; owns the weights' leaves and the compiled steps.

    Args:
        kv_cache: the cache holds what this dtype gives back of keys and values, in the model's own dtype: the
            twin of a quantized paged cache.
    """

    def __init__(self, model: Decoder, ledger: CompileLedger, kv_cache: str = "auto") -> None:
        self.functions = ContiguousFunctions(model, kv_cache)
        self.config = model.config
        self.ledger = ledger
        self.dtype = jnp.dtype(model.config.dtype)
        self.routing = RoutingRecord(self.config.num_layers, self.config.num_experts)

    def run(
        self, rows: Sequence[Row], *, record_routing: bool = False
    ) -> Iterator[tuple[list[RowStep], set[int]]]:
        """Generates for all rows together.

        Yields after each step (the first is the prefill) the new token of every row still running and a
        set; the caller adds the rows that have ended to the set, and they are left out from then on. The
        loop itself ends rows at their `max_tokens`.
        """
        batch = batch_bucket(len(rows))
        longest = max(len(row.prompt) for row in rows)
        slots = slot_bucket(max(len(row.prompt) + row.max_tokens for row in rows))
        padding = batch - len(rows)
        params = [row.params for row in rows] + [SamplingParams(temperature=0.0)] * padding
        mode = sampler_mode([row.params for row in rows], self.config.vocab_size)
        arrays = sampling_arrays(params, [row.seed for row in rows] + [0] * padding)
        cache = empty_cache(self.config, batch, max(slots, token_bucket(longest)), self.dtype)

        cache, state, output = self._prefill(rows, batch, cache, arrays, mode, record_routing)
        running = np.arange(batch) < len(rows)
        ended: set[int] = set()
        produced = 0
        while True:
            produced += 1
            self._record("decode" if produced > 1 else "prefill", output)
            yield self._row_steps(output.sampled, rows, running), ended
            for row in range(len(rows)):
                if row in ended or produced >= rows[row].max_tokens:
                    running[row] = False
            if not running.any():
                return
            cache, state, output = self._decode(
                cache, state, jnp.asarray(running), arrays, mode, record_routing
            )

    def _prefill(
        self,
        rows: Sequence[Row],
        batch: int,
        cache: ContiguousCache,
        arrays: SamplingArrays,
        mode: SamplerMode,
        record: bool,
    ) -> tuple[ContiguousCache, StepState, StepOutput]:
        tokens, lengths = pad_prompts([row.prompt for row in rows], batch)
        width = self.config.vocab_size if mode.penalty else 0
        prompts = [row.prompt for row in rows] if mode.penalty else []
        seen = jnp.asarray(initial_seen(prompts, batch, width))
        key = PrefillKey(batch, tokens.shape[1], cache.num_slots, mode, record)
        args = (self.functions.leaves, cache, jnp.asarray(tokens), jnp.asarray(lengths), seen, arrays)

        def build() -> jax.stages.Wrapped:
            def prefill(*a):
                return self.functions.prefill(*a, mode=mode, record=record)

            return jax.jit(prefill, donate_argnums=(1, 4) if mode.penalty else (1,))

        return self.ledger.get("prefill", key, build, lambda: shapes_of(args))(*args)

    def _decode(
        self,
        cache: ContiguousCache,
        state: StepState,
        active: jax.Array,
        arrays: SamplingArrays,
        mode: SamplerMode,
        record: bool,
    ) -> tuple[ContiguousCache, StepState, StepOutput]:
        key = DecodeKey(state.tokens.shape[0], cache.num_slots, mode, record)
        args = (self.functions.leaves, cache, state, active, arrays)

        def build() -> jax.stages.Wrapped:
            def decode(*a):
                return self.functions.decode(*a, mode=mode, record=record)

            return jax.jit(decode, donate_argnums=(1, 2))

        return self.ledger.get("decode", key, build, lambda: shapes_of(args))(*args)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """float32 arrays of length n - 1: log p(token t | tokens < t)."""
        tokens, lengths = pad_prompts(sequences, batch_bucket(len(sequences)))
        key = ScoreKey(*tokens.shape)
        args = (self.functions.leaves, jnp.asarray(tokens), jnp.asarray(lengths))

        def build() -> jax.stages.Wrapped:
            return jax.jit(self.functions.score)

        scores = np.asarray(self.ledger.get("score", key, build, lambda: shapes_of(args))(*args))
        return [scores[i, : len(sequence) - 1].copy() for i, sequence in enumerate(sequences)]

    def _record(self, phase: str, output: StepOutput) -> None:
        if output.counts is not None:
            self.routing.add(phase, np.asarray(output.counts), np.asarray(output.overflow))

    @staticmethod
    def _row_steps(sampled: Sampled, rows: Sequence[Row], running: np.ndarray) -> list[RowStep]:
        """Reads a step's result; this is where the host waits for the device."""
        tokens = np.asarray(sampled.tokens)
        if sampled.logprob is None:
            return [RowStep(i, int(tokens[i]), None) for i in range(len(rows)) if running[i]]
        logprobs = read_logprobs(sampled, [row.params.logprobs for row in rows])
        return [RowStep(i, int(tokens[i]), logprobs[i]) for i in range(len(rows)) if running[i]]


def pad_prompts(prompts: Sequence[Sequence[int]], batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded int32 `[batch, T]` and lengths int32 `[batch]`; rows past the prompts have length 0."""
    T = max(2, token_bucket(max(len(prompt) for prompt in prompts)))
    tokens = np.zeros((batch, T), np.int32)
    lengths = np.zeros(batch, np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
        lengths[i] = len(prompt)
    return tokens, lengths
