"""Decides which tokens the next step computes. Host code on plain values: no JAX, no text, no clock.

    add → waiting ──admit──→ running ──finish/abort──→ finished
              ↑                 │
              └────preempt──────┘   (blocks given up; see `moejax.engine.scheduling.swap`)

`schedule` claims blocks and advances `Sequence.computed` as if the step had run; `postprocess` brings the
sampled tokens back. Between the two a second `schedule` may come (the overlapped loop): a token that was
sampled but not read is `pending`, and its sequence goes on with the value that the device holds.
"""

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Sequence as Items
from typing import Any

from moejax.cache.allocator import BlockAllocator, OutOfBlocks, WindowAllocator
from moejax.cache.prefix import Match, PrefixTree
from moejax.cache.store import BlockStore
from moejax.core.errors import RequestError
from moejax.core.scheduling import KvPolicyConfig
from moejax.engine.scheduling.eviction import Eviction
from moejax.engine.scheduling.integrity import check_scheduler
from moejax.engine.scheduling.plan import Chunk, StepPlan
from moejax.engine.scheduling.policies import Policy
from moejax.engine.scheduling.reuse import brought, find, reuse
from moejax.engine.scheduling.sequence import Sequence, State, decodes_next, end_reason, needs_host
from moejax.engine.scheduling.speculation import Speculation
from moejax.engine.scheduling.swap import SwapSpace


