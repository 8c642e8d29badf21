"""An experiment's command line: Hydra's flags, its overrides, and what Hydra's grammar does not have.

- words: `python -m experiments.compare A B` is `runs=["A","B"]`
- named sections: `workload.mix.chat.share=2` adds a section "chat", which Hydra wants written as a whole
- tables: `sampling.structured_outputs.regex=[0-9]+` adds an entry, which Hydra wants a `+` before
- variants: `ab.variants.fast=[engine.overlap=true]`, whose items hold an `=`, gets them quoted
- shell completion for `python -m experiments.NAME`; Hydra's own knows only `python script.py`
"""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser

from moejax.core.errors import ConfigError, did_you_mean

# Hydra's flags that take the next argument as their value.
_WITH_VALUE = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd", "--package", "-p")
MULTIRUN = ("-m", "--multirun")
_OPTIONAL_VALUE = ("--info", "-i", "--cfg", "-c", "--resume")
_VARIANT = re.compile(r"(?:\+{1,2})?((?:ab|ablation|serve(?=\.models))\.(\w+)\.[\w.-]+)=(.*)", re.DOTALL)
_TABLE = re.compile(r"(sampling\.(structured_outputs|logit_bias)|serve\.split)\b.*=.*", re.DOTALL)
_NAMED = re.compile(
    r"\+*(engine\.scheduling\.tenants|engine\.scheduling\.slo_classes|workload\.mix|simulate\.fleets)"
    r"\.(\w+)\.([\w.]+)=(.*)",
    re.DOTALL,
)


def before_flags(argv: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Returns a command line, whose flags but -m are last, with overrides that have the last word."""
    flags = (i for i, text in enumerate(argv) if text.startswith("-") and text not in MULTIRUN)
    place = next(flags, len(argv))
    return [*argv[:place], *overrides, *argv[place:]]


def translate(argv: Sequence[str], positional: str | None = None) -> list[str]:
    """A command line for Hydra.

    Args:
        argv: without the program's name.
        positional: the key of the list that words (arguments without `=`, or paths that exist) make up.

    Raises:
        ConfigError: words and the key at once.
    """
    rest: list[str] = []
    words: list[str] = []
    flags: list[str] = []  # they go last: Hydra takes no override after a flag that stands among them
    before = ""
    for argument in argv:
        flagged = argument.startswith("-") or before in _WITH_VALUE or before in _OPTIONAL_VALUE
        if positional is not None and not flagged and _is_word(argument):
            words.append(argument)
        elif match := _VARIANT.fullmatch(argument):
            # A misspelt section is Hydra's to explain.
            adds = "++" if match[2] in ("variants", "stages", "models") else ""
            rest.append(f"{adds}{match[1]}={_quoted_list(items(match[3]))}")
        elif match := _NAMED.fullmatch(argument):
            section, name, keys, value = match.groups()
            for key in reversed([name, *keys.split(".")]):
                value = f"{{{key}:{value}}}"
            rest.append(f"+{section}={value}")
        elif _TABLE.fullmatch(argument):
            rest.append(f"++{argument}")
        else:
            (flags if flagged else rest).append(argument)
        before = argument
    if not words:
        return [*rest, *flags]
    given = [argument for argument in rest if argument.startswith(f"{positional}=")]
    if given:
        raise ConfigError(
            f"{words[0]!r} and {given[0]!r}: give the {positional} either as words or as a list"
        )
    return [f"{positional}={_quoted_list(words)}", *rest, *flags]


def without_tracker(argv: Sequence[str], schema: type) -> list[str]:
    """Returns `argv` without `tracker=none` where `schema` has no tracker: it asks for what is so anyway."""
    tracks = has_section(schema, "tracker")
    return [argument for argument in argv if tracks or argument != "tracker=none"]


def has_section(schema: type, name: str) -> bool:
    """Returns whether dataclass `schema` has a field of that name."""
    return any(field.name == name for field in dataclasses.fields(schema))


def override_key(argument: str) -> str:
    """Returns the key of a KEY=VALUE argument, without `+` or `~`; a flag is its own key."""
    return argument.partition("=")[0].lstrip("+~")


class _Flags(argparse.ArgumentParser):
    """Hydra's flags, but a wrong one is a `ConfigError` and not three lines of usage."""

    def error(self, message: str) -> Any:
        flags = [option for action in self._actions for option in action.option_strings]
        flags.append("--resume")  # ours: `experiments.launch.sweep` has taken it out already
        bad = message.removeprefix("unrecognized arguments: ").split()[0]
        hint = did_you_mean(bad, flags) if message.startswith("unrecognized") else ""
        raise ConfigError(f"{message}{hint}; see --help")


def parse_flags(argv: Sequence[str]) -> argparse.Namespace:
    """Parses a command line that `translate` has written; `overrides` are its KEY=VALUE arguments.

    Raises:
        ConfigError: a flag is unknown or does not go with another one.
    """
    parser = _Flags(parents=[get_args_parser()], add_help=False)
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
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


def _is_word(argument: str) -> bool:
    return bool(argument) and ("=" not in argument or Path(argument).exists())


def items(text: str) -> list[str]:
    """Returns the items of `[a=1,b=[2,3]]`, or the one item of a text without brackets, each without the
    quotes around it."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return [_unquoted(text)] if text else []
    texts, depth, quote, start = [], 0, "", 1
    for place in range(1, len(text) - 1):
        sign = text[place]
        if quote:
            escapes = len(text[:place]) - len(text[:place].rstrip("\\"))
            quote = "" if sign == quote and escapes % 2 == 0 else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "[{(":
            depth += 1
        elif sign in "]})":
            depth -= 1
        elif sign == "," and depth == 0:
            texts.append(text[start:place])
            start = place + 1
    texts.append(text[start:-1])
    return [_unquoted(item.strip()) for item in texts if item.strip()]


def _unquoted(item: str) -> str:
    if len(item) < 2 or item[0] not in "'\"" or item[-1] != item[0]:
        return item
    inner = re.sub(r"(\\*)\1\\" + item[0], rf"\1{item[0]}", item[1:-1])
    return re.sub(r"(\\+)\1$", r"\1", inner)


def _quoted_list(values: Sequence[str]) -> str:
    return "[" + ",".join(quoted(value) for value in values) + "]"


def quoted(value: str) -> str:
    """Returns a text in quotes for Hydra's parser, to which a backslash counts only before a quote."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f'"{escaped}"'


# --- completion ---------------------------------------------------------------------------------------------


def print_bash_completion(name: str) -> None:
    """Prints the code for `eval "$(python -m experiments.NAME --shell-completion install=bash)"`.

    It serves every experiment, and replaces another completion for `python` where there is one.
    """
    code = (Path(__file__).parent / "completion.bash").read_text()
    print(f"# completion of every experiment's options; from experiments.{name}\n{code}", end="")


def query_line(line: str) -> str:
    """`PYTHON -m experiments.NAME ARGS` → `app ARGS`, which Hydra's query understands.

    A blank at the end stays: it says that the last word is finished.
    """
    words = line.split()
    for i, word in enumerate(words[:-1]):
        if word == "-m" and words[i + 1].startswith("experiments."):
            return "app " + line.split(words[i + 1], 1)[1].lstrip()
    return line or "app "
