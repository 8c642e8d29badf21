"""Speculative decoding on the host: what is drafted, what is kept, and that no defect goes unseen."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from moejax.cache.allocator import BlockAllocator, OutOfBlocks
from moejax.core.scheduling import SpeculationConfig
from moejax.engine.requests.api import SamplingParams
from moejax.engine.scheduling import speculation
from moejax.engine.scheduling.plan import UNKNOWN, Draft, GroupPlan, StepPlan, draft_plans
from moejax.engine.scheduling.sequence import Sequence, State
from moejax.engine.scheduling.speculation import NgramProposer, Speculation, SuffixProposer
from moejax.engine.scheduling.utility import Utility
from tests.engine.asks import Ask
from tests.engine.host_engine import LOOPS, HostEngine, Limits, chunks_of, decodes_of
from tests.examples import slow_but


def sequence(tokens: list[int], prompt_len: int = 1, **fields: Any) -> Sequence:
    return Sequence(tokens, prompt_len, SamplingParams(**fields), 1_000, 0)


# -- proposers -----------------------------------------------------------------------------------------

NGRAM = SpeculationConfig(method="ngram", min_ngram=2, max_ngram=3)


def test_an_ngram_is_continued_as_it_was_last() -> None:
    proposer = NgramProposer(NGRAM)
    # 1 2 stood twice: the later place is repeated, but the longest run of at most three goes before it.
    assert proposer.propose(sequence([1, 2, 3, 7, 1, 2, 4, 9, 1, 2]), 2) == [4, 9]
    assert proposer.propose(sequence([5, 1, 2, 3, 7, 1, 2, 4, 5, 1, 2]), 2) == [3, 7]
    assert proposer.propose(sequence([8, 5, 1, 2, 3, 9, 5, 1, 2, 4, 8, 5, 1, 2]), 2) == [4, 8]
    assert proposer.propose(sequence([1, 2, 3, 4]), 2) == [] == proposer.propose(sequence([1]), 2)


def test_a_loop_is_drafted_as_far_as_asked() -> None:
    looping = sequence([9, 1, 2, 1, 2, 1, 2])
    assert NgramProposer(NGRAM).propose(looping, 5) == [1, 2, 1, 2, 1]
    grown, proposer = sequence([1, 2, 3]), NgramProposer(NGRAM)
    for token, drafts in ((1, []), (2, [3, 1, 2]), (3, [1, 2, 3]), (5, [])):
        grown.tokens.append(token)
        assert proposer.propose(grown, 3) == drafts  # reads only what is new


def test_a_suffix_is_continued_with_what_followed_most_often() -> None:
    proposer = SuffixProposer(SpeculationConfig(method="suffix"))
    assert proposer.propose(sequence([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 5, 6, 1, 2]), 2) == [3, 4]
    # Outputs that have ended are remembered, prompts are not; a longer run goes before a more frequent one.
    ended = sequence([6, 7, 8, 9, 1, 2, 30, 31], prompt_len=2)
    proposer.ended(ended)
    assert proposer.propose(sequence([50, 51, 1, 2]), 3) == [30, 31]
    assert proposer.propose(sequence([50, 51, 6, 7]), 3) == []
    assert proposer.propose(sequence([1, 2, 40, 0, 1, 2, 40, 8, 9, 1, 2]), 3) == [30, 31]


def test_outputs_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "REMEMBERED", 8)
    proposer = SuffixProposer(SpeculationConfig(method="suffix"))
    for first in (10, 20, 30, 40):
        proposer.ended(sequence([0, *range(first, first + 5)]))
    assert proposer.propose(sequence([0, 10, 11]), 1) == []
    assert proposer.propose(sequence([0, 40, 41]), 1) == [42]
    assert sum(len(history.tokens) for history in proposer._outputs) <= 16


def test_a_rare_continuation_is_not_drafted() -> None:
    tokens = [token for i in range(20) for token in (1, 2, 100 + i)]
    assert SuffixProposer(SpeculationConfig(method="suffix")).propose(sequence([*tokens, 1, 2]), 3) == []


def plain_suffix(sources: list[list[int]], newest: list[int], most: int) -> list[int]:
    """What "suffix" drafts, place by place and token by token."""
    found = []
    for number, tokens in enumerate(sources):
        ends = [i for i in range(2, len(tokens) + 1) if tokens[i - 2 : i] == newest[-2:]]
        for end in ends[-speculation.PLACES - 1 :]:
            if number == 0 and end == len(tokens):
                continue
            length = 2
            while length < min(end, len(newest), speculation.LONGEST_MATCH) and (
                tokens[end - length - 1] == newest[-length - 1]
            ):
                length += 1
            found.append((length, tokens[end : end + most]))
    longest = max((length for length, _ in found), default=0)
    follow = [tokens for length, tokens in found if length == longest]
    least = speculation.LEAST_SHARE * len(follow)
    drafts: list[int] = []
    for depth in range(most):
        counts = Counter(
            tokens[depth] for tokens in follow if tokens[:depth] == drafts and len(tokens) > depth
        )
        token, count = max(counts.items(), key=lambda item: item[1], default=(-1, 0))
        if token == -1 or count < least:
            break
        drafts.append(token)
    return drafts


def test_a_suffix_is_continued_as_place_by_place() -> None:
    rng = random.Random(0)
    kinds = Counter[int]()
    for _ in range(400):
        most = rng.choice([4, 40])
        loop = [rng.randrange(most) for _ in range(rng.randrange(1, 9))]
        tokens = [rng.randrange(most) for _ in range(rng.randrange(1, 40))] + loop * rng.randrange(20)
        ended = [
            [0, *(rng.randrange(most) for _ in range(rng.randrange(12)))] for _ in range(rng.randrange(4))
        ]
        proposer = SuffixProposer(SpeculationConfig(method="suffix"))
        for output in ended:
            proposer.ended(sequence(output))
        remembered = [token for output in ended for token in (*output[1:], -1)]
        drafts = proposer.propose(sequence(tokens), 6)
        assert drafts == plain_suffix([tokens, remembered], tokens, 6)
        kinds[len(drafts)] += 1
    assert min(kinds[0], kinds[6], sum(kinds[n] for n in range(1, 6))) > 20


# -- steps ---------------------------------------------------------------------------------------------

BUSY = [
    Ask(5, 12),
    Ask(3, 9, n=3),
    Ask(9, 14, stop_below=300),
    Ask(2, 1),
    Ask(6, 12, seed=1),
    Ask(4, score=True),
]


def drain(limits: Limits, kind: type[Speculation] = Speculation) -> Counter[str]:
    engine = HostEngine(limits, speculation=kind)
    for ask in BUSY:
        engine.submit(ask)
    engine.drain()
    return engine.events


@LOOPS
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_tokens_are_those_of_plain_decoding(overlap: bool, right: float) -> None:
    events = drain(Limits(k=3, right=right, overlap=overlap, num_blocks=12, max_num_batched_tokens=12))
    assert bool(events["drafts kept"]) == (right > 0) and events["preemptions"]
    assert bool(events["drafts dropped"]) == (right < 1)


@LOOPS
def test_right_drafts_take_as_few_steps_as_can_be(overlap: bool) -> None:
    engine = HostEngine(Limits(k=3, overlap=overlap))
    group = engine.submit(Ask(4, 10))
    rows = []
    while not engine.idle:
        plan = engine.step()
        rows += [] if plan is None else [len(decodes_of(plan)) or chunks_of(plan)]
    assert len(group.tokens[0]) == 14
    # The prompt's step samples the first token; 4 + 4 more, and of the last one no draft is of any use.
    assert rows == [[(0, 0, 4)], 4, 4, 1]


def test_a_step_with_a_prompt_drafts_nothing_and_penalties_never_do() -> None:
    engine = HostEngine(Limits(k=3))
    first = engine.submit(Ask(4, 20))
    engine.step()
    assert decodes_of(engine.step()) == [0] * 4
    engine.submit(Ask(4, 8))
    plan = engine.step()
    assert decodes_of(plan) == [0] and chunks_of(plan)
    first.samples[0].params = SamplingParams(max_tokens=20, presence_penalty=1.0)
    assert decodes_of(engine.step()) == [0, 1, 1, 1, 1]
    engine.drain()


def test_drafts_take_free_blocks_only() -> None:
    """Two that just fit: drafts are cut where memory ends, and nobody is preempted for them."""
    engine = HostEngine(Limits(k=5, num_blocks=8, block_size=2, max_num_seqs=2))
    for _ in range(2):
        engine.submit(Ask(3, 6))
    engine.drain()
    assert not engine.events["preemptions"] and engine.events["drafts kept"]


def test_drafts_of_a_runner_are_made_one_after_another_for_all_groups() -> None:
    one, other, third = (sequence([5, 6, 7]) for _ in range(3))
    known = StepPlan([one, one], [2, 3], drafts={1: Draft((4,))})
    assert draft_plans(known) == []
    drafts = {2: Draft((UNKNOWN,)), 3: Draft((UNKNOWN, UNKNOWN)), 4: Draft((UNKNOWN,))}
    first = StepPlan([one, other, one, one, other], [2, 2, 3, 4, 3], drafts=drafts)
    second = StepPlan([third], [2])
    (alone, again), both = draft_plans(first), draft_plans(GroupPlan([first, second]))
    assert (alone.decodes, alone.groups[0].positions, alone.groups[0].drafts) == ([one, other], [2, 2], {})
    assert (again.decodes, again.groups[0].positions) == ([one], [3])
    assert again.groups[0].drafts == {0: Draft((UNKNOWN,))}  # it decodes the first
    assert [part.drafting for plan in both for part in plan.groups] == [1, 1, 2, 2]
    assert [plan.groups[0] for plan in both] == [alone, again] and not any(p.groups[1].decodes for p in both)


# -- as many as pay -----------------------------------------------------------------------------------


def seconds_under_utility(
    pace: Callable[[int, bool], float], right: float, requests: int, blind: bool = False
) -> float:
    """Returns the time in which requests of 512 tokens decode where `pace` tells that of a step, by its rows
    beyond one a sequence and by whether it is launched alone."""
    engine, seconds = HostEngine(Limits(k=4, right=right, utility=True, num_blocks=2_000, overlap=True)), []
    speculation = engine.scheduler.speculation
    assert speculation is not None and speculation.utility is not None
    if blind:
        engine.utility = speculation.utility = Utility(4, speculation.utility.times, blind=True)

    def timed(rows: int, alone: bool) -> float:
        seconds.append(pace(max(0, rows - requests), alone))
        return seconds[-1]

    engine.pace = timed
    for seed in range(requests):
        engine.submit(Ask(4, 512, seed=seed))
    engine.drain()
    return sum(seconds)


PAYS = [
    (right, lonely, each, requests, noise)
    for right in (0.0, 0.2, 0.5, 0.8, 1.0)
    for lonely, each in ((0.3, 0.0), (0.3, 0.2), (1.0, 0.5), (0.0, 1.0))
    for requests in (1, 3)
    for noise in (0.0, 0.2)
]
QUICK = [(0.2, 0.3, 0.2, 1, 0.2), (0.5, 0.3, 0.2, 1, 0.0), (0.8, 0.0, 1.0, 1, 0.0), (1.0, 0.3, 0.0, 1, 0.2)]


@pytest.mark.parametrize(("right", "lonely", "each", "requests", "noise"), slow_but(QUICK, PAYS))
def test_as_many_drafts_as_pay(right: float, lonely: float, each: float, requests: int, noise: float) -> None:
    """Whatever drafts get right and cost, it takes little more time than the best number of them, and than
    none, while all would take up to thirteen times as much. There are thirteen sizes to be timed here: an
    engine pads rows to a few."""
    gains = [1 + sum(right**place for place in range(1, number + 1)) for number in range(5)]
    times = [1 + lonely * (n > 0) + requests * each * n for n in range(5)]
    best = 512 * min(time / gain for time, gain in zip(times, gains, strict=True))
    chance = random.Random(3)

    def pace(drafts: int, alone: bool) -> float:
        return (1 + lonely * alone + each * drafts) * chance.uniform(1 - noise, 1 + noise)

    seconds = seconds_under_utility(pace, right, requests)
    # Two hundredths are the margin's, and the pauses' in proposing, which save the host's time.
    assert seconds <= min(best / (0.90 - noise / 2), 512 / (0.92 - noise / 4))


BLIND = [(0.0, 0.3, 0.2, 1), (1.0, 0.3, 0.2, 1), (0.8, 0.0, 1.0, 1), (0.5, 0.3, 0.2, 1), (0.8, 0.3, 0.1, 3)]


@pytest.mark.parametrize(("right", "lonely", "each", "requests"), slow_but(BLIND[:1], BLIND))
def test_what_a_model_drafts_is_judged_where_it_is_made(
    right: float, lonely: float, each: float, requests: int
) -> None:
    """The steps that find out cost a tenth at most, where all drafts would take up to twice as long."""
    times = [1 + lonely * (n > 0) + requests * each * n for n in range(5)]
    gains = [1 + sum(right**place for place in range(1, number + 1)) for number in range(5)]
    best = 512 * min(time / gain for time, gain in zip(times, gains, strict=True))

    def pace(drafts: int, alone: bool) -> float:
        return 1 + lonely * alone + each * drafts

    seconds = seconds_under_utility(pace, right, requests, blind=True)
    assert best <= seconds <= 1.1 * best
    assert right or seconds > best  # something was tried


@pytest.mark.parametrize(("first", "then", "least", "most"), [(0.2, 8.0, 250, 330), (8.0, 0.2, 200, 330)])
def test_a_machine_that_changes_is_timed_anew(first: float, then: float, least: int, most: int) -> None:
    """Drafts that pay at first do not later, or the other way round: five tokens take 1.2, or 9."""
    steps: list[float] = []

    def pace(drafts: int, alone: bool) -> float:
        steps.append(1 + alone * (first if len(steps) < 60 else then))
        return steps[-1]

    seconds_under_utility(pace, 1.0, 1)
    assert least < len(steps) < most


# -- defects -------------------------------------------------------------------------------------------


class KeepsAWrongDraft(Speculation):
    """Takes what the row after a wrong draft sampled."""

    def accept(self, plan: StepPlan, row: int) -> bool:
        plan.drafts[row].accepted = True
        plan.decodes[row].computed += 1
        return True


class ForgetsToRollBack(Speculation):
    def take_back(self, plan: StepPlan) -> None:
        for row in plan.drafts:
            plan.decodes[row].pending -= plan.decodes[row].state is not State.FINISHED

    def accept(self, plan: StepPlan, row: int) -> bool:
        accepted = super().accept(plan, row)
        plan.decodes[row].computed -= accepted
        return accepted


class KeepsBlocksOfDrafts(Speculation):
    def give_back(self, plan: StepPlan, allocator: BlockAllocator) -> None: ...


class DropsARightDraft(Speculation):
    def accept(self, plan: StepPlan, row: int) -> bool:
        return row - 1 not in plan.drafts and super().accept(plan, row)


class DraftsPastTheEnd(Speculation):
    def depth(self, sequence: Sequence) -> int:
        return self.config.k

    def draft(self, plan: StepPlan, budget: int, *rest: Any) -> None:
        self.proposer.propose = lambda sequence, most: [0] * most  # type: ignore[method-assign]
        super().draft(plan, budget, *rest)


class DraftsBeyondTheBudget(Speculation):
    def draft(self, plan: StepPlan, budget: int, *rest: Any) -> None:
        super().draft(plan, budget + 1, *rest)


DEFECTS = [each for each in Speculation.__subclasses__() if each.__module__ == __name__]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_found(defect: type[Speculation]) -> None:
    with pytest.raises((AssertionError, LookupError, OutOfBlocks)):
        for right in (0.5, 1.0):
            drain(Limits(k=3, right=right, max_num_batched_tokens=12), defect)
