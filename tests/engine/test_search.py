"""Beam search, and the best of several samples."""

import dataclasses
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moejax
from moejax import LLM, BeamSearchParams, EngineConfig, PrefixCacheConfig, SamplingParams, beam_search
from moejax.core.errors import RequestError
from moejax.engine.search import Beam, _Search
from tests.engine.tiny import small_config, write_model
from tests.examples import slow_but

TINY = Path(moejax.__file__).parent / "assets" / "tiny"
ENGINE = EngineConfig(
    compile_cache=False, max_model_len=96, max_num_seqs=8, seq_buckets=[8], token_buckets=[64],
    block_buckets=[24], num_blocks=24,
)  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM("tiny", engine=ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """One layer, with a tokenizer."""
    directory = write_model(tmp_path_factory.mktemp("one"), small_config(max_position_embeddings=96))
    with LLM(directory, engine=ENGINE) as made:
        yield made


@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5])
def test_search_of_a_chain_that_is_known(penalty: float) -> None:
    """Two tokens and an end, 0, of known probabilities: of all sequences of at most three the best nine."""
    chances: dict[int, dict[int, float]] = {1: {0: 0.2, 1: 0.5, 2: 0.3}, 2: {0: 0.6, 1: 0.3, 2: 0.1}}
    logprobs = {a: {b: math.log(p) for b, p in row.items()} for a, row in chances.items()}
    params = BeamSearchParams(beam_width=9, max_tokens=3, length_penalty=penalty, early_stopping="never")
    search, every = _Search([1]), []
    while search.running:
        search.step([logprobs[([1, *b.token_ids])[-1]] for b in search.running], params, {0})

    def grow(tokens: tuple[int, ...], total: float) -> None:
        if tokens[-1:] == (0,) or len(tokens) == 3:
            every.append((total / len(tokens) ** penalty, tokens))
            return
        for token, logprob in logprobs[([1, *tokens])[-1]].items():
            grow((*tokens, token), total + logprob)

    grow((), 0.0)
    best = sorted(every, reverse=True)[:9]
    found = sorted(((score, beam.token_ids) for score, beam in search.ended), reverse=True)
    assert np.allclose([score for score, _ in found], [score for score, _ in best])
    assert {tokens for _, tokens in found} <= {tokens for _, tokens in every}


def test_when_a_search_stops() -> None:
    ended, going = Beam(-1.0, (0,)), {0: math.log(0.5), 1: math.log(0.5)}
    for stopping, goes_on in ((True, False), (False, False), ("never", True)):
        search = _Search([1], [Beam(-0.4, (1,))], [(-1.0, ended)])
        params = BeamSearchParams(beam_width=1, max_tokens=8, early_stopping=stopping)
        search.step([{1: -2.5, 2: -2.6}], params, {0})
        assert bool(search.running) == goes_on, stopping
    narrow = _Search([1])
    narrow.step([going], BeamSearchParams(beam_width=1, max_tokens=4), {0})
    assert [beam.token_ids for _, beam in narrow.ended] == [(0,)] and narrow.running == []


def test_a_width_of_one_is_greedy(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True)
    greedy = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
    prompts = ["The function returns", [5, 9, 200]]
    for (found,), output in zip(
        beam_search(llm, prompts, params), llm.generate(prompts, greedy), strict=True
    ):
        sample = output.outputs[0]
        assert found.token_ids == sample.token_ids and found.finish_reason == "length"
        total = sum(each.logprob for each in sample.logprobs or [])
        assert found.cumulative_logprob == pytest.approx(total, abs=1e-4)
        assert found.score == pytest.approx(total / 12, abs=1e-4) and found.text == sample.text


def test_wider_finds_likelier_ones(llm: LLM) -> None:
    found = {}
    for width in (1, 4):
        params = BeamSearchParams(beam_width=width, max_tokens=10, length_penalty=0.0, ignore_eos=True)
        (found[width],) = beam_search(llm, "The function returns", params)
    scores = [each.score for each in found[4]]
    assert scores == sorted(scores, reverse=True) and len({tuple(x.token_ids) for x in found[4]}) == 4
    assert scores[0] >= found[1][0].score


