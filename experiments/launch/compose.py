"""Composes an experiment's configs ahead of Hydra's own run, to find a mistake before any folder exists.

Hydra makes a run's folder and then calls the experiment, and in a sweep it runs one job after another; a
wrong value would thus leave a folder behind, or come to light after hours. So every job is composed and its
dataclasses are built here first.
"""

import argparse
import dataclasses
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra.version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from experiments.launch.arguments import translate
from experiments.launch.errors import Known
from experiments.launch.launcher import check_launcher
from experiments.launch.structured import build
from moejax.core.errors import ConfigError, did_you_mean

VERSION_BASE = "1.3"
_MOST_JOBS_CHECKED = 200  # at some 30 ms each; a longer sweep's other jobs are checked when they start


class _Flags(argparse.ArgumentParser):
    """Hydra's flags, but a wrong one is a `ConfigError` and not three lines of usage."""

    def error(self, message: str) -> Any:
        flags = [option for action in self._actions for option in action.option_strings]
        flags.append("--resume")  # ours: `experiments.launch.sweep` has taken it out already
        bad = message.removeprefix("unrecognized arguments: ").split()[0]
        hint = did_you_mean(bad, flags) if message.startswith("unrecognized") else ""
        raise ConfigError(f"{message}{hint}; see --help")


def parse_flags(argv: list[str]) -> argparse.Namespace:
    """Hydra's command line, parsed; `overrides` are the KEY=VALUE arguments."""
    parser = get_args_parser()
    parser.__class__ = _Flags
    args = parser.parse_args(translate(argv))
    chosen = [flag for flag in ("run", "multirun", "shell_completion", "cfg", "info") if getattr(args, flag)]
    if len(chosen) > 1:
        raise ConfigError(
            f"--{chosen[0].replace('_', '-')} and --{chosen[1].replace('_', '-')} exclude each other"
        )
    if args.resolve and not (args.cfg or args.help):
        raise ConfigError("--resolve goes with --cfg or --help only")
    if args.package and not args.cfg:
        raise ConfigError("--package goes with --cfg only")
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        raise ConfigError(f"--config-dir {args.config_dir!r} is not a folder")
    return args


@contextmanager
def composer(config_dir: Path, args: argparse.Namespace, task_name: str) -> Iterator[Hydra]:
    """A Hydra that searches `config_dir` (and --config-dir) as the one that runs the experiment will."""
    hydra.version.setbase(VERSION_BASE)
    search_path = create_config_search_path(str(config_dir))
    if args.config_dir is not None:
        folder = f"file://{Path(args.config_dir).absolute()}"
        search_path.prepend(provider="command-line", path=folder, anchor=SearchPathQuery(provider="schema"))
    GlobalHydra.instance().clear()
    try:
        yield Hydra.create_main_hydra2(task_name=task_name, config_search_path=search_path)
    finally:
        GlobalHydra.instance().clear()


@dataclass(frozen=True)
class PlannedJob:
    """A job of a sweep before it runs: its number, arguments, folder and dataclass."""

    number: int
    overrides: list[str]
    folder: Path
    config: Any


@dataclass(frozen=True)
class PlannedSweep:
    """A sweep before it runs.

    Attributes:
        folder: absolute, where its jobs' folders will be.
        root: the same as Hydra's option has it.
        basic: Hydra's own sweeper takes all combinations; another one chooses as it goes.
        n_trials: how many jobs such another one will choose, if it says so.
        jobs: those that were composed: of a basic sweep all, or the first so many of a long one.
        total: number of jobs; None where the sweeper chooses them.
    """

    folder: Path
    root: str
    basic: bool = True
    n_trials: int | None = None
    jobs: tuple[PlannedJob, ...] = ()
    total: int | None = None


def check_jobs(
    app: Hydra, config_name: str, args: argparse.Namespace, schema: type, *, resumed: bool = False
) -> PlannedSweep | None:
    """Composes the run, or every job of the sweep, and builds its dataclasses unless only to be shown.

    Returns:
        The sweep, if it is one. All jobs of a `resumed` one are composed, however many.
    """
    mode = RunMode.MULTIRUN if args.multirun else RunMode.RUN
    config = _compose(app, config_name, args.overrides, mode)
    if args.cfg or args.info or args.help or args.hydra_help:
        return None
    if mode == RunMode.RUN and config.hydra.mode == RunMode.MULTIRUN:
        mode = RunMode.MULTIRUN
        config = _compose(app, config_name, args.overrides, mode)
    check_launcher(config, sweep=mode == RunMode.MULTIRUN)
    if mode == RunMode.RUN:
        _check_sweeper(config, args.overrides)
        _try_job(schema, config)
        return None
    root = str(config.hydra.sweep.dir)  # composed again, it would be named after another second
    sweep = PlannedSweep(Path(root).absolute(), root)
    if not str(config.hydra.sweeper.get("_target_", "")).endswith("BasicSweeper"):
        # It chooses the values itself, one job after the other; what it does not choose must fit by itself.
        parsed = OverridesParser.create().parse_overrides(list(args.overrides))
        alone = [
            text for text, item in zip(args.overrides, parsed, strict=True) if not item.is_sweep_override()
        ]
        _try_job(schema, _compose(app, config_name, alone, RunMode.MULTIRUN))
        return dataclasses.replace(sweep, basic=False, n_trials=config.hydra.sweeper.get("n_trials"))
    swept = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    parser = OverridesParser.create(config_loader=app.config_loader)
    # As they were written: what `${hydra:…}` names differs from job to job.
    given = typing.cast(dict[str, list[str]], OmegaConf.to_container(config.hydra.overrides, resolve=False))
    overrides = parser.parse_overrides([*swept, *given["task"]])
    fixed = [*given["hydra"], assignment("hydra.sweep.dir", root)]
    combinations = BasicSweeper.split_arguments(overrides, None)[0]
    jobs = []
    for number, job in enumerate(combinations if resumed else combinations[:_MOST_JOBS_CHECKED]):
        composed = _compose(app, config_name, [*fixed, *job], RunMode.RUN)
        folder = _name_job(composed, number)
        jobs.append(PlannedJob(number, list(job), folder, _build_alone(schema, composed)))
    return dataclasses.replace(sweep, jobs=tuple(jobs), total=len(combinations))


