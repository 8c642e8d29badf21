"""Defects put into the host side of the engine on purpose: random workloads must find each of them."""

from collections.abc import Sequence as Row
from typing import Any

import pytest
from hypothesis import Phase

from moejax.cache.allocator import BlockAllocator, OutOfBlocks, WindowAllocator
from moejax.cache.prefix import Match, Node, PrefixTree
from moejax.engine.scheduling.plan import StepPlan
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.sequence import Sequence, State
from moejax.engine.scheduling.static import StaticScheduler
from moejax.engine.scheduling.swap import SwapSpace
from tests.engine.test_state_machine import Machine, Remembering, Swapping, explore


class SkipsCopies(Scheduler):
    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        if plan:
            plan.copies.clear()
        return plan


class KeepsSlots(Scheduler):
    def _leave(self, sequence: Sequence) -> None:
        super()._leave(sequence)
        self.free_slots.pop()


class PreemptsTheOldest(Scheduler):
    def _make_room(self, plan: StepPlan, sequence: Sequence) -> bool:
        self.running.append(self.running.pop(0))
        return super()._make_room(plan, sequence)


class ForgetsWhatIsPending(Scheduler):
    """A sequence preempted while its token is on the device never learns it, and waits for ever."""

    def preempt(self, sequence: Sequence) -> None:
        super().preempt(sequence)
        sequence.pending *= 2


class BreaksPromises(Scheduler):
    """Gives away the slots that forks are to have."""

    @property
    def _open_slots(self) -> int:
        return len(self.free_slots)


class TakesTokensOfTheDead(Scheduler):
    def postprocess(self, plan: StepPlan, tokens: Row[int]) -> None:
        ended = [sequence for _, sequence in plan.sampling_rows() if sequence.state is State.FINISHED]
        super().postprocess(plan, tokens)
        for sequence in ended:
            sequence.tokens.append(0)


class SharesUncounted(BlockAllocator):
    def fork(self, table: Row[int]) -> list[int]:
        return list(table)


class WritesSharedBlocks(BlockAllocator):
    def append(self, table: list[int], position: int) -> tuple[int, int] | None:
        if position // self.block_size < len(table):
            return None
        return super().append(table, position)


class KeepsSharedBlocks(BlockAllocator):
    def release(self, table: list[int]) -> None:
        super().release([block for block in table if self.refcount(block) == 1])
        table.clear()


class SlidesTooFar(WindowAllocator):
    def trim(self, table: list[int], start: int) -> None:
        super().trim(table, start + 1)


class NeverSlides(WindowAllocator):
    def trim(self, table: list[int], start: int) -> None: ...


class SharesWindowsUncounted(WindowAllocator):
    def fork(self, table: Row[int]) -> list[int]:
        return list(table)


class SkipsCopiesInWindows(Scheduler):
    def schedule(self) -> StepPlan | None:
        plan = super().schedule()
        if plan:
            plan.window_copies.clear()
        return plan


class CountsReadmissions(PrefixTree):
    def count(self, prompt: int, sources: Any, unasked: str | None, again: bool) -> None:
        super().count(prompt, sources, unasked, False)


class CountsNoHits(PrefixTree):
    def count(self, prompt: int, sources: Any, unasked: str | None, again: bool) -> None:
        super().count(prompt, {}, unasked, again)


class ForgetsWhose(PrefixTree):
    """One root for all identities."""

    def match(self, identity: Any, tokens: Row[int]) -> Match:
        return super().match(0, tokens)

    def insert(self, identity: Any, *arguments: Any, **options: Any) -> None:
        super().insert(0, *arguments, **options)


class CopiesWhatIsNotWritten(PrefixTree):
    def _add(self, *arguments: Any, fresh: bool) -> Node:
        return super()._add(*arguments, fresh=False)


class EvictsParents(PrefixTree):
    def evict(self) -> int:
        node = next((node for node in self.nodes() if not node.live), None)
        assert node is not None, "no block is kept"
        for child in [c for children in node.children.values() for c in children]:
            child.parent = node.parent
        node.children = {}
        self._remove(node)
        assert node.block is not None
        return node.block


class ForgetsToSave(PrefixTree):
    def take_saves(self) -> list[tuple[int, int]]:
        return super().take_saves()[1:]


class RemembersWhatIsNotComputed(Scheduler):
    """Takes a token for stored that was only sampled."""

    def _give_back(self, sequence: Sequence) -> None:
        sequence.computed += 1
        super()._give_back(sequence)
        sequence.computed -= 1


