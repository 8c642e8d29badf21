"""A vocabulary that does not divide by the devices is padded, and nothing that a caller sees shows it."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import LLM, ParallelConfig, SamplingParams
from moejax.engine.step.sampler import SamplerMode
from tests.engine.mesh_models import BASE, ENGINE, FAMILIES, checkpoint, prompts
from tests.engine.test_mesh import LAYOUTS, agree

pytestmark = pytest.mark.multidevice

VOCAB = 333
# Compiles fastest.
DENSE = BASE.replace(num_layers=1, moe_layers=(False,), sliding_windows=(None,))
MIXTURE = SamplerMode(greedy=False, filters=True, penalty=True, logprobs=VOCAB)
PARAMS = [
    SamplingParams(max_tokens=5, temperature=0.0, logprobs=VOCAB, ignore_eos=True),
    # So hot that every id is nearly as likely: without a mask one draw in a hundred would be of padding.
    SamplingParams(max_tokens=12, temperature=1e4, top_k=-1, seed=5, n=2, logprobs=VOCAB, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.8, top_k=VOCAB, top_p=0.97, min_p=0.01, seed=1,
                   repetition_penalty=1.3, logprobs=7, ignore_eos=True),
    SamplingParams(max_tokens=5, temperature=0.0, repetition_penalty=1.5, logprobs=0, ignore_eos=True),
]  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def made(family: str, tied: bool) -> Path:
        config = (FAMILIES | {"dense": DENSE})[family].replace(vocab_size=VOCAB, tie_word_embeddings=tied)
        return checkpoint(config, tmp_path_factory.mktemp(f"{family}-{tied}"))

    return made


@pytest.fixture(scope="session")
def single(model: Any) -> Any:
    @functools.cache
    def run(family: str, tied: bool) -> Any:
        return outcome(LLM(str(model(family, tied)), engine=ENGINE))

    return run


def outcome(llm: LLM) -> Any:
    """Tokens, log-probabilities by token, scores. Every token of the vocabulary is named, and no other."""
    llm.runner.builder.warm_modes = [MIXTURE]  # else each mix of these in a batch is a program
    asked = prompts(4, VOCAB)
    done = llm.generate(asked, PARAMS)
    samples = [sample for out in done for sample in out.outputs]
    tokens = [sample.token_ids for sample in samples]
    assert max(token for row in tokens for token in row) < VOCAB
    top = []
    for sample in samples[:3]:
        for step in sample.logprobs or []:
            assert sorted(step.top) == list(range(VOCAB))
            assert np.logaddexp.reduce(list(step.top.values())) == pytest.approx(0.0, abs=1e-5)
            top.append([step.top[token] for token in range(VOCAB)])
    chosen = [step.logprob for sample in samples[3:] for step in sample.logprobs or []]
    scores = llm.score([[0, VOCAB - 1, 7, VOCAB - 2, 3], *(p for p in asked if len(p) > 1)])
    return tokens, np.asarray(top), np.asarray(chosen), np.concatenate(scores)


def resolved(llm: LLM) -> dict[str, str]:
    return {r.key: r.reason for r in llm.resolutions}


def check(layout: str, family: str, tied: bool, model: Any, single: Any) -> None:
    llm = LLM(str(model(family, tied)), engine=ENGINE, parallel=ParallelConfig(**LAYOUTS[layout]))
    agree(outcome(llm), single(family, tied))
    devices = llm.parallel_config.tensor_size
    padded = -(-VOCAB // devices) * devices
    said = f"vocabulary {VOCAB} padded to {padded} for {devices} devices"
    assert resolved(llm).get("vocab_size") == (said if devices > 1 else None)
    llm.engine.scheduler.check_integrity()


@pytest.mark.slow
def test_a_mesh_gives_what_one_device_gives(model: Any, single: Any) -> None:
    check("tp8", "dense", True, model, single)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, tied: bool, model: Any, single: Any) -> None:
    check(layout, "qwen2_moe", tied, model, single)
