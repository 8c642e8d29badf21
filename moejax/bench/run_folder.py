"""A run's or a sweep's folder: its own alone, and without files of an earlier one. No JAX here.

Of runs that begin at once, one gets a folder. What an earlier run has left there is refused or, with
`overwrite`, put aside until the end; it comes back where the new run has written nothing.
"""

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from itertools import count
from pathlib import Path

from moejax.core.errors import ConfigError, MoejaxError
from moejax.report.experiments import EXPERIMENTS
from moejax.results.sweep import JOB_FILE, SWEEP_FILE, job_folders

_BY_HYDRA = {".hydra", "run.log"}
_ASIDE = ".replaced"
# What runs and sweeps leave beside their plots.
_NAMES = (
    *_BY_HYDRA, "result.json", "requests.jsonl", "metrics.jsonl", "summary.json", "routing.npz",
    "profile.json", "program.json", "dumps", "trace", "wandb", "quantization.json", "methods",
    "comparison.json", "ratios.png", "distributions*.png", "report.html", "outputs.jsonl", "workspace.json",
    "backend-*.log", JOB_FILE, SWEEP_FILE, "sweep.png", "multirun.yaml", "optimization_results.yaml",
    "study.db", "points.csv", "tables.csv", "machine.csv",
)  # fmt: skip


def run_files(folder: Path) -> list[Path]:
    """Returns what a run, or a sweep and its jobs, have left in `folder`; nothing of the user's own."""
    plots = [f"{name}.png" for report in EXPERIMENTS.values() for name in report.plots]
    jobs = job_folders(folder) if (folder / SWEEP_FILE).exists() else []
    files = [file for place in (folder, *jobs) for file in place.glob("*")]
    return sorted(file for file in files if any(fnmatch(file.name, name) for name in (*_NAMES, *plots)))


def drop_replaced(folder: Path) -> None:
    """Deletes the earlier run that `claimed` has put aside."""
    shutil.rmtree(folder / _ASIDE, ignore_errors=True)


@contextmanager
def claimed(
    folder: Path, *, numbered: bool = False, overwrite: bool = False, refused: Callable[[], bool] = bool
) -> Iterator[Path]:
    """Makes `folder` if it is missing, keeps it from other runs until the end, and yields it.

    Args:
        numbered: where there is such a folder, take `folder_2` or the next that is free.
        overwrite: take it with an earlier run's files in it.
        refused: asked at the end, whether the run was, and so leaves nothing but what was there before; one
            that ends with a `MoejaxError` is.

    Raises:
        ConfigError: a run is writing there now; or, without `overwrite`, one has done so.
        OSError: the folder cannot be made.
    """
    path, made = _make(folder, numbered)
    lock = _lock(path)
    aside = path / _ASIDE
    try:
        files = run_files(path)
        if (files or aside.exists()) and not overwrite:
            raise taken(path, files)
        if aside.exists():  # by a run that was killed
            _remove(files)
        elif files:
            _move(path, aside, files)
        before = {item.name for item in path.iterdir()}
        (path / ".hydra").mkdir()  # which claims it on file systems without locks too
        try:
            yield path
        finally:
            with suppress(OSError):
                (path / ".hydra").rmdir()  # if nobody has put anything into it
            new = {item.name for item in path.iterdir()} - before
            written = [file for file in run_files(path) if file.name != ".hydra" and file.suffix != ".log"]
            if aside.exists() and not written:
                _remove([path / name for name in new & _BY_HYDRA])
                _move(aside, path, run_files(aside))
            elif new <= _BY_HYDRA and (refused() or isinstance(sys.exc_info()[1], MoejaxError)):
                _remove([path / name for name in new])
                with suppress(OSError):  # where another run has made something in one of them
                    for place in made:
                        place.rmdir()
            drop_replaced(path)
    finally:
        os.close(lock)


def _make(folder: Path, numbered: bool) -> tuple[Path, list[Path]]:
    """Returns the folder, and what was made of it and of those above, the innermost first."""
    missing = [path for path in folder.parents if not path.exists()]
    for number in count(2):
        place = folder if number == 2 else folder.with_name(f"{folder.name}_{number - 1}")
        try:
            place.mkdir(parents=True)
            return place, [place, *missing]
        except FileExistsError:
            if not numbered:
                break
    return folder, []


def taken(folder: Path, files: list[Path]) -> ConfigError:
    """Returns the error of a folder in which an earlier run has left `files`."""
    names = ", ".join(str(file.relative_to(folder)) for file in files[:3])
    sweep = (folder / SWEEP_FILE).exists()
    kind = f"sweep already: go on with --resume {folder}," if sweep else f"run already ({names}):"
    return ConfigError(f"{str(folder)!r} holds a {kind} choose another folder, or say overwrite=true")


def _move(source: Path, target: Path, files: list[Path]) -> None:
    for file in files:
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():  # the log of an engine that did not start
            file.rename(place)


def _remove(files: list[Path]) -> None:
    for file in files:
        shutil.rmtree(file) if file.is_dir() else file.unlink()


def _lock(folder: Path) -> int:
    """Returns a descriptor with a lock on `folder`, which ends with it or with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(f"a run is writing into {str(folder)!r} now: choose another folder") from error
    except OSError:
        pass  # a file system without locks
    return descriptor
