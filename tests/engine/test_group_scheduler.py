"""Data-parallel groups: requests are dealt out evenly, and each group's state stays sound."""

import random

import pytest

from moejax.cache.allocator import BlockAllocator
from moejax.core.errors import RequestError
from moejax.engine.core import Engine
from moejax.engine.requests.api import RequestMetrics, RequestOutput, SamplingParams
from moejax.engine.requests.output import OutputProcessor
from moejax.engine.requests.state import RequestState
from moejax.engine.scheduling.groups import GroupScheduler
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.sequence import Sequence, State
from moejax.engine.scheduling.static import StaticScheduler
from tests.plain.fake_runner import FakeRunner

BLOCKS, SIZE, SLOTS, BUDGET = 12, 4, 3, 8


def grouped(groups: int, kind: type[Scheduler] = Scheduler, blocks: int = BLOCKS) -> GroupScheduler:
    return GroupScheduler([kind(BlockAllocator(blocks, SIZE), SLOTS, BUDGET) for _ in range(groups)])


def request(number: int, prompt: int, output: int, n: int = 1) -> RequestState:
    params = SamplingParams(max_tokens=output, n=n, temperature=0.0, ignore_eos=True)
    ids = [(7 * number + i) % 50 for i in range(prompt)]
    builders = [OutputProcessor(i, params, None) for i in range(n)]
    samples = [
        Sequence(list(ids), prompt, params, prompt + output, order=100 * number + i, seed=number * 10 + i)
        for i in range(n)
    ]
    samples[0].forks = samples[1:]
    out = RequestOutput(str(number), None, ids, [b.output for b in builders], RequestMetrics(0.0))
    live = RequestState(out, builders)
    live.attach(samples[:1])
    return live


def tokens_of(requests: list[RequestState]) -> list[list[list[int]]]:
    return [[list(sample.token_ids) for sample in r.output.outputs] for r in requests]


def run(
    scheduler: GroupScheduler | Scheduler, requests: list[RequestState], blocks: int, overlap: bool
) -> Engine:
    engine = Engine(scheduler, FakeRunner(blocks, SIZE), overlap=overlap)
    engine.add(requests)
    while engine.step():
        scheduler.check_integrity()
    return engine


def workload(seed: int) -> list[RequestState]:
    draw = random.Random(seed)
    return [
        request(i, draw.randint(1, 14), draw.randint(1, 16), n=draw.choice((1, 1, 1, 2, 3)))
        for i in range(14)
    ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", [Scheduler, StaticScheduler])
@pytest.mark.parametrize("groups", [2, 3])
def test_tokens_do_not_depend_on_the_number_of_groups(
    groups: int, kind: type[Scheduler], overlap: bool
) -> None:
    blocks = 40 if kind is StaticScheduler else BLOCKS  # the continuous one is made to preempt
    alone, together = workload(groups), workload(groups)
    run(kind(BlockAllocator(blocks, SIZE), SLOTS, BUDGET), alone, blocks, overlap)
    scheduler = grouped(groups, kind, blocks)
    engine = run(scheduler, together, blocks, overlap)
    assert tokens_of(together) == tokens_of(alone)
    assert scheduler.idle and scheduler.allocator.num_used == 0
    assert scheduler._load == [0] * groups and not scheduler._counted
    assert kind is StaticScheduler or engine.stats.as_dict()["preemptions"] > 0


def test_requests_are_dealt_to_the_group_with_the_least_to_do() -> None:
    scheduler = grouped(3)
    sizes = [20, 4, 4, 4, 20]
    made = [request(i, 2, size - 2) for i, size in enumerate(sizes)]
    for live in made:
        scheduler.add(live.roots[0])
    # 20 | 4 | 4, then 4 to the second, then 20 to the third.
    assert [live.roots[0].group for live in made] == [0, 1, 2, 1, 2]


def test_forks_stay_with_their_root() -> None:
    scheduler = grouped(2)
    first, second = request(0, 3, 4), request(1, 3, 4, n=3)
    scheduler.add(first.roots[0])
    root, forks = second.roots[0], list(second.roots[0].forks)
    scheduler.add(root)
    assert root.group == 1 and [f.group for f in forks] == [1, 1]
    scheduler.finish(root)
    assert scheduler._load == [7, 0]


def test_a_step_has_a_plan_for_every_group_and_rows_in_their_order() -> None:
    scheduler = grouped(3)
    lone = request(0, 3, 4)
    scheduler.add(lone.roots[0])
    plan = scheduler.schedule()
    assert plan is not None and len(plan.groups) == 3
    assert [len(part.sequences) for part in plan.groups] == [1, 0, 0]
    assert plan.sequences == [lone.roots[0]] and plan.chunk_tokens == 3 and plan.num_tokens == 3
    other = request(1, 2, 4)
    scheduler.add(other.roots[0])
    assert scheduler.postprocess(plan, [9]) == [(0, lone.roots[0])]
    plan = scheduler.schedule()
    assert plan is not None and plan.sequences == [lone.roots[0], other.roots[0]]
    assert scheduler.postprocess(plan, [5, 6]) == [(0, lone.roots[0]), (1, other.roots[0])]
    assert lone.roots[0].tokens[-2:] == [9, 5] and other.roots[0].tokens[-1] == 6


def test_what_fits_no_group_is_refused_whole() -> None:
    scheduler = grouped(2)
    with pytest.raises(RequestError, match="cache has 12"):
        scheduler.add(request(0, 40, 40).roots[0])
    assert scheduler.idle and scheduler._load == [0, 0]


def test_nothing_to_do_gives_no_plan() -> None:
    assert grouped(2).schedule() is None


def test_a_sequence_in_the_wrong_group_is_found() -> None:
    scheduler = grouped(2)
    live = request(0, 3, 4)
    scheduler.add(live.roots[0])
    scheduler.schedule()
    live.roots[0].group = 1
    with pytest.raises(AssertionError, match="runs in group 0"):
        scheduler.check_integrity()


def test_a_failed_step_ends_its_requests_and_computes_the_others_anew() -> None:
    scheduler = grouped(2)
    requests = [request(i, 3, 6) for i in range(8)]
    engine = Engine(scheduler, FakeRunner(BLOCKS, SIZE, fail_at=frozenset({2})), overlap=True)
    engine.add(requests)
    while engine.step():
        scheduler.check_integrity()
    assert {r.output.error is None for r in requests} == {True, False}
    assert all(s.state is State.FINISHED for r in requests for s in r.sequences)
    assert scheduler._load == [0, 0]
