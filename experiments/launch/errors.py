"""Hydra's, OmegaConf's and YAML's exceptions as one line: what is wrong, where, and what would be right.

Knows the wording of Hydra 1.3 and OmegaConf 2.3 (pyproject.toml bounds Hydra, Hydra OmegaConf); what it does
not recognise it passes on in their own words, shortened to the first line.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import yaml
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import errors as oc

from moejax.core.errors import did_you_mean, unknown

_TYPES = {"Integer": "an integer", "Float": "a number", "Boolean": "true or false", "String": "a text"}
_MOST_NAMES = 16  # with a near name at hand, longer lists only bury it
_PLUGINS = ("joblib", "submitit", "submitit_local", "optuna")


@dataclass(frozen=True)
class Known:
    """The valid names, for suggestions: dotted keys of the composed default config, and options by group."""

    keys: tuple[str, ...] = ()
    groups: dict[str, list[str]] = field(default_factory=dict)
    configs: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


def one_line(text: object) -> str:
    """`text` on one line; blank runs become one space."""
    return " ".join(str(text).split())


def explain(error: BaseException, known: Known) -> str | None:
    """The line for an error that Hydra raised before a job ran; None if it is none of the user's making."""
    if str(error).startswith("Config group override must be a string"):
        return _bad_group_value(known)
    if isinstance(error, OverrideParseException):
        return _parse_error(error)
    if isinstance(error, MissingConfigException):
        return _missing_config(error, known)
    cause = error.__cause__ or error.__context__
    if isinstance(error, ConfigCompositionException):
        return _composition(error, cause, known)
    if isinstance(error, oc.OmegaConfBaseException):
        return _omegaconf(error, known)
    if isinstance(error, yaml.YAMLError):
        return f"a config file is not valid YAML: {one_line(error)}"
    if isinstance(error, HydraException):
        return _first_line(error)
    if isinstance(error, (ValueError, AssertionError)) and _raised_by(error, "hydra", "omegaconf"):
        return one_line(error) or None
    if _raised_by(error, "optuna", "sqlalchemy"):
        text = _first_line(error)
        nothing = text in ("Record does not exist.", "No trials are completed yet.")
        return "no trial gave a value, so there is no best one" if nothing else f"hydra.sweeper: {text}"
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or str(error.__cause__ or type(error).__name__)
    return one_line(text.strip().splitlines()[0])


