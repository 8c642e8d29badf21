"""Says which of a command line's overrides, or which config file, Hydra could not compose, and what would do.

Hydra has the last word on what it accepts: this is asked only once it has refused. It takes the overrides one
by one against the groups and the schema; what it finds no fault with is shown as Hydra's first line.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from experiments.launch.schema import RecordedSections
from experiments.launch.structured import build, expected, mirror
from moejax.core.errors import ConfigError, did_you_mean, unknown
from moejax.core.words import one_line
from moejax.results.goals import Goal

FAULTS = (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, AssertionError)
"""Exceptions by which Hydra refuses a command line or a config file."""

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
_MOST_NAMES = 16  # with a near name at hand, longer lists only bury it
_CHOICES = "hydra.runtime.choices."  # the experiment's groups, as keys
_PLUGINS = ("joblib", "submitit", "submitit_local", "optuna")


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its name where it has none."""
    if isinstance(error, yaml.YAMLError):
        return f"a config file is not valid YAML: {one_line(error)}"
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read {error.filename}: {error.strerror}"
    text = str(error).strip() or str(error.__cause__ or type(error).__name__)
    return one_line(text.splitlines()[0])


def parse_override(text: str) -> Override:
    """Parses one KEY=VALUE argument.

    Raises:
        ConfigError: Hydra's grammar has no such argument.
    """
    loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
    try:
        return OverridesParser.create(config_loader=loader).parse_overrides([text])[0]
    except HydraException as error:
        key, equals, value = text.partition("=")
        if not equals:
            line = f"cannot read argument {text!r}: write KEY=VALUE, such as seed=1; flags: see --help"
        elif key.strip("~+").replace(".", "").replace("_", "").isalnum():
            line = (
                f"cannot read the value in {text!r}; lists are [1,2], and a value with special characters"
                f" needs quotes inside the shell's: '{key}=\"{value.strip(chr(34) + chr(39))}\"'"
            )
        else:
            line = f"cannot read argument {text!r}: write KEY=VALUE with a key such as workload.seed"
        raise ConfigError(line) from error


def group_options(group: str, search: Sequence[str] = ()) -> list[str]:
    """Returns the options of a group; `search` are overrides of Hydra's search path."""
    loader = GlobalHydra.instance().config_loader()
    return sorted(loader.get_group_options(group, ObjectType.CONFIG, overrides=list(search)))


OWNED = ("experiment", "scenario", "workload")  # groups of which an option may be another experiment's
_TAKES_ALL = ("ablation", "workload")  # the options are of the experiments that it runs


def owners_of(preset: str, group: str) -> list[str]:
    """Returns the experiments that a preset or workload of ours is for: those that its first lines name."""
    file = CONFIG_DIR / group / f"{preset}.yaml"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    header = "".join(line for line in lines if line.startswith("#"))
    return list(dict.fromkeys(re.findall(r"experiments\.(\w+)", header)))


def own_presets(presets: Sequence[str], experiment: str, group: str = "experiment") -> list[str]:
    """Returns those of a group that are the experiment's, or that are in no folder of ours."""
    if (experiment, group) == _TAKES_ALL:
        return list(presets)
    return [name for name in presets if experiment in (owners_of(name, group) or [experiment])]


def preset_goals() -> dict[str, list[Goal]]:
    """Returns each preset's goals, its own or those of the preset that it is made of; raises as `build`, or
    what OmegaConf raises."""

    def of(name: str) -> list[Any]:
        bases = [item for item in files[name].get("defaults", ()) if isinstance(item, str) and item in files]
        return files[name].get("goals", [goal for base in bases for goal in of(base)])

    found = (
        file for group in ("experiment", "scenario") for file in sorted(CONFIG_DIR.glob(f"{group}/*.yaml"))
    )
    files: Any = {file.stem: OmegaConf.load(file) for file in found}
    asked: Any = {name: OmegaConf.merge(mirror(RecordedSections), {"goals": of(name)}) for name in files}
    return {name: build(RecordedSections, config).goals for name, config in asked.items()}


