"""Adapters that are trained: they learn beside frozen weights, resume bit for bit, and serve from a slot."""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from moejax import LLM, EngineConfig
from moejax.checkpoint.hf import load_pretrained
from moejax.checkpoint.peft import merge_adapter, read_adapter
from moejax.core.adapters import AdaptersConfig
from moejax.core.errors import CheckpointError, ConfigError, OutputError
from moejax.text.corpus import Corpus, Document
from moejax.train.adapter import base_params, factors_of
from moejax.train.config import TrainAdapterConfig, TrainConfig
from moejax.train.data import TrainingText, encode, prepare_text
from moejax.train.export import Exported, export
from moejax.train.loop import TrainResult, train
from moejax.train.step import init_state
from moejax.train.tokenizer import END_OF_TEXT

from .small import Recorder, small_config, small_text


class Trained(NamedTuple):
    config: TrainConfig
    text: TrainingText
    result: TrainResult
    tracker: Recorder
    exported: Exported


def adapter_config(base: Path, folder: Path, **changes: Any) -> TrainConfig:
    adapter = TrainAdapterConfig(rank=2, base=str(base))
    return small_config(
        folder,
        **{"adapter": adapter, "token_noise": 0.0, "weight_decay": 0.0, "learning_rate": 0.03, "steps": 48}
        | changes,
    )


def few_words(text: TrainingText) -> TrainingText:
    """Documents of three of the words: other text than the base has seen."""
    train, held_out = (
        tuple(Document(document.name, "router sends token " * 80) for document in part)
        for part in (text.corpus.train, text.corpus.held_out)
    )
    sample = "".join(document.text + END_OF_TEXT for document in held_out)
    tokens = encode(text.tokenizer, train)
    return TrainingText(Corpus(train, held_out), text.tokenizer, tokens, sample, "few words")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder, text = tmp_path_factory.mktemp("adapter"), small_text()
    whole = small_config(folder / "base")
    export(whole, train(whole, Recorder(), text), folder / "model", "a command")
    config, tracker, text = adapter_config(folder / "model", folder), Recorder(), few_words(text)
    result = train(config, tracker, text)
    return Trained(config, text, result, tracker, export(config, result, folder / "exported", "a command"))


@pytest.mark.slow
def test_it_learns_beside_weights_that_stay(trained: Trained) -> None:
    first, *_, last = [value for _, value in trained.tracker.series("held_out/loss")]
    assert last < first - 0.05
    assert trained.result.metrics["base_held_out_perplexity"] == pytest.approx(math.exp(first))
    # What is trained, kept and counted are the factors alone; B is zero at the start, and none at the end.
    assert all(not b.any() and a.any() for a, b in factors_of(init_state(trained.config).params).values())
    factors = factors_of(trained.result.state.params)
    assert all(b.any() for _, b in factors.values())
    assert trained.result.metrics["num_params"] == sum(a.size + b.size for a, b in factors.values())


def test_what_was_exported_is_what_was_trained(trained: Trained) -> None:
    adapter = read_adapter(
        trained.exported.directory, load_pretrained(trained.config.adapter.base).model.config
    )
    factors = factors_of(trained.result.state.params)
    assert adapter.factors.keys() == factors.keys()
    for name, pair in factors.items():
        for mine, theirs in zip(pair, adapter.factors[name], strict=True):
            np.testing.assert_array_equal(mine, theirs)
    again = export(trained.config, trained.result, trained.exported.directory, "a command")
    assert again.held_out.loss == trained.exported.held_out.loss
    assert trained.exported.held_out.loss == pytest.approx(trained.result.held_out.loss, abs=1e-5)


def test_it_serves_from_a_slot(trained: Trained) -> None:
    """The sum of log-probabilities of a text is that of the evaluation in training."""
    engine = EngineConfig(
        compile_cache=False, max_model_len=64, max_num_seqs=2, adapters=AdaptersConfig(1, 2), autotune="rules"
    )
    stream = trained.text.held_out[:33]
    with LLM(trained.config.adapter.base, dtype="float32", engine=engine) as llm:
        llm.load_adapter("mine", trained.exported.directory)
        (base,), (mine,) = (llm.score([stream.tolist()], adapter=name) for name in (None, "mine"))
    model = load_pretrained(trained.config.adapter.base, dtype="float32").model
    merge_adapter(model, read_adapter(trained.exported.directory, model.config))
    logits = np.asarray(model(stream[None]))[0]
    expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(32), stream[1:]]
    np.testing.assert_allclose(mine, expected, atol=1e-4)
    assert mine.sum() > base.sum()


@pytest.mark.slow
def test_it_goes_on_from_a_checkpoint_with_the_same_bits(trained: Trained, tmp_path: Path) -> None:
    base = Path(trained.config.adapter.base)
    config = adapter_config(base, tmp_path)

    class Stopping(Recorder):
        def log(self, metrics: Any, step: int | None = None) -> None:
            super().log(metrics, step)
            if step == 11:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, Stopping(), trained.text)
    result = train(config, Recorder(), trained.text)
    assert result.resumed_from == 8
    for mine, whole in zip(jax.tree.leaves(result.state), jax.tree.leaves(trained.result.state), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(whole).tobytes()
    other = dataclasses.replace(config, adapter=TrainAdapterConfig(rank=3, base=str(base)))
    with pytest.raises(CheckpointError, match=r"adapter.rank \(2 there, 3 here\)"):
        train(other, Recorder(), trained.text)


def test_only_what_is_targeted(trained: Trained, tmp_path: Path) -> None:
    adapter = dataclasses.replace(trained.config.adapter, targets=["router", "attention"])
    state = init_state(adapter_config(Path(adapter.base), tmp_path, adapter=adapter))
    assert {name.split(".")[2] for name in factors_of(state.params)} == {"attention", "moe"}
    assert not any("experts" in name for name in factors_of(state.params))


def test_mistakes(trained: Trained, tmp_path: Path) -> None:
    base = Path(trained.config.adapter.base)
    with pytest.raises(OutputError, match=f"{base.name} exists and is no adapter directory"):
        export(trained.config, trained.result, base, "a command")
    assert load_pretrained(base).model is not None
    with pytest.raises(ConfigError, match=r"seq_len 65 exceeds the 64 of adapter.base"):
        train(adapter_config(base, tmp_path, seq_len=65, model=TrainConfig().model), Recorder(), trained.text)
    with pytest.raises(ConfigError, match=r"unknown|no model|there is no"):
        base_params(adapter_config(tmp_path / "nothing", tmp_path))
    with pytest.raises(ConfigError, match=r"documents: '\(' is no regular expression"):
        TrainConfig(documents="(")
    with pytest.raises(ConfigError, match=r"documents: 'xyz' is in the names of 0 documents to train on"):
        prepare_text(TrainConfig(documents="xyz"))
