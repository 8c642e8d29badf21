"""`python -m experiments.kernels`: mistakes are one line, and the default tracker gets the table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from experiments.kernels import main
from experiments.launch.app import CONFIG_DIR, launch
from moejax.bench.program.compiler import FOLDER, plugin_folder
from tests.gpu_compiler import needs_gpu_compiler


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


NAMES = [
    (["ops=[rmsnorm]"], ["ops: unknown kernel 'rmsnorm'; did you mean 'rms_norm'?", "flash_attention"]),
    (["ops=[rms_norm]", "specs=[decode_17]"], ["'decode_17'; did you mean 'decode_16'?", "prefill_4096"]),
    (
        ["ops=[rms_norm]", "specs=[decode,nothing]"],
        ["specs: unknown part of a spec 'nothing'", "mixtral_8x7b"],
    ),
    (["implementations=[cuda]"], ["unknown implementation 'cuda'", "known: pallas_triton, triton_jit"]),
    (
        ["ops=[grouped_swiglu,rms_norm]", "implementations=[triton_jit]", "specs=[prefill_512,decode_99]"],
        ["'decode_99'"],
    ),
    (["mode=fast"], ["mode: unknown value 'fast'", "known: bench, static, tune"]),
    (["targets=[sm_70]"], ["targets[0]: unknown value 'sm_70'", "known: sm_80, sm_90"]),
    (["ops=rms_norm"], ["ops must be a list: ops=[rms_norm]"]),
    (["specs=[decode]", "update_baseline=true"], ["update_baseline=true writes whole operations"]),
]


@pytest.mark.parametrize(("argv", "expected"), NAMES, ids=[" ".join(argv) for argv, _ in NAMES])
def test_a_wrong_name_is_one_line_and_leaves_nothing(
    argv: list[str], expected: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = launch(main, "kernels", argv)
    out, err = capsys.readouterr()
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    for text in expected:
        assert text in err
    assert out == "" and list(tmp_path.iterdir()) == []


DEVICES = [
    ("mode=bench", "cpu", "mode=bench times kernels on a CUDA device, and JAX has only 'cpu' here"),
    ("mode=tune", "cpu", "mode=tune times kernels on a CUDA device, and JAX has only 'cpu' here"),
    ("mode=tune", "gpu", "mode=tune knows a100, h100, h200, and this is 'cpu'"),
]


@pytest.mark.parametrize(("mode", "backend", "expected"), DEVICES)
def test_a_device_that_cannot_be_timed_is_one_line(
    mode: str,
    backend: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Known only once the job runs: Hydra's own folder goes again, and nothing of ours is there."""
    if jax.default_backend() != "cpu":
        pytest.skip("this machine has a device to time on")
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    code = launch(main, "kernels", [mode, "ops=[rms_norm]", "hydra.run.dir=run"])
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    assert expected in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_gpu_compiler
def test_the_default_tracker_has_the_table(tmp_path: Path) -> None:
    """As a program: W&B offline, the table in its run, the figures on stdout, the command to look at it."""
    pytest.importorskip("wandb")
    command = [
        *(sys.executable, "-m", "experiments.kernels", "mode=static", "ops=[rms_norm]", "specs=[decode_16]"),
        "hydra.run.dir=run",
    ]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    clean[FOLDER] = str(plugin_folder())
    environment = {**clean, "PYTHONPATH": str(CONFIG_DIR.parent), "COLUMNS": "100", "XLA_FLAGS": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    where, line = done.stdout.splitlines()
    metrics = json.loads(line)
    assert metrics["kernels"] == 8 and metrics["failures"] == 0
    rows = json.loads((tmp_path / where.removeprefix("results: ") / "result.json").read_text())["cases"]
    assert "rms_norm_residual" in done.stderr and "decode_16" in done.stderr
    look = next(line for line in done.stderr.splitlines() if " leet " in line)
    run_dir = look.split(" leet ")[1]

    read = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", run_dir],
        capture_output=True, text=True, cwd=tmp_path, timeout=60,
        env={**environment, "WANDB_MODE": "offline"},
    )  # fmt: skip
    if read.returncode and "not available" in read.stderr:
        pytest.skip(f"wandb-core does not run here: {read.stderr.strip()}")
    state = json.loads(read.stdout[read.stdout.index("{") : read.stdout.rindex("}") + 1])
    logged = state["summary"]["kernel_table"]
    assert (logged["_type"], logged["nrows"], logged["ncols"]) == ("table-file", 8, len(rows[0]))
    assert state["summary"]["kernels"] == 8
    assert state["config"]["ops"] == ["rms_norm"] and state["state"] == "finished"
    # The table itself: the same rows, in the run's folder.
    (table,) = (tmp_path / run_dir).rglob("kernel_table*.table.json")
    stored = json.loads(table.read_text())
    assert stored["columns"] == list(rows[0])
    assert [dict(zip(stored["columns"], row, strict=True))["spec"] for row in stored["data"]] == [
        row["spec"] for row in rows
    ]
