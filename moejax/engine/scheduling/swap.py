"""What becomes of the keys and values of a sequence that loses its place. No JAX here.

recompute   they are given up, and its tokens are computed again
swap        its blocks are copied to slots of the host's store, and from there into other blocks
auto        whichever is expected to take less time

Where the store is full, and of who has to compute its whole prompt (`Sequence.not_looked_up`), they are
given up in any case.
"""

import statistics
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Any

from moejax.cache.allocator import BlockAllocator
from moejax.core.config import Preemption
from moejax.engine.scheduling.sequence import Sequence

MOVED_AT_A_TIME = 16
"""Blocks that one call of a program copies to the host's store, or from there, at most."""

_OBSERVED = 32  # newest steps of each kind by which time is predicted


class SwapSpace:
    """The part of a store on the host that sequences wait in, and the choice of who does.

    Args:
        mode: see above.
        first, slots: its places in the store; those before `first` are the prefix cache's.

    Attributes:
        move_s: seconds that copying `MOVED_AT_A_TIME` blocks out and in again takes, for "auto".
        saves: slot → block that is still to be copied there, before anything is written to the block again.
        counts: `swapped_tokens` and `recomputed_tokens` of those that came back, `swaps_without_room`, and
            `swaps_given_up` of those that were lost, or are computed again sooner than loaded.
    """

    def __init__(self, mode: Preemption = "recompute", first: int = 0, slots: int = 0) -> None:
        self.mode, self.first, self.num_slots = mode, first, slots
        self.move_s = 0.0
        self.saves: dict[int, int] = {}
        self.counts: Counter[str] = Counter()
        self._free: list[int] = []
        self._made = 0  # slots that were ever in use; the store's memory is committed as it is written
        self._decode_s: deque[float] = deque(maxlen=_OBSERVED)
        self._chunks: deque[tuple[float, int]] = deque(maxlen=_OBSERVED)

    def observe(self, seconds: float, prompt_tokens: int) -> None:
        """Says how long a step took, and how many tokens of prompts it computed."""
        if prompt_tokens:
            self._chunks.append((seconds, prompt_tokens))
        else:
            self._decode_s.append(seconds)

    def out(self, sequence: Sequence, block_size: int) -> None:
        """Has the blocks of a sequence that is about to lose them copied, if they are to be."""
        sequence.preempted_at = tokens = sequence.computed
        blocks = sequence.blocks[: -(-tokens // block_size)]
        if self.mode == "recompute" or not tokens or sequence.not_looked_up is not None:
            return
        moves = -(-len(blocks) // MOVED_AT_A_TIME)
        if self.mode == "auto" and self.recompute_s(tokens) <= moves * self.move_s:
            return
        if len(blocks) > self.num_slots - self._made + len(self._free):
            self.counts["swaps_without_room"] += 1
            return
        sequence.swapped = [self._slot() for _ in blocks]
        self.saves.update(zip(sequence.swapped, blocks, strict=True))

    def back(self, sequence: Sequence, loads: list[tuple[int, int]], allocator: BlockAllocator) -> None:
        """Adds to the table of a sequence that is admitted the blocks that it lacks of those it had, and to
        `loads` from which slot each is to be filled."""
        size, slots = allocator.block_size, sequence.swapped
        found = len(sequence.blocks) * size if slots else sequence.computed
        for slot in slots[len(sequence.blocks) :]:
            (block,) = allocator.grow(sequence.blocks, (len(sequence.blocks) + 1) * size)
            loads.append((slot, block))
        kind = "swapped_tokens" if slots else "recomputed_tokens"
        self.counts[kind] += max(0, sequence.preempted_at - found)
        if slots:
            sequence.computed = sequence.cached = max(found, sequence.preempted_at)
        self._free += slots  # what is still to be saved there is loaded in the same step
        sequence.swapped = []

    def forget(self, sequence: Sequence) -> None:
        """Gives up what the store has of a sequence, if it has anything."""
        for slot in sequence.swapped:
            self.saves.pop(slot, None)
        self._free += sequence.swapped
        sequence.swapped = []

    def take_saves(self) -> list[tuple[int, int]]:
        """Returns the (block, slot) that are still to be copied to the store; they count as copied."""
        saves, self.saves = self.saves, {}
        return [(block, slot) for slot, block in saves.items()]

    def recompute_s(self, tokens: int) -> float:
        """Predicts the seconds by which computing so many tokens of prompts makes steps longer, by what the
        last ones took; 0 before the first."""
        decoding = statistics.median(self._decode_s) if self._decode_s else 0.0
        each = [max(0.0, seconds - decoding) / count for seconds, count in self._chunks]
        return tokens * statistics.median(each) if each else 0.0

    def check_integrity(self, waiting: Items[Sequence], block_size: int) -> None:
        """Checks that slots are conserved: free, or one sequence's that waits.

        Raises:
            AssertionError: says what is wrong.
        """
        for sequence in waiting:
            if sequence.swapped and len(sequence.swapped) != -(-sequence.preempted_at // block_size):
                raise AssertionError(f"{sequence!r} has {len(sequence.swapped)} blocks in the host's store")
        slots = sorted([*self._free, *(slot for sequence in waiting for slot in sequence.swapped)])
        if slots != list(range(self.first, self.first + self._made)) or self._made > self.num_slots:
            raise AssertionError(f"slots {slots} are not each of {self._made} from {self.first} once")

    def _slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._made += 1
        return self.first + self._made - 1


def swap_stats(spaces: Iterable[SwapSpace]) -> dict[str, Any]:
    """Returns what `LLM.stats` tells of tokens that were preempted, and of swaps that found no room."""
    counts = sum((space.counts for space in spaces), Counter[str]())
    names = ("swapped_tokens", "recomputed_tokens", "swaps_without_room", "swaps_given_up")
    return {name: counts[name] for name in names}