def check_swept(item: Override, *, sweep: bool) -> None:
    """Checks an override of several values; `sweep` says whether there is one.

    Raises:
        ConfigError: there is none, or Hydra does not sweep over that key.
    """
    text, (key, _, value) = item.input_line, str(item.input_line).partition("=")
    if sweep and item.is_hydra_override():
        raise ConfigError(f"{text!r}: Hydra's own settings cannot be swept; give one value")
    if not sweep and item.value_type == ValueType.SIMPLE_CHOICE_SWEEP:
        raise ConfigError(
            f"{text!r} names several values: write {key}=[{value}] for a list, add -m for one run each, or"
            f" quote a text: '{key}=\"{value}\"'"
        )
    if not sweep:
        raise ConfigError(f"{text!r} asks for several runs: add -m")


def check_overrides(config_name: str, schema: type, overrides: Sequence[str]) -> None:
    """Finds the fault for which Hydra does not compose `config_name` with `overrides`.

    Runs within an initialised Hydra that knows `schema`; does nothing where it finds no fault.

    Raises:
        ConfigError: one line about the first override, or the file, that is wrong.
    """
    parsed = [parse_override(text) for text in overrides]
    search = [str(item.input_line) for item in parsed if item.key_or_group == "hydra.searchpath"]
    _Checks(config_name, schema, search).run(parsed)


