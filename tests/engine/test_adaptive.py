"""Limits follow a target on machines whose steps take what a formula says, and change no token."""

import dataclasses
import itertools
from random import Random
from typing import Any, NamedTuple

import pytest

from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.core.scheduling import AdaptiveBatchingConfig
from moejax.engine.llm import LLM
from moejax.engine.scheduling.adaptive import METHODS, AdaptiveBatching, Fitted
from moejax.engine.stats import StepRecord
from moejax.engine.step.buckets import Buckets
from tests.engine.asks import Ask
from tests.engine.host_engine import LOOPS, HostEngine, Limits
from tests.engine.paged import greedy, prompt, tight, tokens
from tests.engine.tiny import small_config

by_method = pytest.mark.parametrize("method", METHODS)
TARGET_MS = 10.0
ENGINE = EngineConfig(max_num_seqs=64, max_num_batched_tokens=512)


def adaptive(method: str = "fitted", **fields: Any) -> AdaptiveBatchingConfig:
    given = {"enabled": True, "method": method, "target_itl_ms": TARGET_MS} | fields
    return AdaptiveBatchingConfig(**given)


class Coefficients(NamedTuple):
    """Milliseconds: of any step, of a prompt token, of a row."""

    a: float
    b: float
    c: float


# 16 rows take 8.4 ms alone and 13.5 with 128 tokens.
MACHINE = Coefficients(2.0, 0.04, 0.4)


class Machine:
    """Fills the running limit in all steps and the prompts' in every other one; a step takes what its buckets
    cost, with noise, and one of a hundred ten times that."""

    def __init__(self, config: AdaptiveBatchingConfig, costs: Coefficients = MACHINE, seed: int = 0) -> None:
        engine = dataclasses.replace(ENGINE, adaptive_batching=config)
        self.buckets = Buckets.of(engine, num_blocks=256)
        self.controller = METHODS[config.method](config, lambda: self.buckets)
        self.costs, self._random = costs, Random(seed)
        self.limits: list[tuple[int, int]] = []

    def time_ms(self, rows: int, tokens: int) -> float:
        a, b, c = self.costs
        return a + b * self.buckets.tokens_for(tokens) + c * self.buckets.rows_for(rows, tokens)

    def run(self, steps: int) -> list[tuple[int, int]]:
        """Returns both limits after each step."""
        for step in range(steps):
            rows, tokens = self.controller.running, self.controller.prefill if step % 2 else 0
            ms = self.time_ms(rows, tokens) * self._random.lognormvariate(0.0, 0.05)
            ms *= 10 if self._random.random() < 0.01 else 1
            self.controller.observe(ms / 1e3, rows, tokens, rows)
            self.limits.append((self.controller.running, self.controller.prefill))
            assert self.controller.running in self.buckets.rows
            assert self.controller.prefill in self.buckets.tokens
        return self.limits[-steps:]


@by_method
@pytest.mark.parametrize("start", [1, 16, 64])
def test_limits_settle_within_the_band_and_stay(method: str, start: int) -> None:
    """The mean of all steps does, and those with prompts take no longer than their slack allows."""
    machine = Machine(adaptive(method, start=start, start_tokens=8 * start))
    machine.run(1500)
    late = machine.run(1500)
    times = [(machine.time_ms(running, 0), machine.time_ms(running, prefill)) for running, prefill in late]
    assert sum(0.8 < (a + b) / 2 / TARGET_MS < 1.2 for a, b in times) > 0.95 * len(times)
    assert sum(b < 1.2 * 2.0 * TARGET_MS for _, b in times) > 0.95 * len(times)


@by_method
def test_equal_steps_give_equal_limits(method: str) -> None:
    assert Machine(adaptive(method)).run(500) == Machine(adaptive(method)).run(500)


@by_method
def test_limits_follow_a_machine_that_changes(method: str) -> None:
    """Down within a history of steps after it became slow, and up again after it became fast."""
    machine = Machine(adaptive(method))
    before = machine.run(1000)[-1]
    machine.costs = Coefficients(*(4 * x for x in MACHINE))
    assert machine.run(200)[-1] < before
    slow = machine.run(300)[-1]
    assert slow[0] < before[0]
    assert machine.time_ms(slow[0], 0) <= 1.2 * TARGET_MS
    machine.costs = MACHINE
    assert before[0] in {running for running, _ in machine.run(1500)}


def test_fitted_finds_the_coefficients() -> None:
    controller = Machine(adaptive(target_itl_ms=30.0)).controller
    assert isinstance(controller, Fitted)
    random, machine = Random(1), Machine(adaptive(target_itl_ms=30.0), Coefficients(2.0, 0.02, 0.2))
    for _ in range(400):
        rows, size = random.choice(machine.buckets.rows), random.choice((0, *machine.buckets.tokens))
        controller.observe(machine.time_ms(rows, size) / 1e3 * random.uniform(0.99, 1.01), rows, size, rows)
    assert [1e3 * x for x in controller.coefficients] == pytest.approx([2.0, 0.02, 0.2], rel=0.1)


