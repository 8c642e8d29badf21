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
    load = llm.load

    def load_nothing(*args, fill: bool):
        return load(*args, fill=False) if not fill else pytest.fail("weights were read")

    monkeypatch.setattr(llm, "load", load_nothing)


@pytest.mark.parametrize(
    ("experiment", "override", "line"),
    [
        ("latency", "workload.prompt_len=2048", "2048 + 32 tokens exceed the limit of 2048"),
        ("latency", "engine.max_model_len=16", "tokens exceed the limit of 16"),
        ("latency", "hardware.kind=a200", "hardware.kind: unknown device 'a200'"),
        ("throughput", "workload.output_len=2048", "exceed the limit of 2048 (engine.max_model_len)"),
        ("latency", "engine.num_blocks=1", "64 + 32 tokens need 3 cache blocks of 32, and the cache has 1"),
        ("profile", "engine.num_blocks=1", "tokens need 3 cache blocks of 32, and the cache has 1"),
        ("profile", "workload.prompt_len=2048", "exceed the limit of 2048"),
        ("stress", "stress.probe_tokens=2048", "stress.probe_tokens 2048 leave no room"),
        ("quantization", "quantization.seq_len=2048", "quantization.seq_len=2048 and one token more"),
        ("quantization", "quantization.text=nowhere.txt", "nowhere.txt"),
        ("generate", f"prompts={'word ' * 3000}", "prompt 0 has 3000 tokens"),
        ("latency", "model.path=nowhere", "nowhere"),
    ],
)
def test_what_is_too_long_or_unknown(
    experiment: str, override: str, line: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert launch(main_of(experiment), experiment, [override, "tracker=none"], ahead=True) == 2
    out, err = capsys.readouterr()
    assert line in err and err.startswith("error: ") and err.count("\n") == 1, err
    assert out == "" and list(tmp_path.iterdir()) == []


def test_a_missing_key(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("moejax.tracking.wandb")

    def refuse(timeout_s: float) -> None:
        raise TrackingError("W&B: no API key")

    monkeypatch.setattr(wandb, "require_login", refuse)
    assert launch(main_of("latency"), "latency", ["tracker=wandb"], ahead=True) == 2
    assert capsys.readouterr().err == "error: W&B: no API key\n"
    assert list(tmp_path.iterdir()) == []
