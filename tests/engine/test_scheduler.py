"""What the scheduler promises, case by case; `test_state_machine.py` has it in random order.

`HostEngine` checks every plan (limits, order, who is preempted, who writes where), the state after every step
and at the end every token, so a test here says what is special about its case.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.cache.allocator import BlockAllocator
from moejax.core.config import PrefixCacheConfig
from moejax.core.errors import RequestError
from moejax.engine.requests.api import SamplingParams
from moejax.engine.scheduling import reuse, scheduler
from moejax.engine.scheduling.plan import StepPlan
from moejax.engine.scheduling.policies import Policy
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.sequence import Sequence, State
from tests.engine.asks import Ask
from tests.engine.host_engine import LOOPS, HostEngine, Limits, alone, chunks_of, decodes_of, run

# -- admission ----------------------------------------------------------------------------------------------


def test_requests_are_admitted_in_order_while_slots_last():
    engine = HostEngine(Limits(max_num_seqs=2))
    for _ in range(4):
        engine.submit(Ask(3, max_tokens=2))
    assert engine.scheduler.num_waiting == 4
    assert chunks_of(engine.step()) == [(0, 0, 3), (1, 0, 3)]
    assert [s.order for s in engine.scheduler.waiting()] == [2, 3]
    assert decodes_of(engine.step()) == [0, 1]
    assert chunks_of(engine.step()) == [(2, 0, 3), (3, 0, 3)]
    engine.drain()


def test_a_request_that_does_not_fit_yet_keeps_its_turn():
    """The third would fit beside the first, but must not overtake the second."""
    engine = HostEngine(Limits(num_blocks=10))
    engine.submit(Ask(16, max_tokens=4))
    engine.submit(Ask(24))
    engine.submit(Ask(1))
    assert chunks_of(engine.step()) == [(0, 0, 16)]
    assert decodes_of(engine.step()) == [0]
    engine.drain()


def test_blocks_are_kept_free_for_those_that_run():
    """The watermark: two more would fill the pool, and preempt each other at the next block."""
    engine = HostEngine(Limits(num_blocks=4))
    assert engine.scheduler.watermark == 1
    for _ in range(4):
        engine.submit(Ask(4, max_tokens=2))
    assert len(chunks_of(engine.step())) == 3 and engine.allocator.num_free == 1
    engine.drain()


def test_an_empty_engine_needs_no_reserve():
    engine = HostEngine(Limits(num_blocks=4))
    engine.submit(Ask(16, max_tokens=1))
    assert chunks_of(engine.step()) == [(0, 0, 16)] and engine.allocator.num_free == 4
    assert engine.idle


def test_the_watermark_is_a_hundredth_of_the_pool():
    assert HostEngine(Limits(num_blocks=1000)).scheduler.watermark == 10


def test_forks_are_promised_slots_and_blocks():
    """A group is admitted as a whole, and nobody takes its forks' slots while its prompt is computed."""
    engine = HostEngine(Limits(max_num_seqs=4, max_num_batched_tokens=6))
    engine.submit(Ask(10, n=3))
    engine.submit(Ask(1))
    engine.submit(Ask(1))
    assert chunks_of(engine.step()) == [(0, 0, 6)]
    assert chunks_of(engine.step()) == [(0, 6, 4), (3, 0, 1)]
    assert len(engine.scheduler.running) == 4 and engine.scheduler.num_waiting == 1
    engine.drain()


def test_too_long_a_request_is_refused_in_one_line():
    engine = HostEngine(Limits(num_blocks=4, block_size=4))
    with pytest.raises(RequestError) as caught:
        engine.submit(Ask(10, max_tokens=8))
    assert str(caught.value) == (
        "18 tokens (10 of them the prompt) need 5 cache blocks of 4, and the cache has 4; raise "
        "engine.num_blocks or lower max_tokens"
    )
    assert engine.idle
    engine.submit(Ask(10, max_tokens=7))  # the last token sampled is never stored
    engine.submit(Ask(16, score=True))
    engine.drain()
    with pytest.raises(RequestError, match="17 tokens"):
        engine.submit(Ask(17, score=True))


def test_too_many_samples_are_refused_in_one_line():
    engine = HostEngine(Limits(max_num_seqs=2))
    with pytest.raises(RequestError) as caught:
        engine.submit(Ask(1, n=3))
    assert str(caught.value) == "n=3 exceeds engine.max_num_seqs 2; raise it or lower n"
    assert engine.idle
    engine.submit(Ask(1, n=2))
    engine.drain()