@by_method
def test_the_smallest_buckets_are_always_allowed(method: str) -> None:
    """On a machine that never reaches the target."""
    machine = Machine(adaptive(method), Coefficients(100.0, 1.0, 1.0))
    assert machine.run(500)[-1] == (1, 16)


@by_method
def test_nothing_moves_without_evidence(method: str) -> None:
    """Steps in smaller buckets than the limits', and steps that nobody waits for."""
    machine = Machine(adaptive(method))
    controller, before = machine.controller, (machine.controller.running, machine.controller.prefill)
    for _ in range(300):
        controller.observe(0.001, 3, 0, 3)
        controller.observe(0.001, 4, 9, 3)
        controller.observe(1.0, 16, 128, 0)
    assert (controller.running, controller.prefill) == before == (16, 128)


def test_limits_move_over_the_buckets_that_a_warm_up_leaves() -> None:
    config = dataclasses.replace(ENGINE, adaptive_batching=adaptive(), token_buckets=[64, 512])
    whole, machine = Buckets.of(config, 256), Machine(adaptive())
    assert whole.thinned(config, 512).rows == (1, 4, 16, 64) and whole.rows == (1, 4, 16, 64)
    machine.buckets = whole
    machine.controller.refresh()
    assert machine.controller.prefill == 64


