"""The common part of runners on devices: batches padded to buckets, warm-up, results read by the host."""

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.core.config import EngineConfig, ModelConfig
from moejax.engine.pipeline.microbatches import Part
from moejax.engine.routing.expert_counts import RoutingRecord
from moejax.engine.routing.recorder import RoutingRecorder
from moejax.engine.routing.replay import RoutingReplay
from moejax.engine.scheduling.plan import Plan, draft_plans
from moejax.engine.step.batch import BatchBuilder
from moejax.engine.step.buckets import Buckets
from moejax.engine.step.ledger import CompileLedger, Program
from moejax.engine.step.limits import CacheSpec, Limits, StepKey
from moejax.engine.step.program import PagedOutput
from moejax.engine.step.runner import StepResult
from moejax.engine.step.sampler import SamplerMode, read_logprobs
from moejax.sharding.spmd import SingleDevice
from pallas_kernels.work_list import MOST_QUERIES, latent_heads, latent_queries


class Rows(NamedTuple):
    """The rows of a batch, as the host must know them to read the result.

    Attributes:
        logprobs: how many likeliest tokens each row asks for; None where nobody does.
        prompt_logprobs: the same of each chunk token, in the place of the prompt token after it.
        rows, chunk_tokens: of each data-parallel group, padding not counted.
        record: whether somebody asked for expert counts.
        plan: what was asked for; its sequences have gone on since.
        places: see `RoutingRecorder.places`.
    """

    logprobs: list[int | None] | None
    prompt_logprobs: list[int | None] | None
    rows: list[int]
    chunk_tokens: list[int]
    record: bool
    plan: Plan
    places: Sequence[list[np.ndarray]]

    @classmethod
    def of(cls, plan: Plan, key: StepKey, capture: RoutingRecorder | None) -> "Rows":
        prompt: list[int | None] = []
        for chunk in plan.chunks if key.prompt_logprobs >= 0 else ():
            prompt += [chunk.sequence.params.prompt_logprobs] * chunk.scored
            prompt += [None] * (chunk.count - chunk.scored)
        return cls(
            [s.params.logprobs for s in plan.sequences] if key.mode.logprobs >= 0 else None,
            prompt or None,
            [len(part.sequences) for part in plan.groups],
            [part.chunk_tokens for part in plan.groups],
            any(s.record for s in plan.sequences),
            plan,
            () if capture is None else capture.places(plan),
        )


class PlannedSteps:
    """Implements `moejax.engine.step.runner.Runner` without computing anything: notes each step's bucket.

    Args:
        ends: tokens that no row samples.
    """

    def __init__(self, builder: BatchBuilder, ends: Collection[int]) -> None:
        self.builder, self.token = builder, next(t for t in range(len(ends) + 1) if t not in ends)
        self.keys: dict[StepKey, None] = {}

    def reset(self) -> None: ...

    def launch(self, plan: Plan) -> StepResult:
        drafts = draft_plans(plan, self.builder.limits.mtp)
        self.keys |= dict.fromkeys(map(self.builder.key, (*drafts, *self.builder.parts(plan))))
        return StepResult([self.token] * len(plan.sequences), padded_tokens=plan.num_tokens)

    def save(self, plan: Plan) -> None: ...

    def ready(self, handle: StepResult) -> bool:
        return True

    def collect(self, handle: StepResult) -> StepResult:
        return handle


