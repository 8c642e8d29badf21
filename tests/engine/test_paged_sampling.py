"""What a request asks for besides tokens survives chunks, preemption, forks and changing neighbours: ends,
log-probabilities, penalties, filters, scores."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.engine.requests.output import OutputProcessor
from moejax.engine.step.sampler import SamplerMode
from tests.engine.paged import REDUCTIONS, SCARCE, OneByOne, assert_clean, greedy, prompt, tight, tokens
from tests.engine.tiny import VOCAB, FullForward, log_softmax
from tests.numerics import assert_close, tolerance

pytestmark = pytest.mark.usefixtures("equal_steps_once")

PROMPTS = [prompt(n, 7) for n in (16, 5, 8, 13, 1, 15, 10)]
ROUNDING = tolerance(*REDUCTIONS)


@pytest.fixture(scope="module")
def whole(bare_llm: LLM) -> FullForward:
    return FullForward(bare_llm.model)


@pytest.fixture(scope="module")
def alone(bare_llm: LLM) -> OneByOne:
    return OneByOne(bare_llm.model)


@pytest.fixture(scope="module")
def scarce(bare_llm: LLM) -> LLM:
    return bare_llm.variant(SCARCE)


@pytest.fixture
def preempting(scarce: LLM) -> Any:
    """The scarce engine; the test must have preempted somebody, and left nothing behind."""
    scarce.reset_stats()
    yield scarce
    assert scarce.stats()["preemptions"] > 0
    assert_clean(scarce)


# -- ends ----------------------------------------------------------------------------------------------


def test_stop_tokens(preempting: LLM, whole: FullForward) -> None:
    """Each ends where its own stop token first comes, whoever goes on."""
    plain = [whole.greedy(ids, 16) for ids in PROMPTS]
    places = [15, 13, 12, 14, 2, 0, 15]
    params = [greedy(16, stop_token_ids=[p[at]]) for p, at in zip(plain, places, strict=True)]
    for out, p, at in zip(preempting.generate(PROMPTS, params), plain, places, strict=True):
        sample = out.outputs[0]
        assert sample.token_ids == p[: p.index(p[at]) + 1]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", p[at])


def test_end_of_sequence(bare_llm: LLM, whole: FullForward, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own token ends a request, unless it is to be ignored."""
    llm = bare_llm.variant(tight())
    plain = [whole.greedy(ids, 10) for ids in PROMPTS]
    monkeypatch.setattr(llm.builder, "eos_token_ids", tuple(p[4] for p in plain))
    ends = [next(i for i, token in enumerate(p) if token in llm.builder.eos_token_ids) for p in plain]
    for ignore in (False, True):
        outs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=ignore))
        for out, p, end in zip(outs, plain, ends, strict=True):
            sample = out.outputs[0]
            assert sample.token_ids == (p if ignore else p[: end + 1])
            assert (sample.finish_reason, sample.stop_reason) == ("length" if ignore else "stop", None)
    assert_clean(llm)


@pytest.mark.parametrize("overlap", [True, False])
def test_stop_strings(overlap: bool, llm: LLM, oracle: FullForward) -> None:
    """Only the text shows them, a step after the scheduler has gone on."""
    engine = llm.variant(dataclasses.replace(SCARCE, overlap=overlap))
    assert engine.tokenizer is not None
    texts = ["naïve café", "the router sends each", "is smaller", "router", "each token to"]
    params, want = [], []
    for i, text in enumerate(texts):
        plain = oracle.greedy(engine.tokenizer.encode(text), 12)
        whole = engine.tokenizer.decode(plain)
        params.append(
            SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=[whole[4 + i : 6 + i]])
        )
        want.append(OutputProcessor(0, params[-1], engine.tokenizer))
        while not want[-1].finished:
            want[-1].add(plain[len(want[-1].output.token_ids)], None)
    for out, builder in zip(engine.generate(texts, params), want, strict=True):
        assert out.outputs[0] == builder.output
        assert builder.output.finish_reason == "stop" and len(builder.output.token_ids) < 12
    assert_clean(engine)


# -- log-probabilities and scores ----------------------------------------------------------------------