class Scheduler:
    """Continuous batching: each step takes one token of every running sequence and fills the rest of
    `max_num_batched_tokens` with parts of prompts (Orca, OSDI 2022; Sarathi-Serve, arXiv 2403.02310).

    Args:
        allocator: the cache's blocks; where it remembers prefixes, prompts are looked up.
        max_num_seqs: sequences that run at a time; each holds a slot in [0, max_num_seqs).
        max_num_batched_tokens: tokens a step computes.
        policy: who goes first; first come first served by default.
        windows: blocks of layers with a sliding window, where these have their own.
        swap: what becomes of what is preempted; computed again by default.
        speculation: drafts for those that decode; none by default.
        kv_policy: what sequences keep of their blocks; all by default.

    Two limits may be lowered between steps, to 1 at least: `most_running`, sequences that run at a time (a
    request of more samples runs alone), and `most_prefill`, prompt tokens of a step that decodes. Nobody is
    preempted for them, only admitted later.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: Policy | None = None,
        windows: WindowAllocator | None = None,
        swap: SwapSpace | None = None,
        speculation: Speculation | None = None,
        kv_policy: KvPolicyConfig | None = None,
    ) -> None:
        self.allocator, self.windows = allocator, windows
        self.eviction = Eviction(allocator, windows, kv_policy)
        self._chunked: list[Sequence] = []  # by the last plan
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.most_running, self.most_prefill = max_num_seqs, max_num_batched_tokens
        self.policy = policy or Policy()
        self.swap = swap or SwapSpace()
        self.speculation = speculation
        self.running: list[Sequence] = []  # by rising policy key
        # A heap by (over its tenant's quota, *rank), order; holds finished ones until they surface.
        self._waiting: list[tuple[Any, int, Sequence]] = []
        self._ranked = False  # anew in this step
        self.num_waiting = 0  # samples queued
        self.free_slots = list(range(max_num_seqs))
        # Kept free at an admission while others run, so that their next blocks do not preempt it at once.
        self.watermark = max(1, allocator.num_blocks // 100)
        self._unreported = 0  # preemptions by plans that came to nothing
        self.prefixes = allocator.prefixes
        self.compacts = self._loose = False  # blocks move down; they may lie apart, since somebody has left
        self.store: BlockStore | None = None  # that its slots are in, where a step's blocks may be lost
        self.admits = True  # else only who has run before comes in again

    @property
    def idle(self) -> bool:
        return not self.running and not self.num_waiting

    @property
    def drafts(self) -> bool:
        """Tells whether the next step may have drafts, which continue tokens that must be read before."""
        return self.speculation is not None and self.speculation.wanted(self.running)

    def waiting(self) -> list[Sequence]:
        """Returns the queue in the policy's order."""
        return [s for _, _, s in sorted(self._waiting, key=lambda e: e[:2]) if s.state is State.WAITING]

    def check_fits(self, sequence: Sequence) -> None:
        """Raises `RequestError` for what could never run, however empty the engine is."""
        allocator, need = self.allocator, self._least_blocks(sequence)
        if need > allocator.num_blocks:
            raise RequestError(
                f"{sequence.max_length} tokens ({sequence.prompt_len} of them the prompt) need {need} cache "
                f"blocks of {allocator.block_size}, and the cache has {allocator.num_blocks}; raise "
                "engine.num_blocks or lower max_tokens"
            )
        if sequence.samples > self.max_num_seqs:
            raise RequestError(
                f"n={sequence.samples} exceeds engine.max_num_seqs {self.max_num_seqs}; raise it or lower n"
            )
        self.policy.check_fits(sequence, self._whole(sequence) * sequence.samples)

    def check_on_time(self, sequence: Sequence) -> None:
        """Raises `RequestError` for what would come too late, where the policy refuses that."""
        self.policy.check_on_time(sequence, self.waiting())

    @property
    def prefix_caches(self) -> list[PrefixTree]:
        """The memory of prefixes, of each data-parallel group its own; empty without."""
        return [self.prefixes] if self.prefixes is not None else []

    @property
    def swaps(self) -> list[SwapSpace]:
        """What becomes of what is preempted, of each data-parallel group."""
        return [self.swap]

    def add(self, sequence: Sequence, group: int | None = None) -> None:
        """Queues a sequence (with its forks). The only group is its own.

        Raises:
            RequestError: it could never run.
        """
        self.check_fits(sequence)
        for fork in sequence.forks:
            fork.state = State.PROMISED
        self._enqueue(sequence)

    def schedule(self) -> StepPlan | None:
        """Returns the next step's plan; None if there is nothing to compute now."""
        before = self._unreported
        plan = StepPlan(preempted=before)
        self._unreported = 0
        self._tick()
        if self.policy.moves:
            self.running.sort(key=self.policy.key)
        if self.prefixes is not None:
            self.prefixes.settle()
        urgent = self._displace(plan) if self.policy.preempts else None
        budget = self._decode(plan, self.max_num_batched_tokens)
        if plan.decodes:
            budget = min(budget, self.most_prefill)
        # Nothing is loaded into a block that is copied after the loads.
        loads = all(self.allocator.refcount(source) for source, _ in plan.copies)
        if urgent is not None and loads and budget > 0 and self._room(urgent, self._unpromised_slots):
            budget -= self._begin(urgent, plan, budget)
        for sequence in self.running:
            if budget <= 0:
                break
            if sequence is not urgent and not decodes_next(sequence):
                budget -= self._chunk(plan, sequence, budget)
        # After a preemption memory is short, or places are: nobody new comes in.
        while budget > 0 and plan.preempted == before and (first := self._admissible()):
            budget -= self._begin(first, plan, budget)
        self.allocator.release(plan.held)
        self._fork(plan)
        # They preempt nobody.
        speculation = self.speculation if plan.preempted == before else None
        if speculation is not None and (speculation.beside_prompts or not plan.chunks):
            speculation.draft(plan, budget, self.allocator, self.windows)
        if plan.decodes or plan.chunks:
            if self._loose:
                tables, most = [s.blocks for s in self.running], self.max_num_seqs
                moves = self.allocator.move_down(tables, most, plan.copies)
                plan.copies, self._loose = plan.copies + moves, bool(moves)
            plan.saves = self.take_saves()
            return plan
        self._unreported = plan.preempted
        return None

    def wait_s(self) -> float:
        """Returns seconds until a rate allows one of those that wait to go on; 0 where none is the reason."""
        waiting = self.waiting() if self.admits else []
        return min((self.policy.rate_wait_s(s) for s in waiting), default=0.0)

    def _tick(self) -> None:
        """Begins a step."""
        self.policy.tick()
        self._ranked = False
        if self.store is not None:
            self.store.begin()
        for sequence in self._chunked:  # before others want blocks
            self.eviction.trim(sequence)

    def postprocess(self, plan: StepPlan, tokens: Items[int]) -> list[tuple[int, Sequence]]:
        """Takes in the sampled tokens, one a row of the plan (rows that sample nothing are ignored, and those
        whose draft was wrong).

        Sequences that reach `max_length` or a stop token end, with that as `finish_reason`, and give up what
        they own. A sequence that has ended since the plan was made gets nothing.

        Returns:
            The rows whose token was taken, with their sequences.
        """
        taken = []
        speculation = self.speculation if plan.drafts else None
        if speculation is not None:
            speculation.take_back(plan)
        for row, sequence in plan.sampling_rows():
            if sequence.state is State.FINISHED:
                continue
            if not plan.tells(row):
                if sequence.state is State.RUNNING:  # else it has been preempted meanwhile
                    sequence.guessed -= 1
                    sequence.tentative.append(tokens[row])
                continue
            if speculation is None or row not in plan.drafts:
                sequence.pending -= 1
            elif not speculation.accept(plan, row):
                continue
            sequence.append(tokens[row])
            taken.append((row, sequence))
            if self.policy.charges:
                self.policy.sampled(sequence)
            sequence.finish_reason = end_reason(sequence)
            if sequence.finish_reason is not None:
                self.finish(sequence)
        for chunk in plan.chunks:
            if chunk.last and chunk.sequence.score:
                self.finish(chunk.sequence)
        if speculation is not None:
            speculation.give_back(plan, self.allocator)
        if self.speculation is not None:
            self.speculation.judge(dict.fromkeys(sequence for _, sequence in taken))
            self.speculation.learn(plan)
        return taken

    def take_saves(self) -> list[tuple[int, int]]:
        """Returns the (block, slot) to be copied to the host's store before the next step."""
        remembered = self.prefixes.take_saves() if self.prefixes is not None else []
        return remembered + self.swap.take_saves()

    def save_only(self) -> StepPlan | None:
        """Returns a plan with nothing but blocks to be copied to the host's store; None if there are none."""
        saves = self.take_saves()
        return StepPlan(saves=saves) if saves else None

    def stored_tokens(self) -> int:
        """Counts tokens whose keys and values the blocks hold or are about to; a shared one counts once."""
        allocator, size = self.allocator, self.allocator.block_size
        # Sequences that share a last block leave the same places of it empty.
        empty = [
            (len(s.blocks) * size - s.computed) / allocator.refcount(s.blocks[-1])
            for s in self.holders()
            if s.blocks
        ]
        return round(allocator.num_used * size - sum(empty))

    def forget_device_state(self) -> None:
        """Gives up, after a failed step, tokens that were not read, and has what runs computed anew."""
        for sequence in [*self.running, *self.waiting()]:
            sequence.pending = 0
            self.eviction.forget(sequence)
            self.swap.forget(sequence)
        for sequence in list(self.running):
            sequence.computed = 0  # what its blocks hold is not known: nothing of it is remembered
            self.preempt(sequence)
        if self.prefixes is not None:
            self.prefixes.clear()

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence, whatever its state, together with forks that have not started.

        A fork that has not started can only end with its root.
        """
        if sequence.state is State.FINISHED:
            return
        if sequence.state is State.PROMISED:
            raise AssertionError(f"{sequence!r} has not started; finish its root")
        if sequence.state is State.RUNNING:
            self._end(sequence)
        else:
            self._dequeue(sequence)
            self.swap.forget(sequence)
        sequence.state = State.FINISHED
        if self.speculation is not None:
            self.speculation.ended(sequence)
        for fork in sequence.forks:
            fork.state = State.FINISHED
        sequence.forks = []

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks and slot and queues it again."""
        sequence.computed -= max(0, sequence.pending - 1)  # drafts, of which nobody knows yet
        self.swap.out(sequence, self.allocator.block_size)
        self._leave(sequence)
        sequence.computed = sequence.cached = sequence.guessed = 0
        sequence.tentative = []
        sequence.preemptions += 1
        self._enqueue(sequence)

    def check_integrity(self) -> None:
        """Raises `AssertionError` with what is wrong, see `check_scheduler`."""
        check_scheduler(self)

    def holders(self) -> list[Sequence]:
        """Sequences that own blocks and a slot."""
        return self.running

    def _least_blocks(self, sequence: Sequence) -> int:
        """Counts the blocks without which it cannot end; forks can come and go one at a time."""
        return self._whole(sequence)

    def _whole(self, sequence: Sequence) -> int:
        """Counts the blocks of a whole sample. The last token that it samples is never stored."""
        return self.allocator.blocks_for(sequence.max_length - (not sequence.score))

    # -- parts of a step ---------------------------------------------------------------------------------

    def _decode(self, plan: StepPlan, budget: int) -> int:
        """Adds one token of every sequence that decodes, oldest first; returns what is left of the budget."""
        index, running, speculation = 0, self.running, self.speculation
        decodes, positions, append = plan.decodes, plan.positions, self.allocator.append
        while index < len(running) and budget > 0:
            sequence = running[index]
            index += 1
            if not decodes_next(sequence) or needs_host(sequence):
                continue
            position = sequence.computed
            draft = speculation.tentative(sequence) if speculation else None
            if draft is not None:
                position += len(sequence.tentative) + sequence.guessed
            elif speculation and speculation.waits(sequence):
                continue
            if self.eviction.policy is not None:
                self.eviction.decode(sequence, position)
            try:
                copy = append(sequence.blocks, position)
            except OutOfBlocks:
                # Those behind it in the order have not been scheduled yet, so one of them can go.
                if not self._make_room(plan, sequence):
                    continue
                copy = append(sequence.blocks, position)
            if copy is not None:
                plan.copies.append(copy)
            if self.windows is not None:
                plan.window_copies += self.eviction.slide(sequence, sequence.computed, position + 1)
            if draft is not None:
                plan.drafts[len(decodes)] = draft
                sequence.guessed += 1
            else:
                sequence.computed = position + 1
                sequence.pending += 1
            decodes.append(sequence)
            positions.append(position)
            budget -= 1
        return budget

    def _make_room(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Has the cache grow, or preempts from the order's end, until `sequence` can append; False if it had
        to go itself."""
        allocator, index = self.allocator, sequence.computed // self.allocator.block_size
        if allocator.extend(1) <= 0:
            return True
        while True:
            victim = self.running[-1]
            self.preempt(victim)
            plan.preempted += 1
            if victim is sequence:
                return False
            # If it was the other owner of a shared block, no block is free, but none is needed any more.
            mine = index < len(sequence.blocks) and allocator.refcount(sequence.blocks[index]) == 1
            if mine or allocator.num_free:
                return True

    def _chunk(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        """Adds as much of a prompt as the budget allows, and returns its tokens; its blocks are there."""
        first = sequence.computed == sequence.cached
        todo = sequence.length - sequence.computed
        # Its last token is sampled, though perhaps not read yet.
        complete = not sequence.score and sequence.length >= sequence.max_length
        if todo <= 0 or complete:
            return 0
        count = self.eviction.most(sequence, min(todo, budget))
        if not count:
            return 0
        found = max(0, sequence.cached - sequence.preempted_at) if first else 0
        chunk = Chunk(sequence, sequence.computed, count, count == todo, first, found)
        sequence.computed += count
        plan.window_copies += self.eviction.chunk(chunk)
        if self.prefixes is not None and sequence.identity is not None:
            whole = sequence.computed // self.allocator.block_size
            known = sequence.tokens[: whole * self.allocator.block_size]
            self.prefixes.insert(sequence.identity, known, sequence.blocks[:whole], ended=False)
        if chunk.last and not sequence.score:
            sequence.pending += 1
        plan.chunks.append(chunk)
        return count

    def _begin(self, sequence: Sequence, plan: StepPlan, budget: int) -> int:
        """Admits one of the queue and returns how many of its tokens the step computes. Of who comes back
        with all but one, that is decoded: a chunk, however short, would cost more."""
        swapped, imported = bool(sequence.swapped), bool(sequence.imported)
        self._admit(sequence, plan)
        whole = imported or (swapped and sequence.cached == sequence.preempted_at)
        if not (whole and decodes_next(sequence)):
            return self._chunk(plan, sequence, budget)
        plan.decodes.append(sequence)
        plan.positions.append(sequence.computed)
        sequence.computed += 1
        sequence.pending += 1
        return 1

    def _fork(self, plan: StepPlan) -> None:
        """Starts the forks of prompts that this plan completes: they share all blocks and sample now."""
        self._chunked = [chunk.sequence for chunk in plan.chunks]
        for chunk in plan.chunks:
            parent = chunk.sequence
            forks = parent.forks if chunk.last else []
            plan.forks.append(forks)
            if not forks:
                continue
            parent.forks = []
            for fork in forks:
                fork.blocks = self.allocator.fork(parent.blocks)
                self.eviction.fork(parent, fork)
                fork.computed, fork.pending = parent.computed, parent.pending
                fork.charged, fork.resumed = True, parent.resumed
                self._run(fork)

    def _displace(self, plan: StepPlan) -> Sequence | None:
        """Makes room for the first of the queue, if those that the policy lets it displace can give it all
        that it lacks: each has had its quantum since it was admitted. Returns whom there is room for then."""
        first = self._first()
        if first is None or first.pending or self._room(first):
            return None
        match = self.match(first)
        short = self.blocks_short(first, match) + self.watermark + len(first.forks)
        slots, gone = self._open_slots, []
        for sequence in reversed(self.running):
            if slots >= first.samples and short <= 0:
                break
            had = len(sequence.tokens) - sequence.resumed >= self.policy.config.quantum_tokens
            if had and self.policy.displaces(first, sequence):
                gone.append(sequence)
                slots += sequence.samples
                short -= sum(self.allocator.refcount(block) == 1 for block in sequence.blocks)
        if slots >= first.samples and short <= 0 and not match.waits:
            for sequence in gone:
                self.preempt(sequence)
            plan.preempted += len(gone)
            return first
        return None

    def _first(self) -> Sequence | None:
        """Returns the first of the queue; none that its tenant's quota has wait."""
        policy, again = self.policy, self.policy.by_service or self.policy.limited
        if not self.admits:
            begun = [entry for entry in self._waiting if entry[2].preemptions]
            return min((e for e in begun if e[2].state is State.WAITING), default=(None,) * 3)[2]
        if again or (policy.moves and not self._ranked):
            self._ranked = True
            live = [s for *_, s in self._waiting if s.state is State.WAITING]
            seqs, blocks = self._used_by_tenants()
            over = [policy.over_quota(s, seqs, blocks, self._whole(s) * s.samples) for s in live]
            ranks = zip(over, policy.ranks(live, self.match), live, strict=True)
            self._waiting = [((held, *rank), s.order, s) for held, rank, s in ranks]
            heapq.heapify(self._waiting)
        while self._waiting and self._waiting[0][2].state is not State.WAITING:
            heapq.heappop(self._waiting)
        # Those over their quota come last.
        return self._waiting[0][2] if self._waiting and not self._waiting[0][0][0] else None

    def _used_by_tenants(self) -> tuple[Counter[str], Counter[str]]:
        """Counts each tenant's running sequences, and the blocks that they may come to need."""
        seqs, blocks = Counter[str](), Counter[str]()
        for sequence in self.running if self.policy.limited else ():
            seqs[sequence.options.tenant] += sequence.samples
            blocks[sequence.options.tenant] += self._whole(sequence) * sequence.samples
        return seqs, blocks

    def _admissible(self) -> Sequence | None:
        """Returns the first of the queue if there is room for it now."""
        first = self._first()
        return first if first is not None and self._room(first) else None

    def _room(self, sequence: Sequence, slots: int | None = None) -> bool:
        """Tells whether there is room for one that waits, among so many slots; None: the open ones."""
        # A token still on the device is needed to compute the sequence again.
        if sequence.pending or sequence.samples > (self._open_slots if slots is None else slots):
            return False
        match = self.match(sequence)
        if match.waits:
            return False
        reserve = self.watermark + len(sequence.forks) if self.running else 0
        short = self.allocator.extend(self.blocks_short(sequence, match) + reserve) - reserve
        if short > 0:
            return False
        # No reserve is needed where all have room to end without anyone's going.
        others = (*self.running, sequence) if short + reserve > 0 else ()
        if sum(self._whole(s) * s.samples for s in others) > self.allocator.num_blocks:
            return False
        there = self.store is None or brought(self, sequence, match, self.store)
        return self._room(sequence, slots) if there is None else there

    @property
    def _open_slots(self) -> int:
        """Slots neither taken nor promised to forks, within `most_running` where anyone runs."""
        barred = self.max_num_seqs - self.most_running if self.running else 0
        return max(0, self._unpromised_slots - barred)

    @property
    def _unpromised_slots(self) -> int:
        return len(self.free_slots) - sum(len(s.forks) for s in self.running if s.forks)

    def match(self, sequence: Sequence) -> Match:
        """Finds what is computed of a sequence's tokens but the last, of which it samples."""
        return find(self, sequence)

    def _admit(self, sequence: Sequence, plan: StepPlan) -> None:
        """Moves one of the queue to running, with blocks for all the tokens it has."""
        if self._waiting[0][2] is sequence:
            heapq.heappop(self._waiting)
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
            heapq.heapify(self._waiting)
        self._dequeue(sequence)
        if self.prefixes is not None:
            reuse(self, sequence, plan)
        self.swap.back(sequence, plan.loads, self.allocator)
        if sequence.imported:
            had = len(sequence.blocks)
            self.allocator.grow(sequence.blocks, sequence.imported)
            if sequence.blocks_of_host is not None:
                plan.imports.append((sequence.blocks[had:], sequence.blocks_of_host))
            sequence.computed = sequence.cached = max(sequence.computed, sequence.imported)
            sequence.imported = 0  # once: who loses its place computes them again
            sequence.blocks_of_host = None
        self.policy.admitted(sequence)
        sequence.resumed = len(sequence.tokens)
        self.allocator.grow(sequence.blocks, sequence.length)
        self._run(sequence)

    def blocks_short(self, sequence: Sequence, match: Match) -> int:
        """Counts blocks that are not free and that it needs for the tokens it has."""
        need = self.allocator.blocks_for(sequence.length) - match.in_pool
        return need - (self.allocator.num_free - match.kept_in_pool)

    def _run(self, sequence: Sequence) -> None:
        sequence.slot = heapq.heappop(self.free_slots)
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=self.policy.key)

    def _end(self, sequence: Sequence) -> None:
        """Ends a running sequence."""
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.on_release is not None:
            sequence.on_release(sequence)
        remembers = self.prefixes is not None and sequence.identity is not None and not sequence.swapped
        if self.prefixes is not None and remembers and sequence.computed:
            known = sequence.tokens[: sequence.computed]
            self.prefixes.insert(sequence.identity, known, sequence.blocks, ended=True)
        self.allocator.release(sequence.blocks)
        self._loose = self.compacts
        self.eviction.release(sequence)
        heapq.heappush(self.free_slots, sequence.slot)
        sequence.slot = -1

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        rank = (False, *self.policy.key(sequence))
        heapq.heappush(self._waiting, (rank, sequence.order, sequence))
        self.num_waiting += sequence.samples
        self.policy.queued(sequence)

    def _dequeue(self, sequence: Sequence) -> None:
        self.num_waiting -= sequence.samples
        self.policy.left(sequence)
