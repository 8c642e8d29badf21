"""A small engine on the host: allocator, scheduler and fake runner in the plain or the overlapped loop.

It checks every plan and the whole state after every step, and counts what happened, so that tests can assert
that the cases they are about did occur. `alone` is the oracle: a request's tokens on an engine of its own.
"""

import functools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from moejax.cache.allocator import GONE, BlockAllocator, WindowAllocator, window_blocks
from moejax.cache.prefix import PrefixTree, make_prefixes
from moejax.core.config import Preemption, PrefixCacheConfig, StaticBatchingConfig
from moejax.core.scheduling import KvPolicyConfig, SchedulingConfig, SpeculationConfig
from moejax.engine.requests.builder import roots_of
from moejax.engine.scheduling.eviction import Eviction
from moejax.engine.scheduling.plan import Chunk, StepPlan
from moejax.engine.scheduling.policies import POLICIES, Policy
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.sequence import Sequence, State
from moejax.engine.scheduling.speculation import Speculation
from moejax.engine.scheduling.static import StaticScheduler
from moejax.engine.scheduling.swap import SwapSpace
from moejax.engine.scheduling.utility import StepTimes, Utility
from tests.engine.asks import VOCAB_SIZE, Ask, Group, Oracle
from tests.engine.below import doubled, lie_below
from tests.plain.fake_runner import FakeRunner

LOOPS = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])


