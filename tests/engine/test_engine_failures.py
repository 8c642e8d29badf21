"""Steps that fail, interrupts and aborts: who is told, who goes on, and that nothing is left behind."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from moejax.core.errors import RequestError, StepError
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOutput, SamplingParams
from moejax.engine.scheduling.plan import StepPlan
from tests.engine.paged import SCARCE, assert_clean, greedy, prompt
from tests.engine.tiny import FullForward

pytestmark = pytest.mark.usefixtures("equal_steps_once")

PROMPTS = [prompt(n, 3) for n in (9, 4, 16, 1, 12, 6)]


class Trap:
    """Raises at one call of the runner's `launch` or `collect`, and remembers whose step that was."""

    def __init__(
        self, llm: LLM, name: str, at: int, error: Callable[[], BaseException], patch: pytest.MonkeyPatch
    ) -> None:
        self.calls, self.hit = 0, False
        self.concerned: set[str] = set()
        self._plans: dict[int, StepPlan] = {}
        launch, collect = llm.runner.launch, llm.runner.collect

        def trapped_launch(plan: StepPlan) -> Any:
            if name == "launch":
                self._maybe(at, error, plan)
            handle = launch(plan)
            self._plans[id(handle)] = plan
            return handle

        def trapped_collect(handle: Any) -> Any:
            if name == "collect":
                self._maybe(at, error, self._plans[id(handle)])
            return collect(handle)

        patch.setattr(llm.runner, "launch", trapped_launch)
        patch.setattr(llm.runner, "collect", trapped_collect)

    def _maybe(self, at: int, error: Callable[[], BaseException], plan: StepPlan) -> None:
        self.calls += 1
        if self.calls - 1 == at:
            self.hit = True
            self.concerned = {
                sequence.owner[0].output.request_id
                for sequence in plan.sequences
                if not sequence.owner[0].finished
            }
            raise error()


@pytest.fixture(scope="module")
def whole(bare_llm: LLM) -> FullForward:
    return FullForward(bare_llm.model)


@pytest.fixture(scope="module", params=[True, False], ids=["overlapped", "plain"])
def engine(bare_llm: LLM, request: pytest.FixtureRequest) -> LLM:
    return bare_llm.variant(dataclasses.replace(SCARCE, overlap=request.param))


@pytest.fixture(scope="module")
def static(bare_llm: LLM) -> LLM:
    return bare_llm.variant(dataclasses.replace(SCARCE, batching="static"))


def check(out: RequestOutput, whole: FullForward, count: int, failed: bool) -> None:
    """Whole and right, or failed with the beginning of what it would have been."""
    want = whole.greedy(out.prompt_token_ids, count)
    sample = out.outputs[0]
    assert out.finished and (out.error is not None) == failed
    if failed:
        assert sample.finish_reason == "error" and sample.token_ids == want[: len(sample.token_ids)]
        assert len(sample.token_ids) < count
    else:
        assert sample.finish_reason == "length" and sample.token_ids == want


