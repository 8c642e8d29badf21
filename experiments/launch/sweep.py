"""Sweeps that can be stopped at any moment and go on: which jobs are still to do, what is told at the end.

    python -m experiments.latency -m seed=1,2,3          a sweep; each job leaves job.json when it has ended
    python -m experiments.latency --resume multirun/…    the jobs that did not end well, and no other

`--resume` repeats the recorded command line in the same folder; arguments beside it replace recorded ones. It
works with every launcher: Hydra's launcher is handed only the jobs that are to be done.
"""

import argparse
import dataclasses
import functools
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import RunMode

from experiments.launch.compose import PlannedJob, PlannedSweep, assignment
from experiments.launch.errors import one_line
from moejax.core.errors import ConfigError
from moejax.results.result import RESULT_FILE
from moejax.results.sweep import (
    JobRecord,
    SweepRecord,
    changed_keys,
    claim_sweep,
    is_finished,
    job_folders,
    job_key,
    job_rows,
    read_job,
    read_sweep,
    write_job,
    write_sweep,
)
from moejax.sharding.distributed import read_environment
from moejax.tracking.provenance import git_state

Failed = Callable[[str, BaseException], None]
_MOST_CHANGES = 3
_MULTIRUN = ("-m", "--multirun")


def expand_resume(
    argv: Sequence[str], experiment: str, schema: type, *, alone: bool = True
) -> tuple[list[str], Path | None]:
    """The command line with `--resume DIR` replaced by what the sweep in DIR was started with, and DIR.
    Unless `alone`, the sweep may be running: in process 0 of this very run.

    Raises:
        ConfigError: DIR holds no sweep, or another experiment's.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--resume", metavar="DIR")
    try:
        found, given = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError("--resume needs the folder of a sweep: --resume DIR") from error
    # Hydra's parser takes -m before or after all overrides, not between them.
    given.sort(key=lambda text: text not in _MULTIRUN)
    if found.resume is None:
        own = {item.name for item in dataclasses.fields(schema)}
        for text in given:
            if text.startswith("resume=") and "resume" not in own:
                raise ConfigError(f"a sweep is resumed with --resume {text.removeprefix('resume=') or 'DIR'}")
        return given, None
    folder = Path(found.resume)
    record = read_sweep(folder)
    if record.experiment != experiment:
        raise ConfigError(
            f"{found.resume!r} is a sweep of another experiment: "
            f"python -m experiments.{record.experiment} --resume {found.resume}"
        )
    if alone and record.alive:
        raise ConfigError(f"the sweep in {found.resume!r} is still running ({record.process})")
    replaced = {_key(text) for text in given}
    kept = [text for text in record.argv if _key(text) not in replaced or text.startswith("-")]
    flags = [] if set(_MULTIRUN) & {*kept, *given} else ["-m"]
    expanded = [*flags, *kept, *given, assignment("hydra.sweep.dir", found.resume)]
    return sorted(expanded, key=lambda text: text not in _MULTIRUN), folder


def _key(argument: str) -> str:
    return argument.split("=")[0].lstrip("+~")


@contextmanager
def sweeping(
    plan: PlannedSweep | None,
    experiment: str,
    argv: Sequence[str],
    *,
    resumed: Path | None,
    speaks: bool,
    failed: Failed,
) -> Iterator["Sweep | None"]:
    """Around Hydra's run. Without a plan (a single run) there is nothing to do.

    Args:
        argv: the command line as it is to be recorded.
        resumed: the folder whose finished jobs are left alone.
        speaks: this process writes the sweep's record and tells the user; of several processes one does.
        failed: told (label, exception) of a job that failed in another process.

    Raises:
        ConfigError: a finished job of the resumed sweep had another configuration, or the folder of a new one
            holds a sweep.
        OutputError: the record cannot be written.
    """
    if plan is None:
        yield None
        return
    sweep = Sweep(plan, experiment, list(argv), resumed, speaks, failed)
    sweep.start()
    make = Plugins.instantiate_launcher

    def wrapped(self: Plugins, *args: Any, **kwargs: Any) -> Launcher:
        return _Pending(make(self, *args, **kwargs), sweep)

    # On the class: launchers that start processes pickle the instance.
    Plugins.instantiate_launcher = wrapped  # type: ignore[method-assign]
    complete = False
    try:
        yield sweep
        complete = True
    finally:
        Plugins.instantiate_launcher = make  # type: ignore[method-assign]
        sweep.end(complete)


class Sweep:
    """What is done of a sweep and what is not. `finished` is, at the end, how many of its jobs ended well."""

    def __init__(
        self,
        plan: PlannedSweep,
        experiment: str,
        argv: list[str],
        resumed: Path | None,
        speaks: bool,
        failed: Failed,
    ) -> None:
        self.plan, self.experiment, self.failed, self.speaks = plan, experiment, failed, speaks
        self.resumed = resumed is not None
        # Of several processes only one writes into the sweep's folder; all read what is finished from there.
        self.folder = resumed if resumed is not None else Path(plan.root)
        kept = [text for text in argv if _key(text) != "hydra.sweep.dir"]
        self.record = SweepRecord(experiment, kept, expected=plan.total or plan.n_trials)
        self.done: dict[int, JobRecord] = {}
        self.offset = self.finished = 0

    def start(self) -> None:
        """Finds out what is done, and says how to go on after a kill."""
        notes = self._look_back() if self.resumed else self._look_around()
        if not self.speaks:
            return
        (write_sweep if self.resumed else claim_sweep)(self.folder, self.record)
        count = "" if self.record.expected is None else f" of {self.record.expected} jobs"
        done = f", {len(self.done) or self._told()} of them done" if self.resumed else ""
        self._say(f"sweep{count}{done}; if it is stopped, go on with: {self._command()}", *notes)

    def overrides(self) -> list[str]:
        """Hydra's: the folder, since Hydra would name it after another second; and of a study that goes on
        only the trials that are left."""
        found = [assignment("hydra.sweep.dir", self.plan.root)]
        if not self.plan.basic and self.resumed and self.plan.n_trials is not None:
            found.append(f"hydra.sweeper.n_trials={max(0, self.plan.n_trials - self._told())}")
        return found

    def _told(self) -> int:
        """Of a search: the trials whose outcome the study knows."""
        if self.plan.basic:
            return 0
        return sum(record is not None and record.state != "running" for record in self._records())

    def _records(self) -> list[JobRecord | None]:
        return [read_job(folder) for folder in job_folders(self.folder)]

    def _look_back(self) -> list[str]:
        """Of a resumed sweep: the jobs that are done, and lines about their code."""
        if not self.plan.basic:
            numbers = [int(path.name) for path in job_folders(self.folder) if path.name.isdigit()]
            self.offset = max(numbers, default=-1) + 1
        for job in self.plan.jobs:
            folder = self.folder / job.folder.relative_to(self.plan.folder)
            record = read_job(folder)
            if record is not None and is_finished(folder, record):
                self._check_same(job, folder, record)
                self.done[job.number] = record
        now = _code_here()
        before = [record for record in self._records() if record is not None and record.state == "finished"]
        others = [r for r in before if r.git and _code(r.git) != _code(now)]
        if not others:
            return []
        names = ", ".join(dict.fromkeys(_code_name(record.git) for record in others))
        return [
            f"warning: {len(others)} finished jobs ran on other code ({names}) than this "
            f"({_code_name(now)}); sweep.json says which"
        ]

    def _check_same(self, job: PlannedJob, folder: Path, record: JobRecord) -> None:
        key, config = job_key(job.config, job.folder)  # as the configuration names it
        if key == record.key:
            return
        # Other code may have brought or dropped keys; those say nothing.
        common = record.git != _code_here()
        changes = list(changed_keys(record.config, config, common=common))
        if not changes:
            return
        more = f" and {len(changes) - _MOST_CHANGES} more" if len(changes) > _MOST_CHANGES else ""
        raise ConfigError(
            f"job {job.number} ({' '.join(job.overrides)}) is done with another configuration: "
            f"{', '.join(changes[:_MOST_CHANGES])}{more}; resume with the same arguments, or start anew"
        )

    def _look_around(self) -> list[str]:
        """Of a new sweep: a line about one of the same command that was killed."""
        for folder in sorted(self.folder.parent.glob("*/"), reverse=True) if self.speaks else ():
            try:
                other = read_sweep(folder)
            except ConfigError:
                continue
            same = (other.experiment, other.argv) == (self.experiment, self.record.argv)
            if same and other.state != "complete" and not other.alive:
                ended = [record for record in map(read_job, job_folders(folder)) if record is not None]
                done = sum(record.state == "finished" for record in ended)
                return [
                    f"an earlier sweep of this command is unfinished ({done} done): {self._command(folder)}"
                ]
        return []

    def end(self, complete: bool) -> None:
        """Rows, table, plots, and how to go on where something is left."""
        if not self.speaks or not self.folder.is_dir():
            return
        rows = job_rows(self.folder)
        self.finished = sum(row["state"] == "finished" for row in rows)
        expected = self.record.expected or len(rows)
        # A search takes a refused combination for an answer.
        tried = self.finished if self.plan.basic else len(rows)
        state = "complete" if complete and tried >= expected else "incomplete"
        self.record = dataclasses.replace(self.record, state=state, jobs=rows)
        write_sweep(self.folder, self.record)
        from moejax.report.sweep import report_sweep

        report_sweep(dataclasses.asdict(self.record), self.folder, objective=not self.plan.basic)
        failures = sum(row["state"] == "failed" for row in rows)
        line = f"sweep: {self.finished} of {expected} jobs finished"
        line += f", {failures} failed" if failures else ""
        self._say(line if state == "complete" else f"{line}; go on with: {self._command()}")

    def _command(self, folder: Path | None = None) -> str:
        path = (folder or self.folder).absolute()
        here = Path.cwd()
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        return f"python -m experiments.{self.experiment} --resume {shlex.quote(str(shown))}"

    def _say(self, *lines: str) -> None:
        sys.stdout.flush()
        for line in lines:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class JobLog:
    """Keeps the running job's job.json, if it is a sweep's; `value` is what the experiment returned."""

    def __init__(self) -> None:
        hydra = HydraConfig.get()
        self.value: Any = None
        self.began = time.monotonic()
        writes = hydra.mode == RunMode.MULTIRUN and read_environment().index == 0
        self.folder = Path(hydra.runtime.output_dir) if writes else None
        self.record = JobRecord("", {}, list(hydra.overrides.task))

    def start(self, config: Any) -> None:
        """What an earlier attempt left as a result is no longer one."""
        if self.folder is not None:
            key, plain = job_key(config, self.folder)
            self.record = dataclasses.replace(self.record, key=key, config=plain, git=_code_here())
            (self.folder / RESULT_FILE).unlink(missing_ok=True)
            write_job(self.folder, self.record)

    def end(self, state: str, error: str | None = None) -> None:
        if self.folder is not None:
            number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
            fields: dict[str, Any] = {
                "has_result": (self.folder / RESULT_FILE).is_file(),
                "value": float(self.value) if number else None,
                "error": error,
                "seconds": time.monotonic() - self.began,
            }
            write_job(self.folder, self.record.ended(state, **fields))


@contextmanager
def recorded() -> Iterator[JobLog]:
    """Around a job: its record says how it ended. An interrupted one stays unfinished, like a killed one."""
    log = JobLog()
    try:
        yield log
    except Exception as error:
        log.end("failed", one_line(error) or type(error).__name__)
        raise
    log.end("finished")


class _Pending(Launcher):
    """Hydra's launcher, handed only the jobs that are to be done; each keeps its folder."""

    def __init__(self, inner: Launcher, sweep: Sweep) -> None:
        self.inner, self.sweep = inner, sweep

    def setup(self, **kwargs: Any) -> None:
        self.inner.setup(**kwargs)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        first, done = initial_job_idx + self.sweep.offset, self.sweep.done
        numbers = range(first, first + len(job_overrides))
        jobs = dict(zip(numbers, job_overrides, strict=True))
        returns = {number: _finished(jobs[number], done[number]) for number in numbers if number in done}
        pending = [number for number in numbers if number not in done]
        for group in self._groups(pending):
            overrides = [self._in_its_folder(jobs[number], number, group) for number in group]
            for number, result in zip(group, self.inner.launch(overrides, group[0]), strict=True):
                returns[number] = self._told(result, number, jobs[number])
        return [returns[number] for number in numbers]

    def _groups(self, numbers: list[int]) -> list[list[int]]:
        """What is launched together: all, or in this process, one after the other, unbroken sequences."""
        if not isinstance(self.inner, BasicLauncher):
            return [numbers] if numbers else []
        groups: list[list[int]] = []
        for number in numbers:
            if groups and groups[-1][-1] == number - 1:
                groups[-1].append(number)
            else:
                groups.append([number])
        return groups

    def _in_its_folder(self, overrides: Sequence[str], number: int, group: list[int]) -> list[str]:
        """The launcher numbers jobs without gaps, and Hydra's subfolder is the number."""
        if group == list(range(group[0], group[0] + len(group))):
            return list(overrides)
        folders = {job.number: job.folder for job in self.sweep.plan.jobs}
        name = str(folders[number].relative_to(self.sweep.plan.folder))
        return [*overrides, assignment("hydra.sweep.subdir", name)]

    def _told(self, result: JobReturn, number: int, overrides: Sequence[str]) -> JobReturn:
        """A failure in another process as a job's failure here: the others' results still count."""
        if result.status == JobStatus.FAILED:
            self.sweep.failed(f"job {number} ({' '.join(overrides)}): ", result._return_value)
            result.status, result._return_value = JobStatus.COMPLETED, None
        return result


def _finished(overrides: Sequence[str], record: JobRecord) -> JobReturn:
    result = JobReturn(overrides=list(overrides))
    result.status, result._return_value = JobStatus.COMPLETED, record.value
    return result


@functools.cache
def _code_here() -> dict[str, Any]:
    """Of when this process first asked: what it has imported does not change any more."""
    return git_state()


def _code(git: dict[str, Any]) -> tuple[Any, Any]:
    return git.get("commit"), git.get("diff_hash")


def _code_name(git: dict[str, Any]) -> str:
    commit = git.get("commit")
    changed = f"+{(git.get('diff_hash') or '')[:4]}" if git.get("dirty") else ""
    return f"{commit[:7]}{changed}" if commit else "unknown"
