"""Sweeps that are stopped and go on: nothing finished is repeated, nothing is lost."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from experiments.launch.app import CONFIG_DIR, launch, output_dir
from experiments.launch.notebook import compose
from experiments.launch.schema import LatencyConfig
from moejax.core.errors import CheckpointError, ConfigError
from moejax.results.sweep import (
    job_key,
    read_job,
    read_sweep,
    write_job,
    write_sweep,
)
from tests.sharding.processes import started, wait_all

SCRIPT = str(Path(__file__).with_name("swept_experiment.py"))
ROOT = CONFIG_DIR.parent


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "RUNS": str(folder / "runs")}


def run(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """The swept experiment, as its users start one."""
    return subprocess.run(
        [sys.executable, SCRIPT, *argv], cwd=folder, env=environment(folder), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def kill_in_job_of_seed(folder: Path, seed: int, *argv: str) -> str:
    """Starts it, and kills it with SIGKILL in the middle of that job; returns stderr."""
    with subprocess.Popen(
        [sys.executable, SCRIPT, *argv], cwd=folder, env=environment(folder), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        end = time.monotonic() + 100
        while str(seed) not in seeds(folder):
            assert process.poll() is None and time.monotonic() < end, process.stderr
            time.sleep(0.05)
        time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stderr is not None
        return process.stderr.read()


def seeds(folder: Path) -> list[str]:
    """What has been run, in order."""
    runs = folder / "runs"
    return runs.read_text().split() if runs.exists() else []


@pytest.mark.slow
def test_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    argv = ("-m", "tracker=none", "hydra.sweep.dir=here", "seed=1,2,13,4")
    err = kill_in_job_of_seed(tmp_path, 2, *argv)
    assert "go on with: python -m experiments.latency --resume here" in err
    assert seeds(tmp_path) == ["1", "2"]
    first = (tmp_path / "here" / "0" / "result.json").read_bytes()
    assert read_sweep(tmp_path / "here").state == "running"

    done = run(tmp_path, "--resume", "here")
    assert done.returncode == 2, done.stderr  # seed 13 fails; the others still run
    assert seeds(tmp_path) == ["1", "2", "2", "13", "4"]
    assert "sweep of 4 jobs, 1 of them done" in done.stderr
    assert "error: job 2 (tracker=none seed=13): seed 13 brings bad luck" in done.stderr
    assert "sweep: 3 of 4 jobs finished, 1 failed; go on with: " in done.stderr
    assert (tmp_path / "here" / "0" / "result.json").read_bytes() == first
    record = read_sweep(tmp_path / "here")
    assert record.state == "incomplete"
    assert [(row["job"], row["state"]) for row in record.jobs] == [
        ("0", "finished"), ("1", "finished"), ("2", "failed"), ("3", "finished")
    ]  # fmt: skip

    (tmp_path / "mended").touch()
    done = run(tmp_path, f"--resume={tmp_path / 'here'}")
    assert done.returncode == 0, done.stderr
    assert seeds(tmp_path)[5:] == ["13"]
    assert read_sweep(tmp_path / "here").state == "complete"
    assert [json.loads((tmp_path / f"here/{n}/result.json").read_text())["metrics"] for n in range(4)] == [
        {"median_ttft_ms": -float((seed - 3) ** 2)} for seed in (1, 2, 13, 4)
    ]  # fmt: skip
    assert (tmp_path / "here" / "sweep.png").is_file()
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
def test_submitit_goes_on_with_the_missing_jobs_only(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="hydra-submitit-launcher is not installed (make test installs it)")
    argv = ("-m", "tracker=none", "hydra/launcher=submitit_local", "hydra.sweep.dir=here", "seed=13,1,14,13")
    done = run(tmp_path, *argv)
    assert done.returncode == 2, done.stderr
    assert sorted(seeds(tmp_path)) == ["1", "13", "13", "14"]
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [line.split(" (")[0] for line in lines] == ["error: job 0", "error: job 3"]
    (tmp_path / "mended").touch()
    done = run(tmp_path, "--resume", "here")
    assert done.returncode == 0, done.stderr
    assert seeds(tmp_path)[4:] == ["13", "13"]
    results = [json.loads((tmp_path / f"here/{n}/result.json").read_text()) for n in range(4)]
    assert [r["metrics"]["median_ttft_ms"] for r in results] == [-100.0, -4.0, -121.0, -100.0]


# --- in this process ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


class Sweeper:
    """Runs sweeps of an experiment that notes its seeds, and raises what it is told to."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.raises: dict[int, BaseException] = {}

    def __call__(self, *argv: str) -> int:
        def main(config: LatencyConfig) -> None:
            self.seeds.append(config.seed)
            if config.seed in self.raises:
                raise self.raises[config.seed]
            (output_dir() / "result.json").write_text("{}\n" if config.seed == 99 else '{"a": 1}')

        return launch(main, "latency", list(argv))

    def take(self) -> list[int]:
        found, self.seeds = self.seeds, []
        return found


SWEEP = ("-m", "seed=1,2,3", "hydra.sweep.dir=here")