@dataclass(frozen=True)
class _Checks:
    """Checks against what Hydra finds with the overrides `search` of its search path."""

    config_name: str
    schema: type
    search: list[str]

    def run(self, overrides: Sequence[Override]) -> None:
        for item in overrides:
            if item.is_sweep_override():
                check_swept(item, sweep=False)
        groups = [item for item in overrides if self.options(item.key_or_group)]
        for item in groups:
            self.check_options(item)
        try:
            config = self.compose(groups)
        except FAULTS as error:
            self.check_choices(groups)
            raise ConfigError(self.file_fault(error, groups)) from error
        for item in overrides:
            if item not in groups:
                self.apply(config, item)

    def compose(self, groups: Sequence[Override] = ()) -> DictConfig:
        texts = [*self.search, *(str(item.input_line) for item in groups)]
        return hydra.compose(self.config_name, texts, return_hydra_config=True)

    def options(self, group: str) -> list[str]:
        return group_options(group, self.search)

    def check_options(self, item: Override) -> None:
        group, value, options = item.key_or_group, item.value(), self.options(item.key_or_group)
        presets = group in ("experiment", "scenario")
        for option in value if isinstance(value, list) else [value]:
            if option is None or option in options:
                continue
            known = own_presets(options, self.config_name, group) if group in OWNED else options
            line = f"{group}={option}: {unknown('preset' if presets else 'option', str(option), known)}"
            if group.startswith("hydra/") and option in _PLUGINS:
                line += "; this plugin comes with: pip install 'moejax[sweep]'"
            raise ConfigError(line)

    def check_choices(self, groups: Sequence[Override]) -> None:
        """Checks that the experiment has the groups that are chosen from, and each once, and that a preset is
        its own."""
        try:
            choices = self.compose().hydra.runtime.choices
        except FAULTS:
            return
        for item in groups:
            group, preset = item.get_key_element().lstrip("+~"), str(item.value())
            owned = group in OWNED and (self.config_name, group) != _TAKES_ALL
            owners = owners_of(preset, group) if owned else ()
            if owners and self.config_name not in owners:
                line = f"{group}={preset} is a preset of {' and '.join(owners)}: "
                known = ", ".join(own_presets(self.options(group), self.config_name, group)) or "none"
                line += f"python -m experiments.{owners[0]} {group}={preset}"
                raise ConfigError(f"{line} (presets of {self.config_name}: {known})")
            if item.is_add() and group in choices:
                raise ConfigError(
                    f"{group!r} is chosen twice; leave out the '+' to replace the default: {group}=NAME"
                )
            if group == "tracker" and group not in choices:
                raise ConfigError(f"this experiment tracks nothing: leave out {item.input_line}")
            if not item.is_add() and group not in choices:
                names = ", ".join(sorted(name for name in choices if not name.startswith("hydra/")))
                raise ConfigError(f"this experiment has no {group!r} group (its groups: {names})")

    def file_fault(self, error: BaseException, groups: Sequence[Override]) -> str:
        """Returns the line for config files that do not fit each other, with the file that Hydra names."""
        if isinstance(error, MissingConfigException) and error.missing_cfg_file == self.config_name:
            names = [name for name in self.options("") if not name.startswith("_")]
            return unknown("config", self.config_name, names)
        line, cause = first_line(error), error.__cause__ or error.__context__
        if isinstance(cause, OmegaConfBaseException):
            fault = first_line(cause)
            if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and cause.full_key:
                fault = self.unknown_key(cause.full_key, _flat_keys(self.compose()))
            line = f"{line.split(':')[0]}: {fault}"
        return line

    def apply(self, config: DictConfig, item: Override) -> None:
        """Sets one key of a composed config as Hydra will.

        Raises:
            ConfigError: there is no such key, or it takes no such value.
        """
        key, value = item.key_or_group, item.value()
        adds = item.is_add() or item.is_force_add()
        if "/" in key or item.package is not None:
            groups = [str(name) for name in config.hydra.runtime.choices if "@" not in name]
            ours = ", ".join(sorted(name for name in groups if not name.startswith("hydra/")))
            raise ConfigError(f"unknown config group {key!r}{did_you_mean(key, groups)} (known: {ours})")
        keys = _flat_keys(config)
        if item.is_add() and key in keys and not isinstance(value, (dict, list)):
            raise ConfigError(f"'+{key}': the key exists already; leave out the '+'")
        if not adds and key not in keys:
            raise ConfigError(self.unknown_key(key, keys))
        if item.is_delete():
            return
        try:
            OmegaConf.update(config, key, value, merge=True, force_add=adds)
        except FAULTS as error:
            raise ConfigError(_misfit(key, value, expected(self.schema, key), error)) from error

    def unknown_key(self, key: str, keys: Sequence[str]) -> str:
        """Returns the line for a key that does not exist, with the nearest one and its section's keys."""
        section, _, leaf = key.rpartition(".")
        prefix = f"{section}." if section else ""
        below = [name.removeprefix(prefix) for name in keys if name.startswith(prefix)]
        names = {name.split(".")[0] for name in below} - {"hydra"}
        if section in keys and not names:
            return f"unknown key {key!r}: {section!r} is a value without keys"
        same_leaf = [name for name in keys if name.rpartition(".")[2] == leaf]
        same_leaf = [name for name in same_leaf if section or not name.startswith("hydra.")]
        if not section:
            groups = {name.removeprefix(_CHOICES) for name in keys if name.startswith(_CHOICES)}
            names |= {name for name in groups if "/" not in name and "@" not in name}
        hint = did_you_mean(leaf, names, prefix)
        if same_leaf:
            # A section's own key rather than one of a section within it; of several the workload's.
            ranks = {name: (name.count("."), not name.startswith("workload."), name) for name in same_leaf}
            hint = f"; did you mean {min(same_leaf, key=ranks.__getitem__)!r}?"
        elif not hint and section not in keys:
            hint = did_you_mean(key, keys)
        where = f"keys of {section!r}" if section else "known"
        if hint and len(names) > _MOST_NAMES:
            names = set()
        return f"unknown key {key!r}{hint}" + (f" ({where}: {', '.join(sorted(names))})" if names else "")


def _misfit(key: str, value: Any, words: str | None, error: BaseException) -> str:
    """Returns the line for a value of the wrong type; `words` say what the key takes, if that is known."""
    if words is None or (words == "a section" and isinstance(value, dict)):
        return f"{key}: {first_line(error)}"
    if words == "a list" and value is not None:
        return f"{key} must be a list: {key}=[{value}]"
    return f"{key} must be {words}, got {'null' if value is None else repr(value)}"


def _flat_keys(config: DictConfig) -> list[str]:
    """Returns every dotted key, sections included."""

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for name, value in node.items() if isinstance(node, dict) else ():
            yield f"{prefix}{name}"
            yield from walk(value, f"{prefix}{name}.")

    return list(walk(OmegaConf.to_container(config, resolve=False), ""))
