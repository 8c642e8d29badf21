"""Cuts a step into microbatches, which follow each other through the stages of a pipeline. No JAX here.

Rows that decode are dealt out evenly. Prompt tokens are cut into even parts, wherever that falls: the parts
of one chunk are in consecutive microbatches, and each stage runs these in order, so that the later part finds
the earlier one's keys. Samples that start with a chunk go with its last part.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from itertools import pairwise
from typing import Any, NamedTuple

from moejax.engine.scheduling.plan import Chunk, GroupPlan, Plan, StepPlan
from moejax.engine.scheduling.sequence import Sequence


class Part(NamedTuple):
    """A microbatch of a step.

    Attributes:
        plan: what it computes; it has the whole plan's saves, loads and copies where it is the first.
        rows: of each of its rows, the row of the whole plan. A chunk's row is in each part of the chunk, and
            what the last one gives is valid.
        spans: of each of its chunks, where its tokens are among all chunk tokens of the whole plan: the first
            one's index, and how many.
    """

    plan: Plan
    rows: list[int]
    spans: list[tuple[int, int]]


class _Cut(NamedTuple):
    """One group's `Part`."""

    plan: StepPlan
    rows: list[int]
    spans: list[tuple[int, int]]


def split_plan(plan: Plan, count: int, rank: Callable[[Sequence], Any], least_tokens: int = 1) -> list[Part]:
    """Returns at most `count` microbatches; fewer where there are too few rows, or tokens of chunks.

    Args:
        rank: decoding rows with a low one go into the first microbatches.
        least_tokens: prompts are not cut into more parts of this size than their tokens fill.
    """
    groups = plan.groups
    decodes = min(count, max(len(group.decodes) for group in groups))
    tokens = max(max(group.chunk_tokens, group.min_tokens) for group in groups)
    chunks = min(count, -(-tokens // least_tokens)) if plan.chunks else 0
    number = max(decodes, chunks)
    cut = [_split(group, number, decodes, chunks, rank) for group in groups]
    if len(groups) == 1:
        parts = [Part(*mine) for mine in cut[0]]
    else:
        parts = [_join([mine[i] for mine in cut], groups) for i in range(number)]
    return with_moves([part for part in parts if part.rows], plan)


def with_moves(parts: list[Part], plan: Plan) -> list[Part]:
    """Gives the first part the blocks that the whole plan saves, loads and copies."""
    for group, first in zip(plan.groups, parts[0].plan.groups, strict=True):
        first.saves, first.loads, first.imports = group.saves, group.loads, group.imports
        first.copies, first.window_copies = group.copies, group.window_copies
    return parts


def _split(
    plan: StepPlan, number: int, decodes: int, chunks: int, rank: Callable[[Sequence], Any]
) -> list[_Cut]:
    """Returns one group's microbatches; the first `decodes` have decoding rows, `chunks` prompts."""
    parts = [_Cut(StepPlan(), [], []) for _ in range(number)]
    active, ended = len(plan.decodes) - plan.idle, range(len(plan.decodes) - plan.idle, len(plan.decodes))
    order = sorted(range(active), key=lambda row: rank(plan.decodes[row]))
    for (part, rows, _), mine in zip(parts, _even([*order, *ended], decodes), strict=False):
        rows += mine
        _take_rows(plan, part, rows)
        part.idle = sum(row in ended for row in rows)
    if plan.chunks:
        _cut_chunks(plan, parts[:chunks])
    return parts


def _take_rows(plan: StepPlan, part: StepPlan, rows: Items[int]) -> None:
    """Gives a part some of the decoding rows. A sequence's keep their order: each finds the keys of those
    before it."""
    part.decodes = [plan.decodes[row] for row in rows]
    part.positions = [plan.positions[row] for row in rows]
    part.drafts = {i: plan.drafts[row] for i, row in enumerate(rows) if row in plan.drafts}
    part.judged = {i: plan.judged[row] for i, row in enumerate(rows) if row in plan.judged}


def tiles_of(plan: Plan, size: int, verified: bool = False) -> list[Part]:
    """Returns a step's tiles of at most `size` tokens and rows, one after another: the rows that decode, then
    the chunks' tokens. Where more samples start with a chunk than a tile has rows, its last token is computed
    again for the others.

    Args:
        verified: only what sequences that are verified get is in tiles. All else is in one part before them.
    """
    groups = plan.groups
    cut = [_tiles(group, size, verified) for group in groups]
    number = max(map(len, cut))
    cut = [mine + [_Cut(StepPlan(tiled=True), [], []) for _ in range(number - len(mine))] for mine in cut]
    first = 0 if any(mine[0].rows for mine in cut) else 1
    parts = [[mine[i] for mine in cut] for i in range(first, number)]
    whole = len(groups) == 1
    return with_moves([Part(*mine[0]) if whole else _join(mine, groups) for mine in parts], plan)


def _tiles(plan: StepPlan, size: int, verified: bool) -> list[_Cut]:
    """Returns one group's part that is not tiled, and its tiles."""
    rest = _Cut(StepPlan(), [], [])
    tiles: list[_Cut] = []

    def last(full: bool) -> _Cut:
        if full:
            tiles.append(_Cut(StepPlan(tiled=True), [], []))
        return tiles[-1]

    decoding: list[int] = []
    for row, sequence in enumerate(plan.decodes):
        tiled = not verified or (sequence.verified and plan.tells(row))
        (decoding if tiled else rest.rows).append(row)
    _take_rows(plan, rest.plan, rest.rows)
    for number in range(0, len(decoding), size):
        part, rows, _ = last(full=True)
        rows += decoding[number : number + size]
        _take_rows(plan, part, rows)
    row, index = len(plan.decodes), 0
    for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
        start, end, samples = chunk.start, chunk.start + chunk.count, range(row + 1, row + 1 + len(forks))
        if verified and not chunk.sequence.verified:
            rest.plan.chunks.append(chunk)
            rest.plan.forks.append(forks)
            rest.rows.extend((row, *samples))
            rest.spans.append((index, chunk.count))
            start, samples = end, samples[:0]
        while start < end or samples:
            start = min(start, end - 1)
            part, rows, spans = last(not tiles or size <= max(tiles[-1].plan.num_tokens, len(tiles[-1].rows)))
            take = min(end - start, size - part.num_tokens)
            first, ends = chunk.first and start == chunk.start, start + take == end
            mine = samples[: (size - len(rows) - 1) * ends]
            samples = samples[len(mine) :]
            part.chunks.append(
                Chunk(chunk.sequence, start, take, chunk.last and ends, first, chunk.found * first)
            )
            part.forks.append([forks[sample - row - 1] for sample in mine])
            rows += [row, *mine]
            spans.append((index + start - chunk.start, take))
            start += take
        row, index = row + 1 + len(forks), index + chunk.count
    return [rest, *tiles]


def _cut_chunks(plan: StepPlan, parts: list[_Cut]) -> None:
    """Puts even parts of all chunk tokens, and of static batching's padding, into each."""
    tokens, count = plan.chunk_tokens, len(parts)
    ends = _ends(tokens, count)
    index, row, at = 0, len(plan.decodes), 0
    for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
        start, left = chunk.start, chunk.count
        while left:
            while ends[at] == index:
                at += 1
            take = min(left, ends[at] - index)
            left -= take
            into, rows, spans = parts[at]
            first, last = chunk.first and start == chunk.start, chunk.last and not left
            into.chunks.append(Chunk(chunk.sequence, start, take, last, first, chunk.found * first))
            into.forks.append([] if left else forks)
            rows += [row] if left else range(row, row + 1 + len(forks))
            spans.append((index, take))
            start, index = start + take, index + take
        row += 1 + len(forks)
    filled = [into for into, _, _ in parts if into.chunks]
    padding = _even(range(plan.min_tokens - tokens), len(filled))
    for into, more in zip(filled, padding, strict=True):
        into.min_tokens = into.chunk_tokens + len(more)


def _ends(items: int, count: int) -> list[int]:
    """Returns where `count` parts of nearly the same length end, the first ones longer."""
    each, more = divmod(items, count) if count else (0, 0)
    return [each * (i + 1) + min(i + 1, more) for i in range(count)]


def _even(items: Items[int], count: int) -> list[Items[int]]:
    """Returns items in order, in `count` parts of nearly the same length."""
    return [items[a:b] for a, b in pairwise([0, *_ends(len(items), count)])]


def _join(mine: list[_Cut], groups: list[StepPlan]) -> Part:
    """Returns one microbatch of all groups, whose rows and tokens follow one another."""
    rows: list[int] = []
    spans: list[tuple[int, int]] = []
    row = token = 0
    for part, whole in zip(mine, groups, strict=True):
        rows += [row + r for r in part.rows]
        spans += [(token + start, length) for start, length in part.spans]
        row, token = row + len(whole.sequences), token + whole.chunk_tokens
    return Part(GroupPlan([part.plan for part in mine]), rows, spans)
