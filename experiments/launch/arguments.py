"""Arguments that Hydra's grammar does not have, written as ones that it has.

- words: `python -m experiments.compare A B` is `runs=["A","B"]`
- variants: `ab.variants.fast=[engine.overlap=true]`, whose items hold an `=`, gets them quoted
"""

import re
from collections.abc import Sequence
from pathlib import Path

from moejax.core.errors import ConfigError

# Hydra's flags that take the next argument as their value.
_WITH_VALUE = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd", "--package", "-p")
_OPTIONAL_VALUE = ("--info", "-i", "--cfg", "-c", "--resume")
_VARIANT = re.compile(r"(?:\+{1,2})?(ab\.(\w+)\.[\w.-]+)=(.*)", re.DOTALL)


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
    before = ""
    for argument in argv:
        flagged = argument.startswith("-") or before in _WITH_VALUE or before in _OPTIONAL_VALUE
        if positional is not None and not flagged and _is_word(argument):
            words.append(argument)
        elif match := _VARIANT.fullmatch(argument):
            adds = "++" if match[2] == "variants" else ""  # a misspelt section is Hydra's to explain
            rest.append(f"{adds}{match[1]}={_quoted_list(items(match[3]))}")
        else:
            rest.append(argument)
        before = argument
    if not words:
        return rest
    given = [argument for argument in rest if argument.startswith(f"{positional}=")]
    if given:
        raise ConfigError(
            f"{words[0]!r} and {given[0]!r}: give the {positional} either as words or as a list"
        )
    return [f"{positional}={_quoted_list(words)}", *rest]


def _is_word(argument: str) -> bool:
    return bool(argument) and ("=" not in argument or Path(argument).exists())


def items(text: str) -> list[str]:
    """The items of `[a=1,b=[2,3]]`, or the one item of a text without brackets; quotes around one are taken
    off."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return [_unquoted(text)] if text else []
    found, depth, quote, start = [], 0, "", 1
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
            found.append(text[start:place])
            start = place + 1
    found.append(text[start:-1])
    return [_unquoted(item.strip()) for item in found if item.strip()]


def _unquoted(item: str) -> str:
    if len(item) < 2 or item[0] not in "'\"" or item[-1] != item[0]:
        return item
    inner = re.sub(r"(\\*)\1\\" + item[0], rf"\1{item[0]}", item[1:-1])
    return re.sub(r"(\\+)\1$", r"\1", inner)


def _quoted_list(values: Sequence[str]) -> str:
    return "[" + ",".join(_quoted(value) for value in values) + "]"


def _quoted(value: str) -> str:
    """For Hydra's parser: a backslash counts only before a quote."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f'"{escaped}"'