def chunks_of(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(order, start, count) of a plan's chunks."""
    assert plan is not None
    return [(chunk.sequence.order, chunk.start, chunk.count) for chunk in plan.chunks]


def decodes_of(plan: StepPlan | None) -> list[int]:
    """Orders of a plan's decodes."""
    assert plan is not None
    return [sequence.order for sequence in plan.decodes]


@dataclass(frozen=True)
class Limits:
    """Configuration of a `HostEngine`. `fail_at`: launches that fail."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    overlap: bool = False
    static: bool = False
    policy: str = "fcfs"
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    prefixes: PrefixCacheConfig | None = None
    slots: int = 0
    window: int | None = None
    shared: bool = True
    starts: StaticBatchingConfig = field(default_factory=StaticBatchingConfig)
    preemption: Preemption = "recompute"
    swap_slots: int = 0
    fail_at: frozenset[int] = frozenset()
    k: int = 0
    right: float = 1.0
    utility: bool = False
    kv_policy: KvPolicyConfig | None = None
    compacts: bool = False
    initial: int = 0
    rows: int = 0


class HostEngine:
    """Schedules, launches, postprocesses.

    Args:
        limits: its configuration.
        scheduler, allocator, prefixes, windows, swap, speculation: other classes than the real ones, to see
            that a defect is found.
        events: what happened is counted here.
        roots: as `roots_of`, for requests that are resumed.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        scheduler: type[Scheduler] | None = None,
        allocator: type[BlockAllocator] = BlockAllocator,
        prefixes: Callable[..., PrefixTree] = make_prefixes,
        events: Counter[str] | None = None,
        roots: Callable[[list[Sequence], int], list[Sequence]] = roots_of,
        windows: type[WindowAllocator] = WindowAllocator,
        swap: type[SwapSpace] = SwapSpace,
        speculation: type[Speculation] = Speculation,
    ) -> None:
        self.limits = limits = limits or Limits()
        scheduler = scheduler or (StaticScheduler if limits.static else Scheduler)
        slots = limits.slots, limits.shared
        self.prefixes = limits.prefixes and prefixes(limits.prefixes, limits.block_size, *slots)
        self.allocator = allocator(limits.num_blocks, limits.block_size, self.prefixes, *doubled(limits))
        self.clock = 0.0  # goes on by a second a step
        self.policy: Policy = POLICIES[limits.policy](limits.scheduling, lambda: self.clock)
        sizes = limits.max_num_seqs, limits.max_num_batched_tokens
        self.windows = None
        if limits.window is not None:
            number = window_blocks(limits.window + limits.k, limits.block_size, *sizes, limits.num_blocks)
            self.windows = windows(number, limits.block_size, limits.window)
        self.swap = swap(limits.preemption, limits.slots, limits.swap_slots)
        self.swap.move_s = 9.0  # and a token of a prompt takes a second
        self.groups: list[Group] = []
        drafts = None
        if limits.k:
            config = SpeculationConfig(method="ngram", k=limits.k)
            drafts = speculation(config, Oracle(self.groups, alone, limits.right))
        self.scheduler = scheduler(self.allocator, *sizes, self.policy, self.windows, self.swap)
        self.scheduler.eviction = Eviction(self.allocator, self.windows, limits.kv_policy)
        self.scheduler.speculation, self.scheduler.compacts = drafts, limits.compacts
        self.utility = Utility(limits.k, StepTimes()) if limits.utility else None
        self.pace: Callable[[int, bool], float] = lambda rows, alone: self.chance.uniform(1, 4)
        self.chance, self.alone = random.Random(1), deque[bool]()  # of launched steps, in their order
        if drafts is not None:
            drafts.utility = self.utility
        if isinstance(self.scheduler, StaticScheduler):
            self.scheduler.starts = limits.starts
        self.runner = FakeRunner(
            limits.num_blocks, limits.block_size, VOCAB_SIZE, limits.fail_at, limits.window,
            limits.kv_policy,
        )  # fmt: skip
        if limits.rows:
            lie_below(self, limits.rows, limits.slots + limits.swap_slots)
        self.events: Counter[str] = Counter() if events is None else events
        self.roots, self.paused = roots, False
        self.kept: list[tuple[Group, set[int], set[int]]] = []
        self.in_flight: tuple[StepPlan, object] | None = None
        self.unreported = 0
        self.hit_tokens = 0
        self._orders = 0
        self._stored: dict[int, int] = {}  # order → positions computed without a gap
        self._scored: set[int] = set()

    def submit(self, ask: Ask) -> Group:
        """Queues a request; `RequestError` if it could never run."""
        first = ask.sequence(self._orders)
        group = Group(ask, [first, *first.forks])
        for sample in group.samples:
            sample.arrival = self.clock
        self.scheduler.add(first)
        self._orders += ask.n
        self.groups.append(group)
        return group

    def abort(self, group: Group, samples: Iterable[int] | None = None) -> None:
        """Ends a request, or some of its samples (which must have started), as a user would between steps."""
        flying = self.in_flight[0].sequences if self.in_flight else []
        for index in range(len(group.samples)) if samples is None else samples:
            sample = group.samples[index]
            if sample.state is State.FINISHED:
                continue
            group.aborted.add(index)
            self.events["abort " + _situation(sample)] += 1
            if sample.forks:
                self.events["abort with unstarted forks"] += 1
                group.aborted.update(range(1, len(group.samples)))
            if sample in flying:
                self.events["abort in flight"] += 1
                self.events["abort with drafts in flight"] += flying.count(sample) > 1
            self.events["abort swapped"] += bool(sample.swapped)
            self.scheduler.finish(sample)
        self.scheduler.check_integrity()

    def interrupt(self, group: Group) -> None:
        """Ends a request and keeps what `resume` needs: its tokens, which samples have ended, and which of
        those were ended from outside."""
        ended = {index for index, sample in enumerate(group.samples) if sample.state is State.FINISHED}
        self.kept.append((group, ended, ended & group.aborted))
        self.events["interruptions with tokens"] += any(sample.generated for sample in group.samples)
        self.events["interruptions of which some have ended"] += bool(ended)
        self.abort(group)

    def resume(self, kept: tuple[Group, set[int], set[int]]) -> None:
        """Queues an interrupted request with the tokens that it had."""
        old, ended, aborted = kept
        first = old.ask.sequence(self._orders)
        samples = [first, *first.forks]
        for index, (sample, before) in enumerate(zip(samples, old.samples, strict=True)):
            sample.tokens, sample.forks = list(before.tokens), []
            sample.state = State.FINISHED if index in ended else State.WAITING
        # Others than on the engine, a sample may have ended here before its first token was read.
        left = [sample for sample in samples if sample.state is State.WAITING]
        for root in self.roots(left, self.limits.max_num_seqs):
            self.scheduler.add(root)
        self._orders += old.ask.n
        self.groups.append(Group(old.ask, samples, set(aborted)))
        self.events["resumptions"] += 1
        self.events["resumptions with forks"] += any(sample.forks for sample in samples)

    def pause(self, wait: bool) -> None:
        """Lets what has begun end and admits nobody, or stops after the step in flight."""
        scheduler = self.scheduler
        untouched = [s for s in scheduler.waiting() if not s.preemptions]
        before = [list(s.tokens) for s in untouched]
        scheduler.admits = False
        for _ in range(10_000):
            if not wait or not (scheduler.running or self.in_flight):
                break
            self.step()
        else:
            raise AssertionError("what has begun does not end")
        if self.in_flight:
            self._postprocess(*self.in_flight)
            self.in_flight = None
        scheduler.admits, self.paused = True, True
        waiting = set(map(id, scheduler.waiting()))
        assert all(id(s) in waiting and not s.computed for s in untouched), "admitted while paused"
        assert before == [s.tokens for s in untouched]
        self.events["pauses that wait" if wait else "pauses that keep"] += bool(scheduler.num_waiting)

    def step(self) -> StepPlan | None:
        """One turn of the loop; returns the plan that it launched. None while it is paused."""
        if self.paused:
            return None
        self.clock += 1
        overlaps = self.scheduler.speculation is not None and self.scheduler.speculation.overlaps
        if self.in_flight and not overlaps and (self.scheduler.drafts or self.in_flight[0].drafts):
            flying, self.in_flight = self.in_flight, None
            self._postprocess(*flying)
            self.scheduler.check_integrity()
        plan = self._schedule()
        self.scheduler.check_integrity()
        launched: tuple[StepPlan, object] | None = None
        if plan:
            try:
                self.alone.append(self.in_flight is None)
                launched = plan, self.runner.launch(plan)
            except RuntimeError:
                self._recover()
                return plan
        if self.limits.overlap:
            launched, self.in_flight = self.in_flight, launched
        if launched:
            self._postprocess(*launched)
        elif not plan and not self.scheduler.idle and self.scheduler.admits and not self.scheduler.wait_s():
            raise AssertionError("nothing to compute, nothing in flight, and yet sequences are left")
        if self.scheduler.idle and (saves := self.scheduler.save_only()) is not None:
            self.runner.save(saves)
            self.events["saves when idle"] += len(saves.saves)
        for name, count in self.scheduler.store.file.counts.items() if self.limits.rows else ():
            self.events[f"blocks {name}"] = max(self.events[f"blocks {name}"], count)
        if self.scheduler.idle and self.limits.initial and not self.in_flight:
            self.events["shrinks"] += self.allocator.made > self.allocator.retract()
        self.scheduler.check_integrity()
        return plan

    def step_until(self, condition: Callable[[], object]) -> StepPlan | None:
        """Steps until something is the case; returns the last plan."""
        plan = None
        while not condition():
            assert not self.idle, "it never came to that"
            plan = self.step()
        return plan

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self.in_flight

    def drain(self) -> int:
        """Steps until nothing is left, and checks all outputs and that nothing is kept; returns the steps.

        The first of the order advances by a token in each step that computes nothing for those behind it, and
        those have no more than their lengths to compute until it ends: hence the bound.
        """
        self.paused = False
        live = [s for g in self.groups for s in g.samples if s.state is not State.FINISHED]
        bound = (len(live) + 1) * (sum(s.max_length for s in live) + 2) + len(self.limits.fail_at)
        # A rate has tenants wait for as many steps as its tokens take.
        rates = [t.tokens_per_s for t in self.policy.config.tenants.values() if t.tokens_per_s]
        bound += round(sum(s.max_length for s in live) / min(rates, default=math.inf)) + 1
        bound += round(self.limits.starts.max_wait_s * len(live))
        steps = 0
        while not self.idle:
            if steps > bound:
                raise AssertionError(f"{steps} steps and {len(live)} sequences not done: starvation")
            self.step()
            steps += 1
        self.check_outputs()
        if self.allocator.num_used:
            raise AssertionError(f"{self.allocator.num_used} blocks leaked")
        if self.windows is not None and self.windows.num_used:
            raise AssertionError(f"{self.windows.num_used} blocks of windows leaked")
        if self.prefixes is not None:
            counts = self.prefixes.counts
            counted = sum(tokens for name, tokens in counts.items() if name.startswith("hit_tokens"))
            assert counted == self.hit_tokens, "hits are not counted"
        return steps

    def check_outputs(self) -> None:
        """Every ended sample has the tokens that its request gets alone, an aborted one the first of them."""
        for group in self.groups:
            expected = alone(group.ask, self.limits.kv_policy, self.limits.block_size)
            for index, sample in enumerate(group.samples):
                if sample.state is not State.FINISHED:
                    continue
                got, want = tuple(sample.tokens), expected[index]
                if got != (want[: len(got)] if index in group.aborted else want):
                    raise AssertionError(f"{group.ask} sample {index} got {got}, alone {want}")
                # A row of static batching keeps what it owns until its batch is over.
                if (sample.blocks or sample.slot != -1 or sample.forks) and self.scheduler.idle:
                    raise AssertionError(f"{sample!r} has ended and still owns something")
                if sample.score and index not in group.aborted:
                    assert sample.order in self._scored, "the prompt is not all computed"

    # -- parts of a step ---------------------------------------------------------------------------------

    def _schedule(self) -> StepPlan | None:
        before = list(self.scheduler.running)
        samples = sum(s.samples for s in before)
        if self.policy.moves:
            self.policy.tick()
            before.sort(key=self.policy.key)
        unforked = {s.order for s in before if s.forks}
        queued = self.scheduler.waiting()
        quantum = self.policy.config.quantum_tokens
        ran = {s.order: len(s.tokens) - s.resumed >= quantum for s in before}
        limits, made = self.limits, self.allocator.made
        plan = self.scheduler.schedule()
        gone = [s for s in before if s.state is not State.RUNNING]
        rest = gone[:-1] if gone == before else gone
        displaced = [s for s in gone if ran[s.order] and any(self.policy.displaces(w, s) for w in queued)]
        assert gone == displaced or self.allocator.made == limits.num_blocks, "the cache could grow"
        self.events["grown"] += self.allocator.made > made
        last = [s for s in before if s not in displaced]
        last = last[len(last) - len([s for s in gone if s not in displaced]) :]
        if any(s not in displaced and s not in last for s in gone) or (rest != gone and not displaced):
            raise AssertionError(f"preempted {gone} of {before}: not the last of the order, or the first")
        self.events["displaced for a better class"] += bool(displaced)
        admitted = [s for s in queued if s.state is State.RUNNING]
        alone = len(admitted) == 1 and not any(s.state is State.RUNNING for s in before)
        if admitted and not alone:  # who takes a place, takes no more than there were
            most = max(self.scheduler.most_running, samples if displaced else 0)
            assert sum(s.samples for s in self.scheduler.running) <= most, "admitted beyond the limit"
        # A plan that came to nothing reports its preemptions with the next one.
        self.unreported += len(gone)
        if plan is not None:
            assert plan.preempted == self.unreported
            self.unreported = 0
        self.events["preemptions"] += len(gone)
        self.events["preemptions before forking"] += sum(s.order in unforked for s in gone)
        for sequence in gone:
            self._swapped_out(sequence)
        if plan:
            self._check_plan(plan, [s for s in before if s not in displaced], queued)
        return plan

    def _check_plan(self, plan: StepPlan, before: list[Sequence], queued: list[Sequence]) -> None:
        """What a runner may rely on, and what the two kinds of batching promise."""
        rows, limits, allocator = plan.sequences, self.limits, self.allocator
        size, real = allocator.block_size, len(plan.decodes) - plan.idle
        real -= len(plan.drafts)
        decodes, padding = plan.decodes[:real], plan.decodes[real + len(plan.drafts) :]
        drafted = Counter(plan.decodes[row] for row in plan.drafts)
        assert not plan.drafts or (sorted(plan.drafts) == list(range(real, len(plan.decodes))))
        assert not plan.drafts or not (plan.chunks or plan.preempted)
        assert not (plan.drafts and self.in_flight and self.in_flight[0].drafts)
        rows = decodes + plan.sequences[len(decodes) + len(plan.drafts) :]
        back = [s for s in decodes if s in queued]  # from the host's store, with one token to compute
        self.events["swaps back that decode"] += len(back)
        assert all(s.preemptions and len(s.tokens) == s.computed - drafted[s] for s in back)
        assert 0 < plan.num_tokens <= limits.max_num_batched_tokens
        # Not of who has just come back from the host's memory.
        if not limits.static and any(s in before for s in decodes):
            assert plan.chunk_tokens <= self.scheduler.most_prefill
        assert plan.num_tokens == real + len(plan.drafts) + sum(c.count for c in plan.chunks)
        assert len({s.slot for s in rows}) == len(rows) <= limits.max_num_seqs
        assert all(s in self.scheduler.running for s in rows if s not in padding)
        if not self.policy.moves:
            keys = [self.policy.key(s) for s in decodes if s not in back]
            assert keys == sorted(keys), "decodes out of order"
        for sequence, position in zip(decodes, plan.positions, strict=False):
            self._advance(sequence, position, 1 + drafted[sequence])
            mine = [p for s, p in zip(plan.decodes, plan.positions, strict=True) if s is sequence]
            assert mine == list(range(position, position + 1 + drafted[sequence]))
            assert mine[-1] < sequence.max_length - 1, "stores the last token that can be sampled"
            for each in mine:
                assert allocator.refcount(sequence.blocks[each // size]) == 1, "writes a shared block"
        for index, (chunk, forks) in enumerate(zip(plan.chunks, plan.forks, strict=True)):
            if chunk.first:
                self._found(chunk)
            self._advance(chunk.sequence, chunk.start, chunk.count)
            assert len(chunk.sequence.blocks) >= allocator.blocks_for(
                chunk.sequence.length - chunk.sequence.pending
            )
            end = chunk.start + chunk.count
            for block in chunk.sequence.blocks[chunk.start // size : allocator.blocks_for(end)]:
                # Whole blocks may be read by what was admitted after it, in the same step.
                later = zip(plan.chunks[index + 1 :], plan.forks[index + 1 :], strict=True)
                readers = [1 + len(f) for c, f in later if block in c.sequence.blocks[: c.start // size]]
                assert allocator.refcount(block) == 1 + len(forks) + sum(readers), "writes a shared block"
                self.events["blocks shared in the step that writes them"] += len(readers)
            for fork in forks:
                self._stored[fork.order] = end
        self._check_copies(plan)
        self._check_transport(plan)
        holders = [s for group in self.groups for s in group.samples if s.blocks]
        stored = {(s.blocks[p // size], p % size) for s in holders for p in range(s.computed)}
        stored = {(block, place) for block, place in stored if block != GONE}
        assert self.scheduler.stored_tokens() == len(stored)
        admitted = [s for s in queued if s.state is State.RUNNING]
        if not self.policy.moves and not self.policy.limited:
            # A pause lets only who has run before come in.
            first = queued if self.scheduler.admits else [s for s in queued if s.preemptions]
            assert admitted == first[: len(admitted)], "admitted out of order"
        assert not admitted or all(s.state is State.RUNNING for s in before), "admitted after a preemption"
        if limits.static:
            assert not plan.preempted and not (admitted and before)
            assert all(s.state is State.FINISHED and s.slot >= 0 for s in padding)
            assert not (plan.decodes and plan.chunks)
            if plan.chunks:
                assert plan.chunk_tokens <= plan.min_tokens <= limits.max_num_batched_tokens
        else:
            assert plan.idle == plan.min_tokens == 0
        self.events["steps"] += 1
        self.events["forks"] += sum(len(forks) for forks in plan.forks)
        self.events["chunked prompts"] += sum(not c.last for c in plan.chunks)
        self.events["padding rows"] += plan.idle
        self.events["mixed steps"] += bool(plan.decodes and plan.chunks)
        self.events["readmissions"] += sum(s.preemptions > 0 for s in admitted)

    def _check_copies(self, plan: StepPlan) -> None:
        """Each copy goes to a block of one decode's own, or moves a block down. A copied block may be freed
        and written over in the same step, so a source may be a later destination; never the other way
        round."""
        sources = [source for source, _ in plan.copies]
        destinations = [destination for _, destination in plan.copies]
        assert len(set(destinations)) == len(destinations)
        own = {
            s.blocks[p // self.allocator.block_size]
            for s, p in zip(plan.decodes, plan.positions, strict=True)
        }
        # Or it is the first one of which a prompt computes only the rest.
        size = self.allocator.block_size
        begun = {b for c in plan.chunks if c.first for b in c.sequence.blocks[: c.start // size + 1]}
        held = {b for s in self.scheduler.running for b in s.blocks} if self.limits.compacts else set()
        for index, (source, destination) in enumerate(plan.copies):
            assert source != destination and destination in own | begun | held
            moved = destination < source and destination in held and self.allocator.refcount(source) == 0
            assert moved or destination in own | begun
            self.events["blocks moved down"] += moved and destination not in own | begun
            assert self.allocator.refcount(destination) == 1 or destination in begun
            assert destination not in sources[index:], "copies from a block that was just written"
            self.events["copies over a copied block"] += destination in sources[:index]
        self.events["copies"] += len(plan.copies)
        self.events["copies in windows"] += len(plan.window_copies)
        self.events["blocks left behind"] += any(GONE in s.window_blocks for s in plan.sequences)
        self.events["blocks evicted"] += any(GONE in s.blocks for s in plan.sequences)

    def _check_transport(self, plan: StepPlan) -> None:
        """Each load goes to another block that was free; nothing is loaded that a save is to overwrite."""
        assert self.prefixes is not None or self.swap.num_slots or not (plan.saves or plan.loads)
        blocks = [block for _, block in plan.loads]
        assert len(set(blocks)) == len(blocks) and not {block for _, block in plan.copies} & set(blocks)
        slots = [slot for _, slot in plan.saves]
        assert len(set(slots)) == len(slots) <= self.limits.slots + self.limits.swap_slots
        self.events["saves"] += len(slots)
        self.events["loads"] += len(blocks)

    def _found(self, chunk: Chunk) -> None:
        """A prompt starts where what others have computed ends."""
        sequence = chunk.sequence
        assert chunk.start == sequence.cached
        if not chunk.start:
            return
        if sequence.preemptions and chunk.start == self._stored.get(sequence.order):
            self.events["swaps back in mid-prompt"] += 1
            return
        assert self.prefixes is not None and sequence.identity is not None
        assert sequence.not_looked_up is None
        earlier = [s for g in self.groups for s in g.samples if s is not sequence or sequence.preemptions]
        known, salt = sequence.tokens[: chunk.start], sequence.identity
        assert any(s.identity == salt and s.tokens[: chunk.start] == known for s in earlier)
        self._stored[sequence.order] = chunk.start
        again = sequence.preemptions > 0 or len(sequence.tokens) > sequence.prompt_len
        self.events["readmission hits" if again else "hits"] += 1
        self.hit_tokens += 0 if again else chunk.start
        self.events["hits within a block"] += chunk.start % self.allocator.block_size > 0

    def _swapped_out(self, sequence: Sequence) -> None:
        """What a preempted sequence has computed is kept on the host, all of it, or given up."""
        swapped, stored = bool(sequence.swapped), self._stored[sequence.order]
        assert not swapped or sequence.preempted_at == stored
        self._stored[sequence.order] = stored if swapped else 0
        self.events["swaps"] += swapped
        self.events["swaps with a token not read"] += swapped and sequence.pending > 0
        self.events["swaps with forks to come"] += swapped and bool(sequence.forks)
        self.events["swaps without room"] = max(
            self.events["swaps without room"], self.swap.counts["swaps_without_room"]
        )

    def _advance(self, sequence: Sequence, start: int, count: int) -> None:
        """Positions are computed one after another, from 0 again only after a preemption."""
        if start != self._stored.get(sequence.order, 0) or sequence.computed != start + count:
            raise AssertionError(
                f"{sequence!r} computes from {start}, not from {self._stored.get(sequence.order)}"
            )
        self._stored[sequence.order] = start + count

    def _postprocess(self, plan: StepPlan, handle: object) -> None:
        ended = [s for _, s in plan.sampling_rows() if s.state is State.FINISHED]
        self.events["tokens of ended sequences"] += len(ended) - plan.idle
        before = [len(s.tokens) for s in ended]
        wanted = [(row, s) for row, s in plan.sampling_rows() if s.state is not State.FINISHED]
        result = self.runner.collect(handle)
        if result.mass is not None:
            self.scheduler.eviction.take(plan, result.mass)
        taken = self.scheduler.postprocess(plan, result.tokens)
        self._check_drafts(plan)
        alone = self.alone.popleft()
        if self.utility is not None and not plan.chunks:
            rows, drafting = len(plan.decodes), bool(plan.drafts) or (self.limits.overlap and alone)
            self.utility.times.observe(rows, drafting, self.pace(rows, alone))
            self.events["without drafts, as is faster"] += not self.utility.drafting
        right = [row for row, draft in plan.drafts.items() if draft.accepted]
        wanted = [(row, s) for row, s in wanted if row not in plan.drafts or row in right]
        assert taken == wanted and before == [len(s.tokens) for s in ended]
        for _, sequence in taken:
            if sequence.state is State.FINISHED and len(sequence.tokens) < sequence.max_length:
                self.events["stops"] += 1
        self.swap.observe(1.0 + plan.chunk_tokens, plan.chunk_tokens)
        for chunk in plan.chunks:
            if chunk.sequence.score and chunk.start + chunk.count == chunk.sequence.prompt_len:
                self._scored.add(chunk.sequence.order)
                self.events["scores"] += 1

    def _check_drafts(self, plan: StepPlan) -> None:
        """A sequence keeps its right drafts up to the first wrong one or to its end, and nothing else."""
        for sequence in dict.fromkeys(plan.decodes[row] for row in plan.drafts):
            drafts = [draft for row, draft in plan.drafts.items() if plan.decodes[row] is sequence]
            kept = [draft.accepted for draft in drafts]
            first = plan.positions[plan.decodes.index(sequence)] + 1
            assert kept == sorted(kept, reverse=True), "kept after a wrong draft"
            assert [d.token for d in drafts[: sum(kept)]] == sequence.tokens[first : first + sum(kept)]
            self.events["drafts kept"] += sum(kept)
            self.events["drafts dropped"] += len(kept) - sum(kept)
            if sequence.state is State.FINISHED:
                self.events["ends within drafts"] += not all(kept)
                continue
            if not all(kept):
                assert drafts[sum(kept)].token != sequence.tokens[first + sum(kept)], "a right draft dropped"
            self._stored[sequence.order] = sequence.computed
            assert (sequence.computed, sequence.pending) == (len(sequence.tokens) - 1, 0)
            assert len(sequence.blocks) == self.allocator.blocks_for(sequence.computed), (
                "keeps drafts' blocks"
            )

    def _recover(self) -> None:
        """A launch failed: what ran before it counts, all else is computed anew."""
        self.events["failures"] += 1
        if self.in_flight:
            self._postprocess(*self.in_flight)
            self.in_flight = None
        for sequence in [*self.scheduler.running, *self.scheduler.waiting()]:
            self._stored[sequence.order] = 0
            self.events["failures while swapped"] += bool(sequence.swapped)
        self.scheduler.forget_device_state()
        self.runner.reset()
        self.scheduler.check_integrity()


def _situation(sample: Sequence) -> str:
    if sample.state is State.WAITING:
        return "preempted" if sample.preemptions else "waiting"
    return "mid-prompt" if sample.computed < sample.prompt_len else "running"


@functools.cache
def alone(
    ask: Ask, kv_policy: KvPolicyConfig | None = None, block_size: int = 4
) -> tuple[tuple[int, ...], ...]:
    """What a request's samples get on an engine that has room for all and runs nothing else; its blocks only
    matter to policies."""
    size = block_size if kv_policy else 4
    engine = HostEngine(Limits(512, size, 16, 1024, kv_policy=kv_policy))
    group = engine.submit(ask)
    while not engine.idle:
        engine.step()
    assert not engine.events["preemptions"]
    return tuple(tuple(tokens) for tokens in group.tokens)


def run(limits: Limits, asks: Iterable[Ask]) -> HostEngine:
    """All requests at once, to the end, checked."""
    engine = HostEngine(limits)
    for ask in asks:
        engine.submit(ask)
    engine.drain()
    return engine
