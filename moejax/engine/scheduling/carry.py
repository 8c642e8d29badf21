"""From the scheduler of one layout into that of another, between two steps. No JAX here.

Who runs goes on where it was, if a group has room for it; else it is queued again, as what is preempted is.
"""

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple

from moejax.core.errors import ConfigError, RequestError
from moejax.engine.scheduling.sequence import Sequence, State


class Place(NamedTuple):
    """Where a sequence that runs goes on: its group, and the blocks that are to hold what its own do."""

    sequence: Sequence
    group: int
    blocks: list[int]

    def moves(self, block_size: int) -> list[tuple[int, int, int, int]]:
        """Returns the group and number of each block that holds anything, and those of its copy."""
        held = -(-(self.sequence.computed + len(self.sequence.tentative)) // block_size)
        pairs = zip(self.sequence.blocks[:held], self.blocks, strict=False)
        return [(self.sequence.group, block, self.group, copy) for block, copy in pairs]


def waiting(scheduler: Any) -> list[Sequence]:
    """Returns the queues of all groups."""
    return [s for part in getattr(scheduler, "groups", [scheduler]) for s in part.waiting()]


def find_places(old: Any, new: Any, stays: Callable[[Sequence], bool]) -> list[Place]:
    """Finds room in a new, empty scheduler for who runs and `stays`, in the policy's order. Blocks that are
    shared are there once for each table. The sequences are left as they are.

    Raises:
        ConfigError: one of all, those that wait included, could never run there.
    """
    for sequence in (*old.running, *waiting(old)):
        try:
            new.check_fits(sequence)
        except RequestError as error:
            raise ConfigError(f"reconfigure: a request could never run there: {error}") from error
    parts, places = getattr(new, "groups", [new]), list[Place]()
    slots, load = [part.max_num_seqs for part in parts], [0] * len(parts)
    for sequence in filter(stays, sorted(old.running, key=new.policy.key)):
        samples, blocks = sequence.samples, len(sequence.blocks)
        for group in sorted(range(len(parts)), key=load.__getitem__):
            allocator, table = parts[group].allocator, list[int]()
            if slots[group] >= samples and allocator.num_free >= blocks:
                allocator.grow(table, blocks * allocator.block_size)
                places.append(Place(sequence, group, table))
                slots[group] -= samples
                load[group] += sequence.max_length * samples
                break
    return places


def hand_over(old: Any, new: Any, places: list[Place]) -> None:
    """Gives a new scheduler all sequences of the old one, which is of no use then."""
    parts, key, staying = getattr(new, "groups", [new]), new.policy.key, {id(each[0]) for each in places}

    def deal(sequence: Sequence, group: int | None = None) -> Any:
        for each in (sequence, *sequence.forks):
            each.group = 0
        return parts[new.deal(sequence, group)] if len(parts) > 1 else new

    others = sorted((s for s in (*old.running, *waiting(old)) if id(s) not in staying), key=key)
    for sequence, group, blocks in places:
        sequence.blocks = blocks
        deal(sequence, group)._run(sequence)
    for sequence in others:
        part, sequence.swapped = deal(sequence), []
        if sequence.state is State.RUNNING:
            sequence.preempted_at, sequence.preemptions = sequence.computed, sequence.preemptions + 1
            sequence.computed = sequence.cached = sequence.guessed = 0
            sequence.blocks, sequence.window_blocks, sequence.tentative, sequence.slot = [], [], [], -1
            part._enqueue(sequence)
        else:  # which the policy has counted
            heapq.heappush(part._waiting, ((False, *key(sequence)), sequence.order, sequence))
            part.num_waiting += sequence.samples
