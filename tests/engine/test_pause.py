"""What ends, holds or repeats requests from outside their tokens: time limits, pauses, retries. On the host
alone: the runner is a fake, and time passes where a test says so."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from moejax.cache.allocator import BlockAllocator
from moejax.core.errors import RequestError, StepError
from moejax.engine.core import Engine, PauseMode
from moejax.engine.requests.state import RequestState
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.static import StaticScheduler
from tests.engine.host_engine import LOOPS
from tests.engine.test_group_scheduler import grouped, request, tokens_of
from tests.plain.fake_runner import FakeRunner

SCHEDULERS: dict[str, Callable[[], Any]] = {
    "continuous": lambda: Scheduler(BlockAllocator(10, 4), 4, 8),
    "static": lambda: StaticScheduler(BlockAllocator(32, 4), 4, 8),
    "groups": lambda: grouped(2, blocks=16),
}
KINDS = pytest.mark.parametrize("kind", list(SCHEDULERS))


def build(kind: str, overlap: bool, *, retries: int = 0, fail_at: tuple[int, ...] = ()) -> Engine:
    scheduler = SCHEDULERS[kind]()
    blocks = scheduler.allocator.num_blocks
    runner = FakeRunner(blocks, 4, fail_at=frozenset(fail_at))
    engine = Engine(scheduler, runner, overlap=overlap)
    engine.retries = retries
    return engine


def workload() -> list[RequestState]:
    return [request(i, 5 + i, 9 + i % 3, n=1 + i % 3) for i in range(9)]


def whole() -> list[list[list[int]]]:
    asked = workload()
    engine = build("continuous", False)
    engine.run(asked)
    return tokens_of(asked)


def finish(engine: Engine) -> None:
    while engine.step():
        engine.scheduler.check_integrity()
    assert engine.scheduler.idle and engine.scheduler.allocator.num_used == 0


def reasons(asked: RequestState) -> list[str | None]:
    return [sample.finish_reason for sample in asked.output.outputs]


def streamed(asked: RequestState) -> list[list[int]]:
    return [
        [token for chunk in asked.chunks if chunk.index == i for token in chunk.token_ids]
        for i in range(len(asked.sequences))
    ]


# -- time limits -----------------------------------------------------------------------------------------


@KINDS
@LOOPS
def test_a_time_limit(kind: str, overlap: bool) -> None:
    """A step takes a second. Whoever is out of time ends before the next one, in any state, with the first of
    its tokens; the others do not notice; and the engine never says that it is idle too early."""
    asked, engine, want = workload(), build(kind, overlap), whole()
    clock = SimpleNamespace(now=0.0)
    engine.clock = lambda: clock.now
    limits = [None, 4.0, 1.5, None, 3.0, 2.0, None, 6.0, 1e300]
    for one, limit in zip(asked, limits, strict=True):
        for sequence in one.sequences:
            sequence.params = dataclasses.replace(sequence.params, max_time_s=limit)
        one.streams = True
    engine.on_step = lambda record: setattr(clock, "now", clock.now + 1.0)
    engine.add(asked)
    engine.run_until(lambda: all(one.finished for one in asked))
    finish(engine)
    ended = set()
    for one, limit, tokens in zip(asked, limits, want, strict=True):
        got = [sample.token_ids for sample in one.output.outputs]
        assert [tokens[i][: len(ids)] for i, ids in enumerate(got)] == got
        assert streamed(one) == got
        last = {chunk.index: chunk.finish_reason for chunk in one.chunks}
        assert [last[i] for i in range(len(got))] == reasons(one) and not one.output.error
        assert set(reasons(one)) <= ({"length"} if limit in (None, 1e300) else {"length", "time"})
        for reason, ids, all_ids in zip(reasons(one), got, tokens, strict=True):
            assert (reason == "length") == (ids == all_ids)
            ended |= {(reason, bool(ids))}
    assert ended >= {("time", True), ("time", False), ("length", True)}


def test_process_0_s_clock_decides() -> None:
    """Whatever this process's says."""
    said: list[int] = []
    theirs = iter([10_000_000, 11_000_000, 11_999_999, 12_000_000])
    asked, engine = request(0, 3, 20), build("continuous", False)
    engine.agree = lambda value: said.append(value) or next(theirs)
    asked.sequences[0].params = dataclasses.replace(asked.sequences[0].params, max_time_s=2.0)
    engine.add([asked])
    for steps in (1, 2):
        engine.step()
        assert len(asked.output.outputs[0].token_ids) == steps
    assert engine.step() and reasons(asked) == ["time"] and len(said) == 4
    assert not engine.step() and len(said) == 4, "nobody is asked where nothing is limited"


# -- pauses ----------------------------------------------------------------------------------------------


@KINDS
@LOOPS
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7, 11])
def test_holding_everything_changes_nothing(kind: str, overlap: bool, steps: int) -> None:
    asked, engine = workload(), build(kind, overlap)
    engine.add(asked)
    for _ in range(steps):
        engine.step()
    before = [len(sample) for one in tokens_of(asked) for sample in one]
    engine.pause("keep")
    after = [len(sample) for one in tokens_of(asked) for sample in one]
    assert {b - a for a, b in zip(before, after, strict=True)} <= ({0, 1} if overlap else {0})
    held = tokens_of(asked), engine.state() | {"paused": True}
    late = request(20, 4, 3)
    engine.add([late])
    assert not engine.step() and tokens_of(asked) == held[0]
    with pytest.raises(RequestError, match=r"paused.*LLM.unpause"):
        engine.run([request(21, 4, 3)])
    assert engine.state() == held[1] | {"waiting": held[1]["waiting"] + 1}
    engine.unpause()
    finish(engine)
    assert tokens_of(asked) == whole() and late.finished and not engine.stopped


