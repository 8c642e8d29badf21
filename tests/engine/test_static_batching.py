"""The baseline of continuous batching: waits for its batch, pads, never preempts, gives the same tokens."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.core.config import EngineConfig, StaticBatchingConfig
from moejax.core.errors import ConfigError, RequestError
from moejax.engine.scheduling.policies import make_policy
from moejax.engine.scheduling.sequence import State
from tests.engine.asks import Ask
from tests.engine.host_engine import LOOPS, HostEngine, Limits, chunks_of, decodes_of, run


@LOOPS
def test_static_waits_for_its_batch(overlap: bool):
    """The third request comes in only after the longer of the first two has ended."""
    engine = HostEngine(Limits(max_num_seqs=2, static=True, overlap=overlap))
    first, second, third = (engine.submit(Ask(3, max_tokens=n)) for n in (2, 7, 2))
    engine.step_until(lambda: not first.live)
    assert engine.scheduler.num_waiting == 1 and not third.samples[0].preemptions
    engine.step_until(lambda: third.samples[0].state is State.RUNNING)
    assert not second.live
    engine.drain()


def test_static_computes_ended_rows_as_padding():
    engine = HostEngine(Limits(max_num_seqs=3, static=True))
    for tokens in (2, 6, 3):
        engine.submit(Ask(3, max_tokens=tokens))
    engine.step()
    plans = [engine.step() for _ in range(5)]
    assert [decodes_of(plan) for plan in plans] == [[0, 1, 2], [1, 2, 0], [1, 0, 2], [1, 0, 2], [1, 0, 2]]
    assert [plan.idle for plan in plans] == [0, 1, 2, 2, 2]
    assert [plan.num_tokens for plan in plans] == [3, 2, 1, 1, 1]
    assert engine.idle and engine.allocator.num_used == 0


def test_static_pads_prompts_to_the_longest():
    engine = HostEngine(Limits(static=True))
    for length in (3, 9, 5):
        engine.submit(Ask(length))
    plan = engine.step()
    assert plan.chunk_tokens == 17 and plan.min_tokens == 27
    engine.drain()


def test_static_cuts_long_prompts_and_pads_within_the_budget():
    engine = HostEngine(Limits(static=True, max_num_batched_tokens=16))
    for length in (10, 12, 4):
        engine.submit(Ask(length))
    plans = [engine.step(), engine.step()]
    assert [chunks_of(plan) for plan in plans] == [[(0, 0, 10), (1, 0, 6)], [(1, 6, 6), (2, 0, 4)]]
    assert [plan.min_tokens for plan in plans] == [16, 16]
    assert decodes_of(engine.step()) == [0, 1, 2]
    engine.drain()


@LOOPS
def test_static_sets_aside_whole_sequences_and_never_preempts(overlap: bool):
    """Each needs four of nine blocks in the end, though one at first: two run at a time."""
    engine = HostEngine(Limits(num_blocks=9, static=True, overlap=overlap))
    for _ in range(5):
        engine.submit(Ask(3, max_tokens=14))
    engine.step()
    assert len(engine.scheduler.running) == 2
    engine.drain()
    assert not engine.events["preemptions"]


def test_static_refuses_samples_that_do_not_fit_together():
    """Nobody gives way to another, so all must fit."""
    with pytest.raises(RequestError, match="need 12 cache blocks"):
        HostEngine(Limits(num_blocks=11, static=True)).submit(Ask(3, max_tokens=14, n=3))
    run(Limits(num_blocks=12, static=True), [Ask(3, max_tokens=14, n=3)])


@LOOPS
@settings(max_examples=60, derandomize=True)
@given(
    asks=st.lists(
        st.builds(Ask, st.integers(1, 20), st.integers(1, 15), st.integers(1, 3), st.sampled_from((0, 200))),
        min_size=1,
        max_size=10,
    )
)
def test_static_gives_the_tokens_of_continuous_batching(overlap: bool, asks: list[Ask]):
    static, continuous = (run(Limits(40, static=static, overlap=overlap), asks) for static in (True, False))
    assert [group.tokens for group in static.groups] == [group.tokens for group in continuous.groups]


def test_an_abort_of_the_whole_batch_lets_the_next_in():
    engine = HostEngine(Limits(max_num_seqs=2, static=True, overlap=True))
    groups = [engine.submit(Ask(5, max_tokens=9)) for _ in range(4)]
    for _ in range(3):
        engine.step()
    engine.abort(groups[0])
    assert engine.allocator.num_used > 0, "its row is computed as padding and keeps its blocks"
    engine.abort(groups[1])
    assert engine.allocator.num_used == 0
    engine.drain()


def test_static_scores_and_samples_together():
    engine = run(Limits(static=True), [Ask(9, score=True), Ask(3, max_tokens=5), Ask(2, score=True)])
    assert engine.events["scores"] == 2


@LOOPS
@pytest.mark.parametrize(
    ("batch_size", "max_wait_s", "sizes"),
    [
        (None, 0.0, [1, 4]),  # whoever is there: the first alone, then all that came meanwhile
        (3, 100.0, [3, 2]),  # three are waited for, and of those that are left the oldest's time
        (None, 4.0, [4, 1]),  # the four that came within as many seconds
        (5, 100.0, [5]),
    ],
)
def test_a_batch_waits_for_others(batch_size: int | None, max_wait_s: float, sizes: list[int], overlap: bool):
    """A request comes each second, of which a step takes one."""
    starts = StaticBatchingConfig(batch_size, max_wait_s)
    engine = HostEngine(Limits(max_num_seqs=8, static=True, overlap=overlap, starts=starts))
    asked, batches, launched = 5, [], 0
    while asked or not engine.idle:
        if asked:
            engine.submit(Ask(3, max_tokens=9))
            asked -= 1
        plan = engine.step()
        if plan is not None and any(chunk.first for chunk in plan.chunks):
            batches.append(len(plan.chunks))
        launched += plan is not None
    assert batches == sizes
    engine.check_outputs()


def test_a_waiting_batch_can_be_paused_and_ended():
    engine = HostEngine(Limits(static=True, starts=StaticBatchingConfig(4, 50.0)))
    first, second = engine.submit(Ask(3)), engine.submit(Ask(5))
    assert engine.step() is None and engine.scheduler.wait_s() == 49.0
    engine.pause(wait=True)
    engine.paused = False
    engine.abort(first)
    assert engine.step() is None and second.live
    engine.drain()
    assert engine.clock >= 50.0


@pytest.mark.parametrize(
    ("options", "processes", "line"),
    [
        ({"static_batching": StaticBatchingConfig(65)}, 1, "batch_size 65 exceeds engine.max_num_seqs 64"),
        ({"batching": "static", "static_batching": StaticBatchingConfig(max_wait_s=1.0)}, 2, "by the clock"),
    ],
)
def test_static_mistakes(options: dict[str, Any], processes: int, line: str):
    with pytest.raises(ConfigError, match=line) as error:
        make_policy(EngineConfig(**options), processes)
    assert "\n" not in str(error.value)