@pytest.mark.slow
def test_what_is_shared_changes_nothing() -> None:
    prompts = ["The function returns", "def f(x):", "import"]
    params = BeamSearchParams(beam_width=4, max_tokens=16)
    found = []
    for enabled in (False, True):
        engine = dataclasses.replace(ENGINE, prefix_cache=PrefixCacheConfig(enabled=enabled))
        with LLM("tiny", engine=engine) as llm:
            found.append(beam_search(llm, prompts, params))
            assert (llm.stats().get("prefix_hit_rate") or 0) >= 0.5 * enabled
    for one, other in zip(*found, strict=True):
        assert [x.token_ids for x in one] == [x.token_ids for x in other]
        assert [x.score for x in one] == pytest.approx([x.score for x in other], abs=1e-4)


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype="float32").eval()


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("early_stopping", "penalty"),
    slow_but([("never", 2.0)], product([False, True, "never"], [1.0, 0.0, 2.0])),
)
def test_transformers_finds_the_same(tiny: LLM, theirs: Any, early_stopping: Any, penalty: float) -> None:
    torch = pytest.importorskip("torch")
    params = BeamSearchParams(3, 24, length_penalty=penalty, early_stopping=early_stopping)
    prompts = [tiny.encode(text) for text in ("The function returns", "def f(x):", "a")]
    for prompt, found in zip(prompts, beam_search(tiny, prompts, params), strict=True):
        told = theirs.generate(
            torch.tensor([prompt]), num_beams=3, num_return_sequences=3, max_new_tokens=24,
            length_penalty=penalty, early_stopping=early_stopping, do_sample=False,
            eos_token_id=list(tiny.eos_token_ids), pad_token_id=0, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
        assert [each.score for each in found] == pytest.approx(told.sequences_scores.tolist(), abs=1e-4)
        for each, sequence in zip(found, told.sequences.tolist(), strict=True):
            assert sequence[len(prompt) : len(prompt) + len(each.token_ids)] == each.token_ids


def test_the_best_of_several_samples(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=3, n=6, logprobs=0, ignore_eos=True)
    every = llm.generate("The function returns", params)[0].outputs
    means = [np.mean([each.logprob for each in sample.logprobs or []]) for sample in every]
    ranked = [every[i].token_ids for i in np.argsort(means)[::-1]]
    asked = dataclasses.replace(params, n=2, best_of=6, logprobs=None)
    best = llm.generate("The function returns", asked)[0].outputs
    assert [sample.token_ids for sample in best] == ranked[:2]
    assert [sample.index for sample in best] == [0, 1] and all(sample.logprobs is None for sample in best)
    output = llm.submit("The function returns", asked)
    llm.step()
    with pytest.raises(RequestError, match="interrupt: of a request with best_of"):
        llm.interrupt(output.request_id)
    while not output.finished:
        llm.step()
    assert [sample.token_ids for sample in output.outputs] == ranked[:2]
    with pytest.raises(RequestError, match="best_of: a stream cannot tell"):
        llm.generate_stream("x", asked)


def test_mistakes(llm: LLM) -> None:
    with pytest.raises(RequestError, match="best_of 2 is below n 3"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(RequestError, match="beam_width must be an integer of at least 1, got 0"):
        BeamSearchParams(beam_width=0)
    with pytest.raises(RequestError, match="beam_width 600 needs the 1200 likeliest tokens"):
        beam_search(llm, "x", BeamSearchParams(beam_width=600))
    with pytest.raises(RequestError, match=r"prompt 1 has \d+ tokens; with max_tokens 95 .*max_model_len"):
        beam_search(llm, ["a", "The function returns"], BeamSearchParams(max_tokens=95))
    without = LLM(small_config(), load_format="dummy", engine=EngineConfig(compile_cache=False))
    assert beam_search(without, [[1, 2]], BeamSearchParams(2, 2))[0][0].text is None
