"""What parameters do to logits, against a plain twin: biases, banned words, least lengths, penalties; through
chunks, preemption, forks, the overlapped loop and static batches."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from moejax.core.errors import RequestError
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.engine.requests.output import OutputProcessor
from moejax.engine.step.sampler import SamplerMode
from tests.engine.paged import SCARCE, assert_clean, greedy, prompt
from tests.engine.tiny import FullForward

PROMPTS = [prompt(n, 7) for n in (16, 5, 8, 13, 1, 15, 10)]


def plain_twin(whole: FullForward, llm: LLM, ids: list[int], params: SamplingParams) -> list[int]:
    """The greedy tokens, each from the whole forward pass and these rules, in numpy."""
    assert llm.tokenizer is not None
    ends = {*llm.eos_token_ids, *params.stop_token_ids}
    banned = []
    for word in params.bad_words:
        plain, spaced = llm.encode(word), llm.encode(f" {word}")
        banned += [plain, spaced] if len(plain) == len(spaced) and plain[0] != spaced[0] else [plain]
    out: list[int] = []
    while len(out) < params.max_tokens:
        row = whole.logits(ids + out)[-1].astype(np.float32)
        for *before, last in banned:
            if out[max(0, len(out) - len(before)) :] == before:
                row[last] = -np.inf
        if len(out) < params.min_tokens:
            row[list(ends)] = -np.inf
        for token, bias in params.logit_bias.items():
            row[token] += np.float32(bias)
        for token in {*ids, *out}:
            factor = np.float32(params.repetition_penalty)
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        for token in set(out):
            row[token] -= np.float32(out.count(token)) * np.float32(params.frequency_penalty)
            row[token] -= np.float32(params.presence_penalty)
        out.append(int(row.argmax()))
        if out[-1] in params.stop_token_ids or (out[-1] in ends and not params.ignore_eos):
            break
    return out


@pytest.fixture(scope="module")
def asked(llm: LLM, oracle: FullForward) -> list[SamplingParams]:
    """One of each kind for each of `PROMPTS`; what is banned or biased is what would come otherwise."""
    assert llm.tokenizer is not None
    plain = [oracle.greedy(ids, 12) for ids in PROMPTS]

    def words(place: int, length: int) -> list[str]:
        """Texts in the output of a prompt that are so many tokens."""
        parts = [plain[place][i : i + length] for i in range(13 - length)]
        texts = [(llm.get_tokenizer().decode(part), part) for part in parts]
        return [t for t, part in texts if t.strip() == t != "" and llm.encode(t) == part]

    pair = next(place for place in range(len(PROMPTS)) if words(place, 2))
    others = iter(place for place in range(len(PROMPTS)) if place != pair)
    params = {
        pair: greedy(12, bad_words=words(pair, 2), frequency_penalty=0.3, min_tokens=3),
        next(others): greedy(12, presence_penalty=1.5),
        next(others): greedy(12, frequency_penalty=-2.0, presence_penalty=0.5),
        next(others): greedy(12, frequency_penalty=2.0, repetition_penalty=1.3),
        (at := next(others)): greedy(12, logit_bias={plain[at][0]: -100, 17: 2.5, str(plain[at][2]): -1e9}),
        (at := next(others)): greedy(12, min_tokens=7, stop_token_ids=plain[at][:5], ignore_eos=False),
        (at := next(others)): greedy(12, bad_words=words(at, 1)[:2]),
    }
    return [params[place] for place in range(len(PROMPTS))]


def kind(asked: list[SamplingParams], field: str) -> SamplingParams:
    """The first that sets a field."""
    return next(params for params in asked if getattr(params, field))


@pytest.fixture(scope="module")
def scarce(llm: LLM) -> LLM:
    return llm.variant(SCARCE)


def rules_engine(scarce: LLM, **changes: Any) -> LLM:
    """All batches run in one mode, else every mixture of rules is a program."""
    engine = scarce.variant(dataclasses.replace(SCARCE, **changes))
    engine.runner.builder.warm_modes = [SamplerMode(penalty=True, biases=32)]
    return engine


@pytest.mark.parametrize(
    "changes", [{}, {"overlap": False}, {"batching": "static"}], ids=["overlapped", "plain", "static"]
)
def test_each_row_by_its_own_rules(
    changes: dict[str, Any], llm: LLM, scarce: LLM, oracle: FullForward, asked: list[SamplingParams]
) -> None:
    engine = rules_engine(scarce, **changes)
    want = [plain_twin(oracle, llm, ids, params) for ids, params in zip(PROMPTS, asked, strict=True)]
    outs = engine.generate(PROMPTS, asked)
    assert [out.outputs[0].token_ids for out in outs] == want
    effects = [w != oracle.greedy(ids, 12)[: len(w)] for ids, w in zip(PROMPTS, want, strict=True)]
    assert all(effects), effects
    assert changes.get("batching") or engine.stats()["preemptions"] > 0
    assert_clean(engine)


def test_forks_count_their_own_tokens(
    llm: LLM, scarce: LLM, oracle: FullForward, asked: list[SamplingParams]
) -> None:
    engine = rules_engine(scarce)
    for params in (kind(asked, "presence_penalty"), kind(asked, "bad_words")):
        several = dataclasses.replace(params, n=2)
        for ids, out in zip(PROMPTS[:3], engine.generate(PROMPTS[:3], several), strict=True):
            want = plain_twin(oracle, llm, ids, params)
            assert [sample.token_ids for sample in out.outputs] == [want, want]
    assert_clean(engine)


def test_who_asks_for_nothing_keeps_its_programs(bare_llm: LLM) -> None:
    engine, counts = bare_llm.variant(SCARCE), []
    for params in (greedy(4), greedy(4, logit_bias={1: 1.0, 2: 1.0, 3: 1.0}, presence_penalty=1), greedy(4)):
        engine.generate(PROMPTS[1:2], params)
        counts.append(len(engine.ledger.entries))
        mode = engine.builder.mode(params, engine.builder.biases(params))
        assert (mode.biases, mode.penalty) == ((4, True) if params.logit_bias else (0, False))
    assert counts[0] < counts[1] == counts[2]


def test_stop_strings_wait_for_min_tokens(llm: LLM) -> None:
    """One that is complete before them is let pass, also by the part of the text that is still held back."""
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("sends each token each")
    texts = []
    for least in (0, 8):
        output = OutputProcessor(
            0, SamplingParams(min_tokens=least, max_tokens=99, stop=["ea", "xxxxxx"]), llm.tokenizer
        )
        for token in ids:
            if not output.finished:
                output.add(token, None)
        texts.append((output.output.text, output.output.stop_reason))
    assert texts[0] == ("sends ", "ea")
    assert texts[1] == ("sends each token ", "ea")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens 5 exceeds max_tokens 4"),
        ({"presence_penalty": 2.5}, r"presence_penalty must be a number in \[-2, 2\]"),
        ({"logit_bias": {"a": 1}}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {1: math.nan}}, "logit_bias must map token ids to numbers"),
        ({"bad_words": [""]}, r"bad_words.* a string that is not empty"),
        ({"presence_penality": 1}, "unknown keyword 'presence_penality'; did you mean 'presence_penalty'"),
    ],
)
def test_wrong_parameters_are_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


def test_what_the_model_cannot_do_is_refused(llm: LLM, bare_llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"logit_bias has 320, out of range; the vocabulary is 0\.\.319"):
        llm.generate([1], SamplingParams(logit_bias={320: 1.0}))
    with pytest.raises(RequestError, match=r"bad_words.* tokenizer"):
        bare_llm.generate([1], SamplingParams(bad_words=["a"]))


def test_vllms_prompts_and_tokenizer(scarce: LLM) -> None:
    llm = rules_engine(scarce)
    text, params = "def route(", greedy(4)
    ids = llm.encode(text)
    assert llm.get_tokenizer().decode(ids) == text
    want = llm.generate(text, params)[0]
    every = [{"prompt": text}, {"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": text}]
    for out in (*llm.generate(every, params), llm.generate(every[0], params)[0]):
        assert out.outputs[0].token_ids == want.outputs[0].token_ids and out.prompt_token_ids == ids
    assert [out.prompt for out in llm.generate(every, params)] == [text, None, text]
    for wrong in ({}, {"prompt": text, "multi_modal_data": 1}):
        with pytest.raises(RequestError, match="prompt 0 takes the keys prompt and prompt_token_ids"):
            llm.generate(wrong)
    with pytest.raises(RequestError, match="prompt 0 must be text or a flat list of token ids"):
        llm.generate({"prompt": None})
