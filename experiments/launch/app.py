"""Starts an experiment: Hydra around a function that takes a dataclass.

    def main(config: LatencyConfig) -> None: ...

    if __name__ == "__main__":
        run_experiment(main, "latency")

A user's mistake ends in one line on stderr, `error: …`, and exit code 2; nothing is written where that can be
known beforehand. An exception that is no `MoejaxError` is a defect: it keeps its traceback, exit code 1.
Ctrl-C is 130. In a sweep each failing job has its line and the others still run; `--resume DIR` goes on with
one that was stopped (see `experiments.launch.sweep`).

Several processes (`moejax.sharding.distributed`) run the same code; see `experiments.launch.processes`. If
one of them fails, all end.
"""

import functools
import logging
import os
import sys
import traceback
import typing
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments.launch.arguments import translate
from experiments.launch.completion import print_bash_completion, query_line
from experiments.launch.compose import (
    VERSION_BASE,
    PlannedSweep,
    build_job,
    check_jobs,
    composer,
    known_names,
    parse_flags,
)
from experiments.launch.errors import Known, explain, one_line
from experiments.launch.processes import own_folder, prefix, runs_here, taking_part
from experiments.launch.structured import mirror
from experiments.launch.sweep import expand_resume, recorded, sweeping
from experiments.launch.variants import check_variants
from moejax.core.errors import ConfigError, MoejaxError
from moejax.sharding.distributed import process_count, read_environment, report_failure

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
USER_ERROR, DEFECT, INTERRUPTED = 2, 1, 130

Main = Callable[[Any], Any]


def run_experiment(
    main: Main, config_name: str, *, config_dir: Path = CONFIG_DIR, positional: str | None = None
) -> None:
    """Runs `main` on the config that the command line describes, and exits with the code if it is not 0.

    `positional` is the key of the list that arguments without a key make up.

    `main`'s first parameter is annotated with the experiment's dataclass, which becomes the config's schema.
    `configs/<config_name>.yaml` lists `<config_name>_schema` first in its defaults.
    """
    code = launch(main, config_name, sys.argv[1:], config_dir=config_dir, positional=positional)
    if code:
        report_failure(code)
        sys.exit(code)


def output_dir() -> Path:
    """The running job's Hydra output folder."""
    return Path(HydraConfig.get().runtime.output_dir)


def launch(
    main: Main,
    config_name: str,
    argv: list[str],
    *,
    config_dir: Path = CONFIG_DIR,
    positional: str | None = None,
) -> int:
    """`run_experiment` for a given command line; returns the exit code."""
    jobs = _Jobs(main, schema_of(main))
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        place = read_environment()
        if not runs_here(place, jobs.schema):
            return 0
        argv = translate(argv, positional)
        argv, resumed = expand_resume(argv, config_name, jobs.schema, alone=place.index == 0)
        with own_folder(place) as overrides, _hydra_environment([sys.argv[0], *argv, *overrides]):
            return _launch(jobs, config_name, [*argv, *overrides], config_dir, resumed)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except _ConfigFault as fault:
        if full_error:
            traceback.print_exception(fault.error)
        return _fail(str(fault), USER_ERROR)
    except MoejaxError as error:
        if full_error:
            traceback.print_exception(error)
        return _fail(str(error), USER_ERROR)
    except _JobError as error:
        return _fail(str(error).rstrip(), DEFECT)
    except Exception as error:
        if jobs.exit_code:
            return jobs.exit_code  # a sweeper that stumbles over a failed job's missing result
        traceback.print_exception(error)
        return DEFECT


def schema_of(main: Main) -> type:
    """The dataclass that `main`'s first parameter is annotated with."""
    hints = [hint for name, hint in typing.get_type_hints(main).items() if name != "return"]
    if not hints:
        raise TypeError(f"{main.__qualname__} must annotate its parameter with the experiment's dataclass")
    return hints[0]


def register_schema(config_name: str, schema: type) -> None:
    """Makes `schema` known to Hydra as `<config_name>_schema`."""
    ConfigStore.instance().store(name=f"{config_name}_schema", node=mirror(schema), provider="moejax")


class _ConfigFault(Exception):
    """A user's mistake that Hydra found, with the line that explains it."""

    def __init__(self, line: str, error: BaseException) -> None:
        super().__init__(line)
        self.error = error


def _launch(
    jobs: "_Jobs", config_name: str, argv: list[str], config_dir: Path, resumed: Path | None = None
) -> int:
    args = parse_flags(argv)
    register_schema(config_name, jobs.schema)
    name = args.config_name or config_name
    known = functools.partial(known_names, config_dir, args, config_name)
    plan: PlannedSweep | None = None
    if args.shell_completion:
        if "install=bash" in args.overrides:
            print_bash_completion(config_name)
            return 0
        os.environ["COMP_LINE"] = query_line(os.environ.get("COMP_LINE", ""))
    else:
        with _faults(known, reading=True), composer(config_dir, args, config_name) as app:
            plan = check_jobs(app, name, args, jobs.schema, resumed=resumed is not None)
        shown = args.cfg or args.info or args.help or args.hydra_help
        if plan is None and not shown and args.config_dir is None:  # variants know our own folder only
            check_variants(jobs.schema, config_name, args.overrides)
    speaks = read_environment().index == 0
    around = sweeping(plan, config_name, argv, resumed=resumed, speaks=speaks, failed=jobs.failed)
    with _faults(known, reading=False), around as sweep:
        sys.argv += sweep.overrides() if sweep is not None else []
        start = hydra.main(version_base=VERSION_BASE, config_path=str(config_dir), config_name=config_name)
        start(jobs.task)()
    if sweep is not None and not sweep.plan.basic and sweep.finished and jobs.exit_code == USER_ERROR:
        return 0  # a search over settings: combinations that are refused are among its answers
    return jobs.exit_code