@pytest.mark.parametrize(
    "fields, line",
    [
        ({"method": "aimed"}, "engine.adaptive_batching.method"),
        ({"target_itl_ms": 0.0}, "engine.adaptive_batching.target_itl_ms"),
        ({"sizes": [4, 1]}, "engine.adaptive_batching.sizes"),
        ({"upper": 0.9}, "engine.adaptive_batching.upper"),
        ({"history": 5}, "engine.adaptive_batching.history=5 is below least=10; raise it or lower least"),
        ({"longest": 1.1}, "engine.adaptive_batching.longest=1.1 is below upper=1.2"),
    ],
)
def test_a_wrong_constant_is_one_line(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AdaptiveBatchingConfig(**fields)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_static_batching_refuses_it() -> None:
    with pytest.raises(
        ConfigError, match=r"^engine.adaptive_batching.enabled=true does not go with engine\.b"
    ):
        EngineConfig(batching="static", adaptive_batching=adaptive())


# -- the scheduler's live limits -----------------------------------------------------------------------------


@LOOPS
def test_a_lowered_limit_preempts_nobody(overlap: bool) -> None:
    """Nobody is admitted until enough have ended; one request of more samples then runs alone."""
    engine = HostEngine(Limits(max_num_seqs=4, overlap=overlap))
    first = [engine.submit(Ask(3, max_tokens)) for max_tokens in (6, 8, 12)]
    engine.step_until(lambda: len(engine.scheduler.running) == 3)
    engine.scheduler.most_running = 2
    later, group = engine.submit(Ask(3)), engine.submit(Ask(3, 4, n=3))
    engine.step_until(lambda: later.samples[0].computed)
    assert [each.live for each in first] == [False, False, True]
    engine.step_until(lambda: group.samples[0].computed)
    assert not any(each.live for each in (*first, later))
    engine.drain()
    assert engine.events["preemptions"] == 0


def test_prompts_beside_decodes_keep_to_their_budget() -> None:
    engine = HostEngine(Limits(max_num_batched_tokens=32))
    engine.scheduler.most_prefill = 5
    engine.submit(Ask(20, 12))
    plan = engine.step()
    assert plan is not None and plan.chunk_tokens == 20  # nobody waits
    engine.submit(Ask(12))
    beside = []
    while not engine.idle:
        plan = engine.step()
        beside += [plan.chunk_tokens] if plan is not None and plan.decodes else []
    assert beside[:4] == [5, 5, 2, 0]


# -- real engines --------------------------------------------------------------------------------------------


class Mover:
    """In a controller's place: goes through all pairs of limits, three steps each."""

    def __init__(self, buckets: Buckets) -> None:
        pairs = itertools.product(buckets.rows, buckets.tokens)
        self._pairs = itertools.cycle([pair for pair in pairs for _ in range(3)])
        self.running, self.prefill = next(self._pairs)

    def observe(self, *step: Any) -> None:
        self.running, self.prefill = next(self._pairs)

    def stats(self) -> dict[str, int]:
        return {"most_running": self.running, "most_prefill": self.prefill}


MOVING = tight(max_num_batched_tokens=16, seq_buckets=[2, 4], token_buckets=[4, 16], strict_compile=True)


@pytest.fixture(scope="module")
def warm(bare_llm: LLM) -> LLM:
    llm = bare_llm.variant(dataclasses.replace(MOVING, adaptive_batching=adaptive()))
    llm.warmup(max_total_len=32)
    return llm


@LOOPS
def test_tokens_do_not_depend_on_the_limits(bare_llm: LLM, warm: LLM, overlap: bool) -> None:
    """Whatever they are in a step, and with nothing left to compile after a warm-up."""
    config = dataclasses.replace(MOVING, overlap=overlap, adaptive_batching=adaptive(start=2, start_tokens=4))
    prompts, params = [prompt(n, 5) for n in (9, 21, 1, 16, 2, 11)], [greedy(n) for n in (9, 3, 8, 5, 7, 4)]
    wanted = tokens(bare_llm.generate(prompts, params))
    llm = warm.variant(config)
    llm.warmup(max_total_len=32)
    steps: list[StepRecord] = []
    llm.engine.on_step = steps.append
    assert tokens(llm.generate(prompts, params)) == wanted
    assert (llm.stats()["most_running"], llm.stats()["most_prefill"]) in itertools.product((2, 4), (4, 16))
    mover: Any = Mover(llm.runner.buckets)
    llm.engine.adapt(mover)
    steps.clear()
    assert tokens(llm.generate(prompts, params)) == wanted
    assert len({(step.most_running, step.most_prefill) for step in steps}) == 4
    assert not llm.ledger.recompiles


@LOOPS
def test_compilation_is_no_latency(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """Neither the step that was compiled is fed to the controller, nor one that was in flight meanwhile."""
    config = dataclasses.replace(MOVING, overlap=overlap, strict_compile=False, adaptive_batching=adaptive())
    llm = LLM(small_config(), load_format="dummy", engine=config)
    records: list[StepRecord] = []
    fed: list[float] = []
    entries: list[int] = []
    controller = llm.engine.adaptive
    assert isinstance(controller, AdaptiveBatching)
    llm.engine.on_step = records.append
    monkeypatch.setattr(controller, "observe", lambda seconds, *rest: fed.append(seconds))
    monkeypatch.setattr(llm.runner, "ready", lambda handle: False)  # all are read after the next launch
    launch = llm.runner.launch

    def watched(plan: Any) -> Any:
        handle = launch(plan)
        entries.append(len(llm.ledger.entries))
        return handle

    monkeypatch.setattr(llm.runner, "launch", watched)
    llm.generate([prompt(4), prompt(3), prompt(5)], [greedy(n) for n in (5, 5, 9)])  # 4 rows, then 2
    new = [after > before for before, after in itertools.pairwise([0, *entries])]
    slow = [mine or (overlap and next_) for mine, next_ in itertools.pairwise([*new, False])]
    assert [record.compiled for record in records] == slow and any(new) and not all(slow)
    assert fed == pytest.approx([r.seconds for r in records if not r.compiled], abs=2e-9)


@pytest.mark.slow
def test_groups_share_a_controller(bare_llm: LLM) -> None:
    config = dataclasses.replace(MOVING, adaptive_batching=adaptive(start=2, start_tokens=4))
    parallel = ParallelConfig(ep=2, attention="data")
    prompts = [prompt(n, 5) for n in (9, 21, 1, 16, 2, 11)]
    plain = LLM(small_config(), load_format="dummy", engine=dataclasses.replace(MOVING), parallel=parallel)
    llm = LLM(small_config(), load_format="dummy", engine=config, parallel=parallel)
    mover: Any = Mover(llm.runner.buckets)
    llm.engine.adapt(mover)
    assert tokens(llm.generate(prompts, greedy(8))) == tokens(plain.generate(prompts, greedy(8)))
    assert {part.most_running for part in llm.engine._parts} == {mover.running}


@pytest.mark.slow
@by_method
def test_a_real_engine_gives_the_same_tokens(llm: LLM, method: str) -> None:
    """With a target that cannot be met, one that is always met, and one between."""
    prompts = [prompt(n, 7) for n in (40, 3, 17, 50, 9, 1, 30, 5)]
    engine = EngineConfig(compile_cache=False, token_buckets=[16, 64], block_buckets=[16], max_num_seqs=8)
    wanted = tokens(llm.generate(prompts, greedy(12)))
    for target in (0.001, 1.0, 1e4):
        moving = adaptive(method, target_itl_ms=target, sizes=[1, 2, 4], start=2, least=2)
        other = llm.variant(dataclasses.replace(engine, adaptive_batching=moving))
        assert tokens(other.generate(prompts, greedy(12))) == wanted
