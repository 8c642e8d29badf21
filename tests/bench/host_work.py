"""Times the host's work in a step without a model: schedule, build the batch, postprocess.

    python -m tests.bench.host_work      # a table on stderr, one line of JSON on stdout

In the plain loop the device waits for the host; in the overlapped loop host work is hidden only as long as it
takes less than a step. So it has limits of its own, apart from any model's speed. No step is computed: every
row samples token 0.
"""

import argparse
import json
import time
from collections.abc import Sequence as Row
from typing import Any

import numpy as np

from moejax.cache.allocator import BlockAllocator
from moejax.core.config import EngineConfig
from moejax.engine.requests.api import SamplingParams
from moejax.engine.scheduling.plan import StepPlan
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.sequence import Sequence
from moejax.engine.step.batch import BatchBuilder
from moejax.engine.step.buckets import Buckets
from moejax.engine.step.limits import Limits
from moejax.engine.step.sampler import SamplerMode
from moejax.report.tables import rows_table, stderr_console

PROMPT_LEN, OUTPUT_LEN = 48, 2
BLOCK_SIZE = 32
SLOTS = 256
"""Sequences that run at a time while a queue is worked off."""


class _Host:
    """Allocator, scheduler and batch builder, large enough that nothing is preempted."""

    def __init__(self, sequences: int, max_len: int) -> None:
        config = EngineConfig(
            max_num_seqs=sequences,
            max_num_batched_tokens=max(2048, sequences * PROMPT_LEN),
            block_size=BLOCK_SIZE,
        )
        per_sequence = -(-max_len // BLOCK_SIZE)
        # Admissions keep a hundredth of the pool free.
        num_blocks = (sequences + 1) * per_sequence * 102 // 100 + 1
        buckets = Buckets.of(config, num_blocks)
        self.max_len = max_len
        self.scheduler = Scheduler(
            BlockAllocator(num_blocks, BLOCK_SIZE), sequences, config.max_num_batched_tokens
        )
        self.builder = BatchBuilder(
            buckets, Limits(sequences, BLOCK_SIZE, per_sequence, buckets.segments.ends)
        )

    def sequence(self, order: int) -> Sequence:
        """A greedy request that runs to its full length."""
        prompt, params = list(range(PROMPT_LEN)), SamplingParams(temperature=0.0)
        return Sequence(prompt, PROMPT_LEN, params, self.max_len, order, seed=order, mode=SamplerMode())


def measure_steps(sequences: int, steps: int) -> dict[str, Any]:
    """Times `steps` steps in which every one of `sequences` decodes: a row of medians in microseconds."""
    host = _Host(sequences, PROMPT_LEN + steps + 1)
    scheduler, builder = host.scheduler, host.builder
    for order in range(sequences):
        scheduler.add(host.sequence(order))
    prompts = scheduler.schedule()
    assert prompts is not None and len(prompts.chunks) == sequences
    scheduler.postprocess(prompts, _tokens(prompts))
    laps = []
    for _ in range(steps):
        times = [time.perf_counter()]
        plan = scheduler.schedule()
        times.append(time.perf_counter())
        assert plan is not None and len(plan.decodes) == sequences
        builder.build(plan)
        times.append(time.perf_counter())
        tokens = _tokens(plan)
        times.append(time.perf_counter())
        scheduler.postprocess(plan, tokens)
        times.append(time.perf_counter())
        laps.append(times)
    schedule, build, _, postprocess = (np.median(np.diff(laps), axis=0) * 1e6).tolist()
    work = {"schedule_us": schedule, "postprocess_us": postprocess, "build_us": build}
    return {"sequences": sequences, **work}


def measure_queue(requests: int) -> dict[str, Any]:
    """Times queueing, scheduling and postprocessing a queue of `requests` at once, `SLOTS` of them at a time.

    What a request costs must not depend on how many wait behind it.
    """
    host = _Host(min(SLOTS, requests), PROMPT_LEN + OUTPUT_LEN)
    scheduler = host.scheduler
    queue = [host.sequence(order) for order in range(requests)]
    start = time.perf_counter()
    for sequence in queue:
        scheduler.add(sequence)
    seconds = time.perf_counter() - start
    while not scheduler.idle:
        start = time.perf_counter()
        plan = scheduler.schedule()
        seconds += time.perf_counter() - start
        assert plan is not None
        tokens = _tokens(plan)
        start = time.perf_counter()
        scheduler.postprocess(plan, tokens)
        seconds += time.perf_counter() - start
    return {"requests": requests, "us_per_request": seconds / requests * 1e6}


def _tokens(plan: StepPlan) -> list[int]:
    return [0] * len(plan.sequences)


def main(argv: Row[str] | None = None) -> None:
    """Command line; see the module's header."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.host_work", description="Times the host's work per engine step."
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256], help="running sequences")
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[1_000, 10_000], help="lengths of the queue"
    )
    parser.add_argument("--steps", type=int, default=200, help="steps timed for each")
    options = parser.parse_args(argv)
    steps = [measure_steps(sequences, options.steps) for sequences in options.sequences]
    queue = [measure_queue(requests) for requests in options.requests]
    console = stderr_console()
    console.print(rows_table(steps, "host work per decoding step (medians)"))
    console.print(rows_table(queue, "scheduling a queue"))
    print(json.dumps({"steps": steps, "queue": queue}))


if __name__ == "__main__":
    main()