def test_logprobs(bare_llm: LLM, whole: FullForward) -> None:
    """Of the chosen token and the likeliest, for those that ask, as the whole forward pass has them."""
    engine = bare_llm.variant(SCARCE)
    engine.runner.builder.warm_modes = [SamplerMode(logprobs=VOCAB)]  # else each count is a program
    counts: list[int | None] = [3, None, 0, 5, None, 1, VOCAB]
    outs = engine.generate(PROMPTS, [greedy(8, logprobs=n) for n in counts])
    for ids, out, count in zip(PROMPTS, outs, counts, strict=True):
        sample = out.outputs[0]
        assert sample.token_ids == whole.greedy(ids, 8)
        if count is None:
            assert sample.logprobs is None
            continue
        assert sample.logprobs is not None and len(sample.logprobs) == 8
        reference = log_softmax(whole.logits([*ids, *sample.token_ids]))[len(ids) - 1 : -1]
        chosen = reference[np.arange(8), sample.token_ids]
        assert_close([entry.logprob for entry in sample.logprobs], chosen, ROUNDING)
        for entry, row in zip(sample.logprobs, reference, strict=True):
            assert entry.rank == 1 and len(entry.top) == count
            order = np.argsort(-row, kind="stable")[:count]
            if count < VOCAB:
                assert list(entry.top) == order.tolist()
            assert_close(
                list(entry.top.values()) or [0.0], row[list(entry.top)] if count else [0.0], ROUNDING
            )


def test_scores(bare_llm: LLM, scarce: LLM, whole: FullForward, alone: OneByOne) -> None:
    """Long ones in chunks, preempted by older requests that still generate, one as long as may be."""
    scarce.reset_stats()
    sequences = [prompt(n, 8) for n in (16, 2, 9, 31, 32, 3, 24)]
    generating = [scarce.submit(prompt(n, 9), greedy(12)) for n in (9, 14)]
    scores = scarce.score(sequences)
    while scarce.step():
        pass
    for ids, ours in zip(sequences, scores, strict=True):
        reference = log_softmax(whole.logits(ids))[np.arange(len(ids) - 1), ids[1:]]
        assert ours.dtype == np.float32 and ours.shape == (len(ids) - 1,)
        assert_close(ours, reference, ROUNDING)
        assert_close(ours, alone.score(ids), ROUNDING)
    for out in generating:
        assert out.outputs[0].token_ids == whole.greedy(out.prompt_token_ids, 12)
    assert scarce.stats()["preemptions"] > 0
    assert_clean(scarce)
    static = bare_llm.variant(dataclasses.replace(SCARCE, batching="static"))
    for ours, theirs in zip(static.score(sequences), scores, strict=True):
        assert_close(ours, theirs, ROUNDING)
    assert_clean(static)


def test_prompt_logprobs(scarce: LLM, whole: FullForward) -> None:
    """Of the prompt's tokens and the likeliest in their places, once each, though prompts are cut, computed
    again and shared by samples, as the whole forward pass and `score` have them; generation goes on."""
    counts: list[int | None] = [3, None, 0, 5, 4, 0, 2]
    params = [greedy(12, prompt_logprobs=n, n=1 + i % 2) for i, n in enumerate(counts)]
    scores = [scarce.score([ids])[0] if len(ids) > 1 else np.zeros(0) for ids in PROMPTS]
    for config in (SCARCE, dataclasses.replace(SCARCE, batching="static", overlap=False)):
        engine = scarce.variant(config)
        outs = engine.generate(PROMPTS, params)
        again = [out.metrics.preemptions for out in outs if out.prompt_logprobs is not None]
        assert any(again) == (config is SCARCE)
        for ids, out, count, scored in zip(PROMPTS, outs, counts, scores, strict=True):
            assert [sample.token_ids for sample in out.outputs] == [whole.greedy(ids, 12)] * len(out.outputs)
            if count is None:
                assert out.prompt_logprobs is None
                continue
            assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
            entries = [entry for entry in out.prompt_logprobs[1:] if entry is not None]
            assert len(entries) == len(out.prompt_logprobs) - 1 == len(ids) - 1
            assert_close([0.0, *(entry.logprob for entry in entries)], [0.0, *scored], ROUNDING)
            for entry, token, row in zip(entries, ids[1:], log_softmax(whole.logits(ids)), strict=False):
                assert entry.rank == 1 + (row > row[token]).sum()
                assert list(entry.top) == np.argsort(-row, kind="stable")[:count].tolist()
                assert_close([entry.logprob, *entry.top.values()], row[[token, *entry.top]], ROUNDING)
        assert_clean(engine)