# -- a step's tokens ----------------------------------------------------------------------------------------


def test_decodes_come_first_and_prompts_fill_the_rest():
    engine = HostEngine(Limits(max_num_batched_tokens=8))
    engine.submit(Ask(2))
    engine.submit(Ask(20))
    assert chunks_of(engine.step()) == [(0, 0, 2), (1, 0, 6)]
    plan = engine.step()
    assert decodes_of(plan) == [0] and chunks_of(plan) == [(1, 6, 7)] and plan.num_tokens == 8
    assert chunks_of(engine.step()) == [(1, 13, 7)]
    engine.drain()


def test_a_prompts_last_token_alone_is_decoded():
    engine = HostEngine(Limits(max_num_batched_tokens=8))
    group = engine.submit(Ask(9, max_tokens=1))
    assert chunks_of(engine.step()) == [(0, 0, 8)]
    plan = engine.step()
    assert decodes_of(plan) == [0] and plan.positions == [8] and not plan.chunks
    assert group.samples[0].state is State.FINISHED and len(group.samples[0].tokens) == 10


def test_samples_start_with_the_last_chunk_and_not_before():
    engine = HostEngine(Limits(max_num_batched_tokens=8))
    group = engine.submit(Ask(9, max_tokens=2, n=2))
    plan = engine.step()
    assert plan.forks == [[]] and list(plan.sampling_rows()) == []
    plan = engine.step()
    assert chunks_of(plan) == [(0, 8, 1)] and plan.forks == [[group.samples[1]]]
    assert list(plan.sampling_rows()) == [(0, group.samples[0]), (1, group.samples[1])]
    engine.drain()


@LOOPS
def test_chunked_prompts_give_the_tokens_of_whole_ones(overlap: bool):
    asks = [Ask(n, max_tokens=5, n=1 + n % 3, first=n) for n in (17, 30, 1, 8, 23)]
    engine = run(Limits(num_blocks=200, max_num_batched_tokens=9, overlap=overlap), asks)
    assert engine.events["chunked prompts"] and not engine.events["preemptions"]


# -- preemption ---------------------------------------------------------------------------------------------


@LOOPS
def test_the_latest_is_preempted_and_the_oldest_never(overlap: bool):
    """Two that need six blocks each, of seven: the second goes, comes back, and loses no token."""
    engine = HostEngine(Limits(num_blocks=7, overlap=overlap))
    old, new = engine.submit(Ask(4, max_tokens=20)), engine.submit(Ask(4, max_tokens=20))
    engine.drain()
    assert old.samples[0].preemptions == 0 and new.samples[0].preemptions >= 1
    assert engine.events["preemptions"] == engine.events["readmissions"] == new.samples[0].preemptions


def test_nobody_is_admitted_in_a_step_that_preempts():
    engine = HostEngine(Limits(num_blocks=6))
    engine.submit(Ask(7, max_tokens=12))
    engine.submit(Ask(8, max_tokens=12))
    engine.step()
    engine.submit(Ask(1, max_tokens=1))  # kept out by the watermark, then by the preemption
    plan = engine.step_until(lambda: engine.events["preemptions"])
    assert plan is not None and plan.preempted == 1 and not plan.chunks
    engine.drain()


def test_a_blocks_last_owner_needs_no_copy_and_is_not_preempted():
    """Both samples share the pool's last block. When the second goes, no block is free, yet the first can
    write where it is; it used to be preempted too."""
    engine = HostEngine(Limits(num_blocks=6, block_size=3))
    group = engine.submit(Ask(16, max_tokens=2, n=2))
    engine.step()
    plan = engine.step()
    assert plan.preempted == 1 and not plan.copies and decodes_of(plan) == [0]
    engine.drain()
    assert [s.preemptions for s in group.samples] == [0, 1]


@LOOPS
def test_a_group_is_preempted_before_it_forks(overlap: bool):
    """It is queued again as a whole, keeps its place, and shares its prompt when its turn comes."""
    engine = HostEngine(Limits(num_blocks=11, max_num_batched_tokens=5, max_num_seqs=5, overlap=overlap))
    for _ in range(2):
        engine.submit(Ask(1, max_tokens=16))
    group = engine.submit(Ask(28, max_tokens=4, n=2))
    engine.step_until(lambda: engine.events["preemptions before forking"])
    assert engine.scheduler.num_waiting == 2 and group.samples[0].forks == group.samples[1:]
    engine.drain()
    assert engine.events["forks"] == 1