@contextmanager
def _faults(known: Callable[[], Known], *, reading: bool) -> Iterator[None]:
    """Turns what Hydra raises over a user's mistake into `_ConfigFault`; lets everything else through."""
    try:
        yield
    except (MoejaxError, _JobError, BrokenPipeError):
        raise
    except Exception as error:
        if type(error).__module__.startswith("submitit."):
            raise _JobError(str(error)) from error  # a job that was killed: what its log ends with
        # The jobs' own exceptions do not come this way (see _Jobs): an OSError is Hydra's, over a file.
        if isinstance(error, OSError) and error.filename is not None:
            line = _file_line(error, reading)
        else:
            line = explain(error, known()) or ""
        if not line:
            raise
        raise _ConfigFault(line, error) from error


def _file_line(error: OSError, reading: bool) -> str:
    if reading:
        return f"cannot read {error.filename}: {error.strerror}"
    remedy = "hydra.run.dir=DIR (with -m: hydra.sweep.dir=DIR) chooses another folder"
    return f"cannot write {error.filename}: {error.strerror}; {remedy}"


class _JobError(Exception):
    """A job's defect in another process, as its traceback's text."""


@dataclass
class _Jobs:
    """What Hydra calls for each job, and what became of them.

    A job's exception is reported and recorded here instead of being raised through Hydra, which would print a
    line of its own first. A job in another process (joblib, submitit) does raise, since only its exception
    gets back to us.
    """

    main: Main
    schema: type
    exit_code: int = 0
    process: int = field(default_factory=os.getpid)

    @property
    def task(self) -> Callable[[DictConfig], Any]:
        @functools.wraps(self.main)
        def run(config: DictConfig) -> Any:
            return self._run(config)

        return run

    def _run(self, config: DictConfig) -> Any:
        try:
            with recorded() as record:
                built = self._build(config)
                record.start(built)
                if getattr(built, "verbose", False):
                    logging.getLogger("moejax").setLevel(logging.DEBUG)
                with taking_part(built) as config:
                    record.value = self.main(config)
            return record.value
        except MoejaxError as error:
            report_failure(USER_ERROR)
            if os.getpid() != self.process:
                raise
            code = _fail(f"{_job_label()}{error}", USER_ERROR)
            self.exit_code = self.exit_code or code
        except BrokenPipeError:
            self.exit_code = self.exit_code or _reader_left()
        except Exception as error:
            report_failure(DEFECT)
            if os.getpid() != self.process:
                raise _JobError("".join(traceback.format_exception(error))) from error
            sys.stderr.write(f"{_job_label()}failed with a defect:\n" if _job_label() else "")
            traceback.print_exception(error)
            self.exit_code = DEFECT
        if process_count() > 1:
            # Whether the other processes go on to a sweep's next job is not known here.
            raise SystemExit(self.exit_code)
        return None

    def failed(self, label: str, error: BaseException) -> None:
        """A job of a sweep failed in another process."""
        if isinstance(error, MoejaxError):
            code = _fail(f"{label}{error}", USER_ERROR)
            self.exit_code = self.exit_code or code
        else:
            self.exit_code = _fail(f"{label}failed with a defect:\n{str(error).rstrip()}", DEFECT)

    def _build(self, config: DictConfig) -> Any:
        """The dataclass; `check_jobs` has built it before, except where a sweeper chose the values."""
        try:
            return build_job(self.schema, config)
        except OmegaConfBaseException as error:
            raise ConfigError(explain(error, Known()) or str(error)) from error


def _job_label() -> str:
    """`job 3 (seed=3): ` within a sweep, else nothing."""
    config = HydraConfig.get()
    if config.mode != RunMode.MULTIRUN:
        return ""
    name = str(config.sweep.subdir)  # of a resumed sweep the folder keeps the number
    number = name if name.isdigit() else config.job.num
    return f"job {number} ({' '.join(config.overrides.task)}): "


def _fail(message: str, code: int) -> int:
    sys.stdout.flush()
    sys.stderr.write(
        f"{prefix()}error: {one_line(message)}\n" if code == USER_ERROR else f"{prefix()}{message}\n"
    )
    sys.stderr.flush()
    return code


def _reader_left() -> int:
    """For `… | head`: the exit code, and stdout led nowhere, since Python would complain again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _fail("stopped: the reader of the output has closed it", DEFECT)


@contextmanager
def _hydra_environment(argv: list[str]) -> Iterator[None]:
    """For the time of a run: the command line that Hydra reads, and its errors raised and not printed."""
    old_argv, old_flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = argv
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        with warnings.catch_warnings():
            # Our preset of that name is checked against the plugin's schema of that name, as it should be;
            # Hydra 1.3 complains that 1.2 was to stop doing so.
            warnings.filterwarnings("ignore", r"\s*'hydra/launcher/submitit_slurm' is validated against")
            yield
    finally:
        sys.argv = old_argv
        if old_flag is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = old_flag
