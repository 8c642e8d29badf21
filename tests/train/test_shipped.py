"""The shipped model: small, complete, as good as its card says, and using every expert."""

import re

import numpy as np
import pytest
from flax import nnx

from moejax.checkpoint.directory import resolve_model_dir
from moejax.checkpoint.hf import load_pretrained
from moejax.engine.requests.tokenizer import Tokenizer
from moejax.nn.param import num_params
from moejax.routing.analysis import load_shares
from moejax.train.config import TrainConfig
from moejax.train.data import encode, prepare_text
from moejax.train.evaluate import Evaluator, HeldOut
from moejax.train.step import model_config

TINY = resolve_model_dir("tiny")
CARD = (TINY / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def held_out() -> HeldOut:
    """Its text measured as `experiments.train` measures it."""
    model, _ = load_pretrained("tiny", dtype="float32")
    tokenizer = Tokenizer.load(TINY)
    assert tokenizer is not None
    stream = np.array(tokenizer.encode((TINY / "held_out.txt").read_text(encoding="utf-8")), np.int32)
    return Evaluator(TrainConfig())(nnx.to_pure_dict(nnx.state(model)), stream)


def test_it_is_whole_and_small() -> None:
    names = {path.name for path in TINY.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "held_out.txt", "README.md"} <= names
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= 10_000_000


def test_it_has_the_shape_of_the_default_configuration() -> None:
    model, config = load_pretrained("tiny", dtype="float32")
    assert config == model_config(TrainConfig())
    assert (config.num_experts, config.num_experts_per_tok) == (16, 4)
    assert f"{num_params(model) / 1e6:.2f} M parameters" in CARD


@pytest.mark.optimized
def test_its_perplexity_is_the_cards(held_out: HeldOut) -> None:
    printed = re.search(r"\*\*(\d+\.\d\d)\*\* a token", CARD)
    assert printed is not None
    # The last printed digit, and what another machine's order of summation may add to it.
    assert held_out.perplexity == pytest.approx(float(printed[1]), abs=0.011)
    assert f"{held_out.tokens} tokens" in " ".join(CARD.split())


@pytest.mark.slow
def test_it_uses_every_expert(held_out: HeldOut) -> None:
    shares = load_shares(held_out.counts)
    assert shares.shape == (5, 16)
    assert shares.min() > 0.01 and shares.max() < 0.25


@pytest.mark.slow
def test_its_held_out_text_was_not_trained_on() -> None:
    """Where this Python is the one it was trained with; another version splits other text."""
    config = TrainConfig()
    text = prepare_text(config)
    if text.sample != (TINY / "held_out.txt").read_text(encoding="utf-8"):
        pytest.skip("another Python version's standard library")
    assert text.tokenizer.to_str() == (TINY / "tokenizer.json").read_text(encoding="utf-8")
    assert len(encode(text.tokenizer, text.corpus.train)) == len(text.train)
