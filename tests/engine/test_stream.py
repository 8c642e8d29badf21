"""`generate_stream`: the same tokens as `generate`, one step at a time, and what leaving it early means."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import pytest

from moejax.core.errors import RequestError
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOutput, SamplingParams
from moejax.engine.requests.output import StreamChunk

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=12, seed=3, n=3)


@pytest.fixture
def requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RequestOutput]]:
    """The outputs behind the streams, in the order of the calls."""
    made: list[RequestOutput] = []
    make = llm.builder.to_generate

    def spy(*args: Any, **options: Any) -> Any:
        out = make(*args, **options)
        made.extend(request.output for request in out)
        return out

    monkeypatch.setattr(llm.builder, "to_generate", spy)
    yield made


def joined(chunks: list[StreamChunk], index: int = 0) -> tuple[str, list[int]]:
    mine = [chunk for chunk in chunks if chunk.index == index]
    return "".join(chunk.text for chunk in mine), [token for chunk in mine for token in chunk.token_ids]


@pytest.mark.parametrize("text", ["the router sends", "naïve 🙂", "привет"])
def test_chunks_join_to_what_generate_gives(text: str, llm: LLM) -> None:
    chunks = list(llm.generate_stream(text, GREEDY))
    out = llm.generate(text, GREEDY)[0].outputs[0]
    assert joined(chunks) == (out.text, out.token_ids)
    assert llm.tokenizer is not None and out.text == llm.tokenizer.decode(out.token_ids)
    assert [chunk.finish_reason for chunk in chunks] == [None] * 11 + ["length"]
    assert all(len(chunk.token_ids) == 1 for chunk in chunks)


def test_samples_alternate(llm: LLM) -> None:
    chunks = list(llm.generate_stream([5, 6, 7], SAMPLED))
    out = llm.generate([5, 6, 7], SAMPLED)[0]
    for sample in out.outputs:
        assert joined(chunks, sample.index) == (sample.text, sample.token_ids)
    assert [chunk.index for chunk in chunks[:6]] == [0, 1, 2, 0, 1, 2]


def test_logprobs_come_with_their_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    chunks = list(llm.generate_stream([5, 6, 7], params))
    out = llm.generate([5, 6, 7], params)[0]
    assert [entry for chunk in chunks for entry in chunk.logprobs or []] == out.outputs[0].logprobs
    assert [c.prompt_logprobs for c in chunks] == [out.prompt_logprobs] + [None] * 3
    assert len(out.prompt_logprobs or []) == 3
    assert all(chunk.logprobs is None for chunk in llm.generate_stream([5, 6, 7], GREEDY))


def test_leaving_early_aborts_and_keeps_what_was_generated(llm: LLM, requests: list[RequestOutput]) -> None:
    whole = llm.generate([5, 6, 7], GREEDY)[0].outputs[0]
    stream = llm.generate_stream([5, 6, 7], GREEDY)
    chunks = [next(stream) for _ in range(5)]
    output = requests[-1]
    assert not output.finished and output.outputs[0].finish_reason is None
    stream.close()  # type: ignore[attr-defined]
    sample = output.outputs[0]
    assert output.finished and sample.finish_reason == "abort"
    assert sample.token_ids == whole.token_ids[:5] == joined(chunks)[1]
    assert llm.tokenizer is not None and sample.text == llm.tokenizer.decode(sample.token_ids)
    assert len(output.metrics.token_times) == 5


def test_a_forgotten_stream_ends_too(llm: LLM, requests: list[RequestOutput]) -> None:
    for chunk in llm.generate_stream([5, 6, 7], GREEDY):
        if len(chunk.token_ids):
            break
    assert requests[-1].outputs[0].finish_reason == "abort"


def test_leaving_early_in_the_middle_of_a_step(llm: LLM, requests: list[RequestOutput]) -> None:
    """A step adds to all samples, whether the chunks have been read or not."""
    stream = llm.generate_stream([5, 6, 9], SAMPLED)
    for _ in range(4):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert [len(sample.token_ids) for sample in requests[-1].outputs] == [2, 2, 2]
    assert {sample.finish_reason for sample in requests[-1].outputs} == {"abort"}


def test_streams_do_not_disturb_each_other(llm: LLM) -> None:
    """Nor does a whole generate between two of their steps."""
    params = [GREEDY, SAMPLED, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)]
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    alone = [list(llm.generate_stream(ids, p)) for ids, p in zip(prompts, params, strict=True)]
    streams = [llm.generate_stream(ids, p) for ids, p in zip(prompts, params, strict=True)]
    together: list[list[StreamChunk]] = [[], [], []]
    for step in zip_longest(*streams):
        for chunks, chunk in zip(together, step, strict=True):
            if chunk is not None:
                chunks.append(chunk)
        llm.generate([99], SamplingParams(temperature=0.0, max_tokens=2))
    assert together == alone


def test_the_prompt_is_checked_at_the_call(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prompt 0 is empty"):
        llm.generate_stream([])


def test_nothing_runs_before_the_first_chunk_is_asked_for(llm: LLM, requests: list[RequestOutput]) -> None:
    llm.generate_stream([5, 6, 7], GREEDY)
    assert requests[-1].outputs[0].token_ids == [] and requests[-1].metrics.token_times == []
