"""The simulated engine takes the steps that an engine takes, whatever they last, and its clock holds them."""

import itertools
from typing import Any

import pytest

from moejax.core.config import EngineConfig, PrefixCacheConfig
from moejax.engine.core import Engine
from moejax.engine.requests.api import RequestMetrics, RequestOutput, SamplingParams
from moejax.engine.requests.output import OutputProcessor
from moejax.engine.requests.state import RequestState
from moejax.engine.scheduling.groups import scheduler_of
from moejax.engine.scheduling.policies import make_policy
from moejax.engine.scheduling.sequence import Sequence
from moejax.simulate.runner import simulated_engine
from moejax.simulate.step import Part, StepTime
from tests.plain.fake_runner import FakeRunner

BLOCKS, SIZE = 24, 4
CASES: dict[str, dict[str, Any]] = {
    "continuous": {},
    "chunks": {"max_num_batched_tokens": 8},
    "plain": {"overlap": False},
    "static": {"batching": "static"},
    "prefix": {"prefix_cache": PrefixCacheConfig(enabled=True, place="device")},
    # Under "slo" ranks move with the clock, so that durations decide over the order.
    **{name: {"policy": name} for name in ("priority", "sjf", "edf", "fair")},
}


def requests() -> list[RequestState]:
    """Returns requests of unequal lengths that begin alike, and together need more than all blocks."""
    made = []
    for number in range(12):
        prompt = [1 + i if i < 8 else 100 * number + i for i in range(5 + 3 * number % 17)]
        params = SamplingParams(max_tokens=2 + 7 * number % 19, ignore_eos=True)
        processor = OutputProcessor(0, params, None)
        metrics = RequestMetrics(0.0)
        output = RequestOutput(str(number), None, prompt, [processor.output], metrics)
        request = RequestState(output, [processor])
        length = len(prompt) + params.max_tokens
        request.attach([Sequence(list(prompt), len(prompt), params, length, number, identity=())])
        made.append(request)
    return made


def serve(engine: Engine) -> list[tuple[int, int, int]]:
    """Returns each step's prompt tokens, decodes and preemptions."""
    steps: list[tuple[int, int, int]] = []
    engine.on_step = lambda r: steps.append((r.prefill_tokens, r.decode_tokens, r.preempted))
    asked = requests()
    engine.add(asked)
    while engine.step():
        engine.scheduler.check_integrity()
    assert all(one.finished and len(one.output.outputs[0].token_ids) for one in asked)
    return steps


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_a_runner_that_computes(case: str, groups: int) -> None:
    changes = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "block_size": SIZE, **CASES[case]}
    config = EngineConfig(**changes)
    ticks = itertools.cycle([1e-3, 5e-2, 7e-4])
    engine, _, clock = simulated_engine(config, lambda plan: StepTime(next(ticks), ()), BLOCKS, groups=groups)
    scheduler = scheduler_of(
        config,
        BLOCKS,
        groups=groups,
        policy=make_policy(config, clock=lambda: 0.0),
        prefixes=config.prefix_cache,
    )
    truth = serve(Engine(scheduler, FakeRunner(BLOCKS, SIZE), overlap=config.overlap, clock=lambda: 0.0))
    assert serve(engine) == truth
    if case == "continuous" and groups == 1:
        assert sum(preempted for *_, preempted in truth) > 0 and clock.now > 0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_s_duration_is_between_its_tokens(overlap: bool) -> None:
    config = EngineConfig(max_num_seqs=6, max_num_batched_tokens=64, block_size=SIZE, overlap=overlap)
    seconds = itertools.count(1)
    engine, runner, clock = simulated_engine(
        config, lambda plan: StepTime(s := float(next(seconds)), (Part("host", "roofline", s),)), 100
    )
    (asked,) = requests()[1:2]
    engine.run([asked])
    times = asked.output.metrics.token_times
    assert times == [1.0, *(n * (n + 1) / 2 for n in range(2, len(times) + 1))]
    assert runner.parts["host", "roofline"] >= times[-1] and clock.now >= times[-1]


def test_a_duration_that_cannot_be_told_is_kept() -> None:
    def broken(plan: Any) -> StepTime:
        raise ValueError("no table")

    engine, runner, _ = simulated_engine(EngineConfig(block_size=SIZE), broken, 100)
    engine.add(requests()[:1])
    engine.step()
    assert isinstance(runner.error, ValueError)
