"""`work_dir`: a run that stops goes on where it was, with the same bits; another run is refused."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moejax.core.errors import ConfigError, OutputError
from moejax.core.quant import QuantRule
from moejax.nn.param import iter_params
from moejax.ptq.apply import quantize_model
from moejax.ptq.batches import HiddenStates
from moejax.ptq.store import WorkDir
from tests.ptq.models import FAMILIES, build, quant, tokens

CONFIG = FAMILIES["qwen2_moe"].replace(
    dtype="bfloat16", num_layers=3, moe_layers=(True,) * 3, sliding_windows=(None,) * 3
)
RULES = [QuantRule("layers.1.attention.*", method="rtn", format="fp8"), QuantRule("lm_head", format="w8a8")]


class Stop(Exception):
    pass


def run(folder, method="gptq", fmt="int4_g8_asym", *, stop=None, ids=None, seed=0, **changes):
    """All parameters of the quantized model, and the report."""
    model = build(CONFIG, seed=seed)

    def progress(share, text):
        if stop is not None and text == stop:
            raise Stop

    config = quant(method, fmt, rules=RULES, work_dir=None if folder is None else str(folder), **changes)
    report = quantize_model(model, config, tokens() if ids is None else ids, progress=progress)
    return {name: np.asarray(param[...]) for name, param in iter_params(model)}, report


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize(
    ("method", "fmt", "stop", "resumed"),
    [
        pytest.param("awq", "int4_g8", "quantizing layer 1", 1, marks=pytest.mark.slow),
        pytest.param("awq", "int4_g8", "running layer 2, quantized", 2, marks=pytest.mark.slow),
        pytest.param("gptq", "int4_g8_asym", "calibrating lm_head", 3, marks=pytest.mark.slow),
        ("smoothquant", "w8a8_static", "calibrating layer 0", 0),
    ],
)
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path, method, fmt, stop, resumed):
    rules = {"fmt": fmt, "method": method}
    if method == "smoothquant":
        rules["min_tokens"] = 20
    whole, want = run(None, **rules)
    with pytest.raises(Stop):
        run(tmp_path / "w", stop=stop, **rules)
    found, report = run(tmp_path / "w", **rules)
    same(found, whole)
    assert [stage.resumed for stage in report.stages] == [True] * resumed + [False] * (4 - resumed)
    for mine, other in zip(report.stages, want.stages, strict=True):
        assert mine.expert_tokens == other.expert_tokens and mine.folded == other.folded
        assert [w.output_error for w in mine.weights] == [w.output_error for w in other.weights]
        assert [w.shape for w in mine.weights] == [w.shape for w in other.weights]
    check_finished(tmp_path / "w", found, **rules)


def check_finished(folder, first, **rules):
    """It has nothing to do, and keeps no hidden states."""
    assert sorted(path.name for path in folder.iterdir()) == [
        "lock", "run.json", "stage_000.npz", "stage_001.npz", "stage_002.npz", "stage_003.npz",
    ]  # fmt: skip
    second, report = run(folder, stop="calibrating layer 0", **rules)
    same(first, second)
    assert all(stage.resumed for stage in report.stages)


@pytest.mark.slow
def test_a_finished_run_that_never_stopped(tmp_path):
    first, _ = run(tmp_path)
    check_finished(tmp_path, first)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"seed": 1}, "weights"),
        ({"ids": tokens(seed=2)}, "tokens"),
        ({"method": "awq"}, "quant"),
        ({"batch_size": 2}, "quant"),
    ],
)
def test_another_run_is_refused(tmp_path, changes, what):
    with pytest.raises(Stop):
        run(tmp_path, stop="calibrating layer 1")
    with pytest.raises(ConfigError, match=f"holds another run \\(different {what}\\); remove it"):
        run(tmp_path, **changes)


def test_hidden_states_that_are_gone_are_named(tmp_path):
    with pytest.raises(Stop):
        run(tmp_path, stop="calibrating layer 2")
    (tmp_path / "hidden_001.bin").unlink()
    with pytest.raises(ConfigError, match=r"hidden_001.bin is missing"):
        run(tmp_path)


def test_a_disk_without_room_is_named(tmp_path):
    with pytest.raises(OutputError, match=r"cannot write .*hidden_000.tmp"):
        HiddenStates.empty((1 << 50, 1, 1), np.float32, 1, tmp_path / "hidden_000.tmp")


def test_one_run_at_a_time(tmp_path):
    work = WorkDir(str(tmp_path), {"a": "b"})
    with pytest.raises(ConfigError, match="another run is at work"):
        WorkDir(str(tmp_path), {"a": "b"})
    work.close()
    WorkDir(str(tmp_path), {"a": "b"}).close()


@pytest.mark.slow
def test_a_killed_process_goes_on_with_the_same_bits(tmp_path):
    """kill -9 as soon as the first layer is done."""
    code = (
        "import jax; jax.config.update('jax_numpy_dtype_promotion', 'strict');"
        "from tests.ptq.test_resume import run; from pathlib import Path;"
        f"run(Path({str(tmp_path)!r}))"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root, env=environment)
    try:
        while not (tmp_path / "stage_000.npz").exists():
            assert process.poll() is None, "it ended too early"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "stage_003.npz").exists()
    found, report = run(tmp_path)
    assert report.stages[0].resumed and not report.stages[-1].resumed
    same(found, run(None)[0])
