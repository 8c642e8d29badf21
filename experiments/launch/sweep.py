"""Sweeps that can be stopped at any moment and go on: which jobs are still to do, what is told at the end.

    python -m experiments.latency -m seed=1,2,3          a sweep; each job leaves job.json when it has ended
    python -m experiments.latency --resume multirun/…    the jobs that did not end well, and no other

`--resume` repeats the recorded command line in the same folder; arguments beside it replace recorded ones. A
job that finds its own record finished returns the recorded value, so that every launcher and sweeper serves.
"""

import argparse
import dataclasses
import functools
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from experiments.launch.command_line import MULTIRUN, has_section, override_key
from experiments.launch.compose import Plan, assignment
from moejax.bench.run_folder import drop_replaced
from moejax.core.errors import ConfigError, MoejaxError, ReportError
from moejax.core.files import shown_path
from moejax.core.words import one_line
from moejax.results.result import RESULT_FILE, print_ending
from moejax.results.sweep import (
    SWEEP_FILE,
    JobRecord,
    SweepRecord,
    changed_keys,
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

_MOST_CHANGES = 3


def expand_resume(
    argv: Sequence[str], experiment: str, schema: type, *, alone: bool = True
) -> tuple[list[str], Path | None]:
    """Returns the command line with `--resume DIR` replaced by what the sweep in DIR was started with, and
    DIR. Unless `alone`, the sweep may be running: in process 0 of this very run.

    Raises:
        ConfigError: DIR holds no sweep, or another experiment's.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--resume", metavar="DIR")
    try:
        known, given = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError("--resume needs the folder of a sweep: --resume DIR") from error
    # Hydra's parser takes -m before or after all overrides, not between them.
    given.sort(key=lambda text: text not in MULTIRUN)
    if known.resume is None:
        for text in given:
            if text.startswith("resume=") and not has_section(schema, "resume"):
                raise ConfigError(f"a sweep is resumed with --resume {text.removeprefix('resume=') or 'DIR'}")
        return given, None
    folder = Path(known.resume)
    record = read_sweep(folder)
    if record.experiment != experiment:
        raise ConfigError(
            f"{known.resume!r} is a sweep of another experiment: "
            f"python -m experiments.{record.experiment} --resume {known.resume}"
        )
    if alone and record.alive:
        raise ConfigError(f"the sweep in {known.resume!r} is still running ({record.process})")
    replaced = {override_key(text) for text in given}
    kept = [text for text in record.argv if override_key(text) not in replaced or text.startswith("-")]
    flags = [] if set(MULTIRUN) & {*kept, *given} else ["-m"]
    expanded = [*flags, *kept, *given, assignment("hydra.sweep.dir", known.resume)]
    return sorted(expanded, key=lambda text: text not in MULTIRUN), folder


def check_resumed(resumed: Path) -> Callable[[int, Sequence[str], Path, Any], None]:
    """Returns a check of a resumed sweep's jobs before any runs, for `plan_run`."""

    def check(number: int, overrides: Sequence[str], folder: Path, config: Any) -> None:
        subdir = HydraConfig.get().sweep.subdir
        record = _finished(resumed / subdir)
        if record is not None:
            _check_same(f"job {number} ({' '.join(overrides)}) ", record, *job_key(config, folder))

    return check


def _finished(folder: Path) -> JobRecord | None:
    record = read_job(folder)
    return record if is_finished(folder, record) else None


def _check_same(job: str, record: JobRecord, key: str, config: dict[str, Any]) -> None:
    """Raises `ConfigError` where a finished job had another configuration."""
    if key == record.key:
        return
    # Other code may have brought or dropped keys; those say nothing.
    changes = list(changed_keys(record.config, config, common=record.git != _code_here()))
    if changes:
        more = f" and {len(changes) - _MOST_CHANGES} more" if len(changes) > _MOST_CHANGES else ""
        raise ConfigError(
            f"{job}is done with another configuration: {', '.join(changes[:_MOST_CHANGES])}{more};"
            " resume with the same arguments, or start anew"
        )


class Sweep:
    """A sweep's record and its messages; of several processes only one, which `speaks`, writes and tells.

    Attributes:
        finished: at the end, how many of its jobs ended well.
    """

    def __init__(
        self, plan: Plan, experiment: str, argv: Sequence[str], resumed: Path | None, *, speaks: bool
    ) -> None:
        self.plan, self.experiment, self.resumed, self.speaks = plan, experiment, resumed, speaks
        self.folder = resumed if resumed is not None else Path(plan.folder)
        kept = [text for text in argv if override_key(text) != "hydra.sweep.dir"]
        self.record = SweepRecord(experiment, kept, expected=plan.expected)
        self.before: dict[Path, JobRecord] = {}
        self.finished = 0

    def start(self) -> list[str]:
        """Writes the record, says how to go on after a kill, and returns Hydra's overrides for the sweep.

        Raises:
            OutputError: the record cannot be written.
        """
        self.before = self._records()
        done = [record for folder, record in self.before.items() if is_finished(folder, record)]
        told = sum(record.state != "running" for record in self.before.values())
        notes = self._other_code(done) if self.resumed is not None else self._unfinished_before()
        if self.speaks:
            write_sweep(self.folder, self.record)
            drop_replaced(self.folder)
            count = "" if self.record.expected is None else f" of {self.record.expected} jobs"
            count += f", {len(done) if self.plan.basic else told} of them done" if self.resumed else ""
            _say(f"sweep{count}; if it is stopped, go on with: {self._command()}", *notes)
        overrides = [assignment("hydra.sweep.dir", self.plan.folder)]
        if self.resumed is not None and not self.plan.basic:
            # A study goes on with the trials that are left, in folders of their own.
            if self.plan.expected is not None:
                overrides.append(f"hydra.sweeper.n_trials={max(0, self.plan.expected - told)}")
            if self.plan.numbered:
                overrides.append(f"hydra.sweep.subdir='{len(self.before)}+${{hydra.job.num}}'")
        return overrides

    def _records(self) -> dict[Path, JobRecord]:
        records = {folder: read_job(folder) for folder in job_folders(self.folder)}
        return {folder: record for folder, record in records.items() if record is not None}

    def _other_code(self, done: Sequence[JobRecord]) -> list[str]:
        now = _code_here()
        others = [record for record in done if record.git and _code(record.git) != _code(now)]
        if not others:
            return []
        names = ", ".join(dict.fromkeys(_code_name(record.git) for record in others))
        return [
            f"warning: {len(others)} finished jobs ran on other code ({names}) than this "
            f"({_code_name(now)}); sweep.json says which"
        ]

    def _unfinished_before(self) -> list[str]:
        """Looks for a killed sweep of the same command beside a new one's folder."""
        for folder in sorted(self.folder.parent.glob("*/"), reverse=True) if self.speaks else ():
            try:
                other = read_sweep(folder)
            except ConfigError:
                continue
            same = (other.experiment, other.argv) == (self.experiment, self.record.argv)
            if same and other.state != "complete" and not other.alive:
                done = sum(_finished(path) is not None for path in job_folders(folder))
                return [
                    f"an earlier sweep of this command is unfinished ({done} done): {self._command(folder)}"
                ]
        return []

    def failures(self) -> Iterator[tuple[Path, JobRecord]]:
        """Yields the folders and records of jobs that have failed since the start."""
        for folder, record in self._records().items():
            if self.speaks and record.state == "failed" and record != self.before.get(folder):
                yield folder, record

    def end(self, complete: bool) -> None:
        """Writes rows, table and plots, and says how to go on where something is left."""
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
        from moejax.report.parts import Parts
        from moejax.report.sweep import PLOT_FILE, report_sweep

        parts = Parts()
        with parts.part(PLOT_FILE):
            report_sweep(dataclasses.asdict(self.record), self.folder, objective=not self.plan.basic)
        failures = sum(row["state"] == "failed" for row in rows)
        line = f"sweep: {self.finished} of {expected} jobs finished"
        line += f", {failures} failed" if failures else ""
        files = [self.folder / name for name in (SWEEP_FILE, PLOT_FILE) if (self.folder / name).is_file()]
        written = f"rows and plot: {', '.join(map(shown_path, files))}"
        _say(line if state == "complete" else f"{line}; go on with: {self._command()}", written)
        counts = {"jobs": len(rows), "finished": self.finished, "failed": failures}
        print_ending(self.experiment, self.folder, counts)
        if complete:  # else something else ends it, and is told
            parts.check(self.folder / SWEEP_FILE)

    def _command(self, folder: Path | None = None) -> str:
        shown = shown_path((folder or self.folder).absolute())
        return f"python -m experiments.{self.experiment} --resume {shlex.quote(shown)}"


def _say(*lines: str) -> None:
    sys.stdout.flush()
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    sys.stderr.flush()


class JobLog:
    """Keeps the running job's job.json, if it is a sweep's; `value` is what the experiment returned."""

    def __init__(self) -> None:
        hydra = HydraConfig.get()
        self.value: Any = None
        self.began = time.monotonic()
        self.folder = Path(hydra.runtime.output_dir)
        self.writes = hydra.mode == RunMode.MULTIRUN and read_environment().index == 0
        self.record = JobRecord("", {}, list(hydra.overrides.task))

    def done_before(self, config: Any, resumed: Path) -> bool:
        """Whether an earlier attempt, in the sweep's folder `resumed`, has done this job: its record stays,
        and its value is this one's.

        Raises:
            ConfigError: it was done with another configuration.
        """
        record = _finished(resumed / HydraConfig.get().sweep.subdir)
        if record is None:
            return False
        self.writes = False
        _check_same("it ", record, *job_key(config, self.folder))
        self.value = record.value
        return True

    def start(self, config: Any) -> None:
        """Writes the record of a running job. What an earlier attempt left as a result is no longer one."""
        if self.writes:
            key, plain = job_key(config, self.folder)
            self.record = dataclasses.replace(self.record, key=key, config=plain, git=_code_here())
            (self.folder / RESULT_FILE).unlink(missing_ok=True)
            write_job(self.folder, self.record)

    def end(self, state: str, error: Exception | None = None) -> None:
        if self.writes:
            number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
            record = dataclasses.replace(
                self.record,
                state=state,
                has_result=(self.folder / RESULT_FILE).is_file(),
                value=float(self.value) if number else None,
                error=None if error is None else one_line(error) or type(error).__name__,
                traceback=defect_of(error),
                seconds=time.monotonic() - self.began,
            )
            write_job(self.folder, record)


def defect_of(error: Exception | None) -> str | None:
    """Returns the traceback of an exception that is a defect; None for a mistake of the user's."""
    return None if isinstance(error, MoejaxError | None) else "".join(traceback.format_exception(error))


@contextmanager
def recorded() -> Iterator[JobLog]:
    """Around a job: its record says how it ended. An interrupted one stays unfinished, like a killed one."""
    log = JobLog()
    try:
        yield log
    except Exception as error:
        log.end("finished" if isinstance(error, ReportError) else "failed", error)
        raise
    log.end("finished")


@functools.cache
def _code_here() -> dict[str, Any]:
    """Returns the code's state when this process first asked: what it has imported does not change."""
    return git_state()


def _code(git: dict[str, Any]) -> tuple[Any, Any]:
    return git.get("commit"), git.get("diff_hash")


def _code_name(git: dict[str, Any]) -> str:
    commit = git.get("commit")
    changed = f"+{(git.get('diff_hash') or '')[:4]}" if git.get("dirty") else ""
    return f"{commit[:7]}{changed}" if commit else "unknown"
