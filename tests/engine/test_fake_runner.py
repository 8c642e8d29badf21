"""The fake runner must be a fair witness: the same tokens however a request is cut up, others if its cache is
damaged."""

import pytest

from moejax.engine.requests.api import SamplingParams
from moejax.engine.scheduling.plan import Chunk, StepPlan
from moejax.engine.scheduling.sequence import Sequence
from tests.engine.asks import Ask
from tests.engine.host_engine import HostEngine, Limits, alone
from tests.plain.fake_runner import FakeRunner


def _sequence(blocks: list[int], prompt_len: int = 6, slot: int = 0, seed: int = 0) -> Sequence:
    sequence = Sequence(list(range(prompt_len)), prompt_len, SamplingParams(), prompt_len + 9, order=slot)
    sequence.blocks, sequence.slot, sequence.seed = blocks, slot, seed
    return sequence


def _prompt(sequence: Sequence, start: int = 0, count: int | None = None) -> StepPlan:
    """The plan of a prompt or a part of it, as the scheduler leaves the sequence."""
    count = sequence.prompt_len - start if count is None else count
    sequence.computed = start + count
    last = sequence.computed == sequence.prompt_len
    sequence.pending += last
    return StepPlan(chunks=[Chunk(sequence, start, count, last)], forks=[[]])


def _decode(sequence: Sequence, copies: tuple[tuple[int, int], ...] = ()) -> StepPlan:
    position = sequence.computed
    sequence.computed += 1
    sequence.pending += 1
    return StepPlan(decodes=[sequence], positions=[position], copies=list(copies))


def _tokens(runner: FakeRunner, *plans: StepPlan) -> list[int]:
    return [runner.collect(runner.launch(plan)).tokens[0] for plan in plans]


def test_tokens_are_deterministic_and_in_range():
    drawn = [FakeRunner(4, 4, vocab_size=7).launch(_prompt(_sequence([0, 1]))).tokens for _ in range(2)]
    assert drawn[0] == drawn[1] and 0 <= drawn[0][0] < 7


def test_blocks_slots_and_chunks_do_not_matter():
    whole, parts = _sequence([0, 1]), _sequence([3, 2], slot=5)
    expected = _tokens(FakeRunner(4, 4), _prompt(whole))
    runner = FakeRunner(4, 4)
    assert _tokens(runner, _prompt(parts, 0, 5), _prompt(parts, 5)) == [0, *expected]


def test_prompt_seed_and_length_do_matter():
    prompts = [_sequence([0, 1]), _sequence([0, 1], prompt_len=7), _sequence([0, 1], seed=1)]
    tokens = [FakeRunner(4, 4).launch(_prompt(sequence)).tokens[0] for sequence in prompts]
    assert len(set(tokens)) == 3


def test_a_pending_token_is_read_from_its_slot():
    """Decoding from the device's token and from the host's copy of it are the same."""
    results = []
    for host in (False, True):
        sequence, runner = _sequence([0, 1], slot=2), FakeRunner(4, 4)
        first = _tokens(runner, _prompt(sequence))
        if host:
            sequence.tokens += first
            sequence.pending = 0
        results.append(_tokens(runner, _decode(sequence)))
    assert results[0] == results[1]


@pytest.mark.parametrize("position", range(6))
def test_a_write_into_anothers_block_is_seen_however_far_back(position: int):
    results = []
    for damaged in (False, True):
        sequence, runner = _sequence([0, 1]), FakeRunner(4, 4)
        runner.launch(_prompt(sequence))
        if damaged:
            runner._groups[0]._cache[position // 4][position % 4] = 12345
        results.append(_tokens(runner, _decode(sequence)))
    assert results[0] != results[1]


def test_a_missed_copy_is_seen():
    for copies, error in (([(1, 2)], False), ([], True)):
        sequence, runner = _sequence([0, 1]), FakeRunner(4, 4)
        runner.launch(_prompt(sequence))
        sequence.blocks = [0, 2]
        plan = _decode(sequence, tuple(copies))
        if error:
            with pytest.raises(AssertionError, match="which was never written"):
                runner.launch(plan)
        else:
            runner.launch(plan)


def test_a_position_that_was_never_written_is_an_error():
    sequence = _sequence([0, 1])
    sequence.computed = 4
    with pytest.raises(AssertionError, match="reads position 3, which was never written"):
        FakeRunner(4, 4).launch(_prompt(sequence, 4))


def test_a_block_beyond_the_pool_is_an_error():
    with pytest.raises(AssertionError, match="block 4 does not exist"):
        FakeRunner(4, 4).launch(_prompt(_sequence([0, 4])))


def test_it_fails_where_it_is_told_to():
    runner = FakeRunner(4, 4, fail_at=frozenset({1}))
    sequence = _sequence([0, 1])
    runner.launch(_prompt(sequence))
    with pytest.raises(RuntimeError, match="step 1 fails on purpose"):
        runner.launch(_decode(sequence))
    assert runner.launches == 2


def test_reset_forgets_the_cache():
    runner, sequence = FakeRunner(4, 4), _sequence([0, 1])
    runner.launch(_prompt(sequence))
    runner.reset()
    with pytest.raises((AssertionError, KeyError)):
        runner.launch(_decode(sequence))


def test_the_oracle_does_not_depend_on_the_engine():
    """`alone` against the definition written out: hashes of hashes, sampled over all of them."""
    ask = Ask(6, max_tokens=5, n=2, first=3, seed=8)
    for sample, got in enumerate(alone(ask)):
        tokens, held = list(range(3, 9)), []
        while len(tokens) < 11:
            while len(held) < len(tokens):
                held.append(hash((held[-1] if held else 0, tokens[len(held)])))
            tokens.append(hash((hash(tuple(held)), 8 + sample, len(tokens) - 6)) % 1000)
        assert tuple(tokens) == got


def test_the_engine_checks_a_plan_before_it_runs():
    """`HostEngine` is a witness too: two writers of one block are caught before any token is wrong."""
    engine = HostEngine(Limits())
    group = engine.submit(Ask(6, max_tokens=4, n=2))
    engine.step()
    engine.allocator.append = lambda table, position: None
    with pytest.raises(AssertionError, match="writes a shared block"):
        engine.step()
    assert group.live
