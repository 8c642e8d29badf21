"""Adaptive batching against fixed limits on a machine in virtual time: the real scheduler and controller at a
rate that steps up and down, with long prompts among short ones. Wall-clock figures are the experiment's."""

import dataclasses
import functools
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

from moejax.bench.traffic import Lengths, PlannedRequest, RequestKind, ThroughputWorkload, plan_requests
from moejax.cache.allocator import BlockAllocator
from moejax.core.config import EngineConfig
from moejax.core.scheduling import AdaptiveBatchingConfig
from moejax.engine.scheduling.adaptive import METHODS
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.step.buckets import Buckets
from tests.engine.asks import Ask
from tests.plain.fake_runner import FakeRunner

BLOCKS, BLOCK = 400, 32
ENGINE = EngineConfig(max_num_seqs=64, max_num_batched_tokens=1024, block_size=BLOCK)
# Milliseconds of a step, of a prompt token and of a row, about those of the shipped model on two quiet cores.
STEP, TOKEN, ROW = 1.0, 0.08, 0.13
TTFT_S, TPOT_S = 0.5, 0.006
TRAFFIC = ThroughputWorkload(
    num_requests=600,
    request_rate=40.0,
    rate_steps=(1, 3),
    rate_step_s=1.0,
    mix={
        "chat": RequestKind(share=30, prompt_len=16, output_len=Lengths(16, 48)),
        "document": RequestKind(share=1, prompt_len=Lengths(600, 900), output_len=8),
    },
)


class Served(NamedTuple):
    """Requests a second within both objectives, and all gaps between two tokens, in seconds."""

    goodput: float
    gaps: list[float]

    @property
    def p99_itl(self) -> float:
        return float(np.percentile(self.gaps, 99))


@functools.cache
def plan() -> list[PlannedRequest]:
    return plan_requests(TRAFFIC, vocab_size=100)


def serve(config: EngineConfig, noise: Callable[[float], float] = lambda now: 1.0) -> Served:
    """Serves the traffic; each step takes what its buckets cost, times the noise at that instant."""
    scheduler = Scheduler(BlockAllocator(BLOCKS, BLOCK), config.max_num_seqs, config.max_num_batched_tokens)
    runner, buckets, moving = FakeRunner(BLOCKS, BLOCK), Buckets.of(config, BLOCKS), config.adaptive_batching
    controller = METHODS[moving.method](moving, lambda: buckets) if moving.enabled else None
    now, coming, times = 0.0, list(enumerate(plan())), dict[int, list[float]]()
    while coming or not scheduler.idle:
        while coming and coming[0][1].arrival_s <= now:
            order, asked = coming.pop(0)
            scheduler.add(Ask(asked.prompt_len, asked.output_len, seed=order).sequence(order))
            times[order] = [asked.arrival_s]
        if controller is not None:
            scheduler.most_running, scheduler.most_prefill = controller.running, controller.prefill
        step = scheduler.schedule()
        if step is None:
            now = coming[0][1].arrival_s
            continue
        rows, tokens = len(step.sequences), step.chunk_tokens
        ms = STEP + TOKEN * buckets.tokens_for(tokens) + ROW * buckets.rows_for(rows, tokens)
        ms *= noise(now)
        now += ms / 1e3
        for _, sequence in scheduler.postprocess(step, runner.launch(step).tokens):
            times[sequence.order].append(now)
        if controller is not None:
            controller.observe(ms / 1e3, rows, tokens, len(step.decodes))
    ttft = [t[1] - t[0] for t in times.values()]
    tpot = [(t[-1] - t[1]) / (len(t) - 2) for t in times.values()]
    good = sum(a <= TTFT_S and b <= TPOT_S for a, b in zip(ttft, tpot, strict=True))
    return Served(good / now, [float(gap) for t in times.values() for gap in np.diff(t[1:])])


@functools.cache
def fixed(seqs: int, tokens: int) -> Served:
    return serve(dataclasses.replace(ENGINE, max_num_seqs=seqs, max_num_batched_tokens=tokens))


def shared(seed: int) -> Callable[[float], float]:
    """The noise of a machine that other work slows down for a quarter of a second now and then."""
    random, until, slow = Random(seed), 0.0, 1.0

    def noise(now: float) -> float:
        nonlocal until, slow
        if now >= until:
            until, slow = now + random.expovariate(4.0), random.choice((1.0, 1.0, 1.0, 1.5, 2.5))
        return slow * random.lognormvariate(0.0, 0.35) * (8 if random.random() < 0.01 else 1)

    return noise


FIXED = [(seqs, tokens) for seqs in (4, 8, 16, 32, 64) for tokens in (64, 128, 1024)]


def adapted(method: str) -> EngineConfig:
    """With a target of two thirds of the objective."""
    given: dict[str, Any] = {"method": method, "target_itl_ms": 4.0, "sizes": [4, 8, 16, 32, 64]}
    return dataclasses.replace(ENGINE, adaptive_batching=AdaptiveBatchingConfig(enabled=True, **given))


@pytest.mark.parametrize("method", METHODS)
def test_goodput_is_nearly_that_of_the_best_fixed_limits(method: str) -> None:
    """And the default's tail is cut."""
    served, best = serve(adapted(method)), max(fixed(*limits).goodput for limits in FIXED)
    default = fixed(64, 1024)
    assert served.goodput >= 0.95 * best > 2 * default.goodput
    assert served.p99_itl <= 0.2 * default.p99_itl


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_goodput_on_a_shared_machine(method: str) -> None:
    """Three draws of the noise together."""
    served, default = ([serve(c, shared(seed)) for seed in range(3)] for c in (adapted(method), ENGINE))
    assert sum(s.goodput for s in served) > 1.2 * sum(s.goodput for s in default)
    assert max(s.p99_itl for s in served) < 0.4 * min(s.p99_itl for s in default)
