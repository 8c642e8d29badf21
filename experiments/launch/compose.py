"""Composes an experiment's configs ahead of Hydra's own run, to find a mistake before any folder exists.

Hydra makes a run's folder and then calls the experiment, and in a sweep it runs one job after another; a
wrong value would thus leave a folder behind, or come to light after hours. So the run, or each job of the
sweep, is composed and its dataclasses are built here first.
"""

import itertools
import math
import string
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from experiments.launch.command_line import quoted
from experiments.launch.launcher import check_launcher
from experiments.launch.structured import build, mirror
from experiments.launch.validate import (
    CONFIG_DIR,
    FAULTS,
    OWNED,
    check_overrides,
    check_swept,
    first_line,
    group_options,
    own_presets,
    parse_override,
)
from moejax.core.errors import ConfigError

Main = Callable[[Any], Any]
VERSION_BASE = "1.3"
_MOST_JOBS_CHECKED = 200  # a longer sweep's other jobs are checked when they start


def schema_of(main: Main) -> type:
    """The dataclass that `main`'s first parameter is annotated with."""
    hints = [hint for name, hint in typing.get_type_hints(main).items() if name != "return"]
    if not hints:
        raise TypeError(f"{main.__qualname__} must annotate its parameter with the experiment's dataclass")
    return hints[0]


@dataclass(frozen=True)
class Composer:
    """Composes command lines of one experiment; see `composer`."""

    config_name: str
    schema: type
    search: tuple[str, ...] = ()

    def config(self, overrides: Sequence[str]) -> DictConfig:
        """Returns the config of one run, with its `hydra` node.

        Raises:
            ConfigError: Hydra refuses an override or a config file.
        """
        texts = [*self.search, *overrides]
        try:
            return hydra.compose(self.config_name, texts, return_hydra_config=True)
        except FAULTS as error:
            check_overrides(self.config_name, self.schema, texts)
            raise ConfigError(first_line(error)) from error

    def help(self, overrides: Sequence[str], *, resolve: bool) -> str:
        """Returns the help page: the experiment's own groups and presets, and its config.

        Hydra's would list those of all experiments, and takes seconds for it.

        Raises:
            ConfigError: as `config`.
        """
        config = self.config(overrides)
        names = sorted(str(name) for name in config.hydra.runtime.choices)
        groups = {name: group_options(name) for name in names if "/" not in name and "@" not in name}
        groups |= {name: own_presets(groups.get(name, []), self.config_name, name) for name in OWNED}
        lines = [f"{name}: {', '.join(options)}\n" for name, options in groups.items() if options]
        plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        return string.Template(config.hydra.help.template).substitute(
            APP_CONFIG_GROUPS="".join(lines), CONFIG=OmegaConf.to_yaml(plain, resolve=resolve)
        )

    def build(self, overrides: Sequence[str]) -> Any:
        """Returns the dataclass of one run.

        Raises:
            ConfigError: as `config`; or the overrides ask for several runs.
            MoejaxError: a value does not do.
        """
        plan = plan_run(self, overrides)
        if plan.sweep:
            command = " ".join([f"python -m experiments.{self.config_name}", *overrides])
            raise ConfigError(f"this is a sweep of several runs: {command}")
        return plan.config


@contextmanager
def composer(
    experiment: str,
    schema: type,
    *,
    config_name: str | None = None,
    extra_dir: str | None = None,
) -> Iterator[Composer]:
    """Yields a `Composer` that searches our own `configs/`, and `extra_dir` after it."""
    register_schema(experiment, schema)
    search: tuple[str, ...] = ()
    if extra_dir is not None:
        search = (f"hydra.searchpath=[{quoted(f'file://{Path(extra_dir).absolute()}')}]",)
    with hydra_left_alone():
        GlobalHydra.instance().clear()
        with hydra.initialize_config_dir(str(CONFIG_DIR), job_name=experiment, version_base=VERSION_BASE):
            yield Composer(config_name or experiment, schema, search)


@contextmanager
def hydra_left_alone() -> Iterator[None]:
    """Leaves Hydra's own state as it was: a job runs within it, and a notebook may use it for its own."""
    before = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    try:
        yield
    finally:
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = before


def register_schema(experiment: str, schema: type) -> None:
    """Makes `schema` known to Hydra as `<experiment>_schema`."""
    ConfigStore.instance().store(name=f"{experiment}_schema", node=mirror(schema), provider="moejax")


def build_job(schema: type, config: DictConfig) -> Any:
    """Returns the experiment's dataclass from a composed config, with or without its `hydra` node."""
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    OmegaConf.set_readonly(plain, True)
    return build(schema, plain)


def assignment(key: str, value: str) -> str:
    """Returns `key="value"` for Hydra's parser, whatever is in the value."""
    return f"{key}={quoted(value)}"


