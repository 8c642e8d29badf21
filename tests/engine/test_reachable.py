"""Warm-up compiles what `Buckets.reachable` lists: no workload within its maxima may build another shape."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.cache.allocator import BlockAllocator
from moejax.core.config import EngineConfig
from moejax.engine.requests.api import SamplingParams
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.sequence import Sequence
from moejax.engine.scheduling.static import StaticScheduler
from moejax.engine.step.batch import BatchBuilder
from moejax.engine.step.buckets import Buckets
from moejax.engine.step.limits import Limits
from moejax.engine.step.sampler import SamplerMode
from tests.engine.tiny import PROPERTY
from tests.examples import examples
from tests.plain.fake_runner import FakeRunner


@dataclass
class Workload:
    """Requests (prompt, output, samples, step of arrival) and an engine's limits."""

    requests: list[tuple[int, int, int, int]]
    config: EngineConfig
    num_blocks: int
    stop_below: int = 0
    thinned: bool = False
    events: Counter[str] = field(default_factory=Counter)

    @property
    def maxima(self) -> tuple[int, int, int]:
        """Longest prompt, longest request, largest n of what can run."""
        prompts, totals, samples = zip(*((p, p + o, n) for p, o, n, _ in self.requests), strict=True)
        return max(prompts), max(totals), max(samples)

    @property
    def buckets(self) -> Buckets:
        buckets = Buckets.of(self.config, self.num_blocks)
        return buckets.thinned(self.config, self.maxima[1]) if self.thinned else buckets


def sequences(prompt: int, output: int, n: int, order: int, stop_below: int) -> Sequence:
    samples = [
        Sequence(
            tokens=list(range(prompt)),
            prompt_len=prompt,
            params=SamplingParams(),
            max_length=prompt + output,
            order=order + i,
            seed=order + i,
            stop_ids=range(stop_below),
            mode=SamplerMode(),
        )
        for i in range(n)
    ]
    samples[0].forks = samples[1:]
    return samples[0]


def built_keys(workload: Workload) -> set[tuple[int, int, int, int]]:
    """(rows, tokens, segments, owners) of every step of the overlapped loop."""
    config, num_blocks = workload.config, workload.num_blocks
    kind = StaticScheduler if config.batching == "static" else Scheduler
    allocator = BlockAllocator(num_blocks, config.block_size)
    scheduler = kind(allocator, config.max_num_seqs, config.max_num_batched_tokens)
    buckets = workload.buckets
    width = -(-workload.maxima[1] // config.block_size)
    limits = Limits(config.max_num_seqs, config.block_size, width, buckets.segments.ends)
    builder = BatchBuilder(buckets, limits)
    runner = FakeRunner(num_blocks, config.block_size, vocab_size=50)
    arrivals = sorted(enumerate(workload.requests), key=lambda entry: entry[1][3])
    keys, step, flight = set(), 0, None
    while True:
        while arrivals and (arrivals[0][1][3] <= step or (scheduler.idle and flight is None)):
            index, (prompt, output, n, _) = arrivals.pop(0)
            scheduler.add(sequences(prompt, output, n, 100 * index, workload.stop_below))
        plan = scheduler.schedule()
        if plan is None and flight is None:
            assert scheduler.idle
            if not arrivals:
                return keys
            continue
        launched = None
        if plan is not None:
            key, buffer = builder.build(plan)
            assert buffer.size and key.tokens >= plan.chunk_tokens and key.rows >= len(plan.sequences)
            keys.add((key.rows, key.tokens, buckets.segments_for(key.blocks), key.owners))
            workload.events["preempted"] += plan.preempted
            workload.events["copies"] += len(plan.copies)
            launched = plan, runner.launch(plan)
        if flight is not None:
            scheduler.postprocess(flight[0], runner.collect(flight[1]).tokens)
        flight, step = launched, step + 1


def listed(workload: Workload) -> set[tuple[int, int, int]]:
    _, total, samples = workload.maxima
    samples = min(samples, workload.config.max_num_seqs)
    return set(workload.buckets.reachable(total, workload.config.block_size, samples))


def draw(seed: int, batching: str) -> Workload:
    rng = np.random.default_rng(seed)
    block = int(rng.choice([1, 2, 4, 16]))
    slots = int(rng.choice([1, 2, 5, 8, 20]))
    longest = int(rng.choice([3, 12, 40]))
    most = int(rng.integers(1, slots + 1)) if rng.random() < 0.5 else 1
    least = -(-(2 * longest) // block) * (most if batching == "static" else 1)
    num_blocks = least + int(rng.integers(0, 2 * least + 8))
    requests = [
        (
            int(rng.integers(1, longest + 1)),
            int(rng.integers(1, longest + 1)),
            int(rng.integers(1, most + 1)),
            int(rng.integers(0, 30)),
        )
        for _ in range(int(rng.integers(1, 25)))
    ]
    config = EngineConfig(
        batching=batching,  # type: ignore[arg-type]
        max_num_seqs=slots,
        max_num_batched_tokens=slots + int(rng.choice([0, 3, 30, 200])),
        block_size=block,
        block_buckets=[[1, 2, 3, 5, 9, 17], [4], None][rng.integers(3)],
        seq_buckets=[None, [3, 4], [1, 2, 3, 4, 5, 6, 7]][rng.integers(3)],
    )
    stop_below = int(rng.choice([0, 8]))
    return Workload(requests, config, num_blocks, stop_below, thinned=bool(rng.random() < 0.5))


@pytest.mark.parametrize("batching", ["continuous", "static"])
@settings(PROPERTY, max_examples=examples(150))
@given(seed=st.integers(0, 2**30))
def test_every_step_is_listed(batching: str, seed: int) -> None:
    workload = draw(seed, batching)
    steps = built_keys(workload)
    missing = {key[:3] for key in steps} - listed(workload)
    assert not missing, (sorted(missing), workload)
    # Warm-up compiles every step for 1, 2, 4, … owners up to the largest n.
    assert {owners for *_, owners in steps} <= {
        1 << i for i in range((workload.maxima[2] - 1).bit_length() + 1)
    }


def test_the_workloads_preempt_and_copy() -> None:
    """Else the property above would not say much."""
    events: Counter[str] = Counter()
    for seed in range(60):
        workload = draw(seed, "continuous")
        built_keys(workload)
        events += workload.events
    assert events["preempted"] > 20 and events["copies"] > 20


def test_forks_need_no_block_of_their_own_at_first() -> None:
    """Eight samples of a prompt of one block: their first step has eight rows and reads one block."""
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=16, block_size=4, block_buckets=[1, 2, 4])
    workload = Workload([(3, 5, 8, 0)], config, num_blocks=24)
    assert (8, 16, 1, 1) in built_keys(workload)
    assert {key[:3] for key in built_keys(workload)} <= listed(workload)


def test_what_cannot_be_is_not_listed() -> None:
    """Rows need blocks, and a short workload neither reaches the last segment nor fills the largest chunk."""
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=512, block_size=4)
    buckets = Buckets.of(config, 128)
    short = list(buckets.reachable(8, 4))
    assert len(set(short)) == len(short)
    assert {segments for *_, segments in short} == {1, 2, 3} and buckets.segments.ends == (
        8,
        16,
        32,
        48,
        64,
        96,
        128,
    )
    assert max(tokens for _, tokens, _ in short) == 128
    assert {rows for rows, _, segments in short if segments == 1} == {1, 2, 4, 8}
    assert {rows for rows, _, segments in short if segments == 2} == {1, 2, 4, 8, 16}
    assert len(list(buckets.reachable(512, 4))) > len(short)
