"""`python -m experiments.routing`: a trace made and analysed; mistakes are one line."""

import json
from pathlib import Path

import pytest

from experiments.launch.app import launch
from experiments.routing import main
from moejax.routing.capture import load_capture

MISTAKES = [
    ([], ["nothing to look at: give trace=PATH", "generate.kind=uniform|zipf|bursty|correlated"]),
    (["trace=gone"], ["trace=gone: there is no such file or folder"]),
    (["trace=."], ["trace=.: the folder holds no routing.npz; run it with engine.capture_routing=true"]),
    (["generate.kind=zip", "model=tiny"], ["generate.kind", "zipf"]),
    (["generate.knd=zipf"], ["did you mean 'generate.kind'?"]),
    (["generate.kind=zipf", "generate.requests=0", "model=tiny"], ["generate.requests must be"]),
    (["generate.exponent=1.2"], ["generate.exponent is set and generate.kind is not"]),
    (["generate.kind=zipf", "placement.devices=0", "model=tiny"], ["placement.devices must be"]),
    (["generate.kind=zipf", "model=tinny"], ["tinny", "tiny"]),
    (
        ["generate.kind=zipf"],
        ["generate.kind=zipf makes a trace of a model's shape: say which", "model=tiny"],
    ),
    (
        ["generate.kind=zipf", "generate.period=4", "model=tiny"],
        ["generate.period is no parameter of kind 'zipf'"],
    ),
]


@pytest.mark.parametrize(("argv", "expected"), MISTAKES, ids=[" ".join(argv) or "-" for argv, _ in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing(
    argv: list[str],
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = launch(main, "routing", argv)
    out, err = capsys.readouterr()
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    for text in expected:
        assert text in err
    assert out == "" and list(tmp_path.iterdir()) == []


def test_made_then_looked_at(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["generate.requests=2", "generate.prompt_len=4", "generate.output_len=6", "tracker=none"]
    argv = ["model=tiny", "generate.kind=zipf", "generate.exponent=1.2", *small, "hydra.run.dir=made"]
    assert launch(main, "routing", argv) == 0
    assert capsys.readouterr().out.startswith("results: made\n{")
    printed = json.loads(Path("made/result.json").read_text())["metrics"]
    assert printed["rows"] == 18
    made = load_capture("made")
    assert made.meta["model"] == "tiny" and made.ids.shape == (18, 5, 4)
    assert launch(main, "routing", ["trace=[made,made]", "tracker=none", "hydra.run.dir=seen"]) == 0
    both = json.loads(Path("seen/result.json").read_text())["metrics"]
    assert both["traces"] == 2 and both["gini"] == both["gini_made_2"] == printed["gini"]