@dataclass(frozen=True)
class Plan:
    """A run or a sweep before it runs.

    Attributes:
        sweep: whether it is one.
        folder: the run's, or the one in which the jobs' will be, as Hydra's option has it.
        timed: whether that is named after the time, so that another name does as well.
        overwrite: whether an earlier run there may be replaced.
        config: the run's dataclass; None for a sweep.
        basic: whether a sweep takes all combinations; another sweeper chooses them as it goes.
        expected: number of jobs, if it is known.
        numbered: whether a job's folder is called by its number.
    """

    sweep: bool
    folder: str
    timed: bool
    overwrite: bool
    config: Any = None
    basic: bool = True
    expected: int | None = None
    numbered: bool = True


CheckJob = Callable[[int, Sequence[str], Path, Any], None]


def plan_run(
    compose: Composer, overrides: Sequence[str], *, multirun: bool = False, check: CheckJob | None = None
) -> Plan:
    """Composes the run, or every job of the sweep up to the first 200, and builds their dataclasses.

    Args:
        multirun: whether a sweep is asked for; a config may ask for one as well.
        check: called with each job's number, overrides, folder (absolute) and dataclass.

    Raises:
        ConfigError: as `Composer.config`; or several values without a sweep.
        MoejaxError: a value does not do, or what `check` raises.
    """
    parsed = [parse_override(text) for text in overrides]
    swept = [item for item in parsed if item.is_sweep_override()]
    config = compose.config(next(_combinations(parsed)[0]) if swept else overrides)
    sweep = multirun or config.hydra.mode == RunMode.MULTIRUN
    for item in swept:
        check_swept(item, sweep=sweep)
    check_launcher(config, sweep=sweep)
    section = config.hydra.sweep if sweep else config.hydra.run
    unresolved: Any = OmegaConf.to_container(section, resolve=False)
    plan = Plan(sweep, str(section.dir), "${now:" in unresolved["dir"], config.get("overwrite") is True)
    if not sweep:
        # A sweeper that was asked for would do nothing in a single run, unless that was asked for too.
        override = f"hydra/sweeper={config.hydra.runtime.choices.get('hydra/sweeper')}"
        if override in overrides and not any(text.startswith("hydra.mode=") for text in overrides):
            raise ConfigError(f"{override} chooses the jobs of a sweep: add -m")
        return replace(plan, config=_build(compose.schema, config))
    sweeper, numbered = config.hydra.sweeper, unresolved["subdir"] == "${hydra.job.num}"
    if not str(sweeper.get("_target_", "")).endswith("BasicSweeper"):
        # It chooses the values itself, one job after the other; what it does not choose must fit by itself.
        fixed = [str(item.input_line) for item in parsed if item not in swept]
        _build(compose.schema, compose.config(fixed))
        return replace(plan, basic=False, expected=sweeper.get("n_trials"), numbered=numbered)
    for item in swept:
        if not item.is_discrete_sweep():
            raise ConfigError(
                f"{item.input_line!r}: an interval is for a search, such as hydra/sweeper=optuna"
            )
    params = [parse_override(f"{key}={value}") for key, value in (sweeper.get("params") or {}).items()]
    jobs, total = _combinations([*params, *parsed])
    for number, job in enumerate(itertools.islice(jobs, _MOST_JOBS_CHECKED)):
        # The folder as it is now: composed again, it would be named after another second.
        config = compose.config([*job, assignment("hydra.sweep.dir", plan.folder)])
        built = _build(compose.schema, config, number)
        if check is not None:
            check(number, config.hydra.overrides.task, Path(config.hydra.runtime.output_dir), built)
    return replace(plan, expected=total, numbered=numbered)


def _combinations(overrides: Iterable[Override]) -> tuple[Iterator[list[str]], int]:
    """Returns the overrides of each job as Hydra's own sweeper combines them, and how many jobs there are."""
    choices: dict[str, list[str]] = {}
    for item in overrides:
        key = item.get_key_element()
        if item.is_discrete_sweep():
            choices[key] = [f"{key}={value}" for value in item.sweep_string_iterator()]
            if not choices[key]:
                raise ConfigError(f"{item.input_line!r} names no value")
        elif not item.is_sweep_override():
            choices[key] = [str(item.input_line)]
    return map(list, itertools.product(*choices.values())), math.prod(map(len, choices.values()))


def _build(schema: type, config: DictConfig, number: int | None = None) -> Any:
    """Builds the dataclass outside Hydra's own run: of a sweep's job with its number and folder, of a single
    run with stand-ins, since values may name them by `${hydra:…}`."""
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.num, config.hydra.job.id = number or 0, str(number or 0)
        config.hydra.runtime.output_dir = "."
    HydraConfig.instance().set_config(config)
    if number is not None:
        folder = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()
        with read_write(config.hydra.runtime):
            config.hydra.runtime.output_dir = str(folder)
        HydraConfig.instance().set_config(config)
    return build_job(schema, config)