class AdmitsWhilePaused(Scheduler):
    admits: Any = property(lambda self: True, lambda self, value: None)


class SavesTooLate(SwapSpace):
    """Copies a block only after who took it has written to it."""

    def take_saves(self) -> list[tuple[int, int]]:
        late, self.late = getattr(self, "late", []), super().take_saves()
        return late


class SavesWhatIsNotComputed(SwapSpace):
    """Takes the token that is still to be computed for one in the block."""

    def out(self, sequence: Sequence, block_size: int) -> None:
        super().out(sequence, block_size)
        if sequence.swapped and sequence.preempted_at % block_size:
            sequence.preempted_at += 1


class LoadsOtherSlots(SwapSpace):
    def back(self, sequence: Sequence, *arguments: Any) -> None:
        sequence.swapped = sequence.swapped[::-1]
        super().back(sequence, *arguments)


class LeaksSlots(SwapSpace):
    def forget(self, sequence: Sequence) -> None:
        sequence.swapped = []


class GivesSlotsTwice(SwapSpace):
    """Frees the slots of one that is still to come back."""

    def out(self, sequence: Sequence, block_size: int) -> None:
        super().out(sequence, block_size)
        self._free += sequence.swapped


class WaitsForTheLimit(Scheduler):
    """A request of more samples than the limit waits for ever, on an idle engine too."""

    @property
    def _open_slots(self) -> int:
        return min(super()._open_slots, self.most_running - len(self.running))


class AdmitsBeyondTheLimit(Scheduler):
    @property
    def _open_slots(self) -> int:
        return self._unpromised_slots


class IgnoresThePrefillLimit(Scheduler):
    def schedule(self) -> StepPlan | None:
        before, self.most_prefill = self.most_prefill, self.max_num_batched_tokens
        plan = super().schedule()
        self.most_prefill = before
        return plan


def forks_what_has_tokens(samples: list[Sequence], most: int) -> list[Sequence]:
    samples[0].forks = samples[1:]
    return samples[:1]


PREFIXES = (
    CountsReadmissions, CountsNoHits, ForgetsWhose, CopiesWhatIsNotWritten, EvictsParents, ForgetsToSave,
    RemembersWhatIsNotComputed,
)  # fmt: skip
SCHEDULERS = (
    SkipsCopies, SkipsCopiesInWindows, KeepsSlots, PreemptsTheOldest, ForgetsWhatIsPending,
    BreaksPromises, TakesTokensOfTheDead, AdmitsWhilePaused,
    WaitsForTheLimit, AdmitsBeyondTheLimit, IgnoresThePrefillLimit,
)  # fmt: skip
SWAPS = (SavesTooLate, SavesWhatIsNotComputed, LoadsOtherSlots, LeaksSlots, GivesSlotsTwice)
ALLOCATORS = (SharesUncounted, WritesSharedBlocks, KeepsSharedBlocks)
WINDOWS = (SlidesTooFar, NeverSlides, SharesWindowsUncounted)


DEFECTS = (*SCHEDULERS, *ALLOCATORS, *WINDOWS, *PREFIXES, *SWAPS, forks_what_has_tokens)
FOUND_LATE = (
    RemembersWhatIsNotComputed, ForgetsWhatIsPending, EvictsParents, CopiesWhatIsNotWritten, LeaksSlots,
    forks_what_has_tokens,
)  # fmt: skip
"""Found only after many workloads."""


@pytest.mark.parametrize(
    "defect",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in FOUND_LATE)) for each in DEFECTS],
    ids=lambda defect: defect.__name__,
)
def test_a_defect_is_found(defect: Any):
    class Broken(Remembering if defect in PREFIXES else Swapping if defect in SWAPS else Machine):
        pass

    if not isinstance(defect, type):
        Broken.roots = staticmethod(defect)
    elif issubclass(defect, PrefixTree):
        Broken.prefixes = defect
    elif issubclass(defect, WindowAllocator):
        Broken.windows = defect
    elif issubclass(defect, SwapSpace):
        Broken.swap = defect
    elif issubclass(defect, BlockAllocator):
        Broken.allocator = defect
    else:
        Broken.scheduler = (defect, StaticScheduler)
    with pytest.raises((AssertionError, LookupError, OutOfBlocks)):
        explore(Broken, 600, phases=[Phase.generate], report_multiple_bugs=False)
