"""What can be known before weights are read is found before, and a refused run leaves nothing."""

from pathlib import Path

import pytest

from experiments.launch.app import launch
from experiments.launch.notebook import main_of
from moejax.core.errors import TrackingError
from moejax.engine import llm


@pytest.fixture(autouse=True)
def _no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh working directory, and no weights to be had."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llm, "load", lambda *_: pytest.fail("weights were read"))


@pytest.mark.parametrize(
    ("experiment", "override", "line"),
    [
        ("latency", "workload.prompt_len=2048", "tokens exceed the limit of 2048 (the model's longest"),
        ("latency", "engine.max_model_len=16", "limit of 16 (engine.max_model_len); lower work"),
        ("latency", "hardware.kind=a200", "hardware.kind: unknown device 'a200'"),
        ("throughput", "workload.output_len=2048", "exceed the limit of 2048"),
        ("profile", "workload.prompt_len=2048", "exceed the limit of 2048"),
        ("stress", "stress.probe_tokens=2048", "2049 tokens exceed the limit of "),
        ("quantization", "quantization.seq_len=2048", "lower quantization.seq_len"),
        ("generate", f"prompts={'word ' * 3000}", "lower prompts"),
        ("latency", "model.path=nowhere", "nowhere"),
    ],
)
def test_what_is_too_long_or_unknown(
    experiment: str, override: str, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert launch(main_of(experiment), experiment, [override, "tracker=none"]) == 2
    out, err = capsys.readouterr()
    assert line in err and err.startswith("error: ") and err.count("\n") == 1, err
    assert out == "" and list(tmp_path.iterdir()) == []


def test_a_missing_key(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("moejax.tracking.wandb")

    def refuse(timeout_s: float) -> None:
        raise TrackingError("W&B: no API key")

    monkeypatch.setattr(wandb, "require_login", refuse)
    assert launch(main_of("latency"), "latency", ["tracker=wandb"]) == 2
    assert capsys.readouterr().err == "error: W&B: no API key\n"
    assert list(tmp_path.iterdir()) == []