def _check_sweeper(config: DictConfig, overrides: list[str]) -> None:
    """A sweeper that was asked for would do nothing in a single run, unless that was asked for too."""
    name = config.hydra.runtime.choices.get("hydra/sweeper")
    asked = f"hydra/sweeper={name}"
    if asked in overrides and not any(text.startswith("hydra.mode=") for text in overrides):
        raise ConfigError(f"{asked} chooses the jobs of a sweep: add -m")


def assignment(key: str, value: str) -> str:
    """`key='value'` for Hydra's parser, whatever is in the value."""
    escaped = value.replace("\\", "\\\\") if value.endswith("\\") else value
    quoted = escaped.replace("'", "\\'")
    return f"{key}='{quoted}'"


def build_job(schema: type, config: DictConfig) -> Any:
    """The experiment's dataclass from a composed config, with or without its `hydra` node."""
    plain = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    OmegaConf.set_readonly(plain, True)
    return build(schema, plain)


def compose_job(app: Hydra, config_name: str, args: argparse.Namespace, schema: type) -> Any:
    """The dataclass of one run, for callers that run it themselves.

    Raises:
        ConfigError: the config asks for several runs.
    """
    config = _compose(app, config_name, args.overrides, RunMode.RUN)
    if config.hydra.mode == RunMode.MULTIRUN:
        told = " ".join(args.overrides)
        raise ConfigError(f"this is a sweep of several runs: python -m experiments.{config_name} {told}")
    return _try_job(schema, config)


def _try_job(schema: type, config: DictConfig) -> Any:
    """`build_job` before the run has a folder, which `${hydra:…}` may name: with a stand-in."""
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.runtime.output_dir = "."
        config.hydra.job.num, config.hydra.job.id = 0, "0"
    return _build_alone(schema, config)


def _name_job(config: DictConfig, number: int) -> Path:
    """Gives a sweep's job its number and folder, as Hydra will."""
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.job.num, config.hydra.job.id = number, str(number)
    HydraConfig.instance().set_config(config)
    try:
        folder = Path(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir)).absolute()
    finally:
        HydraConfig.instance().cfg = None
    with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
        config.hydra.runtime.output_dir = str(folder)
    return folder


def _build_alone(schema: type, config: DictConfig) -> Any:
    """`build_job` outside Hydra's own run."""
    try:
        HydraConfig.instance().set_config(config)
        return build_job(schema, config)
    finally:
        HydraConfig.instance().cfg = None


def known_names(config_dir: Path, args: argparse.Namespace, config_name: str) -> Known:
    """Valid keys, groups and configs for suggestions; as much as can be found when something is wrong."""
    try:
        with composer(config_dir, args, config_name) as app:
            loader = typing.cast(ConfigLoaderImpl, app.config_loader)
            groups = dict(_groups(loader.repository))
            chosen = [item for item in args.overrides if item.split("=")[0] in groups]
            config = _first_that_composes(app, config_name, [chosen, []])
            return Known(tuple(_keys(config)), groups, tuple(_configs(config_dir)), tuple(args.overrides))
    except Exception:
        # A broken config is reported by the caller already; without it there is just no suggestion.
        return Known(configs=tuple(_configs(config_dir)))


def _compose(app: Hydra, config_name: str, overrides: list[str], mode: RunMode) -> DictConfig:
    config = app.compose_config(
        config_name=config_name, overrides=list(overrides), run_mode=mode, with_log_configuration=False
    )
    HydraConfig.instance().cfg = None
    return config


def _first_that_composes(app: Hydra, config_name: str, candidates: list[list[str]]) -> DictConfig:
    for overrides in candidates[:-1]:
        try:
            return _compose(app, config_name, overrides, RunMode.RUN)
        except Exception:
            continue
    return _compose(app, config_name, candidates[-1], RunMode.RUN)


def _groups(repository: ConfigRepository, parent: str = "") -> Iterator[tuple[str, list[str]]]:
    """Every group with its options, groups within groups included."""
    for name in repository.get_group_options(parent, ObjectType.GROUP):
        group = f"{parent}/{name}" if parent else name
        options = repository.get_group_options(group, ObjectType.CONFIG)
        if options:
            yield group, sorted(options)
        yield from _groups(repository, group)


def _keys(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """Every dotted key, sections included."""
    for key in config:
        name = f"{prefix}{key!s}"
        yield name
        node = config._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            yield from _keys(node, f"{name}.")


def _configs(config_dir: Path) -> Iterator[str]:
    return (path.stem for path in sorted(config_dir.glob("*.yaml")) if not path.stem.startswith("_"))
