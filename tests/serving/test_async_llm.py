"""`AsyncLLM`: the tokens of `LLM`, each request answered once, whoever leaves when."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import LLM, AsyncLLM, EngineConfig, RequestOutput, SamplingParams
from moejax.core.errors import ConfigError, RequestError, StepError
from moejax.serving.async_llm import Overloaded
from moejax.serving.config import ServeSection
from moejax.serving.pool import EnginePool
from moejax.serving.replicas import Replica
from moejax.serving.run import serving_engine
from tests.model_shapes import TWO_LAYERS

ENGINE = EngineConfig(
    compile_cache=False, seq_buckets=[4], token_buckets=[16], block_buckets=[32], max_model_len=48,
    max_num_seqs=4, block_size=4, num_blocks=24, max_num_batched_tokens=16, autotune="rules",
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[7, 11 + i, 13, 17, 19 + i, 23] for i in range(8)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(TWO_LAYERS, load_format="dummy", seed=0, engine=ENGINE) as opened:
        yield opened


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def nothing_is_left(llm: LLM) -> None:
    state = llm.stats()
    assert state["running"] == state["waiting"] == state["used_blocks"] == 0
    llm.engine.scheduler.check_integrity()


def test_the_tokens_are_those_of_llm(llm: LLM, wanted: list[list[int]]) -> None:
    async def run() -> None:
        async with AsyncLLM(llm) as engine:
            outputs = await asyncio.gather(*(engine.generate(prompt, GREEDY) for prompt in PROMPTS))
            assert [output.outputs[0].token_ids for output in outputs] == wanted
            chunks = [chunk async for chunk in engine.stream(PROMPTS[0], GREEDY)]
            assert [token for chunk in chunks for token in chunk.token_ids] == wanted[0]
            assert [chunk.finish_reason for chunk in chunks] == [None] * 7 + ["length"]
            two = [c async for c in engine.stream(PROMPTS[0], dataclasses.replace(GREEDY, n=2))]
            for index in (0, 1):
                assert [t for c in two if c.index == index for t in c.token_ids] == wanted[0]
            mine, plain = await engine.score(PROMPTS[:2]), llm.score(PROMPTS[:2])
            assert all((a == b).all() for a, b in zip(mine, plain, strict=True))

    asyncio.run(run())
    nothing_is_left(llm)


Steps = st.integers(0, 10)


@settings(max_examples=12, deadline=None)
@given(leaves=st.lists(st.tuples(Steps, Steps, st.booleans()), min_size=1, max_size=8), drains=st.booleans())
def test_whoever_leaves_when_no_request_is_lost_or_answered_twice(
    llm: LLM, wanted: list[list[int]], leaves: list[tuple[int, int, bool]], drains: bool
) -> None:
    """Tasks begin and are cancelled after so many turns of the loop; 10 stays. Close comes while some run."""
    answers: list[tuple[int, list[int]]] = []

    async def ask(engine: AsyncLLM, number: int, streams: bool) -> None:
        if streams:
            tokens: list[int] = []
            async for chunk in engine.stream(PROMPTS[number], GREEDY):
                tokens += chunk.token_ids
        else:
            tokens = (await engine.generate(PROMPTS[number], GREEDY)).outputs[0].token_ids
        answers.append((number, tokens))

    async def one(engine: AsyncLLM, number: int, begin: int, end: int, streams: bool) -> bool:
        await asyncio.sleep(2e-4 * begin)
        task = asyncio.create_task(ask(engine, number, streams))
        if end == 10:
            await task
            return True
        await asyncio.sleep(5e-4 * end)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        assert result is None or isinstance(result, asyncio.CancelledError)
        return result is None

    async def run() -> list[bool]:
        engine = AsyncLLM(llm, max_requests=3)
        tasks = [asyncio.create_task(one(engine, i, *times)) for i, times in enumerate(leaves)]
        if not drains:
            done = await asyncio.gather(*tasks)
            assert engine.num_requests == 0
            await engine.close()
            return done
        await asyncio.sleep(1e-3)
        closing = asyncio.create_task(engine.close())
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await closing
        refused = [r for r in results if isinstance(r, BaseException)]
        assert all(isinstance(r, (RequestError, AssertionError)) for r in refused)
        return [r is True for r in results]

    done = asyncio.run(run())
    nothing_is_left(llm)
    assert sorted(number for number, _ in answers) == [i for i, ended in enumerate(done) if ended]
    for number, tokens in answers:
        assert tokens == wanted[number]


def test_a_bound_on_requests_is_a_turn_or_a_refusal(llm: LLM, wanted: list[list[int]]) -> None:
    async def run() -> None:
        async with AsyncLLM(llm, max_requests=2) as engine:
            tasks = [asyncio.create_task(engine.generate(prompt, GREEDY)) for prompt in PROMPTS]
            await asyncio.sleep(0)
            assert engine.num_requests == 2
            with pytest.raises(Overloaded, match=r"^2 requests are running, of at most 2"):
                await engine.generate(PROMPTS[0], GREEDY, wait=False)
            outputs = await asyncio.gather(*tasks)
            assert [output.outputs[0].token_ids for output in outputs] == wanted

    asyncio.run(run())


def test_an_interval_joins_chunks_and_the_first_and_last_come_at_once(
    llm: LLM, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are let go one at a time, as far as a number of tokens; a chunk that came early would be seen."""
    free, taken, told = threading.Semaphore(0), threading.Semaphore(0), list[RequestOutput]()
    step = llm.engine.step_unless_paused

    def stepped(look_s: float) -> bool:
        if not free.acquire(timeout=look_s):
            return False
        try:
            return step(look_s)
        finally:
            taken.release()

    async def run() -> None:
        async with AsyncLLM(llm, stream_interval=3) as engine:
            chunks = engine.stream(PROMPTS[0], GREEDY, on_begin=told.append)
            got, task = list[list[int]](), asyncio.ensure_future(anext(chunks))
            for count, comes in ((1, 1), (3, 0), (4, 3), (6, 0), (7, 3), (8, 1)):
                while len(told[0].outputs[0].token_ids if told else ()) < count:
                    free.release()
                    await asyncio.to_thread(taken.acquire)
                await asyncio.sleep(0.05)
                if comes:
                    got.append((await task).token_ids)
                    assert len(got[-1]) == comes
                    task = asyncio.ensure_future(anext(chunks, None))
                else:
                    assert not task.done()
            assert [token for tokens in got for token in tokens] == wanted[0]
            assert await task is None
            monkeypatch.undo()
            params = dataclasses.replace(GREEDY, logprobs=1, n=2)
            several = [c async for c in engine.stream(PROMPTS[1], params, on_begin=told.append)]
            for sample in told[1].outputs:
                mine = [chunk for chunk in several if chunk.index == sample.index]
                assert len(mine) < len(sample.token_ids)
                assert [t for chunk in mine for t in chunk.token_ids] == sample.token_ids == wanted[1]
                assert [p for chunk in mine for p in chunk.logprobs or ()] == sample.logprobs
                assert "".join(chunk.text for chunk in mine) == sample.text
                assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + ["length"]
        with pytest.raises(ConfigError, match="stream_interval must be 1 to max_unread=2, got 3"):
            AsyncLLM(llm, max_unread=2, stream_interval=3)
        with pytest.raises(ConfigError, match=r"serve\.stream_interval=3 is over serve\.max_unread=2"):
            ServeSection(max_unread=2, stream_interval=3)

    monkeypatch.setattr(llm.engine, "step_unless_paused", stepped)
    asyncio.run(run())
    nothing_is_left(llm)


