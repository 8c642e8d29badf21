"""Sweeps on other launchers than Hydra's own, and experiments in several processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from experiments.launch import launcher as _launcher
from experiments.launch.app import CONFIG_DIR, launch
from experiments.launch.processes import runs_here
from experiments.launch.schema import CompareConfig, LatencyConfig
from moejax.core.parallel import PRESETS, ParallelConfig
from moejax.sharding.distributed import LaunchEnvironment
from tests.examples import slow_but
from tests.experiments import fake_slurm
from tests.sharding.processes import ROOT, started, wait_all

pytestmark = pytest.mark.multidevice

SCRIPT = str(Path(__file__).with_name("launched_experiment.py"))


def sweep(folder: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The launched experiment, as its users start one."""
    return subprocess.run(
        [sys.executable, SCRIPT, "-m", "tracker=none", *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )


def launch_latency(*argv: str) -> int:
    def main(config: LatencyConfig) -> None:
        raise AssertionError("must not run")

    return launch(main, "latency", list(argv))


# --- presets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout"), PRESETS.items())
def test_parallel_preset(name: str, layout: ParallelConfig) -> None:
    text = (CONFIG_DIR / "parallel" / f"{name}.yaml").read_text()
    assert ParallelConfig(**yaml.safe_load(text)) == layout
    if layout.num_devices > 1:  # a header: what it is, for which model, the command
        head = text[: text.index("dp:")]
        assert "For: " in head and f"parallel={name}" in head and "model=" in head


def test_parallel_presets_are_these() -> None:
    assert {path.stem for path in (CONFIG_DIR / "parallel").glob("*.yaml")} >= set(PRESETS)


# --- launchers ----------------------------------------------------------------------------------------------


@pytest.fixture
def _nothing_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("_nothing_written")
@pytest.mark.parametrize(
    ("argv", "texts"),
    [
        (["-m", "hydra/launcher=submitit_slurm"], ["no SLURM here", "sbatch", "srun", "submitit_local"]),
        (
            ["hydra/launcher=submitit_slurm"],
            ["hydra/launcher=submitit_slurm starts the jobs of a sweep: add -m"],
        ),
        (["-m", "hydra/launcher=submitit_slrm"], ["did you mean 'submitit_slurm'?"]),
        (["-m", "hydra/launcher=submitit_slurm", "hydra.launcher.gpus=8"], ["'hydra.launcher.gpus'"]),
    ],
)
def test_launcher_mistake_is_one_line(
    argv: list[str], texts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path.cwd()))
    assert launch_latency(*argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for text in texts:
        assert text in err


@pytest.mark.usefixtures("_nothing_written")
def test_launcher_without_its_plugin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launcher, "_installed", lambda module: False)
    assert launch_latency("-m", "hydra/launcher=submitit_slurm") == 2
    assert "pip install 'moejax[sweep]'" in capsys.readouterr().err


@pytest.mark.slow
def test_submitit_local(tmp_path: Path) -> None:
    """Two jobs, of which one fails: its line, its exit code, and the other's result."""
    pytest.importorskip("submitit", reason="hydra-submitit-launcher is not installed (make test installs it)")
    done = sweep(tmp_path, "hydra/launcher=submitit_local", "seed=1,13")
    assert done.returncode == 2, done.stderr
    assert "error: job 1 (tracker=none seed=13): seed 13 brings bad luck" in done.stderr.splitlines()
    assert "Traceback" not in done.stderr
    (result,) = tmp_path.glob("multirun/latency/*/0/result.json")
    assert json.loads(result.read_text())["seed"] == 1


@pytest.mark.parametrize("seeds", slow_but([], ["1", "1,2"]))
def test_submitit_slurm_with_two_nodes(tmp_path: Path, seeds: str) -> None:
    """The whole way through a stand-in for SLURM: an array of jobs, each a JAX program of two processes."""
    pytest.importorskip("submitit", reason="hydra-submitit-launcher is not installed (make test installs it)")
    fake_slurm.install(tmp_path / "bin")
    done = sweep(
        tmp_path,
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.nodes=2",
        "parallel=ep8",
        f"seed={seeds}",
        PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        FAKE_SLURM_JOB=str(_job_with_free_ports()),
    )
    assert done.returncode == 0, done.stderr
    results = [
        json.loads(path.read_text()) for path in sorted(tmp_path.glob("multirun/latency/*/*/result.json"))
    ]
    wanted = [(int(seed), 8.0, 2) for seed in seeds.split(",")]
    assert [(r["seed"], r["sum"], r["processes"]) for r in results] == wanted
    (script,) = tmp_path.glob("multirun/latency/*/.submitit/*/*_submission.sh")
    for line in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=240"):
        assert f"#SBATCH {line}\n" in script.read_text()
    others = [path.read_text() for path in tmp_path.glob("multirun/latency/*/.submitit/*/*_1_log.err")]
    assert len(others) == len(wanted) and all("[1] INFO experiments: at work" in text for text in others)
    assert "[1]" not in "".join(path.read_text() for path in tmp_path.glob("multirun/latency/*/*/run.log"))


