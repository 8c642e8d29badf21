"""The plain generation loop: one padded batch from prefill to the last token, over a contiguous cache.

Small and slow to admit (a batch ends with its longest row), it is the oracle that a paged, continuously
batched engine is compared with. Shapes are rounded up to buckets so that few programs are compiled.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.cache.contiguous import ContiguousCache, empty_cache
from moejax.engine.requests.api import Logprob, SamplingParams
from moejax.engine.routing.expert_counts import RoutingRecord
from moejax.engine.step.functions import ModelFunctions, StepOutput, StepState, shapes_of
from moejax.engine.step.ledger import CompileLedger
from moejax.engine.step.sampler import (
    Sampled,
    SamplerMode,
    SamplingArrays,
    initial_seen,
    read_logprobs,
    sampler_mode,
    sampling_arrays,
)
from moejax.models.decoder import Decoder


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


class ContiguousEngine:
    """Runs batches of rows; owns the weights' leaves and the compiled steps.

    Args:
        kv_cache: the cache holds what this dtype gives back of keys and values, in the model's own dtype: the
            twin of a quantized paged cache.
    """

    def __init__(self, model: Decoder, ledger: CompileLedger, kv_cache: str = "auto") -> None:
        self.functions = ModelFunctions(model, kv_cache)
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