@contextlib.asynccontextmanager
async def warmed(kind: str) -> AsyncIterator[AsyncLLM]:
    """An engine as a server, a pool or a replica opens it."""
    arguments: dict[str, Any] = {"model": TWO_LAYERS, "load_format": "dummy", "seed": 0, "engine": ENGINE}
    async with contextlib.AsyncExitStack() as ends:
        if kind == "server":
            llm = ends.enter_context(LLM(**arguments))
            served = serving_engine(llm, ServeSection(warmup=True), "toy")
            yield (await ends.enter_async_context(served)).engine
        elif kind == "pool":
            pool = EnginePool({"toy": arguments}, warmup=True)
            ends.push_async_callback(pool.close)
            yield await ends.enter_async_context(pool.lease("toy"))
        else:
            replica = Replica(arguments, ServeSection(warmup=True), "toy")
            ends.enter_context(replica.llm)
            ends.push_async_callback(replica.engine.close)
            ends.callback(replica.monitor.close)
            yield replica.engine


@pytest.mark.parametrize("kind", ["server", "pool", "replica"])
def test_a_warm_up_has_compiled_greedy_and_sampled_requests(kind: str) -> None:
    async def run() -> None:
        async with warmed(kind) as engine:
            compiled = len(engine.llm.ledger.entries)
            sampled = dataclasses.replace(GREEDY, temperature=1.0)
            both = [engine.generate(PROMPTS[i], p) for i in (0, 1) for p in (GREEDY, sampled)]
            await asyncio.gather(*both)
            await engine.generate(PROMPTS[2], sampled)
            await engine.generate(PROMPTS[2], GREEDY)
            assert compiled and len(engine.llm.ledger.entries) == compiled

    asyncio.run(run())