def test_a_preempted_sequence_waits_for_its_token_on_the_device():
    """It went while steps that sample for it were in flight: to compute it anew, their tokens are needed."""
    engine = HostEngine(Limits(num_blocks=5))
    scheduler = engine.scheduler
    old, new = (engine.submit(Ask(length, max_tokens=10)).samples[0] for length in (7, 4))
    plans = [scheduler.schedule()]
    while not plans[-1].preempted:
        plans.append(scheduler.schedule())
    assert new.state is State.WAITING and new.pending == len(plans) - 1
    scheduler.finish(old)
    assert scheduler.schedule() is None, "room enough, but the tokens are not known"
    for plan in plans:
        scheduler.postprocess(plan, [0] * len(plan.sequences))
    assert chunks_of(scheduler.schedule()) == [(1, 0, 4 + len(plans) - 1)]
    scheduler.check_integrity()


# -- samples of one prompt ----------------------------------------------------------------------------------


@LOOPS
def test_samples_share_the_prompt_and_copy_its_last_block(overlap: bool):
    engine = HostEngine(Limits(overlap=overlap))
    group = engine.submit(Ask(10, max_tokens=6, n=3))
    engine.step()
    assert engine.allocator.num_used == 3
    assert {tuple(sample.blocks) for sample in group.samples} == {(0, 1, 2)}
    plan = engine.step()
    assert plan.copies == [(2, 3), (2, 4)]
    assert [sample.blocks[:2] for sample in group.samples] == [[0, 1]] * 3
    engine.drain()
    assert len({tuple(tokens) for tokens in group.tokens}) == 3


def test_a_prompt_that_ends_with_its_block_is_not_copied():
    engine = HostEngine()
    engine.submit(Ask(8, max_tokens=6, n=3))
    engine.drain()
    assert engine.events["forks"] == 2 and not engine.events["copies"]


def test_samples_of_one_token_end_with_the_prompt():
    engine = HostEngine()
    group = engine.submit(Ask(8, max_tokens=1, n=3))
    engine.step()
    assert engine.idle and all(len(tokens) == 9 for tokens in group.tokens)


class _ByTable(Policy):
    """Ranks by a table: lets the samples of two groups come in turns."""

    def key(self, sequence: Sequence) -> tuple[int]:
        return ((0, 3, 1, 2)[sequence.order],)


def test_a_freed_source_may_become_a_destination():
    """0 and 1 share a block, 2 and 3 another. 0 copies its own; 2 must copy too, has 1 preempted for it and
    gets the block that 0 copied from. So copies must be made in their order, or all read before any write."""
    limits = Limits(num_blocks=3, block_size=4, max_num_batched_tokens=32)
    engine = HostEngine(limits)
    engine.policy = engine.scheduler.policy = _ByTable()
    engine.scheduler.watermark = -1  # both groups at once
    groups = [engine.submit(Ask(2, max_tokens=2, n=2, first=i)) for i in range(2)]
    engine.step()
    assert [g.samples[0].blocks for g in groups] == [[0], [1]]
    assert engine.step().copies == [(0, 2), (1, 0)]
    assert engine.events["copies over a copied block"] == 1
    engine.drain()


# -- scores -------------------------------------------------------------------------------------------------


@LOOPS
def test_a_score_computes_the_prompt_and_samples_nothing(overlap: bool):
    engine = HostEngine(Limits(max_num_batched_tokens=8, overlap=overlap))
    group = engine.submit(Ask(17, score=True))
    plans = [engine.step() for _ in range(3)]
    assert [chunks_of(plan) for plan in plans] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 1)]]
    assert not any(list(plan.sampling_rows()) for plan in plans)
    engine.drain()
    assert len(group.samples[0].tokens) == 17


# -- the overlapped loop ------------------------------------------------------------------------------------


def test_a_stop_token_is_found_one_step_late():
    ask = next(
        a for a in (Ask(3, 12, stop_below=150, seed=i) for i in range(99)) if 5 < len(alone(a)[0]) < 15
    )
    plain, late = run(Limits(), [ask]), run(Limits(overlap=True), [ask])
    assert plain.groups[0].tokens == late.groups[0].tokens
    assert plain.events["tokens of ended sequences"] == 0
    assert late.events["tokens of ended sequences"] == 1


