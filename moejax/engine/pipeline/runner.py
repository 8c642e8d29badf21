"""Runs plans on a pipeline of stages: each step in microbatches, each stage a program on devices of its own.

A tick takes every microbatch that is under way through one more stage, the foremost first, and then moves
what the stages gave to the next ones. Here steps 1 and 2, of two microbatches each, over two stages:

    tick       1     2     3     4     5
    stage 0   1.0   1.1   2.0   2.1
    stage 1         1.0   1.1   2.0   2.1

A launch only ticks until its last microbatch has left the first stage; the next launch, or the wait for a
result, brings the rest through. So in the overlapped loop one step follows the other without a pause, given
as many microbatches as stages: a row decodes in the microbatch in which it decoded before, and what that one
sampled is there when the first stage needs it. Where it is not (fewer microbatches, or rows dealt out anew),
the pipeline ticks on with nothing new until it is.

All programs are started from one thread in one order, and each device runs its own in that order. So programs
over two stages' devices (`moejax.sharding.pipeline.Transfer`, which says what moves) cannot wait for each
other in a circle; and a microbatch finds in a stage's pages what all before it wrote, among it the earlier
part of its prompt.

The newest token of a row may be on the device alone. The last stage, which samples, keeps these by slot; the
first, which embeds them, is given the last stage's array whenever it is about to decode one that it has not
got.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from moejax.cache.pool import BlockPool
from moejax.core.config import EngineConfig
from moejax.engine.pipeline.microbatches import Part, split_plan, tiles_of
from moejax.engine.pipeline.stage import Stage
from moejax.engine.routing.replay import RoutingReplay
from moejax.engine.scheduling.plan import Plan
from moejax.engine.scheduling.sequence import Sequence
from moejax.engine.step.bucket_runner import BucketRunner, Rows, is_sampled
from moejax.engine.step.buckets import Buckets
from moejax.engine.step.ledger import CompileLedger, PartLedger
from moejax.engine.step.limits import CacheSpec, StepKey
from moejax.engine.step.program import PagedFunctions, PagedOutput
from moejax.engine.step.runner import StepResult
from moejax.sharding.pipeline import Transfer
from moejax.sharding.spmd import MeshDevices


@dataclass(slots=True)
class Microbatch:
    """A part of a step under way.

    Attributes:
        number: counted over all steps.
        needs: the last microbatch whose sampled tokens it decodes, -1 for none.
        moves: the plan whose blocks are to be copied in each stage before it; None for most.
        stage: the one that it runs in next.
        given: what that stage takes.
        outputs: what the stages before have given.
    """

    number: int
    key: StepKey
    buffer: np.ndarray
    needs: int = -1
    moves: Plan | None = None
    stage: int = 0
    given: jax.Array | None = None
    outputs: list[PagedOutput] = field(default_factory=list)


class LaunchedPipeline(NamedTuple):
    """A step under way: its microbatches with what they hold, and its numbers of rows and chunk tokens."""

    microbatches: list[tuple[Microbatch, Part, Rows]]
    rows: int
    chunk_tokens: int


class PipelineRunner(BucketRunner):
    """Implements `moejax.engine.step.runner.Runner`.

    Args:
        stages: each stage's functions and devices, in order; at least two.
        config, cache, ledger, kernels, replay: as for `DeviceRunner`; each stage has as many blocks.
        microbatches: the most that a step is cut into.
    """

    def __init__(
        self,
        stages: Items[tuple[PagedFunctions, MeshDevices]],
        config: EngineConfig,
        cache: CacheSpec,
        ledger: CompileLedger,
        kernels: str = "xla",
        replay: RoutingReplay | None = None,
        *,
        microbatches: int = 1,
        store_slots: int = 0,
    ) -> None:
        whole, place = stages[0][0].whole, stages[0][1]
        super().__init__(whole, config, cache, ledger, kernels, replay, place=place, store_slots=store_slots)
        self.microbatches = microbatches
        self.stages = [
            Stage(
                functions,
                config,
                cache,
                PartLedger(ledger, f"stage {i}"),
                kernels,
                replay,
                place=place,
                store_slots=store_slots,
            )
            for i, (functions, place) in enumerate(stages)
        ]
        arrays = 0
        for stage in self.stages:
            stage.limits = self.limits  # one buffer for all, whatever the windows of their layers
            stage.arrays = slice(arrays, arrays + len(jax.tree.leaves(stage.pool.blocks(1))))
            arrays = stage.arrays.stop
        places = [place for _, place in stages]
        self._onward = [
            Transfer(source, target, ledger.get, f"transfer {i} to {i + 1}")
            for i, (source, target) in enumerate(pairwise(places))
        ]
        back = f"transfer {len(places) - 1} to 0"
        self._back = Transfer(places[-1], places[0], ledger.get, back)
        # The process that has each stage's outputs; one that has part in all stages needs no other's.
        self._owners = [min(d.process_index for d in place.mesh.devices.flat) for place in places]
        holders = [{d.process_index for d in place.mesh.devices.flat} for place in places]
        self._apart = any(mine != holders[0] for mine in holders)
        self._numbers = 0
        self.reset()

    @property
    def pools(self) -> list[BlockPool]:
        """The blocks of the stages' caches."""
        return [pool for stage in self.stages for pool in stage.pools]

    def reset(self) -> None:
        for stage in self.stages:
            stage.reset()
        self._under_way: list[Microbatch] = []
        self._sampled_by: dict[tuple[int, int], int] = {}  # group and slot → microbatch
        # The last microbatches that the last stage has run, and whose tokens the first stage has been given.
        self._through = self._returned = self._numbers - 1

    def launch(self, plan: Plan) -> LaunchedPipeline:
        """Builds the microbatches and starts them.

        Raises:
            CompileError: a program is not compiled, and may not be any more (`engine.strict_compile`).
        """
        if self.limits.tile:
            parts = tiles_of(plan, self.limits.tile)
        else:
            parts = split_plan(plan, self.microbatches, self._sampled_in, self.buckets.tokens[0])
        keys = [self.builder.key(part.plan) for part in parts]
        # One program for those with chunks, one for those without.
        common = {key.tokens > 0: [k for k in keys if (k.tokens > 0) == (key.tokens > 0)] for key in keys}
        launched = []
        for part, key in zip(parts, keys, strict=True):
            key, buffer = self.builder.build(part.plan, self.builder.common(common[key.tokens > 0]))
            microbatch = self._microbatch(key, buffer)
            microbatch.needs = self._needs(part.plan)
            if any(
                group.saves or group.loads or group.imports or group.copies or group.window_copies
                for group in part.plan.groups
            ):
                microbatch.moves = part.plan
            launched.append((microbatch, part, Rows.of(part.plan, key, self.capture)))
        for microbatch, part, _ in launched:
            for group, group_plan in enumerate(part.plan.groups):
                for _, sequence in group_plan.sampling_rows():
                    self._sampled_by[group, sequence.slot] = microbatch.number
            self._start(microbatch)
        return LaunchedPipeline(launched, len(plan.sequences), plan.chunk_tokens)

    def _save(self, plan: Plan) -> None:
        while self._under_way:
            self._tick()
        for stage in self.stages:
            stage._save(plan)

    def ready(self, handle: LaunchedPipeline) -> bool:
        last = handle.microbatches[-1][0]
        return self._through >= last.number and is_sampled(last.outputs[-1])

    def collect(self, handle: LaunchedPipeline) -> StepResult:
        """Reads a step's result; this is where the host waits for the devices."""
        self._finish(handle.microbatches[-1][0])
        for stage in self.stages:
            stage.store.settle()
        results = []
        # A step that computes any part of a prompt counts as prefill, in all its microbatches.
        phase = "prefill" if handle.chunk_tokens else "decode"
        if self.capture is not None:
            self.capture.next_step()
        for microbatch, part, rows in handle.microbatches:
            output = self._output(microbatch)
            results.append((part, self._result(microbatch.key, rows, output)))
            self._take_routing(microbatch.key, rows, output)
            self._add_counts(phase, rows, output)
        return self._merged(results, handle.rows, handle.chunk_tokens)

    # -- ticks -------------------------------------------------------------------------------------------

    def _start(self, microbatch: Microbatch) -> None:
        """Takes it through the first stage, as soon as the tokens that it decodes are there."""
        while self._through < microbatch.needs:
            self._tick()
        if self._returned < microbatch.needs:
            self._bring_back()
        self._tick(microbatch)

    def _finish(self, microbatch: Microbatch) -> None:
        """Ticks until it has left the last stage."""
        while self._through < microbatch.number:
            self._tick()

    def _tick(self, new: Microbatch | None = None) -> None:
        if new is not None:
            self._under_way.append(new)
        for microbatch in self._under_way:
            self._run_stage(microbatch)
        if self._under_way[0].stage == len(self.stages) - 1:
            self._through = self._under_way.pop(0).number
        for microbatch in self._under_way:
            output = microbatch.outputs[-1]
            assert output.x is not None
            microbatch.given = self._onward[microbatch.stage](output.x)
            microbatch.outputs[-1] = output._replace(x=None)
            microbatch.stage += 1

    def _run_stage(self, microbatch: Microbatch) -> None:
        stage = self.stages[microbatch.stage]
        if microbatch.moves is not None:
            stage.copy(microbatch.moves, self.buckets)
        microbatch.outputs.append(stage.run(microbatch.key, microbatch.buffer, microbatch.given))
        microbatch.given = None

    def _bring_back(self) -> None:
        """Brings the newest tokens of all slots from the last stage to the first."""
        self.stages[0].last = self._back(self.stages[-1].last)
        self._returned = self._through

    # -- parts -------------------------------------------------------------------------------------------

    def _microbatch(self, key: StepKey, buffer: np.ndarray) -> Microbatch:
        microbatch = Microbatch(self._numbers, key, buffer)
        self._numbers += 1
        return microbatch

    def _sampled_in(self, sequence: Sequence) -> int:
        """Returns the microbatch that sampled what it decodes next."""
        return self._sampled_by.get((sequence.group, sequence.slot), -1)

    def _needs(self, plan: Plan) -> int:
        """Returns the last microbatch that sampled what a row decodes and the host has not read."""
        needs = -1
        for group, part in enumerate(plan.groups):
            for row, (sequence, position) in enumerate(zip(part.decodes, part.positions, strict=True)):
                if position >= len(sequence.tokens) and row not in part.drafts:
                    needs = max(needs, self._sampled_by[group, sequence.slot])
        return needs

    def _run(self, key: StepKey, buffer: np.ndarray) -> PagedOutput:
        """Rehearses a step, with everything that can happen to a microbatch."""
        microbatch = self._microbatch(key, buffer)
        self._start(microbatch)
        self._finish(microbatch)
        self._bring_back()
        return self._output(microbatch)

    def _output(self, microbatch: Microbatch) -> PagedOutput:
        """Puts the stages' outputs together in the order of their layers.

        Where the stages are in several processes, these tell each other.
        """
        outputs = microbatch.outputs
        if self._apart:
            every = multihost_utils.process_allgather(jax.tree.map(np.asarray, outputs))
            outputs = [
                jax.tree.map(lambda x, owner=owner: np.asarray(x)[owner], output)
                for output, owner in zip(every, self._owners, strict=True)
            ]
        last = outputs[-1]
        counts: Any = None
        overflow: Any = None
        if last.counts is not None:
            counts = np.concatenate([np.asarray(output.counts) for output in outputs])
            overflow = np.sum([np.asarray(output.overflow) for output in outputs], axis=0)
        captured: Any = None
        if traced := [output.captured for output in outputs if output.captured is not None]:
            captured = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *traced)
        return PagedOutput(last.sampled, counts, overflow, last.prompt_logprobs, captured)

    def _copier(self, segments: int) -> Any:
        return [stage._copier(segments) for stage in self.stages if stage.here]

    def _mover(self, z: int, saving: bool) -> Any:
        return [stage._mover(z, saving) for stage in self.stages]

    def _thinned(self, max_total_len: int) -> Buckets:
        """Returns the buckets of a whole step, and of one microbatch of a full step."""
        whole = self._all_buckets(self.buckets.segments.num_blocks)
        thinned = whole.thinned(self.config, max_total_len)
        rows = {
            whole.rows_for(-(-size // self.microbatches))
            for size in (self.config.max_num_seqs, self.config.max_rows)
        }
        last = whole.tokens_for(min(whole.tokens[-1], whole.rows[-1] * max_total_len))
        tokens = whole.tokens_for(-(-last // self.microbatches))
        return Buckets(
            tuple(sorted({*thinned.rows, *rows})),
            tuple(sorted({*thinned.tokens, tokens})),
            thinned.segments,
            thinned.segment_counts,
            kept_blocks=thinned.kept_blocks,
            drafts=thinned.drafts,
        )