def test_a_stream_that_nobody_reads_ends(llm: LLM) -> None:
    async def run() -> None:
        async with AsyncLLM(llm, max_unread=4) as engine:
            told: list[RequestOutput] = []
            long = dataclasses.replace(GREEDY, max_tokens=40)
            chunks = engine.stream(PROMPTS[0], long, on_begin=told.append)
            await anext(chunks)
            while not told[0].finished:
                await asyncio.sleep(1e-3)
            with pytest.raises(RequestError, match=r"chunks behind, of at most 4"):
                async for _ in chunks:
                    pass
            assert told[0].outputs[0].finish_reason == "abort"

    asyncio.run(run())
    nothing_is_left(llm)


def test_mistakes_are_raised_at_the_call_and_failures_reach_their_requests(
    llm: LLM, monkeypatch: Any
) -> None:
    async def run() -> None:
        engine = AsyncLLM(llm)
        with pytest.raises(RequestError, match="out of range"):
            engine.stream([10**6])
        with pytest.raises(RequestError, match="prompt 0 is empty"):
            await engine.generate([])
        launch = llm.runner.launch

        def fails(plan: Any) -> Any:
            raise RuntimeError("no such kernel")

        monkeypatch.setattr(llm.runner, "launch", fails)
        with pytest.raises(StepError, match="a step failed: RuntimeError: no such kernel"):
            await engine.generate(PROMPTS[0], GREEDY)
        monkeypatch.setattr(llm.runner, "launch", launch)
        assert len((await engine.generate(PROMPTS[0], GREEDY)).outputs[0].token_ids) == 8
        await engine.close()
        with pytest.raises(RequestError, match="closed"):
            await engine.generate(PROMPTS[0], GREEDY)
        await engine.close()

    asyncio.run(run())


def test_pause_from_another_thread_holds_requests_and_cancelling_still_ends_them(
    llm: LLM, wanted: list[list[int]]
) -> None:
    async def run() -> None:
        async with AsyncLLM(llm) as engine:
            await asyncio.to_thread(llm.pause)
            held = asyncio.create_task(engine.generate(PROMPTS[0], GREEDY))
            left = asyncio.create_task(engine.generate(PROMPTS[1], GREEDY))
            await asyncio.sleep(0.05)
            assert not held.done() and llm.stats()["waiting"] == 2
            left.cancel()
            while llm.stats()["waiting"] == 2:
                await asyncio.sleep(1e-3)
            llm.unpause()
            assert (await held).outputs[0].token_ids == wanted[0]

    asyncio.run(run())
    nothing_is_left(llm)


def test_closing_the_engine_below_ends_what_runs() -> None:
    async def run() -> None:
        llm = LLM(TWO_LAYERS, load_format="dummy", seed=0, engine=ENGINE)
        engine = AsyncLLM(llm)
        (llm_request,) = llm.builder.to_generate([PROMPTS[0]], GREEDY)
        task = asyncio.create_task(engine.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=40)))
        while not llm.stats()["running"]:
            await asyncio.sleep(1e-3)
        await asyncio.to_thread(llm.close)
        assert (await task).outputs[0].finish_reason == "abort"
        with pytest.raises(RequestError, match="closed"):
            await engine.generate(PROMPTS[0], GREEDY)
        await engine.close()
        engine._closing = None  # it was looked at just before the thread ended
        with pytest.raises(RequestError, match="closed"):
            await engine._whole([llm_request], wait=True)
        assert not any(thread.name == "moejax-engine" for thread in threading.enumerate())

    asyncio.run(run())
