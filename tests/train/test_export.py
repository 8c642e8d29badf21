"""The exported directory: loads, measures as it says, and never replaces what it should not."""

import json
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

import moejax.train.export as export_module
from moejax.checkpoint.hf import load_pretrained
from moejax.core.errors import OutputError
from moejax.routing.analysis import load_shares
from moejax.train.config import TrainConfig
from moejax.train.evaluate import Evaluator
from moejax.train.export import PROMPTS, Exported, check_export_dir, export
from moejax.train.loop import TrainResult, train

from .small import Recorder, small_config, small_text

Run = tuple[TrainConfig, TrainResult, Exported]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    config = small_config(folder)
    result = train(config, Recorder(), small_text())
    return config, result, export(config, result, folder / "model", "python -m experiments.train a=1")


def test_the_directory_is_what_hugging_face_expects(run: Run) -> None:
    _, _, exported = run
    assert {path.name for path in exported.directory.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "special_tokens_map.json", "held_out.txt", "README.md",
    }  # fmt: skip
    config = json.loads((exported.directory / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["eos_token_id"] == 0
    assert exported.num_bytes == sum(path.stat().st_size for path in exported.directory.iterdir())
    # Nothing of the building is left beside it.
    assert not list(exported.directory.parent.glob(".model*"))


def test_the_weights_are_the_trained_ones_rounded(run: Run) -> None:
    _, result, exported = run
    model, _ = load_pretrained(exported.directory, dtype="float32")
    table = np.asarray(result.state.params["embedding"]["table"])
    np.testing.assert_allclose(np.asarray(model.embedding.table[...]), table, rtol=2**-8)


def test_the_card_reports_the_rounded_weights(run: Run) -> None:
    config, result, exported = run
    model, _ = load_pretrained(exported.directory, dtype="float32")
    measured = Evaluator(config)(nnx.to_pure_dict(nnx.state(model)), result.text.held_out)
    assert measured.loss == exported.held_out.loss
    assert measured.loss != result.held_out.loss
    card = (exported.directory / "README.md").read_text(encoding="utf-8")
    assert f"**{measured.perplexity:.2f}**" in card and f"{measured.tokens} tokens" in card
    assert "python -m experiments.train a=1" in card
    assert f"{load_shares(measured.counts).max():.2%}" in card
    assert all(f"{prompt}▸" in card for prompt in PROMPTS)
    assert "Python Software Foundation" in card


def test_a_second_export_replaces_the_first(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, result, _ = run
    monkeypatch.setattr(export_module, "sample_texts", lambda llm: [])
    target = tmp_path / "model"
    export(config, result, target, "one")
    (target / "stale.txt").write_text("from before")
    export(config, result, target, "two")
    assert not (target / "stale.txt").exists()
    assert "\ntwo\n" in (target / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failure_leaves_the_old_model_as_it_was(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, result, _ = run
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("{}")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "save_tokenizer", fail)
    with pytest.raises(OutputError, match=r"cannot write the model to .*: No space left on device"):
        export(config, result, target, "")
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "config.json"]


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("do not delete")
    with pytest.raises(OutputError, match="is no model directory"):
        check_export_dir(tmp_path)
    with pytest.raises(OutputError, match="is no model directory"):
        check_export_dir(tmp_path / "thesis.tex")
    (tmp_path / "empty").mkdir()
    check_export_dir(tmp_path / "empty")
    check_export_dir(tmp_path / "new" / "deep")
