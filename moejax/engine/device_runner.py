"""Runs plans on the device: builds the batch, finds its bucket's compiled step, owns the device state."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from moejax.cache.pool import BlockPool, Pages
from moejax.core.config import EngineConfig
from moejax.engine.batch import BatchBuilder, Limits, StepKey, layout
from moejax.engine.buckets import Buckets
from moejax.engine.ledger import CompileLedger
from moejax.engine.paged_steps import DeviceState, PagedFunctions, PagedOutput
from moejax.engine.routing import RoutingRecord
from moejax.engine.runner import StepResult
from moejax.engine.sampler import SamplerMode, read_logprobs
from moejax.engine.scheduler import StepPlan
from moejax.engine.steps import shapes_of
from moejax.ops.paged_attention import copy_blocks


class CopyKey(NamedTuple):
    """Shape bucket of the program that copies shared blocks: cache blocks in reach."""

    blocks: int


class Launched(NamedTuple):
    """A step under way: what its rows want to know (likeliest tokens each), and the device's promise."""

    key: StepKey
    wanted: list[int | None] | None
    chunk_tokens: int
    output: PagedOutput


class DeviceRunner:
    """Implements `moejax.engine.runner.Runner`.

    Args:
        functions: the model's leaves and step.
        config: buckets, slots, tokens in a block.
        num_blocks, max_model_len: of the cache, of one sequence.
        ledger: where steps are compiled.
        kernels: implementation of the GPU kernels, "xla" for none.
    """

    def __init__(
        self,
        functions: PagedFunctions,
        config: EngineConfig,
        num_blocks: int,
        max_model_len: int,
        ledger: CompileLedger,
        kernels: str = "xla",
    ) -> None:
        self.functions = functions
        self.ledger = ledger
        self.config = config
        self._one_slab = kernels != "xla"
        self.buckets = self._all_buckets(num_blocks)
        self.limits = Limits(
            slots=config.max_num_seqs,
            block_size=config.block_size,
            table_width=-(-max_model_len // config.block_size),
            slab_ends=self.buckets.slabs.ends,
            kernels=kernels,
        )
        self.builder = BatchBuilder(self.buckets, self.limits)
        model = functions.config
        self.pool = BlockPool(
            model,
            self.buckets.slabs,
            config.block_size,
            jnp.dtype(model.dtype),
            transposed_keys=not self._one_slab,
        )
        self.routing = RoutingRecord(model.num_layers, model.num_experts)
        self.reset()

    def reset(self) -> None:
        self.pool.reset()
        self._last = jnp.zeros(self.limits.slots + 1, jnp.int32)
        self._seen: jax.Array | None = None

    def launch(self, plan: StepPlan) -> Launched:
        """Builds the batch and starts the step.

        Raises:
            CompileError: the step is not compiled, and may not be any more (`engine.strict_compile`).
        """
        if plan.copies:
            self._copy(plan.copies)
        key, buffer = self.builder.build(plan)
        wanted = [s.params.logprobs for s in plan.sequences] if key.mode.logprobs >= 0 else None
        return Launched(key, wanted, plan.chunk_tokens, self._run(key, buffer))

    def _run(self, key: StepKey, buffer: np.ndarray) -> PagedOutput:
        step = self._step(key)
        pages = self.pool.take(self.limits.slab_ends.index(key.blocks) + 1)
        given = DeviceState(pages, self._last, self._seen_of(key))
        state, output = step(self.functions.leaves, given, buffer)
        self.pool.put(state.pages)
        self._last = state.last
        if key.mode.penalty:
            self._seen = state.seen
        return output

    def collect(self, handle: Launched) -> StepResult:
        """Reads a step's result; this is where the host waits for the device."""
        key, output = handle.key, handle.output
        tokens = np.asarray(output.sampled.tokens).tolist()
        logprobs = None if handle.wanted is None else read_logprobs(output.sampled, handle.wanted)
        if output.counts is not None:
            phase = "prefill" if key.tokens else "decode"
            self.routing.add(phase, np.asarray(output.counts), np.asarray(output.overflow))
        scores = None
        if output.prompt_logprobs is not None:
            scores = np.asarray(output.prompt_logprobs)[: handle.chunk_tokens]
        return StepResult(tokens, logprobs, scores, key.rows + key.tokens)

    def warmup(
        self,
        max_total_len: int,
        modes: Sequence[SamplerMode],
        *,
        samples: int = 1,
        score: bool = False,
        record: bool = False,
    ) -> None:
        """Compiles ahead of time every step that such a workload can need, and rehearses each once on an
        empty batch: the first run of a program costs tens of milliseconds more than the next.

        From then on batches are padded to the few buckets compiled here, see `Buckets.thinned`.

        Args:
            max_total_len: of its longest request, prompt and output. A preempted one comes back as a prompt.
            modes: sampler modes that the batches run in.
            samples: the largest n of a request.
            score, record: compile the steps that score prompts, or record routing, as well.
        """
        self.builder.warm_modes = list(dict.fromkeys(modes))
        whole = self._all_buckets(self.buckets.slabs.num_blocks)
        self.buckets = self.builder.buckets = whole.thinned(self.config, max_total_len)
        samples = min(samples, self.limits.slots)  # more than that run one group after another
        owners = [1 << i for i in range((samples - 1).bit_length() + 1)]
        reachable = list(self.buckets.reachable(max_total_len, self.limits.block_size, samples))
        modes, records = self.builder.warm_modes, (False, True) if record else (False,)
        options = itertools.product(reachable, owners, modes, records, (False, True) if score else (False,))
        for (rows, tokens, slabs), sharing, mode, recorded, scored in options:
            if tokens or not scored:
                blocks = self.limits.slab_ends[slabs - 1]
                key = StepKey(rows, tokens, blocks, sharing, mode, recorded, scored)
                jax.block_until_ready(self._run(key, self.builder.empty(key)))
        if samples > 1:
            for slabs in sorted({slabs for _, _, slabs in reachable}):
                self._copier(slabs)

    def _all_buckets(self, num_blocks: int) -> Buckets:
        """Kernels read through block tables, whatever the pool's size: it is one slab."""
        config = self.config
        if self._one_slab:
            config = dataclasses.replace(config, block_buckets=[num_blocks])
        return Buckets.of(config, num_blocks)

    def _seen_of(self, key: StepKey) -> jax.Array | None:
        if not key.mode.penalty:
            return None
        if self._seen is None:
            self._seen = jnp.zeros((self.limits.slots + 1, self.functions.config.vocab_size), jnp.bool_)
        return self._seen

    def _step(self, key: StepKey) -> Any:
        """The compiled step of a bucket."""

        def build() -> jax.stages.Wrapped:
            def step(leaves: Any, state: DeviceState, buffer: jax.Array) -> Any:
                return self.functions.step(leaves, state, buffer, key=key, limits=self.limits)

            return jax.jit(step, donate_argnums=(1,))

        def shapes() -> tuple[Any, ...]:
            slots, vocab = self.limits.slots + 1, self.functions.config.vocab_size
            seen = jax.ShapeDtypeStruct((slots, vocab), jnp.bool_) if key.mode.penalty else None
            state: Any = DeviceState(
                self.pool.shapes(self.limits.slab_ends.index(key.blocks) + 1),
                cast(Any, jax.ShapeDtypeStruct((slots,), jnp.int32)),
                cast(Any, seen),
            )
            buffer = jax.ShapeDtypeStruct((layout(key, self.limits)[1],), jnp.int32)
            return shapes_of(self.functions.leaves), state, buffer

        return self.ledger.get("step", key, build, shapes)

    def _copier(self, slabs: int) -> Any:
        """The compiled program that copies blocks within the first `slabs` slabs."""
        most = self.limits.slots

        def build() -> jax.stages.Wrapped:
            def copy(pages: Pages, pairs: jax.Array, count: jax.Array) -> Pages:
                layers = range(len(pages[0]))
                done = [
                    copy_blocks(tuple(slab[i] for slab in pages), pairs[0], pairs[1], count) for i in layers
                ]
                return tuple(tuple(layer[z] for layer in done) for z in range(len(pages)))

            return jax.jit(copy, donate_argnums=(0,))

        def shapes() -> tuple[Any, ...]:
            integer = jnp.int32
            return (
                self.pool.shapes(slabs),
                jax.ShapeDtypeStruct((2, most), integer),
                jax.ShapeDtypeStruct((), integer),
            )

        return self.ledger.get("copy", CopyKey(self.limits.slab_ends[slabs - 1]), build, shapes)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies blocks before the step that writes into the copies. At most one a slot."""
        pairs = np.zeros((2, self.limits.slots), np.int32)
        pairs[:, : len(copies)] = np.asarray(copies, np.int32).T
        slabs = self.buckets.slabs_for(int(pairs.max()) + 1)
        copier = self._copier(slabs)
        self.pool.put(copier(self.pool.take(slabs), pairs, np.int32(len(copies))))
