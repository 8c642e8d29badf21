"""Several callers at once: whoever waits moves everybody on, and each gets what it would get alone."""

import dataclasses
import random
import threading
from collections import deque
from typing import Any

import pytest

from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.engine.requests.output import StreamChunk
from tests.engine.paged import SCARCE, assert_clean, greedy, prompt
from tests.engine.tiny import FullForward

pytestmark = pytest.mark.usefixtures("equal_steps_once")

SAMPLED = SamplingParams(temperature=1.0, max_tokens=8, seed=7, n=2, ignore_eos=True)


@pytest.fixture(scope="module")
def whole(bare_llm: LLM) -> FullForward:
    return FullForward(bare_llm.model)


@pytest.fixture(scope="module")
def scarce(bare_llm: LLM) -> LLM:
    return bare_llm.variant(SCARCE)


def joined(chunks: list[StreamChunk], index: int = 0) -> list[int]:
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


def test_streams_interleaved_at_random(scarce: LLM, whole: FullForward) -> None:
    """More streams than rows, read in a random order, with preemption."""
    scarce.reset_stats()
    prompts = [prompt(n, 2) for n in (9, 4, 16, 1, 12, 6)]
    streams = [scarce.generate_stream(ids, greedy(12)) for ids in prompts]
    got: list[list[StreamChunk]] = [[] for _ in streams]
    order = random.Random(3)
    left = list(range(len(streams)))
    while left:
        i = order.choice(left)
        chunk = next(streams[i], None)
        if chunk is None:
            left.remove(i)
        else:
            got[i].append(chunk)
    for ids, chunks in zip(prompts, got, strict=True):
        assert joined(chunks) == whole.greedy(ids, 12)
        assert [chunk.finish_reason for chunk in chunks] == [None] * 11 + ["length"]
    assert scarce.stats()["preemptions"] > 0
    assert_clean(scarce)


def test_a_stream_left_early_gives_its_blocks_back(scarce: LLM, whole: FullForward) -> None:
    """At once, and whether it was read to some place, only opened, or forgotten."""
    kept = scarce.submit(prompt(7), greedy(12))
    for read in (0, 1, 3):
        stream = scarce.generate_stream(prompt(11), greedy(9))
        got = [next(stream) for _ in range(read)]
        assert joined(got) == whole.greedy(prompt(11), 9)[:read]
        assert scarce.stats()["running"] + scarce.stats()["waiting"] == 2
        stream.close()  # type: ignore[attr-defined]
        assert scarce.stats()["running"] + scarce.stats()["waiting"] == 1
        scarce.engine.scheduler.check_integrity()
        assert next(stream, None) is None
    scarce.generate_stream(prompt(11), greedy(9))
    assert scarce.stats()["waiting"] == 0
    while scarce.step():
        pass
    assert kept.outputs[0].token_ids == whole.greedy(prompt(7), 12)
    assert_clean(scarce)


def test_the_last_chunk_is_not_lost(scarce: LLM, whole: FullForward) -> None:
    """Another thread may finish a stream's request just when the reader has found no chunk."""

    class Late(deque[StreamChunk]):
        """Found empty, it is filled by somebody else's steps before the reader goes on."""

        def __bool__(self) -> bool:
            if len(self) == 0:
                while scarce.step():
                    pass
                return False
            return True

    make = scarce.builder.to_generate

    def spy(*args: Any, **options: Any) -> Any:
        out = make(*args, **options)
        out[0].chunks = Late()
        return out

    scarce.builder.to_generate = spy  # type: ignore[method-assign]
    try:
        stream = scarce.generate_stream(prompt(9), greedy(6))
    finally:
        del scarce.builder.to_generate
    assert joined(list(stream)) == whole.greedy(prompt(9), 6)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_last_abort_leaves_nothing_in_flight(bare_llm: LLM, whole: FullForward, overlap: bool) -> None:
    """Nobody is left who would collect the step launched for it: the abort does."""
    llm = bare_llm.variant(dataclasses.replace(SCARCE, overlap=overlap))
    out = llm.submit(prompt(6), greedy(9))
    steps = []
    llm.engine.on_step = steps.append
    for _ in range(3):
        llm.step()
    assert (llm.engine._in_flight is not None) == overlap
    llm.abort(out.request_id)
    assert out.finished and out.outputs[0].finish_reason == "abort"
    assert_clean(llm)
    assert len(steps) == 3  # every launched step was collected, and recorded
    got = out.outputs[0].token_ids
    assert got and got == whole.greedy(prompt(6), 9)[: len(got)]
    assert llm.generate([prompt(4)], greedy(3))[0].outputs[0].token_ids == whole.greedy(prompt(4), 3)


def test_many_threads(scarce: LLM, whole: FullForward) -> None:
    """Eight at once, each with streams, whole calls, scores and submissions; all as alone, nothing left."""
    (want,) = scarce.generate([prompt(6)], SAMPLED)
    scores = scarce.score([prompt(13)])[0].tolist()
    errors: list[BaseException] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        try:
            start.wait(60)
            for turn in range(2):
                ids = [prompt(n, number) for n in (3 + number, 16, 1 + turn)]
                for out, one in zip(scarce.generate(ids, greedy(7)), ids, strict=True):
                    assert out.outputs[0].token_ids == whole.greedy(one, 7)
                assert joined(list(scarce.generate_stream(ids[1], greedy(5)))) == whole.greedy(ids[1], 5)
                chunks = list(scarce.generate_stream(prompt(6), SAMPLED))
                assert [joined(chunks, i) for i in range(2)] == [s.token_ids for s in want.outputs]
                assert scarce.score([prompt(13)])[0].tolist() == pytest.approx(scores, rel=1e-4)
                out = scarce.submit(ids[0], greedy(9))
                if number % 2:
                    scarce.step()
                    scarce.abort(out.request_id)
                while not out.finished:
                    scarce.step()
                got = out.outputs[0].token_ids
                assert got == whole.greedy(ids[0], 9)[: len(got)]
                assert len(got) == 9 or out.outputs[0].finish_reason == "abort"
        except BaseException as error:
            errors.append(error)

    for ids in [prompt(n, s) for s in range(8) for n in (3 + s, 16, 1, 2)]:
        whole.greedy(ids, 1)  # the oracle is compiled before the threads start
        break
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not errors, errors[0]
    assert not any(thread.is_alive() for thread in threads)
    assert_clean(scarce)


def test_an_interrupt_in_one_thread(scarce: LLM, whole: FullForward, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other's request goes on: it loses time, not tokens."""
    mine = scarce.generate_stream(prompt(9), greedy(9))
    got = [next(mine) for _ in range(3)]
    launch = scarce.runner.launch
    with monkeypatch.context() as patch:

        def interrupted(plan: Any) -> Any:
            raise KeyboardInterrupt

        patch.setattr(scarce.runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scarce.generate([prompt(4)], dataclasses.replace(SAMPLED, n=1))
    assert scarce.runner.launch == launch
    assert joined(got + list(mine)) == whole.greedy(prompt(9), 9)
    assert_clean(scarce)
