"""A run's folder is one run's, and an earlier run's files stay until a new one writes."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from moejax.bench.run_folder import claimed, run_files
from moejax.core.errors import ConfigError
from moejax.report.experiments import EXPERIMENTS

CLAIM = """
import sys, time
from pathlib import Path
from moejax.bench.run_folder import claimed
from moejax.core.errors import ConfigError
Path(f"ready {sys.argv[2]}").touch()
while not Path("go").exists():
    time.sleep(0.001)
try:
    with claimed(Path("a/run"), numbered=sys.argv[1] == "numbered", overwrite=True) as folder:
        (folder / "result.json").write_text(sys.argv[2])
        time.sleep(0.5)
        print(folder)
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["numbered", "named"])
def test_of_processes_that_begin_at_once_each_has_a_folder_or_is_refused(kind: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CLAIM, kind]
    started = [
        subprocess.Popen([*argv, str(i)], cwd=tmp_path, stdout=subprocess.PIPE, text=True) for i in range(3)
    ]
    while len(list(tmp_path.glob("ready *"))) < len(started):
        time.sleep(0.01)
    (tmp_path / "go").touch()
    said = sorted(process.communicate(timeout=60)[0].strip() for process in started)
    if kind == "numbered":
        assert said == ["a/run", "a/run_2", "a/run_3"]
        assert len({(tmp_path / place / "result.json").read_text() for place in said}) == 3
    else:
        assert said == ["a run is writing into 'a/run' now: choose another folder"] * 2 + ["a/run"]


def test_of_threads_that_begin_at_once_one_gets_a_folder_named_by_hand(tmp_path: Path) -> None:
    together, done = Barrier(8), Barrier(8)

    def begin(number: int) -> bool:
        together.wait()
        try:
            with claimed(tmp_path / "run"):
                done.wait()
                (tmp_path / "run" / "result.json").write_text(str(number))
                return True
        except ConfigError:
            done.wait()
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(begin, range(8))) == 1
    with pytest.raises(ConfigError, match=r"holds a run already \(result\.json\).*overwrite=true"):
        with claimed(tmp_path / "run"):
            pass


def test_the_earlier_run_stays_until_the_new_one_writes(tmp_path: Path) -> None:
    for name in ("result.json", "itl.png", "distributions_2.png", "mine.png", "notes.md"):
        (tmp_path / name).write_text("old")
    (tmp_path / "methods").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ConfigError, match="too long"), claimed(tmp_path, overwrite=True) as folder:
        (folder / ".hydra" / "config.yaml").write_text("new")
        (folder / "run.log").write_text("new")
        raise ConfigError("too long")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "result.json").read_text() == "old"
    with claimed(tmp_path, overwrite=True) as folder:
        assert run_files(folder) == [folder / ".hydra"]
        (folder / "result.json").write_text("new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.png", "notes.md", "result.json"]
    assert (tmp_path / "result.json").read_text() == "new"


def test_a_refused_run_takes_with_it_what_it_made_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.md").write_text("mine")
    for place in ("there", "new/deep/run", "there/run"):
        with pytest.raises(ConfigError), claimed(tmp_path / place) as folder:
            (folder / ".hydra" / "config.yaml").write_text("")
            raise ConfigError("no such model")
    with claimed(tmp_path / "new", refused=lambda: True):
        (tmp_path / "new" / "run.log").write_text("")
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["there", "notes.md"]
    with claimed(tmp_path / "failed", refused=lambda: True) as folder:
        (folder / "backend-hf.log").write_text("why")
    assert (tmp_path / "failed" / "backend-hf.log").exists()


def test_jobs_below_are_a_sweeps_only(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "job.json").touch()
    assert run_files(tmp_path) == []
    (tmp_path / "sweep.json").touch()
    assert [path.name for path in run_files(tmp_path)] == ["job.json", "sweep.json"]


def test_every_plot_is_a_runs(tmp_path: Path) -> None:
    for report in EXPERIMENTS.values():
        for name in report.plots:
            (tmp_path / f"{name}.png").touch()
    assert len(run_files(tmp_path)) == len(list(tmp_path.iterdir())) > 20
