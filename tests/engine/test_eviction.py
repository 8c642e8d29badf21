"""Policies that evict blocks, on the host: whatever else runs, and however often a sequence is preempted, its
queries see what the policy's definition says, and no block is lost."""

import random
from collections import Counter

import pytest

from moejax.cache.allocator import GONE, BlockAllocator, OutOfBlocks
from moejax.core.errors import RequestError
from moejax.core.scheduling import KvPolicyConfig
from moejax.engine.scheduling.eviction import FOREVER
from moejax.engine.scheduling.sequence import Sequence
from tests.engine.asks import Ask
from tests.engine.host_engine import LOOPS, HostEngine, Limits
from tests.examples import examples
from tests.plain.evicted import last_queries

METHODS = ("window", "h2o", "snapkv")
SIZE = 4


def policy(method: str, **changes: int) -> KvPolicyConfig:
    return KvPolicyConfig(**{"method": method, "sinks": 2, "recent": 5, "budget": 20, "observe": 6} | changes)


def defined(engine: HostEngine, sequence: Sequence, root: Sequence, given: KvPolicyConfig) -> list[int]:
    """The last query of each block by the definition, from what each query told: the prompt's queries, which
    forks share, told it as the root's."""
    begin, end = sequence.prompt_len, len(sequence.tokens) - 1
    orders = [(root if p < begin else sequence).order for p in range(end)]
    told = [engine.runner.told.get((order, p), {}) for p, order in enumerate(orders)]
    return last_queries(given, engine.allocator.block_size, begin, told, end)


@LOOPS
@pytest.mark.parametrize("method", METHODS)
def test_one_request(method: str, overlap: bool) -> None:
    """It holds as many blocks as its policy says, and its queries see what the definition says."""
    given = policy(method)
    engine = HostEngine(Limits(overlap=overlap, max_num_batched_tokens=9, kv_policy=given))
    group = engine.submit(Ask(26, 40, n=2, score=False))
    held = []
    while not engine.idle:
        engine.step()
        held.append([sum(block != GONE for block in s.blocks) for s in group.samples])
    engine.drain()
    for sample in group.samples if method != "window" else ():
        want = defined(engine, sample, group.samples[0], given)
        got = [last if last < len(sample.tokens) - 2 else FOREVER for last in sample.kept.last_query]
        assert got == want[: len(got)] and min(got) < FOREVER
    # A prompt of 7 blocks; 5 of them stay, or 1 and those of the last 5 tokens, and snapkv keeps the output.
    expected = {"window": 1 + 2, "h2o": 5, "snapkv": 5 + 64 // 4 - 7}[method]
    assert max(held[-2]) in (expected, expected + 1) and max(held[0]) == 7


@pytest.mark.parametrize("method", METHODS)
def test_random_workloads(method: str) -> None:
    """Memory is short, requests are aborted, steps fail: samples get what they get alone."""
    events = Counter[str]()
    for seed in range(examples(48)):
        chance = random.Random(seed)
        size, seqs = chance.randint(1, 6), chance.randint(1, 6)
        recent, sinks = chance.randint(1, 40 if method == "window" else 9), chance.randint(0, 5)
        stay = -(-sinks // size) + -(-(recent - 1) // size) + 1
        given = policy(method, recent=recent, sinks=sinks, budget=size * (stay + chance.randint(1, 3)))
        limits = Limits(
            num_blocks=-(-64 // size) + chance.randint(0, 9), block_size=size, max_num_seqs=seqs,
            max_num_batched_tokens=max(seqs + chance.randint(0, 20), given.observe),
            overlap=chance.random() < 0.6,
            window=chance.choice((None, None, 3)), fail_at=frozenset(chance.sample(range(200), 2)),
            kv_policy=given,
        )  # fmt: skip
        engine = HostEngine(limits, events=events)
        for _ in range(chance.randint(4, 10)):
            n, stop = chance.choice((1, 1, 2, 3)), chance.choice((0, 0, 40))
            ask = Ask(chance.randint(1, 24), chance.randint(1, 40), n, stop, False, chance.randint(0, 2))
            try:
                engine.submit(ask)
            except RequestError:
                assert n > seqs
            for _ in range(chance.randint(0, 25)):
                engine.step()
        live = [group for group in engine.groups if group.live]
        if live:
            engine.abort(chance.choice(live))
        engine.submit(Ask(20, score=True))
        engine.drain()
    wanted = ("blocks evicted", "chunked prompts", "copies", "failures", "forks", "preemptions")
    assert all(events[name] for name in wanted), events


def test_a_prompt_that_is_scored_is_never_judged() -> None:
    engine = HostEngine(Limits(kv_policy=policy("h2o")))
    group = engine.submit(Ask(60, score=True))
    engine.drain()
    assert group.samples[0].kept is None and not engine.events["blocks evicted"]


def test_what_was_asked_is_not_counted_twice() -> None:
    """A prompt that is preempted while its chunk is in flight tells each query's attention once."""
    given = policy("h2o")
    engine = HostEngine(Limits(overlap=True, max_num_batched_tokens=9, kv_policy=given))
    group = engine.submit(Ask(26, 30))
    (sample,) = group.samples
    for chunks in range(1, 6):
        engine.step()
        if chunks in (2, 4):
            engine.scheduler.preempt(sample)
            engine._stored[sample.order] = 0
    while not engine.idle:
        engine.step()
    told = [engine.runner.told[sample.order, p] for p in range(len(sample.tokens) - 1)]
    total = [sum(each.get(block, 0) for each in told) for block in range(14)]
    sample.kept.settle()
    assert sample.kept.mass[:14].tolist() == total
    engine.check_outputs()


def test_blocks_in_the_middle_come_back() -> None:
    allocator, table = BlockAllocator(6, 4), []
    allocator.grow(table, 20)
    fork = allocator.fork(table)
    allocator.leave_behind(table, 19, 6, sinks=3)
    assert table == [0, GONE, GONE, 3, 4] and allocator.num_free == 1
    allocator.leave_behind(fork, 19, 6, sinks=9)
    assert fork == [0, 1, 2, 3, 4]
    allocator.give_up(fork, 1)
    allocator.give_up(fork, 1)
    allocator.check_integrity([table, fork])
    assert allocator.num_free == 2 and allocator.refcount(GONE) == 0
    assert allocator.grow(table, 28) == [1, 5]
    with pytest.raises(OutOfBlocks):
        allocator.grow(table, 32)
    allocator.release(table)
    allocator.release(fork)
    assert allocator.num_free == 6