class BucketRunner(ABC):
    """A base: how a step runs and blocks are copied is the subclass's.

    Args:
        model: of the whole model.
        config: buckets, slots, tokens in a block.
        cache: its size and dtype.
        ledger: where steps are compiled.
        kernels: implementation of the GPU kernels, "xla" for none.
        replay: the routing that steps are told; None: routers choose.
        place: the devices. Slots, blocks and buckets are each data-parallel group's.
        store_slots: blocks of each group that the host's store has room for.

    `drafter` is the runner of another model that drafts, and this one's its `leader`; None without.
    `warmed` is what `warmup` was told last.
    `capture` takes each computed token's routing where `config.capture_routing` asks for it, else it is None.
    """

    leader: Any = None
    drafter: Any = None
    warmed: dict[str, Any] | None = None

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        cache: CacheSpec,
        ledger: CompileLedger,
        kernels: str,
        replay: RoutingReplay | None,
        *,
        place: SingleDevice,
        store_slots: int,
    ) -> None:
        self.ledger = ledger
        self.config = config
        self.store_slots = store_slots
        self.groups = place.groups
        tile = config.tile_tokens if config.deterministic != "none" else 0
        self._one_segment = kernels != "xla" or config.deterministic == "tiles"
        self.cache = cache
        self.buckets = self._all_buckets(cache.num_blocks)
        kv_heads, queries = model.num_kv_heads // place.axes.size(place.axes.kv), MOST_QUERIES
        if model.latent is not None:
            heads = model.num_heads // place.axes.size(place.axes.tensor)
            kv_heads, queries = latent_heads(heads), latent_queries(heads)
        self.limits = Limits(
            slots=config.max_num_seqs,
            block_size=cache.block_size,
            table_width=-(-cache.max_model_len // cache.block_size),
            segment_ends=self.buckets.segments.ends,
            kernels=kernels,
            capture=config.capture_routing,
            replay=None if replay is None else replay.shape,
            latent=model.latent,
            states=not all(model.paged_layers),
            kv_heads=kv_heads,
            context=min(cache.max_model_len, max(w or cache.max_model_len for w in model.sliding_windows)),
            queries=queries,
            window=cache.window,
            window_ends=_ends_up_to(self.buckets.segments.ends, cache.window_blocks),
            adapters=config.adapters.slots,
            drafter=config.speculation if config.speculation.on_device else None,
            tile=tile,
            verified=config.deterministic == "verified",
            mask_words=-(-model.vocab_size // 32),
            kv_policy=config.kv_policy,
        )
        self.builder = BatchBuilder(self.buckets, self.limits, replay)
        remembered = (cache.num_blocks if config.prefix_cache.enabled else 0), cache.block_size, self.groups
        self.capture = RoutingRecorder(model, *remembered) if config.capture_routing else None
        self._far = jax.default_backend() != "cpu"  # there a host's copy costs more than it saves
        self.routing = RoutingRecord(model.num_layers, model.num_experts)

    @abstractmethod
    def _run(self, key: StepKey, buffer: np.ndarray) -> PagedOutput:
        """Starts a step on a built batch."""

    def programs(self, key: StepKey) -> list[Program]:
        """Returns the programs of a step; none where they are compiled when it first runs."""
        return []

    def compile_ahead(self, keys: Iterable[StepKey]) -> None:
        """Compiles these steps, those that are new, side by side."""
        self.ledger.compile_all([program for key in keys for program in self.programs(key)])

    @abstractmethod
    def _copier(self, segments: int) -> Any:
        """Returns the compiled programs that copy blocks within the first `segments` segments of a pool."""

    @abstractmethod
    def _mover(self, z: int, saving: bool) -> Any:
        """Returns the compiled program that copies blocks of a segment to the host's store, or from there."""

    def _result(self, key: StepKey, batch: Rows, output: PagedOutput) -> StepResult:
        """Reads what a batch gave; this is where the host waits for the device."""
        sampled = jax.tree.map(lambda x: of_groups(x, batch.rows), output.sampled)
        logprobs = None if batch.logprobs is None else read_logprobs(sampled, batch.logprobs)
        prompt = None
        if batch.prompt_logprobs is not None:
            parts = batch.plan.groups
            firsts = [len(part.decodes) * key.tiled for part in parts]  # before a tile's chunk tokens
            told = jax.tree.map(lambda x: of_groups(x, batch.chunk_tokens, firsts), output.prompt_logprobs)
            prompt = read_logprobs(told, batch.prompt_logprobs)
        mass = None if output.mass is None else np.asarray(output.mass)[: batch.rows[0]]
        padded = self.groups * (key.rows + key.tokens)
        return StepResult(sampled.tokens.tolist(), logprobs, prompt, padded, mass)

    def _merged(self, parts: Iterable[tuple[Part, StepResult]], rows: int, chunk_tokens: int) -> StepResult:
        """Returns the result of a step of so many rows and chunk tokens from those of its parts."""
        tokens, padded = [0] * rows, 0
        logprobs: list[Any] | None = None
        prompt: list[Any] | None = None
        for part, result in parts:
            padded += result.padded_tokens
            for row, token in zip(part.rows, result.tokens, strict=True):
                tokens[row] = token
            if result.logprobs is not None:
                logprobs = logprobs or [None] * rows
                for row, logprob in zip(part.rows, result.logprobs, strict=True):
                    logprobs[row] = logprob
            if result.prompt_logprobs is not None:
                prompt, told = prompt or [None] * chunk_tokens, iter(result.prompt_logprobs)
                for start, count in part.spans:
                    prompt[start : start + count] = itertools.islice(told, count)
        return StepResult(tokens, logprobs, prompt, padded)

    def _add_counts(self, phase: str, batch: Rows, output: PagedOutput) -> None:
        """Adds a batch's expert counts to `routing`, unless it counted though nobody asked."""
        requested = batch.record or self.builder.record_all or not self.builder.counting
        if output.counts is not None and requested:
            self.routing.add(phase, np.asarray(output.counts), np.asarray(output.overflow))

    def _take_routing(self, key: StepKey, batch: Rows, output: PagedOutput) -> None:
        """Has a batch's captured routing read, in a while."""
        if self.capture is None or output.captured is None:
            return
        for array in output.captured if self._far else ():
            if isinstance(array, jax.Array):  # put together by the host where there are stages
                array.copy_to_host_async()
        self.capture.add(batch.plan, None if key.tiled else key.rows, *output.captured, batch.places)

    def save(self, plan: Plan) -> None:
        """Copies blocks alone, see `moejax.engine.step.runner.Runner`."""
        self._save(plan)
        if self.capture is not None:
            self.capture.add(plan, None, None, None)

    @abstractmethod
    def _save(self, plan: Plan) -> None:
        """Copies a plan's blocks to the host's store and waits."""

    def warmup(
        self,
        max_total_len: int,
        modes: Sequence[SamplerMode],
        *,
        samples: int = 1,
        prompt_logprobs: Iterable[int] = (-1,),
        record: bool = False,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Compiles ahead of time every step that such a workload can need, and rehearses each once on an
        empty batch: the first run of a program costs tens of milliseconds more than the next.

        From then on batches are padded to the few buckets compiled here, see `Buckets.thinned`.

        Args:
            max_total_len: of its longest request, prompt and output. A preempted one comes back as a prompt.
            modes: sampler modes that the batches run in.
            samples: the largest n of a request.
            prompt_logprobs: likeliest tokens that steps with prompts are to report, -1 for none.
            record: compile the steps that record routing as well. On one group then every step counts: a few
                operations, and half as many programs.
            lock: held for each rehearsal, where other threads use the devices.
        """
        prompt_logprobs = sorted({-1, *prompt_logprobs})
        asked = {"samples": samples, "prompt_logprobs": prompt_logprobs, "record": record}
        self.warmed = {"max_total_len": max_total_len, "modes": modes, **asked}
        self.builder.warm_modes = list(dict.fromkeys(modes))
        self.builder.warm_prompt_logprobs = prompt_logprobs
        self.buckets = self.builder.buckets = self._thinned(max_total_len)
        samples = min(samples, self.limits.slots)  # more than that run one group after another
        owners = [1 << i for i in range((samples - 1).bit_length() + 1)]
        seqs, drafts = self.limits.slots, self.config.speculation.most * (self.limits.kernels == "xla")
        if drafts:  # whose rows read the blocks of their sequence; one size for any number of them
            owners = sorted({*owners, 1 << (samples * (1 + drafts) - 1).bit_length()})
        self.builder.warm_owners = owners
        reachable = list(self.buckets.reachable(max_total_len, self.limits.block_size, samples))
        self.count_always(record)
        modes, records = self.builder.warm_modes, (False, True) if record else (False,)
        if self.builder.record_all or self.builder.counting:
            records = (True,)
        scored = self.builder.warm_prompt_logprobs
        options = itertools.product(reachable, owners, modes, records, scored)
        keys = []
        # No block has more sequences than a step has rows.
        fewer = dict(zip(owners, [0, *owners], strict=False))
        if self.limits.tile:
            keys = [self.builder.tile(*given) for given in itertools.product(modes, records, scored)]
        if self.limits.verified or not self.limits.tile:
            keys += [
                StepKey(rows, tokens, self.limits.segment_ends[segments - 1], sharing, mode, recorded, count)
                for (rows, tokens, segments), sharing, mode, recorded, count in options
                if (tokens or count < 0)
                and fewer[sharing] < rows
                and (not drafts or rows <= seqs or sharing > samples)
            ]
        if self.limits.drafter is not None:
            alone = [k for k in keys if not k.tokens and k.rows <= seqs and k.owners <= max(1, samples)]
            if self.leader is not None:
                keys = list(dict.fromkeys(map(self.builder.following, keys)))
            if self.drafter is None and (not self.limits.mtp or self.limits.drafter.k > 1):
                keys += dict.fromkeys(map(self.builder.drafting, alone))
        keys = list(dict.fromkeys(keys))
        self.compile_ahead(keys)
        for key in keys:
            buffer = np.tile(self.builder.empty(key), self.groups)
            with lock or nullcontext():
                jax.block_until_ready(self._run(key, buffer))
        counts = sorted({segments for _, _, segments in reachable})
        copies = samples > 1 or self.config.prefix_cache.enabled or self.config.compact_cache
        for segments in counts if copies else ():
            self._copier(segments)
        for z in range(counts[-1] if self.store_slots else 0):
            self._mover(z, True)
            self._mover(z, False)
        if self.drafter is not None:
            self.drafter.warmup(max_total_len, modes, samples=samples)

    def count_always(self, count: bool) -> None:
        """Has steps count their routing unasked, or no more; on one group only, where it sends nothing."""
        self.builder.counting = count and self.groups == 1

    def _thinned(self, max_total_len: int) -> Buckets:
        """Returns the buckets that a warm-up compiles."""
        whole = self._all_buckets(self.buckets.segments.num_blocks)
        return whole.thinned(self.config, max_total_len)

    def _all_buckets(self, num_blocks: int) -> Buckets:
        """Kernels read through block tables, whatever the pool's size: it is one segment."""
        config = self.config
        if self._one_segment:
            config = dataclasses.replace(config, block_buckets=[num_blocks])
        return Buckets.of(config, num_blocks)


def _ends_up_to(ends: Sequence[int], blocks: int) -> tuple[int, ...]:
    """Returns the ends of segments that hold fewer blocks, and `blocks` itself; none without blocks."""
    return (*(end for end in ends if end < blocks), blocks) if blocks else ()


def is_sampled(output: PagedOutput) -> bool:
    """Tells, at once, whether a step's tokens can be read."""
    tokens: Any = output.sampled and output.sampled.tokens
    # What stages in several processes put out was gathered into NumPy arrays.
    return isinstance(tokens, np.ndarray) or tokens.is_ready()


def of_groups(x: jax.Array, counts: Sequence[int], firsts: Sequence[int] | None = None) -> np.ndarray:
    """Returns the first `counts[g]` rows, or those from `firsts[g]` on, of each group g's equal share of the
    rows."""
    rows = np.asarray(x)
    each = len(rows) // len(counts)
    if len(counts) == 1 and firsts is None:
        return rows[: counts[0]]
    starts = [g * each + first for g, first in enumerate(firsts or [0] * len(counts))]
    return np.concatenate([rows[a : a + count] for a, count in zip(starts, counts, strict=True)])