def change(folder: Path, **fields: Any) -> None:
    record = read_job(folder)
    assert record is not None
    write_job(folder, dataclasses.replace(record, **fields))


def test_interrupted_and_failed_jobs_are_done_again(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweeper()
    sweep.raises = {2: KeyboardInterrupt()}
    assert sweep(*SWEEP) == 130
    err = capsys.readouterr().err
    assert err.splitlines()[-3:] == [
        "sweep: 1 of 3 jobs finished; go on with: python -m experiments.latency --resume here",
        "rows and plot: here/sweep.json",
        "interrupted",
    ]
    assert sweep.take() == [1, 2]
    sweep.raises = {3: CheckpointError("bad\nfile")}
    assert sweep("--resume", "here") == 2 and sweep.take() == [2, 3]
    assert read_sweep("here").jobs[2]["error"] == "bad file"
    sweep.raises = {}
    assert sweep("--resume", "here") == 0 and sweep.take() == [3]
    assert sweep("--resume", "here") == 0 and sweep.take() == []
    err = capsys.readouterr().err
    assert "sweep: 3 of 3 jobs finished\nrows and plot: here/sweep.json" in err


def test_a_kill_is_told_at_the_next_start_of_the_same_command(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweeper()
    sweep("-m", "seed=1", "hydra.sweep.dir=sweeps/a")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_sweep(Path("sweeps/a"), dataclasses.replace(read_sweep("sweeps/a"), state="running", pid=ended.pid))
    for argv, told in ((("-m", "seed=2"), False), (("-m", "seed=1"), True)):
        capsys.readouterr()
        assert sweep(*argv, f"hydra.sweep.dir=sweeps/b{told}") == 0
        line = "an earlier sweep of this command is unfinished (1 done): python -m experiments.latency"
        assert (f"{line} --resume sweeps/a" in capsys.readouterr().err) == told


def test_a_number_that_another_process_has_by_now_is_no_sweep() -> None:
    sweep = Sweeper()
    sweep("-m", "seed=1", "hydra.sweep.dir=here")
    record = dataclasses.replace(read_sweep("here"), state="running", pid=os.getpid())
    assert record.alive
    began = psutil.Process().create_time()
    write_sweep(Path("here"), dataclasses.replace(record, started=began - 3600))
    assert not read_sweep("here").alive and sweep("--resume", "here") == 0


def test_a_job_that_names_its_own_folder_is_not_repeated() -> None:
    sweep = Sweeper()
    own = "quant.calibration.work_dir='${hydra:runtime.output_dir}/work'"
    assert sweep("-m", "seed=1", own, "hydra.sweep.dir=here") == 0
    sweep.take()
    assert sweep("--resume", "here") == 0 and sweep.take() == []


def test_a_sweep_is_replaced_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweeper()
    sweep(*SWEEP)
    Path("here/2/notes.md").write_text("mine")
    assert sweep("-m", "seed=4,x", "hydra.sweep.dir=here", "overwrite=true") == 2
    assert len(read_sweep("here").jobs) == 3
    assert sweep("-m", "seed=4", "hydra.sweep.dir=here", "overwrite=true") == 0
    assert [row["overrides"]["seed"] for row in read_sweep("here").jobs] == [4]
    assert [path.name for path in Path("here/2").iterdir()] == ["notes.md"]


def test_a_job_without_its_result_is_done_again() -> None:
    sweep = Sweeper()
    sweep(*SWEEP)
    Path("here/0/result.json").unlink()
    Path("here/1/result.json").write_text('{"a": ')
    Path("here/2/job.json").write_text('{"key": "')
    sweep.take()
    assert sweep("--resume", "here") == 0 and sweep.take() == [1, 2, 3]


def test_more_jobs_may_be_asked_for_and_another_tracker(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweeper()
    sweep(*SWEEP)
    sweep.take()
    assert sweep("--resume", "here", "seed=1,2,3,4", "tracker=none") == 0 and sweep.take() == [4]


def test_a_finished_job_of_another_configuration_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweeper()
    sweep(*SWEEP)
    capsys.readouterr()
    sweep.take()
    assert sweep("--resume", "here", "workload.iterations=9") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: job 0 (seed=1 workload.iterations=9) is done with another configuration: ")
    assert "workload.iterations was 3, is 9" in err and err.count("\n") == 1
    assert sweep.take() == []


def test_other_code_is_told_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweeper()
    sweep.raises = {3: CheckpointError("bad")}
    sweep(*SWEEP)
    git = {"commit": "0123456789abcdef", "dirty": False, "diff_hash": None}
    change(Path("here/1"), git=git)
    # A key that came to the configuration with other code does not count.
    record = read_job(Path("here/1"))
    assert record is not None
    del record.config["engine"]["overlap"]
    change(Path("here/1"), key="else", config=record.config)
    sweep.raises = {}
    sweep.take()
    capsys.readouterr()
    assert sweep("--resume", "here") == 0 and sweep.take() == [3]
    assert "warning: 1 finished jobs ran on other code (0123456)" in capsys.readouterr().err
    assert [row["commit"] == "0123456789abcdef" for row in read_sweep("here").jobs] == [False, True, False]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished sweep."""
    folder = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert Sweeper()("-m", "seed=1", "hydra.sweep.dir=here") == 0
    return folder / "here"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--resume"], "--resume needs the folder of a sweep"),
        (["--resume", "nowhere"], "there is no folder 'nowhere'"),
        (
            ["--resume", "here/0"],
            "'here/0' is not a sweep's folder: it has no sweep.json; did you mean 'here'?",
        ),
        (["--resume", "other"], "another experiment: python -m experiments.throughput --resume other"),
        (["--resume", "alive"], "the sweep in 'alive' is still running (process "),
        (
            ["--resume", "away"],
            ' on elsewhere; if it was killed there, set "state" to "incomplete" in sweep.json',
        ),
        (["--resume", "broken"], "broken/sweep.json is not a sweep's record"),
        (["resume=here"], "a sweep is resumed with --resume here"),
        (["--resum", "here"], "did you mean '--resume'?"),
        (list(SWEEP), "'here' holds a sweep already: go on with --resume here"),
        (["-m", "seed=1", "hydra.sweep.dir=broken"], "'broken' holds a sweep already"),
    ],
)
def test_mistakes(argv: list[str], text: str, swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweeper()
    shutil.copytree(swept, "here")
    record = read_sweep("here")
    write_sweep(Path("other"), dataclasses.replace(record, experiment="throughput"))
    write_sweep(Path("alive"), dataclasses.replace(record, state="running", pid=os.getpid()))
    write_sweep(Path("away"), dataclasses.replace(record, state="running", host="elsewhere"))
    Path("broken").mkdir()
    Path("broken/sweep.json").write_text("{")
    assert sweep(*argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and text in err, err
    assert sweep.take() == []


def test_the_key_is_of_what_is_measured() -> None:
    def key(config: Mapping[str, Any], folder: str = "/a/0") -> str:
        made = dataclasses.make_dataclass("C", [(name, Any) for name in config])(**config)
        return job_key(made, Path(folder))[0]

    base = {"x": 1, "tracker": "none", "where": "/a/0/cache", "rate": float("inf")}
    assert key(base) == key({**base, "tracker": "wandb"})
    assert key(base) == key({**base, "where": "/b/1/cache"}, "/b/1")
    assert (
        len({key(base), key({**base, "x": 1.5}), key({**base, "rate": None}), key({**base, "where": "/c"})})
        == 4
    )


def test_a_preset_of_another_experiment_is_named() -> None:
    text = "experiment=throughput_ramp is a preset of throughput"
    with pytest.raises(ConfigError, match=text):
        compose(["experiment=throughput_ramp"], "stress")


# --- the whole way ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.multidevice
def test_a_sweep_of_two_processes_goes_on(tmp_path: Path) -> None:
    """Both leave out the same jobs, though only process 0 writes into the sweep's folder."""
    script = str(Path(__file__).with_name("launched_experiment.py"))
    for argv in (
        ["-m", "parallel=ep8", "tracker=none", "seed=1,2", "hydra.sweep.dir=here"],
        ["--resume", "here"],
    ):
        with started([script, *argv], cwd=tmp_path) as running:
            assert wait_all(running, 240) == [0, 0], running[0].stderr + running[1].stderr
            found = [json.loads(line)["seed"] for line in running[0].stdout.splitlines() if '"seed"' in line]
        assert found == ([1, 2] if "-m" in argv else [2])
        (tmp_path / "here" / "1" / "job.json").unlink()


@pytest.mark.slow
def test_real_sweep_and_run_killed(tmp_path: Path) -> None:
    """A latency sweep, killed in the middle, and a single run: nothing half-written, all in the end."""
    tiny = ("workload.batch_size=1", "workload.prompt_len=4", "workload.iterations=1", "tracker=none")
    program = [sys.executable, "-m", "experiments.latency", *tiny]
    env = environment(tmp_path)

    def start(*argv: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*program, *argv], cwd=tmp_path, env=env, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def kill_when(process: subprocess.Popen[bytes], path: Path) -> None:
        end = time.monotonic() + 300
        while not path.exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    kill_when(start("hydra.run.dir=single"), tmp_path / "single" / "run.log")
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.glob("single/*.png"))
    assert not (tmp_path / "single" / "result.json").exists()

    sweep = ("-m", "workload.output_len=2,3,4", "hydra.sweep.dir=sweep")
    kill_when(start(*sweep), tmp_path / "sweep" / "1" / "job.json")
    before = (tmp_path / "sweep" / "0" / "result.json").read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "experiments.latency", "--resume", "sweep"], cwd=tmp_path, env=env,
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "sweep" / "0" / "result.json").read_bytes() == before
    record = read_sweep(tmp_path / "sweep")
    assert [row["cases"][0]["output_len"] for row in record.jobs] == [2, 3, 4]
    assert record.state == "complete" and "TPOT p50" in done.stderr
