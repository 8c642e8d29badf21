"""`python -m experiments.quantization`: its presets are the files of configs/quant; mistakes are one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from experiments.launch.app import CONFIG_DIR, launch
from experiments.quantization import main

PRESETS = sorted(path.stem for path in (CONFIG_DIR / "quant").glob("*.yaml") if path.stem != "none")

MISTAKES = [
    (["quantization.methods=[int9]"], ["quantization.methods: unknown method 'int9'; did you mean 'int8'?"]),
    (["quantization.methods=[]"], ["quantization.methods is empty: choose among fp8_block128"]),
    (["quantization.methods=[int8,int8]"], ["'int8' stands there twice"]),
    (["quantization.presets.int8.clip=ms"], ["quantization.presets.int8.clip", "did you mean 'mse'?"]),
    (["quantization.presets.int8.formt=int4"], ["did you mean 'quantization.presets.int8.format'?"]),
    (["quantization.calibration.fallback=none"], ["quantization.calibration.fallback", "all, shared"]),
    (["quantization.speed.output_len=1"], ["quantization.speed.output_len must be an integer of at least 2"]),
    (["quant=int8"], ["this experiment has no 'quant' group"]),
    (["+quant@quantization.presets.mine=int5"], ["int5"]),
]


@pytest.mark.parametrize(("argv", "expected"), MISTAKES, ids=[argv[0] for argv, _ in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing(
    argv: list[str],
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = launch(main, "quantization", argv)
    out, err = capsys.readouterr()
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    for text in expected:
        assert text in err
    assert out == "" and list(tmp_path.iterdir()) == []


def test_every_file_is_a_preset() -> None:
    config = yaml.safe_load((CONFIG_DIR / "quantization.yaml").read_text())
    listed = [item for entry in config["defaults"] if isinstance(entry, dict) for item in entry.items()]
    mounted = {key.rpartition(".")[2]: name for key, name in listed if key.startswith("quant@")}
    assert sorted(mounted) == sorted(mounted.values()) == PRESETS
    assert len(config["quantization"]["methods"]) == 8


@pytest.mark.slow
def test_a_small_comparison_as_a_program(tmp_path: Path) -> None:
    """W&B offline, one group: a run for each method and one for all; the figures on stdout."""
    pytest.importorskip("wandb")
    command = [
        *(sys.executable, "-m", "experiments.quantization", "quantization.methods=[int8,int4_rtn_g64]"),
        *("quantization.max_windows=6", "quantization.seq_len=64", "quantization.speed.iterations=1"),
        "hydra.run.dir=run",
    ]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**clean, "PYTHONPATH": str(CONFIG_DIR.parent), "COLUMNS": "100", "XLA_FLAGS": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    metrics = result["metrics"]
    assert metrics["methods"] == 2 and metrics["kl_int4_rtn_g64"] > metrics["kl_int8"]
    assert done.stdout.startswith("results: run\n{")
    assert [row["bits_per_weight"] for row in result["cases"]] == [32.0, 8.25, 4.25]
    assert result["wandb_group"] == "quantization-tiny-run"
    runs = sorted(path for path in tmp_path.rglob("offline-run-*") if path.is_dir())
    assert len(runs) == 3 and "inside the noise (95 %" in done.stderr