@settings(max_examples=60, derandomize=True)
@given(
    asks=st.lists(
        st.builds(Ask, st.integers(1, 20), st.integers(1, 15), st.integers(1, 3), st.sampled_from((0, 200))),
        min_size=1,
        max_size=10,
    ),
    blocks=st.integers(9, 40),
)
def test_both_loops_give_the_same_tokens(asks: list[Ask], blocks: int):
    plain, late = (run(Limits(blocks, overlap=overlap), asks) for overlap in (False, True))
    assert [group.tokens for group in plain.groups] == [group.tokens for group in late.groups]


# -- failed steps -------------------------------------------------------------------------------------------


@LOOPS
def test_after_a_failed_step_all_is_computed_anew(overlap: bool):
    """The token of the step before it is kept, the failed one's is sampled again."""
    asks = [Ask(5, max_tokens=8, n=2), Ask(20, max_tokens=3), Ask(7, score=True)]
    limits = Limits(max_num_batched_tokens=16, overlap=overlap, fail_at=frozenset({0, 1, 4, 9}))
    assert run(limits, asks).events["failures"] == 4


# -- bookkeeping --------------------------------------------------------------------------------------------


def test_a_shared_token_is_stored_once():
    engine = HostEngine()
    engine.submit(Ask(10, max_tokens=9, n=3))
    engine.step()
    assert engine.scheduler.stored_tokens() == 10
    engine.step()
    # The full blocks are shared, the last one is each sample's own with two prompt tokens and one more.
    assert engine.scheduler.stored_tokens() == 8 + 3 * 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: setattr(s.running[0], "slot", s.running[1].slot), "slots"),
        (lambda s: s.free_slots.append(0), "slots"),
        (lambda s: s.running.reverse(), "out of order"),
        (lambda s: setattr(s.running[0], "state", State.WAITING), "should be running"),
        (lambda s: setattr(s.running[0], "computed", 99), "should be running"),
        (lambda s: setattr(s.waiting()[0], "slot", 3), "a waiting sequence owns"),
        (lambda s: setattr(s.waiting()[0], "computed", 1), "a waiting sequence owns"),
        (lambda s: setattr(s, "num_waiting", 5), "5 samples counted as waiting"),
        (lambda s: s._waiting.append(s._waiting[0]), "1 samples counted as waiting, 2 queued"),
        (lambda s: s.running[1].forks.extend(s.running * 9), "slots promised to forks"),
        (lambda s: s.allocator.release(list(s.running[0].blocks)), "refcount"),
    ],
)
def test_check_integrity_finds(damage, message: str):
    engine = HostEngine(Limits(max_num_seqs=2))
    for _ in range(3):
        engine.submit(Ask(3))
    engine.step()
    damage(engine.scheduler)
    with pytest.raises(AssertionError, match=message):
        engine.scheduler.check_integrity()


def test_a_promised_fork_ends_with_its_root_only() -> None:
    scheduler = Scheduler(BlockAllocator(8, 4), 4, 16)
    params = SamplingParams(max_tokens=2)
    root, fork = (Sequence([1] * 20, 20, params, 22, order) for order in range(2))
    root.forks = [fork]
    scheduler.add(root)
    scheduler.schedule()  # 16 of the prompt's 20 tokens
    with pytest.raises(AssertionError, match="finish its root"):
        scheduler.finish(fork)
    scheduler.finish(root)
    assert fork.state is State.FINISHED and scheduler.idle
    scheduler.check_integrity()


@pytest.mark.parametrize("held", [True, False])
def test_nothing_is_loaded_into_a_block_that_is_to_be_copied(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two samples that come back in one step the first copies a remembered block, and the second, swapped
    back, would get that block to load into, before the copy, were it not held."""
    if not held:

        def let_go(owner: Any, sequence: Sequence, plan: StepPlan) -> None:
            reuse.reuse(owner, sequence, plan)
            owner.allocator.release(plan.held)

        monkeypatch.setattr(scheduler, "reuse", let_go)
    limits = Limits(
        num_blocks=11, block_size=2, max_num_seqs=5, max_num_batched_tokens=64, preemption="swap",
        swap_slots=6, prefixes=PrefixCacheConfig(enabled=True), shared=False,
    )  # fmt: skip
    engine = HostEngine(limits)
    engine.submit(Ask(3, 13, seed=1))
    for _ in range(8):
        engine.step()
    engine.submit(Ask(4, 17, n=2, seed=1))
    if held:
        engine.drain()
    else:
        with pytest.raises(AssertionError, match=r"sample \d got"):
            engine.drain()
