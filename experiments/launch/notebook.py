"""The experiments from a notebook's cell: the command line's config without its process.

`moejax.notebook` is what a cell calls; this is its part that needs Hydra, whose own state is left as found.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from experiments.launch.command_line import override_key, translate, without_tracker
from experiments.launch.compose import Main, composer, hydra_left_alone, schema_of
from experiments.launch.validate import CONFIG_DIR
from moejax.core.errors import ConfigError, unknown
from moejax.tracking.base import TrackerConfig

_OVERRIDES = "_overrides"  # attribute of a composed config; `dataclasses.replace` leaves it out


def names() -> list[str]:
    """The experiments: `python -m experiments.NAME`."""
    return sorted(
        file.stem
        for file in Path(__file__).parents[1].glob("[!_]*.py")
        if (CONFIG_DIR / file.name).with_suffix(".yaml").exists()
    )


def main_of(experiment: str) -> Main:
    """An experiment's `main`, which takes its dataclass and writes into Hydra's output folder.

    Raises:
        ConfigError: there is no such experiment.
    """
    if experiment not in names():
        raise ConfigError(unknown("experiment", str(experiment), names()))
    return importlib.import_module(f"experiments.{experiment}").main


def compose(overrides: Sequence[str], experiment: str) -> Any:
    """The dataclass that `python -m experiments.<experiment> <overrides>` would run.

    Raises:
        ConfigError: what the command line would say, in the same words.
    """
    schema = schema_of(main_of(experiment))
    flags = [item for item in overrides if item.startswith("-")]
    if flags:
        raise ConfigError(f"overrides are KEY=VALUE; {flags[0]!r} is a flag of the command line")
    with composer(experiment, schema) as compose_run:
        config = compose_run.build(without_tracker(translate(overrides), schema))
    return with_overrides(config, overrides)


def with_overrides(config: Any, overrides: Sequence[str]) -> Any:
    """Returns `config`, which remembers that it was composed of these."""
    object.__setattr__(config, _OVERRIDES, tuple(overrides))
    return config


def overrides_of(config: object) -> tuple[str, ...] | None:
    """Returns the overrides that `compose` was given for it; None for a config made or changed otherwise."""
    return getattr(config, _OVERRIDES, None)


def untracked(config: Any, experiment: str) -> Any:
    """The same without a tracker."""
    overrides = overrides_of(config)
    if overrides is None:
        return dataclasses.replace(config, tracker=TrackerConfig(kind="none"))
    kept = [item for item in overrides if override_key(item).partition(".")[0] != "tracker"]
    return compose([*kept, "tracker=none"], experiment)


def experiment_of(config: object, asked: str | None = None) -> str:
    """The experiment whose dataclass `config` is; `asked`, if it is that one's.

    Raises:
        ConfigError: of none, of several and none is asked for, or of another one.
    """
    if asked is not None and schema_of(main_of(asked)) is type(config):
        return asked
    matches = [name for name in names() if schema_of(main_of(name)) is type(config)]
    kind = type(config).__name__
    if asked is not None and matches:
        raise ConfigError(f"{kind} is the config of {' and '.join(matches)}, not of {asked}")
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise ConfigError(f"{kind} is no experiment's config; make one with load_config")
    raise ConfigError(f"{kind} is the config of {' and '.join(matches)}; say experiment=NAME")


def call_main(config: Any, experiment: str, out_dir: Path) -> None:
    """Runs the experiment's `main` with `out_dir` as its output folder.

    Raises:
        ConfigError: it wants the overrides that made the config, which are not known.
    """
    main, overrides = main_of(experiment), overrides_of(config)
    if overrides is None and getattr(getattr(config, "ab", None), "variants", None):
        raise ConfigError(
            "ab.variants are composed from load_config's overrides: give all there, and run its config"
            " as it is"
        )
    with hydra_left_alone():
        node = OmegaConf.create({"hydra": OmegaConf.structured(HydraConf)})
        node.hydra.runtime.output_dir = str(out_dir)
        node.hydra.job.config_name = node.hydra.job.name = experiment
        node.hydra.overrides.task = translate(overrides or ())
        HydraConfig.instance().set_config(node)
        main(config)
