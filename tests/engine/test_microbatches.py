"""Steps cut into microbatches: nothing is lost, and what belongs together stays together."""

import numpy as np
import pytest

from moejax import SamplingParams
from moejax.engine.pipeline.microbatches import split_plan
from moejax.engine.scheduling.plan import Chunk, GroupPlan, Plan, StepPlan
from moejax.engine.scheduling.sequence import Sequence


def sequence(length: int, order: int) -> Sequence:
    made = Sequence(list(range(1, length + 1)), length, SamplingParams(), length + 9, order)
    made.slot = order
    return made


def random_plan(draw: np.random.Generator) -> StepPlan:
    plan = StepPlan()
    orders = iter(range(100))
    for _ in range(draw.integers(0, 7)):
        plan.decodes.append(sequence(4, next(orders)))
        plan.positions.append(4)
    for _ in range(draw.integers(0, 4)):
        count = int(draw.integers(1, 12))
        start, last = int(draw.integers(0, 3)), bool(draw.random() < 0.6)
        plan.chunks.append(Chunk(sequence(30, next(orders)), start, count, last))
        forks = [sequence(30, next(orders)) for _ in range(draw.integers(0, 3))]
        plan.forks.append(forks if last else [])
    plan.copies = [(1, 2)]
    if plan.chunks and draw.random() < 0.5:
        plan.min_tokens = plan.chunk_tokens + int(draw.integers(0, 9))
    if not plan.chunks:
        plan.idle = int(draw.integers(0, len(plan.decodes) + 1))
    return plan


def check_split(plan: Plan, count: int, least: int) -> None:
    parts = split_plan(plan, count, lambda s: -s.order, least)
    assert 1 <= len(parts) <= count
    whole, seen, tokens = plan.sequences, {}, []
    for number, part in enumerate(parts):
        mine = part.plan.sequences
        assert [whole[row] for row in part.rows] == mine
        assert len(part.plan.groups) == len(plan.groups)
        for group in part.plan.groups:
            assert len(set(map(id, group.sequences))) == len(group.sequences)
        for row, s in part.plan.groups[0].sampling_rows():
            assert s is mine[row]
        for chunk, (start, length) in zip(part.plan.chunks, part.spans, strict=True):
            assert chunk.count == length > 0
            tokens += [(start + i, chunk.sequence.order, chunk.start + i) for i in range(length)]
        for s in mine:
            seen.setdefault(id(s), []).append(number)
    assert set(seen) == set(map(id, whole))
    chunks = {id(chunk.sequence): chunk for chunk in plan.chunks}
    for name, numbers in seen.items():
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert len(numbers) == 1 or name in chunks
    wanted = [(chunk.sequence.order, chunk.start + i) for chunk in plan.chunks for i in range(chunk.count)]
    assert sorted(tokens) == [(i, *token) for i, token in enumerate(wanted)]
    ends = [(id(c.sequence), c.last) for part in parts for c in part.plan.chunks if c.last]
    assert sorted(ends) == sorted((name, True) for name, chunk in chunks.items() if chunk.last)
    for g, group in enumerate(plan.groups):
        mine_of = [part.plan.groups[g] for part in parts]
        assert [part.copies for part in mine_of] == [group.copies] + [[]] * (len(parts) - 1)
        assert sum(part.idle for part in mine_of) == group.idle
        assert sum(part.min_tokens for part in mine_of) == max(group.min_tokens, group.chunk_tokens)
        decodes = [len(part.decodes) for part in mine_of if part.decodes]
        assert not decodes or max(decodes) - min(decodes) <= 1
        assert all(c.sequence in part.sequences for part in mine_of for c in part.chunks)
        for part in mine_of:
            for chunk, forks in zip(part.chunks, part.forks, strict=True):
                assert not forks or chunk.last


@pytest.mark.parametrize("seed", range(60))
def test_a_step_is_cut_without_loss(seed: int) -> None:
    draw = np.random.default_rng(seed)
    count, least = int(draw.integers(1, 6)), int(draw.integers(1, 6))
    plan = random_plan(draw)
    if plan.decodes or plan.chunks:
        check_split(plan, count, least)
    groups = [random_plan(draw) for _ in range(3)]
    for g, group in enumerate(groups):
        for s in group.sequences:
            s.group = g
    if any(group.decodes or group.chunks for group in groups):
        check_split(GroupPlan(groups), count, least)


def test_rows_go_where_what_they_decode_was_sampled() -> None:
    plan = StepPlan([sequence(4, i) for i in range(6)], [4] * 6)
    # The third and the sixth were in the first microbatch.
    first, second = split_plan(plan, 2, lambda s: s.order % 3 != 2)
    assert [s.order for s in first.plan.decodes] == [2, 5, 0]
    assert [s.order for s in second.plan.decodes] == [1, 3, 4]


def test_few_tokens_are_not_cut() -> None:
    plan = StepPlan(chunks=[Chunk(sequence(30, 0), 0, 9, True)], forks=[[]])
    assert [part.plan.chunk_tokens for part in split_plan(plan, 4, lambda s: 0, 4)] == [3, 3, 3]
    assert [part.plan.chunk_tokens for part in split_plan(plan, 4, lambda s: 0, 16)] == [9]