@KINDS
@LOOPS
def test_waiting_admits_nobody(kind: str, overlap: bool) -> None:
    """What has begun ends, preempted or not; what has not stays."""
    asked, engine = workload(), build(kind, overlap)
    engine.add(asked)
    for _ in range(3):
        engine.step()
    parts = getattr(engine.scheduler, "groups", [engine.scheduler])
    begun = {id(s) for p in parts for s in (*p.running, *p.waiting()) if s in p.running or s.preemptions}
    engine.pause("wait")
    assert kind != "continuous" or engine.stats.preemptions
    for one in asked:
        for sequence, reason in zip(one.sequences, reasons(one), strict=True):
            known = id(sequence) in begun or bool(sequence.generated)
            assert (reason == "length") == known and (known or not sequence.computed)
    assert engine.scheduler.num_waiting and not engine.scheduler.running and not engine.step()
    engine.unpause()
    finish(engine)
    assert tokens_of(asked) == whole()


@KINDS
@LOOPS
def test_aborting_everything(kind: str, overlap: bool) -> None:
    asked, engine = workload(), build(kind, overlap)
    engine.add(asked)
    for _ in range(4):
        engine.step()
    engine.pause("keep")
    engine.pause("abort")  # of what was held
    assert all(set(reasons(one)) <= {"abort", "length"} and one.finished for one in asked)
    assert engine.stopped and engine._in_flight is None
    engine.unpause()
    finish(engine)


def test_threads_wait_and_the_pausing_one_is_told() -> None:
    engine, asked = build("continuous", True), request(0, 3, 30)
    mine, theirs = request(1, 3, 9), request(2, 3, 9)
    for one in (mine, theirs):
        one.streams = True
        engine.add([one])
    paused = threading.Event()

    def other() -> None:
        for _ in engine.stream(theirs):
            paused.wait()

    thread = threading.Thread(target=other)
    thread.start()
    engine.pause("keep")
    stream = engine.stream(mine)
    with pytest.raises(RequestError, match="paused"):
        list(stream)
    paused.set()
    thread.join(0.05)
    assert thread.is_alive() and not theirs.finished and reasons(mine) == ["abort"]
    engine.unpause()
    thread.join()
    engine.run([asked])
    assert len(theirs.output.outputs[0].token_ids) == 9 and len(asked.output.outputs[0].token_ids) == 30


def test_a_waiting_thread_learns_of_an_abort() -> None:
    engine, theirs = build("continuous", True), request(0, 3, 9)
    theirs.streams = True
    engine.add([theirs])
    thread = threading.Thread(target=lambda: list(engine.stream(theirs)))
    engine.pause("keep")
    thread.start()
    thread.join(0.05)
    engine.abort(theirs)
    thread.join(60)
    assert not thread.is_alive() and reasons(theirs) == ["abort"] and engine.stopped


def test_not_from_within_a_step() -> None:
    engine = build("continuous", True)
    engine.on_step = lambda record: engine.pause("keep")
    with pytest.raises(RequestError, match="pause and close: not from within a step"):
        engine.run([request(0, 3, 4)])
    assert not engine.stopped


def test_modes_are_named(bare_llm: Any) -> None:
    mode: Any = "kep"
    with pytest.raises(RequestError, match="pause: unknown mode 'kep'; did you mean 'keep'"):
        bare_llm.pause(mode)
    modes: tuple[PauseMode, ...] = ("wait", "keep", "abort")
    for mode in modes:
        bare_llm.pause(mode)
        assert bare_llm.stats()["paused"]
    bare_llm.unpause()


# -- retries ---------------------------------------------------------------------------------------------


@KINDS
@LOOPS
@pytest.mark.parametrize("fail_at", [(0,), (1,), (3,), (2, 3), (5, 9), (8, 9, 10)])
def test_retries(
    kind: str, overlap: bool, fail_at: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """As many failures as each request may meet change nothing that anybody sees; one more ends those that
    meet it."""
    asked, engine = workload(), build(kind, overlap, retries=len(fail_at), fail_at=fail_at)
    for one in asked:
        one.streams = True
    engine.run(asked)
    finish(engine)
    assert tokens_of(asked) == whole()
    for one in asked:
        assert streamed(one) == tokens_of([one])[0]
    stats = engine.stats
    assert stats.failed_steps == len(fail_at) and stats.retried_requests == len(caplog.messages) > 0
    assert all("is computed again: RuntimeError: step" in line for line in caplog.messages)

    asked, engine = workload(), build(kind, overlap, retries=len(fail_at) - 1, fail_at=fail_at)
    met: dict[str, int] = {}
    fail = engine._fail

    def count(plan: Any, error: Exception) -> None:
        for name in {s.owner[0].output.request_id for s in plan.sequences if not s.owner[0].finished}:
            met[name] = met.get(name, 0) + 1
        fail(plan, error)

    engine._fail = count  # type: ignore[method-assign]
    with contextlib.suppress(StepError):
        engine.run(asked)
    failed = {one.output.request_id for one in asked if one.output.error}
    finish(engine)
    assert failed == {name for name, times in met.items() if times == len(fail_at)}
    for one, want in zip(asked, whole(), strict=True):
        assert one.output.request_id in failed or tokens_of([one])[0] == want
