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
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments.launch.command_line import (
    before_flags,
    has_section,
    parse_flags,
    print_bash_completion,
    query_line,
    translate,
    without_tracker,
)
from experiments.launch.compose import (
    VERSION_BASE,
    Main,
    assignment,
    build_job,
    composer,
    plan_run,
    register_schema,
    schema_of,
)
from experiments.launch.processes import own_folder, prefix, runs_here, taking_part
from experiments.launch.sweep import Sweep, check_resumed, defect_of, expand_resume, recorded
from experiments.launch.validate import CONFIG_DIR, first_line
from experiments.launch.variants import compose_variants
from moejax.bench.ignored import ignored_settings
from moejax.bench.run_folder import claimed
from moejax.core.errors import ConfigError, MoejaxError
from moejax.core.host import HostConfig
from moejax.core.words import one_line
from moejax.sharding.distributed import process_count, read_environment, report_failure

USER_ERROR, DEFECT, INTERRUPTED = 2, 1, 130


def run_experiment(
    main: Main, config_name: str, *, positional: str | None = None, ahead: bool = False
) -> None:
    """Runs `main` on the config that the command line describes, and exits with the code if it is not 0.

    `positional` is the key of the list that arguments without a key make up. With `ahead` each job's dry run
    comes first, which `main` ends by `ExperimentRun.record`: it finds mistakes before weights are read.

    `main`'s first parameter is annotated with the experiment's dataclass, which becomes the config's schema.
    `configs/<config_name>.yaml` lists `<config_name>_schema` first in its defaults.
    """
    code = launch(main, config_name, sys.argv[1:], positional=positional, ahead=ahead)
    if code:
        report_failure(code)
        sys.exit(code)


def output_dir() -> Path:
    """The running job's Hydra output folder."""
    return Path(HydraConfig.get().runtime.output_dir)


def launch(
    main: Main, config_name: str, argv: list[str], *, positional: str | None = None, ahead: bool = False
) -> int:
    """`run_experiment` for a given command line; returns the exit code."""
    jobs = _Jobs(main, schema_of(main), ahead)
    full_error = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        place = read_environment()
        if not runs_here(place, jobs.schema):
            return 0
        argv = without_tracker(translate(argv, positional), jobs.schema)
        argv, resumed = expand_resume(argv, config_name, jobs.schema, alone=place.index == 0)
        with own_folder(place) as overrides:
            argv = before_flags(argv, overrides)
            with _hydra_environment([sys.argv[0], *argv]):
                return _launch(jobs, config_name, argv, resumed)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
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


def _launch(jobs: "_Jobs", config_name: str, argv: list[str], resumed: Path | None = None) -> int:
    args = parse_flags(argv)
    jobs.resumed = resumed.absolute() if resumed is not None else None
    plan, composed = None, []
    if args.shell_completion:
        if "install=bash" in args.overrides:
            print_bash_completion(config_name)
            return 0
        register_schema(config_name, jobs.schema)
        os.environ["COMP_LINE"] = query_line(os.environ.get("COMP_LINE", ""))
    else:
        shown = args.cfg or args.info or args.help or args.hydra_help
        with composer(
            config_name, jobs.schema, config_name=args.config_name, extra_dir=args.config_dir
        ) as compose:
            if args.help:
                print(compose.help(args.overrides, resolve=args.resolve))
                return 0
            if shown:
                compose.config(args.overrides)
            else:
                check = check_resumed(resumed) if resumed is not None else lambda *job: composed.append(job)
                plan = plan_run(compose, args.overrides, multirun=args.multirun, check=check)
        if plan is not None and not plan.sweep and args.config_dir is None:
            compose_variants(plan.config, config_name, args.overrides)  # which know our own folder only
        if plan is not None and not has_section(jobs.schema, "overwrite"):  # it has no folder to replace
            if extra := [
                text for text in argv if text.startswith(("hydra", "-m", "--multirun", "--dry-run"))
            ]:
                raise ConfigError(f"experiments.{config_name} has no run folder: leave out {extra[0]}")
            with _hydras_faults():
                jobs.main(plan.config)
            return 0
        if plan is not None and args.dry_run:
            from experiments.launch.dry_run import print_plan

            print_plan(config_name, plan, args.overrides, composed)
            return 0
    sweep, complete = None, False
    start = hydra.main(version_base=VERSION_BASE, config_path=str(CONFIG_DIR), config_name=config_name)
    with _hydras_faults(), ExitStack() as stack:
        if plan is not None and resumed is None:
            folder = claimed(
                Path(plan.folder),
                numbered=plan.timed,
                overwrite=plan.overwrite,
                refused=lambda: jobs.exit_code == USER_ERROR,
            )
            plan = replace(plan, folder=str(stack.enter_context(folder)))
        if plan is not None and plan.sweep:
            sweep = Sweep(plan, config_name, argv, resumed, speaks=read_environment().index == 0)
            sys.argv[1:] = before_flags(sys.argv[1:], sweep.start())
        elif plan is not None:
            sys.argv[1:] = before_flags(sys.argv[1:], [assignment("hydra.run.dir", plan.folder)])
        try:
            start(jobs.task)()
            complete = True
        finally:
            if sweep is not None:
                jobs.tell_failures(sweep)
                sweep.end(complete)
    if sweep is not None and not sweep.plan.basic and sweep.finished and jobs.exit_code == USER_ERROR:
        return 0  # a search over settings: combinations that are refused are among its answers
    return jobs.exit_code