def _job_with_free_ports() -> int:
    """A job's number for which, and the next, JAX's rule gives ports that are free: 61440 + number % 4096."""
    for job in range(1000 + os.getpid() % 2000, 4000):
        try:
            for port in (61440 + job, 61441 + job):
                socket.create_server(("", port)).close()
        except OSError:
            continue
        return job
    raise AssertionError("no free port")


# --- several processes --------------------------------------------------------------------------------------


def test_process_0_alone_writes_and_prints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with started([SCRIPT, "parallel=ep8"], cwd=run) as running:
        assert wait_all(running, 120) == [0, 0], running[0].stderr + running[1].stderr
        outs, errs = [item.stdout for item in running], [item.stderr for item in running]
    expected = {"sum": 8.0, "seed": 0, "processes": 2, "tracker": "wandb_offline"}
    assert json.loads(outs[0]) == expected  # and no line of Gloo's beside it
    assert outs[1] == ""
    assert "a table" in errs[0] and "a table" not in errs[1]
    assert "[1] INFO experiments: at work" in errs[1] and "[1] WARNING py.warnings" in errs[1]
    (folder,) = run.glob("outputs/latency/*")
    assert {path.name for path in folder.iterdir()} == {
        ".hydra",
        "metrics.jsonl",
        "result.json",
        "run.log",
        "summary.json",
        "wandb",
    }
    assert len(list(folder.glob("wandb/offline-run-*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "code", "text"),
    [
        (13, 2, "[1] error: seed 13 brings bad luck"),
        pytest.param(14, 1, "ZeroDivisionError: a defect of seed 14", marks=pytest.mark.slow),
    ],
)
def test_one_process_fails(tmp_path: Path, seed: int, code: int, text: str) -> None:
    with started([SCRIPT, "parallel=ep8", "tracker=none", f"seed={seed}"], cwd=tmp_path) as running:
        assert wait_all(running, 120) == [1, code], running[0].stderr + running[1].stderr
        assert text in running[1].stderr
        assert f"process 1 of 2 has ended with exit code {code}" in running[0].stderr
    assert not list(tmp_path.glob("outputs/latency/*/result.json"))


@pytest.mark.slow
def test_both_processes_fail(tmp_path: Path) -> None:
    """On the same mistake: each has its line, and neither speaks of the other."""
    with started([SCRIPT, "parallel=single", "tracker=none"], cwd=tmp_path) as running:
        assert wait_all(running, 120) == [2, 2], running[0].stderr + running[1].stderr
        line = "error: parallel: 1 devices do not reach over 2 processes of 4 devices each: start 1, or"
        assert line in running[0].stderr and f"[1] {line}" in running[1].stderr
        assert "ends with it" not in running[0].stderr + running[1].stderr


@pytest.mark.slow
def test_processes_started_differently(tmp_path: Path) -> None:
    """The second one reads another model's section: the line names the keys."""
    override = tmp_path / "other"
    (override / "workload").mkdir(parents=True)
    (override / "workload" / "mine.yaml").write_text(
        "defaults: [latency]\nprompt_len: ${oc.decode:${oc.env:LEN}}\n"
    )
    argv = [SCRIPT, "--config-dir", str(override), "workload=mine", "parallel=ep8", "tracker=none"]
    with started(argv, cwd=tmp_path, env_of=({"LEN": "32"}, {"LEN": "64"})) as running:
        codes = wait_all(running, 120)
        assert codes == [1, 2], running[0].stderr + running[1].stderr
        line = (
            "[1] error: process 1 was started with another configuration than process 0: workload.prompt_len"
        )
        assert line in running[1].stderr


def test_an_experiment_without_a_mesh_runs_in_process_0() -> None:
    other = LaunchEnvironment(1, 2, "localhost:1")
    assert runs_here(other, LatencyConfig)
    assert runs_here(LaunchEnvironment(0, 2, "localhost:1"), CompareConfig)
    assert not runs_here(other, CompareConfig)
