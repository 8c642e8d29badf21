"""The plan of one step: made by the scheduler, read by runners and batch builders. No JAX.

decodes     d0 d1 …              one row each, then one for each draft
chunks      c0 f f  c1  c2 f …   a row for each chunk's sequence, then one for each fork that starts with it
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from moejax.cache.prefix import Node
from moejax.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """`count` tokens of a sequence from position `start`; `first` of its admission, `last` if they complete
    what it has. A first chunk starts after the tokens that were found computed; the last `found` of these it
    had neither computed nor found before. Queries from `weigh_from` on tell what blocks they attend to, where
    steps do, and of one that `ends` a prompt the heads then keep what they choose of it
    (`moejax.engine.scheduling.eviction`)."""

    sequence: Sequence
    start: int
    count: int
    last: bool
    first: bool = False
    found: int = 0
    weigh_from: int = 0
    ends: bool = False

    @property
    def scored(self) -> int:
        """Counts its first tokens that prompt tokens follow whose log-probabilities are wanted."""
        sequence = self.sequence
        return min(self.count, max(0, sequence.prompt_len - 1 - self.start)) * (sequence.prompt_logprobs >= 0)


UNKNOWN = -1
"""Stands for a draft that the runner makes at launch, and puts in its place when it collects the step."""


@dataclass(slots=True)
class Draft:
    """The token that a row decodes before it is known, the last of `tokens`, which follow the sequence's;
    `accepted` once they are, and were right. What the row of a `tentative` one samples is to be verified."""

    tokens: tuple[int, ...]
    accepted: bool = False
    tentative: bool = False

    @property
    def token(self) -> int:
        return self.tokens[-1]


@dataclass(slots=True)
class StepPlan:
    """The work of one step. Rows: the decodes, then each chunk's sequence followed by its new forks.

    Attributes:
        decodes: sequences that compute one token, and `positions` where.
        chunks: prompts, or parts of them, to compute.
        forks: of each chunk, the samples that start with it (only on a last chunk).
        saves, loads: (block, slot) to copy to the store on the host, and then (slot, block) from there, both
            before `copies`.
        imports: blocks to be filled, after the loads, with the last of those that a sequence brings: arrays
            `[at least len(blocks), …]`, see `Sequence.blocks_of_host`.
        copies: (source, destination) blocks to copy, in this order, before anything is written.
        held: blocks to copy of which no table has a part, held so that nothing is loaded into them before.
        window_copies: `copies` of the blocks of layers with a sliding window, where these have their own.
        preempted: sequences that lost their blocks for this plan.
        idle: the last so many decodes are rows of static batching that have ended: computed as padding.
        min_tokens: chunk tokens that static batching computes, padding included; 0 in continuous batching.
        drafts: of the decodes those that continue others of their sequence in this step, by row.
        judged: the draft that a row's sampled token must be for the next one's to count, by row.
        drafting: the number of the draft that the rows make, for this step's runner alone; 0: they sample.
        tiled: its tokens are computed as a tile (`moejax.engine.step.limits.StepKey`).
    """

    decodes: list[Sequence] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    forks: list[list[Sequence]] = field(default_factory=list)
    saves: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)
    imports: list[tuple[list[int], Any]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    window_copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: int = 0
    idle: int = 0
    min_tokens: int = 0
    drafts: dict[int, Draft] = field(default_factory=dict)
    judged: dict[int, Draft] = field(default_factory=dict)
    drafting: int = 0
    tiled: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, padding not counted."""
        return len(self.decodes) - self.idle + self.chunk_tokens

    @property
    def chunk_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    @property
    def sequences(self) -> list[Sequence]:
        """The rows in order."""
        rows = list(self.decodes)
        for chunk, forks in zip(self.chunks, self.forks, strict=True):
            rows.append(chunk.sequence)
            rows.extend(forks)
        return rows

    def tells(self, row: int) -> bool:
        """Tells whether a decoding row samples what its sequence gets, if the drafts before it are right."""
        return row not in self.drafts or not self.drafts[row].tentative

    def known(self, row: int, sequence: Sequence) -> list[int]:
        """Returns the tokens of a row's sequence, its drafts up to this row's included."""
        return [*sequence.tokens, *self.drafts[row].tokens] if row in self.drafts else sequence.tokens

    def placed(self) -> list[tuple[int, Sequence, int]]:
        """Returns the row, sequence and position of every token, decoded ones before chunks'."""
        tokens = list(zip(range(len(self.decodes)), self.decodes, self.positions, strict=True))
        row = len(self.decodes)
        for chunk, forks in zip(self.chunks, self.forks, strict=True):
            tokens += [(row, chunk.sequence, chunk.start + i) for i in range(chunk.count)]
            row += 1 + len(forks)
        return tokens

    def sampling_rows(self) -> Iterator[tuple[int, Sequence]]:
        """Returns the rows that sample a token, with their sequences."""
        yield from enumerate(self.decodes)
        row = len(self.decodes)
        for chunk, forks in zip(self.chunks, self.forks, strict=True):
            for sequence in (chunk.sequence, *forks):
                if chunk.last and not sequence.score:
                    yield row, sequence
                row += 1

    def fetch(self, node: Node, block: int) -> None:
        """Has a block filled with what a node has, from the host's store or else from the pool."""
        if node.slot is not None:
            self.loads.append((node.slot, block))
        else:
            assert node.block is not None
            self.copies.append((node.block, block))

    def written(self, block_size: int) -> set[int]:
        """Returns the blocks that the step writes. To be asked at its launch: tables go on changing."""
        blocks = {s.blocks[p // block_size] for s, p in zip(self.decodes, self.positions, strict=True)}
        for chunk in self.chunks:
            end = chunk.start + chunk.count
            blocks.update(chunk.sequence.blocks[chunk.start // block_size : -(-end // block_size)])
        return blocks.union((block for _, block in self.copies + self.loads), *(b for b, _ in self.imports))

    @property
    def groups(self) -> "list[StepPlan]":
        """The plan of each data-parallel group: itself, where there is one."""
        return [self]


def of_groups(name: str, join: Callable[[Iterator[Any]], Any] = sum) -> Any:
    """Returns a property of what has `groups`: the groups' values of that name as one, their sum if nothing
    else is said."""
    return property(lambda whole: join(getattr(group, name) for group in whole.groups))


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    """Returns one list of what is in several."""
    return list(itertools.chain.from_iterable(lists))


class GroupPlan:
    """One step of several data-parallel groups, each with its own plan, empty where it has nothing to do.

    It reads like one `StepPlan` whose rows and chunks are the groups', one group's after another's.
    """

    def __init__(self, groups: list[StepPlan]) -> None:
        self.groups = groups

    decodes: list[Sequence] = of_groups("decodes", joined)
    chunks: list[Chunk] = of_groups("chunks", joined)
    sequences: list[Sequence] = of_groups("sequences", joined)
    num_tokens: int = of_groups("num_tokens")
    chunk_tokens: int = of_groups("chunk_tokens")
    preempted: int = of_groups("preempted")
    idle: int = of_groups("idle")


Plan = StepPlan | GroupPlan
"""A step's plan as the loop and runners read it."""


def draft_plans(plan: Plan, after_hidden: bool = False) -> list[Plan]:
    """Returns the steps that make a plan's unknown drafts, in order: each decodes the token before them.

    Args:
        after_hidden: the first drafts are there already, and of the others each is made one position earlier
            (`moejax.engine.step.mtp`).
    """
    drafts = [draft for part in plan.groups for draft in part.drafts.values() if not draft.tentative]
    numbers = {len(draft.tokens) for draft in drafts if draft.token == UNKNOWN}
    plans: list[Plan] = []
    for number in sorted(numbers - {1} if after_hidden else numbers):
        parts = [StepPlan(drafting=number) for _ in plan.groups]
        for part, whole in zip(parts, plan.groups, strict=True):
            rows = [row for row, draft in whole.drafts.items() if len(draft.tokens) == number]
            part.decodes = [whole.decodes[row] for row in rows]
            part.positions = [whole.positions[row] - 1 - after_hidden for row in rows]
            if number > 1:
                part.drafts = {i: Draft((UNKNOWN,) * (number - 1)) for i in range(len(rows))}
        plans.append(parts[0] if len(parts) == 1 else GroupPlan(parts))
    return plans