@contextmanager
def _hydras_faults() -> Iterator[None]:
    """Turns what Hydra and its plugins raise over a user's mistake into `ConfigError`. The jobs' own
    exceptions do not come this way (see `_Jobs`): an `OSError` is Hydra's, over a file."""
    try:
        yield
    except (MoejaxError, BrokenPipeError):
        raise
    except Exception as error:
        if type(error).__module__.startswith("submitit."):
            raise _JobError(str(error)) from error  # a job that was killed: what its log ends with
        if isinstance(error, OSError) and error.filename is not None:
            remedy = "hydra.run.dir=DIR (with -m: hydra.sweep.dir=DIR) chooses another folder"
            line = f"cannot write {error.filename}: {error.strerror}; {remedy}"
        elif isinstance(error, (HydraException, OmegaConfBaseException)):
            line = first_line(error)
        elif _raised_by(error, "hydra", "omegaconf"):
            line = one_line(error)
        elif _raised_by(error, "optuna", "sqlalchemy"):
            nothing = first_line(error) in ("Record does not exist.", "No trials are completed yet.")
            line = f"hydra.sweeper: {first_line(error)}"
            line = "no trial gave a value, so there is no best one" if nothing else line
        else:
            raise
        raise ConfigError(line) from error


def _raised_by(error: BaseException, *packages: str) -> bool:
    """Whether the innermost frame is of one of these: their complaint about a flag or a value."""
    (*_, (frame, _)) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).split(".")[0] in packages


class _JobError(Exception):
    """A job in another process was killed; the text is what its log ends with."""


@dataclass
class _Jobs:
    """The jobs that Hydra calls, and how they ended.

    A job's exception is reported and recorded here instead of being raised through Hydra, which would print a
    line of its own first and, in a sweep, leave the other jobs. What a job in another process (joblib,
    submitit) died of is in its job.json.
    """

    main: Main
    schema: type
    ahead: bool
    resumed: Path | None = None
    exit_code: int = 0
    told: set[Path] = field(default_factory=set)
    process: int = field(default_factory=os.getpid)

    @property
    def task(self) -> Callable[[DictConfig], Any]:
        @functools.wraps(self.main)
        def run(config: DictConfig) -> Any:
            return self._run(config)

        return run

    def _run(self, config: DictConfig) -> Any:
        try:
            with recorded() as log:
                built = build_job(self.schema, config)
                if self.resumed is None or not log.done_before(built, self.resumed):
                    log.start(built)
                    if getattr(built, "verbose", False):
                        logging.getLogger("moejax").setLevel(logging.DEBUG)
                    for key, item in ignored_settings(built).items():
                        logging.getLogger("moejax").warning("%s=%s is %s", key, item["value"], item["reason"])
                    getattr(built, "host", HostConfig()).pin()
                    with taking_part(built) as config:
                        if self.ahead and process_count() == 1:
                            from experiments.launch.dry_run import look_ahead

                            look_ahead(self.main, config)
                        log.value = self.main(config)
            return log.value
        except BrokenPipeError:
            self.exit_code = self.exit_code or _reader_left()
        except Exception as error:
            report_failure(USER_ERROR if isinstance(error, MoejaxError) else DEFECT)
            if os.getpid() == self.process or read_environment().index:
                self.told.add(output_dir())
                self._tell(_job_label(), str(error), defect_of(error))
        if process_count() > 1 and os.getpid() == self.process:
            # Whether the other processes go on to a sweep's next job is not known here.
            raise SystemExit(self.exit_code)
        return None

    def tell_failures(self, sweep: Sweep) -> None:
        """Tells of the jobs that have failed in other processes."""
        for folder, record in sweep.failures():
            if folder.absolute() not in self.told:
                label = f"job {folder.relative_to(sweep.folder)} ({' '.join(record.overrides)}): "
                self._tell(label, str(record.error), record.traceback)

    def _tell(self, label: str, error: str, defect: str | None) -> None:
        if defect is None:
            code = _fail(f"{label}{error}", USER_ERROR)
            self.exit_code = self.exit_code or code
        else:
            heading = f"{label}failed with a defect:\n" if label else ""
            self.exit_code = _fail(f"{heading}{defect.rstrip()}", DEFECT)


def _job_label() -> str:
    """`job 3 (seed=3): ` within a sweep, else nothing."""
    config = HydraConfig.get()
    if config.mode != RunMode.MULTIRUN:
        return ""
    name = str(config.sweep.subdir)  # of a resumed sweep the folder keeps the number
    number = name if name.replace("+", "").isdigit() else config.job.num
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
    """For the time of a run: the command line that Hydra reads, its errors raised and not printed, and the
    logging it configures. The caller's handlers come back at the end; Hydra's are closed."""
    old_argv, old_flag = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    loggers = [logging.getLogger(), logging.getLogger("moejax")]
    old_handlers, old_levels = list(loggers[0].handlers), [logger.level for logger in loggers]
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
        for handler in set(loggers[0].handlers) - set(old_handlers):
            handler.close()
        loggers[0].handlers[:] = old_handlers
        for logger, level in zip(loggers, old_levels, strict=True):
            logger.setLevel(level)