def _raised_by(error: BaseException, *packages: str) -> bool:
    """Whether the innermost frame is of one of these: their complaint about a flag or a value."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return module.split(".")[0] in packages


def _parse_error(error: OverrideParseException) -> str:
    text = error.override
    if "=" not in text:
        return f"cannot read argument {text!r}: write KEY=VALUE, such as seed=1; flags: see --help"
    key, value = text.split("=", 1)
    value = value.strip("\"'")
    if re.fullmatch(r"[~+]*[\w.@/$:-]+", key):
        return (
            f"cannot read the value in {text!r}; lists are [1,2], and a value with special characters needs"
            f" quotes inside the shell's: '{key}=\"{value}\"'"
        )
    return f"cannot read argument {text!r}: {_first_line(error)}"


def _missing_config(error: MissingConfigException, known: Known) -> str:
    name = error.missing_cfg_file or ""
    group, _, option = name.rpartition("/")
    text = one_line(error)
    if text.startswith("Cannot find primary config") or not group:
        return unknown("config", name, known.configs) if name and known.configs else _first_line(error)
    where = re.match(r"In '([^']+)'", text)
    inside = f" (in configs/{where[1]}.yaml)" if where and re.match(r"(?!hydra/).*/", where[1]) else ""
    extra = ""
    if group.startswith("hydra/") and option in _PLUGINS:
        extra = "; this plugin comes with: pip install 'moejax[sweep]'"
    options = [str(item) for item in error.options or known.groups.get(group, [])]
    if not options:
        return f"unknown config group {group!r}{did_you_mean(group, known.groups)}"
    return f"{group}={option}: {unknown('option', option, options)}{inside}{extra}"


def _composition(error: ConfigCompositionException, cause: BaseException | None, known: Known) -> str:
    text = str(error)
    key = re.match(r"Could not override '([^']*)'", text)
    if key:
        return _unknown_key(key[1].split("@")[0], known)
    if match := re.match(r"In 'experiment/(.*?)': Could not override '([^']*)'", text):
        return (
            f"experiment={match[1]} sets the group {match[2]!r}, which this experiment does not have;"
            f" configs/experiment/{match[1]}.yaml begins with the command that it is for"
        )
    key = re.search(r"config group '([^']*)' does not exist", text)
    if key:
        return _unknown_key(key[1], known)
    if match := re.match(r"Could not add '([^']*)'\. '([^']*)' is already", text):
        return f"'+{match[1]}': {match[2]!r} is set already; leave out the '+'"
    if match := re.match(r"(\S+) appears more than once in the final defaults list", text):
        return f"{match[1]!r} is chosen twice; leave out the '+' to replace the default: {match[1]}=NAME"
    if match := re.match(r"Could not append to config\. An item is already at '([^']*)'", text):
        return f"'+{match[1]}': the key exists already; leave out the '+'"
    if match := re.match(r"Ambiguous value for argument '([^'=]*)=(.*)'\s*\n", text):
        return (
            f"'{match[1]}={match[2]}' names several values: write {match[1]}=[{match[2]}] for a list, add"
            f" -m for one run each, or quote a text: '{match[1]}=\"{match[2]}\"'"
        )
    if match := re.match(r"Sweep parameters '(.*)' requires --multirun", text):
        return f"'{match[1]}' asks for several runs: add -m"
    if match := re.match(r"You must specify '([^']*)'", text):
        options = ", ".join(known.groups.get(match[1], []))
        return f"no option chosen for {match[1]!r}: add {match[1]}=NAME (known: {options})"
    if isinstance(cause, oc.OmegaConfBaseException):
        place = re.match(r"In '([^']*)'", text)
        line = _omegaconf(cause, known, merging=re.match(r"Error merging override (.*)", text))
        return f"{line} (in config {place[1]!r})" if place else line
    return _first_line(error)


def _bad_group_value(known: Known) -> str:
    """The line for `group=3`: the message of Hydra does not say which group."""
    for override in known.overrides:
        group, _, option = override.partition("=")
        if group in known.groups and option not in known.groups[group]:
            return f"{override}: {unknown('option', option, known.groups[group])}"
    return "a config group needs the name of an option, such as model=tiny"


def _unknown_key(name: str, known: Known) -> str:
    """The line for a key that does not exist: with the nearest one and its section's keys."""
    bare = name.lstrip("+~")
    if "/" in bare:
        ours = ", ".join(sorted(name for name in known.groups if not name.startswith("hydra/")))
        return f"unknown config group {bare!r}{did_you_mean(bare, known.groups)} (known: {ours})"
    if bare in known.groups:
        return f"this experiment has no {bare!r} group"
    section, _, leaf = bare.rpartition(".")
    siblings = _children(section, known.keys)
    same_leaf = [key for key in known.keys if key.rpartition(".")[2] == leaf]
    hint = did_you_mean(bare, [f"{section}.{item}" if section else item for item in siblings])
    if same_leaf:
        # The shallowest: a section's own key rather than one of a section within it.
        nearest = min(same_leaf, key=lambda key: (key.count("."), key))
        hint = f"; did you mean {nearest!r}?"
    elif not hint:
        hint = did_you_mean(bare, known.keys)
    where = f"keys of {section!r}" if section else "known"
    groups = set() if section else {name for name in known.groups if "/" not in name}
    names = sorted({*siblings, *groups})
    if hint and len(names) > _MOST_NAMES:
        names = []
    return f"unknown key {bare!r}{hint}" + (f" ({where}: {', '.join(names)})" if names else "")


def _children(section: str, keys: Iterable[str]) -> list[str]:
    prefix = f"{section}." if section else ""
    return sorted(
        {k[len(prefix) :].split(".")[0] for k in keys if k.startswith(prefix) and not k.startswith("hydra.")}
    )


def _omegaconf(error: oc.OmegaConfBaseException, known: Known, merging: re.Match[str] | None = None) -> str:
    text = one_line(str(error).strip().splitlines()[0])
    key = error.full_key or ""
    if isinstance(error, oc.MissingMandatoryValue):
        key = key or (re.search(r"Missing mandatory value: (\S+)", text) or [key, key])[1]
        return f"{key!r} has no value yet: add {key}=VALUE"
    if (
        isinstance(error, (oc.ConfigKeyError, oc.ConfigAttributeError))
        and "nterpolation" not in type(error).__name__
    ):
        return _unknown_key(key or text, known)
    if isinstance(error, oc.InterpolationResolutionError | oc.GrammarParseError):
        return f"{key or 'a value'}: cannot resolve the interpolation: {text}"
    if match := re.match(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", text):
        return f"{key} must be {_TYPES.get(match[2], match[2])}, got {match[1]!r}"
    if "Optional" in text or "Incompatible value 'None'" in text:
        return f"{key} must have a value; null is not allowed"
    if match := re.match(r"Value '(.*)' is not a valid bool", text):
        return f"{key} must be true or false, got {match[1]!r}"
    if merging and re.search(r"is not a ListConfig, list or tuple|Cannot assign .* to List", text):
        value = merging[1].partition("=")[2]
        return f"{key} must be a list: {key}=[{value}]"
    if merging and re.search(r"is not a subclass of|Cannot assign .* to Dict|Cannot merge DictConfig", text):
        key = key or merging[1].partition("=")[0]
        names = ", ".join(_children(key, known.keys))
        return f"{merging[1]!r}: {key} is a section; set its keys" + (f" ({names})" if names else "")
    if merging:
        return f"{merging[1]!r} does not fit: {text}"
    return f"{key}: {text}" if key else text