# -- sampling ------------------------------------------------------------------------------------------


PENALTY = SamplingParams(temperature=0.0, max_tokens=9, repetition_penalty=1.7, ignore_eos=True)


def test_repetition_penalty(preempting: LLM, alone: OneByOne) -> None:
    """Over prompts that come in chunks, again after preemption, and in slots that others have used."""
    for _ in range(2):
        for ids, out in zip(PROMPTS, preempting.generate(PROMPTS, PENALTY), strict=True):
            assert out.outputs[0].token_ids == alone.steps(ids, PENALTY)[0]
    without = dataclasses.replace(PENALTY, repetition_penalty=1.0)
    assert any(alone.steps(ids, without)[0] != alone.steps(ids, PENALTY)[0] for ids in PROMPTS)


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_repetition_penalty_of_forks(temperature: float, preempting: LLM, alone: OneByOne) -> None:
    """A fork has seen its parent's prompt, and from then on its own tokens."""
    params = dataclasses.replace(PENALTY, temperature=temperature, seed=21, n=2)
    for ids, out in zip(PROMPTS, preempting.generate(PROMPTS, params), strict=True):
        assert [sample.token_ids for sample in out.outputs] == alone.samples(ids, params)


def test_repetition_penalty_in_static_batches(bare_llm: LLM, alone: OneByOne) -> None:
    """Their padding, which is computed, has not been seen: token 0 is nobody's."""
    llm = bare_llm.variant(dataclasses.replace(SCARCE, batching="static"))
    params = dataclasses.replace(PENALTY, repetition_penalty=1e6)
    for ids, out in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        assert out.outputs[0].token_ids == alone.steps(ids, params)[0]
    seen = np.asarray(llm.runner._seen)
    assert not any(0 in ids for ids in PROMPTS) and not seen[: llm.engine_config.max_num_seqs, 0].any()
    assert_clean(llm)


MIXED = {
    "greedy": greedy(12),
    "sampled": SamplingParams(temperature=1.0, max_tokens=9, seed=1, ignore_eos=True),
    "top_k": SamplingParams(temperature=0.7, max_tokens=9, top_k=4, seed=2, ignore_eos=True),
    "penalty": dataclasses.replace(PENALTY, max_tokens=12),
    "all": SamplingParams(
        temperature=1.2, max_tokens=9, top_p=0.8, min_p=0.01, repetition_penalty=1.3, seed=4, ignore_eos=True
    ),
}


@pytest.mark.parametrize(
    "order",
    [
        ["greedy", "penalty", "greedy", "penalty", "penalty", "greedy", "greedy", "penalty"],
        pytest.param(
            ["greedy", "penalty", "sampled", "all", "greedy", "top_k", "penalty", "all", "greedy"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["two", "all"],
)
def test_modes_join_in_flight(order: list[str], scarce: LLM, alone: OneByOne) -> None:
    """Each new neighbour asks more, or less, of the sampler than those already there."""
    scarce.reset_stats()
    asked, outs = [], []
    for i, name in enumerate(order):
        ids = prompt((11, 4, 16, 7)[i % 4], 20 + i)
        asked.append((ids, MIXED[name]))
        outs.append(scarce.submit(ids, MIXED[name]))
        for _ in range(2):
            scarce.step()
    while scarce.step():
        pass
    for (ids, params), out in zip(asked, outs, strict=True):
        assert out.outputs[0].token_ids == alone.steps(ids, params)[0]
    assert scarce.stats()["preemptions"] > 0
    assert_clean(scarce)


def test_preemption_is_told(preempting: LLM) -> None:
    """The requests' own counts add up to the engine's, and times keep their order."""
    outs = preempting.generate(PROMPTS, greedy(10))
    assert sum(out.metrics.preemptions for out in outs) == preempting.stats()["preemptions"]
    assert outs[0].metrics.preemptions == 0, "the oldest is never preempted"
    for out in outs:
        m = out.metrics
        assert m.scheduled_time is not None
        assert m.arrival_time <= m.scheduled_time <= m.token_times[0]
        assert m.token_times == sorted(m.token_times) and len(m.token_times) == 10
    assert len(tokens(outs)) == len(PROMPTS)