# -- a step fails --------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("at", [0, 1, 2, 3, 5, 8, 13, 19])
def test_a_step_fails(
    where: str, at: int, engine: LLM, whole: FullForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests end with "error"; those that wait, run in other steps or were submitted elsewhere get all
    their tokens; nothing stays behind."""
    failed = engine.stats()["failed_steps"]
    trap = Trap(engine, where, at, lambda: RuntimeError("out of\nmemory"), monkeypatch)
    elsewhere = engine.submit(prompt(5, 8), greedy(12))
    with pytest.raises(StepError) as caught:
        engine.generate(PROMPTS, greedy(9))
        raise StepError("not reached unless only the other request was concerned", [])
    while engine.step():
        pass
    assert trap.hit and trap.concerned
    outputs = caught.value.outputs
    mine = trap.concerned - {elsewhere.request_id}
    assert mine, "choose another step: it concerns none of the call's requests"
    assert [out.prompt_token_ids for out in outputs] == PROMPTS
    for out in outputs:
        check(out, whole, 9, out.request_id in trap.concerned)
    check(elsewhere, whole, 12, elsewhere.request_id in trap.concerned)
    first = next(out for out in outputs if out.error)
    assert str(caught.value).startswith(
        f"request {first.request_id}: a step failed: RuntimeError: out of memory"
    )
    assert "\n" not in str(caught.value)
    assert ("more requests" in str(caught.value)) == (len(mine) > 1)
    assert engine.stats()["failed_steps"] == failed + 1
    assert_clean(engine)


@pytest.mark.parametrize(("where", "at"), [("launch", 3), ("collect", 0), ("collect", 8)])
def test_a_retried_step_is_not_seen(
    where: str, at: int, bare_llm: LLM, whole: FullForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bare_llm.variant(dataclasses.replace(SCARCE, retries=1))
    trap = Trap(engine, where, at, lambda: RuntimeError("out of luck"), monkeypatch)
    for out in engine.generate(PROMPTS, greedy(9)):
        check(out, whole, 9, failed=False)
    stats = engine.stats()
    assert stats["failed_steps"] == 1 and stats["retried_requests"] == len(trap.concerned) > 0
    assert_clean(engine)


@pytest.mark.parametrize("at", [0, 2, 6, 11])
def test_a_step_of_a_static_batch_fails(
    at: int, static: LLM, whole: FullForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that have ended keep their blocks until the batch is over; a failure gives those back too."""
    trap = Trap(static, "collect", at, lambda: ValueError("no"), monkeypatch)
    counts = [2, 9, 5, 7, 9, 3]
    with pytest.raises(StepError) as caught:
        static.generate(PROMPTS, [greedy(n) for n in counts])
    assert trap.hit and trap.concerned
    for out, count in zip(caught.value.outputs, counts, strict=True):
        check(out, whole, count, out.request_id in trap.concerned)
    assert_clean(static)


def test_every_other_step_fails(engine: LLM, whole: FullForward, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests one by one: each either fails or is right, and the engine is whole after each."""
    launch, calls = engine.runner.launch, [0]

    def failing(plan: StepPlan) -> Any:
        calls[0] += 1
        if calls[0] % 7 == 0:
            raise RuntimeError
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", failing)
    ends = set()
    for i in range(8):
        out = engine.submit(prompt(6, i), greedy(4 + i % 3))
        while engine.step():
            engine.engine.scheduler.check_integrity()
        check(out, whole, 4 + i % 3, out.error is not None)
        assert out.error is None or out.error.endswith("a step failed: RuntimeError")
        ends.add(out.outputs[0].finish_reason)
        assert_clean(engine)
    assert ends == {"length", "error"}


def test_a_score_and_a_stream_fail(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = PROMPTS[2]
    with monkeypatch.context() as patch:
        Trap(engine, "collect", 1, lambda: RuntimeError("first"), patch)
        with pytest.raises(StepError, match="first"):
            engine.score([ids])
    assert_clean(engine)
    with monkeypatch.context() as patch:
        Trap(engine, "launch", 4, lambda: RuntimeError("second"), patch)
        chunks = []
        with pytest.raises(StepError, match="second") as caught:
            for chunk in engine.generate_stream(ids, greedy(9)):
                chunks.append(chunk)
    got = [token for chunk in chunks for token in chunk.token_ids]
    assert got == caught.value.outputs[0].outputs[0].token_ids and 0 < len(got) < 9
    assert_clean(engine)


def test_an_observer_that_raises(engine: LLM, whole: FullForward) -> None:
    """Its error comes out of the call; the engine is whole and goes on without it."""

    def observer(record: Any) -> None:
        raise ZeroDivisionError

    engine.engine.on_step = observer
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS, greedy(6))
    engine.engine.on_step = None
    assert_clean(engine)
    check(engine.generate(PROMPTS[:1], greedy(6))[0], whole, 6, False)


# -- interrupts ----------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("at", [0, 1, 4, 10])
def test_an_interrupt(
    where: str, at: int, engine: LLM, whole: FullForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the call's requests; what others have submitted is computed anew and comes out right."""
    elsewhere = [engine.submit(prompt(n, 8), greedy(9)) for n in (5, 11)]
    with monkeypatch.context() as patch:
        trap = Trap(engine, where, at, KeyboardInterrupt, patch)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS, greedy(9))
    assert trap.hit
    assert engine.stats()["running"] == 0 and engine.stats()["used_blocks"] == 0
    while engine.step():
        engine.engine.scheduler.check_integrity()
    for out in elsewhere:
        check(out, whole, 9, False)
    assert_clean(engine)
    for out in engine.generate(PROMPTS, greedy(9)):
        check(out, whole, 9, False)


# -- requests that cannot be ---------------------------------------------------------------------------


def test_what_can_never_fit(bare_llm: LLM, whole: FullForward) -> None:
    """Told in one line before anything of the call is queued; what just fits runs."""
    llm = bare_llm.variant(dataclasses.replace(SCARCE, num_blocks=5))
    for refused in (
        lambda: llm.generate([prompt(3), prompt(17)], greedy(5)),
        lambda: llm.submit(prompt(20), greedy(2)),
        lambda: llm.generate_stream(prompt(1), greedy(21)),
        lambda: llm.score([prompt(4), prompt(21)]),
    ):
        with pytest.raises(RequestError, match=r"need 6 cache blocks of 4, and the cache has 5") as caught:
            refused()
        assert "\n" not in str(caught.value) and "engine.num_blocks" in str(caught.value)
        assert_clean(llm)
    for length, count in ((17, 4), (20, 1), (1, 20)):
        check(llm.generate([prompt(length)], greedy(count))[0], whole, count, False)
    assert llm.score([prompt(20)])[0].shape == (19,)
    assert_clean(llm)


# -- aborts --------------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("victim", [0, 2, 5])
def test_abort_at_any_time(victim: int, engine: LLM, whole: FullForward) -> None:
    """Waiting, within its prompt, decoding, preempted or done: it ends with what it has, others go on."""
    reasons, lengths = set(), set()
    for when in range(0, 30, 2):
        outs = [engine.submit(ids, greedy(9)) for ids in PROMPTS]
        for _ in range(when):
            engine.step()
        before = list(outs[victim].outputs[0].token_ids)
        engine.abort(outs[victim].request_id)
        engine.engine.scheduler.check_integrity()
        sample = outs[victim].outputs[0]
        assert outs[victim].finished and sample.token_ids == before
        engine.abort(outs[victim].request_id)
        engine.abort("no such request")
        while engine.step():
            engine.engine.scheduler.check_integrity()
        assert sample.token_ids == before == whole.greedy(PROMPTS[victim], 9)[: len(before)]
        assert sample.finish_reason == ("length" if len(before) == 9 else "abort")
        reasons.add(sample.finish_reason)
        lengths.add(len(before))
        for i, out in enumerate(outs):
            if i != victim:
                check(out, whole, 9, False)
        assert_clean(engine)
    assert "abort" in reasons and len(lengths) > 3


def test_abort_of_forks(engine: LLM, static: LLM) -> None:
    """With the prompt half computed, and with samples under way, in groups and in a static batch."""
    for llm, n in ((engine, 6), (static, 2)):
        params = SamplingParams(temperature=1.0, max_tokens=8, n=n, seed=1, ignore_eos=True)
        (want,) = llm.generate([prompt(10)], params)
        for when in (0, 1, 2, 4, 7, 12):
            out = llm.submit(prompt(10), params)
            for _ in range(when):
                llm.step()
            llm.abort(out.request_id)
            assert out.finished
            for sample, full in zip(out.outputs, want.outputs, strict=True):
                assert sample.token_ids == full.token_ids[: len(sample.token_ids)]
                assert sample.finish_reason in ("abort", "length")
            while llm.step():
                pass
            assert_clean(llm)
