"""An `LLM` as far as serving's parts use it: the real loop and scheduler over a runner without a model."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

from moejax.core.config import EngineConfig, PrefixCacheConfig
from moejax.engine.core import Engine
from moejax.engine.requests.api import Logprob, RequestMetrics, RequestOutput, SamplingParams
from moejax.engine.requests.builder import roots_of
from moejax.engine.requests.output import OutputProcessor
from moejax.engine.requests.state import RequestState
from moejax.engine.routing.expert_counts import RoutingRecord
from moejax.engine.scheduling.groups import scheduler_of
from moejax.engine.scheduling.policies import make_policy
from moejax.engine.scheduling.sequence import Sequence
from moejax.engine.step.runner import StepResult
from tests.plain.fake_runner import FakeRunner

BLOCKS, SIZE = 48, 4
_numbers = itertools.count()


class TimedRunner(FakeRunner):
    """Each step takes a time by chance; `logprob` is what each row's token is told to have."""

    def __init__(self, *args: Any, seed: int = 0, **more: Any) -> None:
        super().__init__(*args, **more)
        self.now, self.chance, self.logprob = 100.0, random.Random(seed), None

    def collect(self, handle: StepResult) -> StepResult:
        self.now += self.chance.choice([1e-4, 3e-3, 0.02, 0.3])
        if self.logprob is None:
            return handle
        return handle._replace(logprobs=[Logprob(self.logprob, 1, {})] * len(handle.tokens))


def stub(fail_at: frozenset[int] = frozenset(), seed: int = 0, **changes: Any) -> Any:
    """Returns an object with `engine`, `runner` and `engine_config`; its clock is the runner's."""
    given = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "block_size": SIZE, **changes}
    prefixes = PrefixCacheConfig(enabled=True, place="device")
    config = EngineConfig(**given, prefix_cache=prefixes)
    runner = TimedRunner(BLOCKS, SIZE, fail_at=fail_at, seed=seed)
    policy = make_policy(config, clock=lambda: runner.now)
    scheduler = scheduler_of(config, BLOCKS, groups=1, policy=policy, prefixes=prefixes)
    engine = Engine(scheduler, runner, overlap=config.overlap, clock=lambda: runner.now)
    engine.retries = config.retries
    holder = SimpleNamespace(routing=RoutingRecord(2, 4), pools=())
    return SimpleNamespace(engine=engine, runner=holder, engine_config=config, clock=runner)


def request(llm: Any, prompt: list[int], max_tokens: int, n: int = 1) -> RequestState:
    """Returns a request that has come now."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n)
    builders = [OutputProcessor(index, params, None) for index in range(n)]
    metrics, number = RequestMetrics(llm.clock.now), next(_numbers)
    output = RequestOutput(str(number), None, prompt, [each.output for each in builders], metrics)
    state = RequestState(output, builders)
    length = len(prompt) + max_tokens
    samples = [
        Sequence(list(prompt), len(prompt), params, length, 100 * number + i, identity=()) for i in range(n)
    ]
    state.attach(roots_of(samples, llm.engine_config.max_num_seqs))
    return state


def serve(llm: Any) -> None:
    """Steps until nothing is left."""
    while llm.engine.step():
        pass
