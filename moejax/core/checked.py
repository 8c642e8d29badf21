"""Configuration dataclasses whose annotations say what each field accepts.

    @dataclass(frozen=True)
    class RampConfig(Checked, section="ramp"):
        max_steps: PositiveInt = 10
        followed: Annotated[float, Must(lambda x: 0 < x <= 1, "a share in (0, 1]")] = 0.9

Types are strict: a text is no number and True is no integer, while an integer is a number. A value that
differs from its field only in kind is stored as the field's: an array as a list or tuple, a text where texts
are listed as a list of one, numpy's numbers as Python's, a path as its text. This is own code because
importing pydantic takes ten times as long as importing all of `moejax.core`.
"""

import dataclasses
import functools
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from moejax.core.errors import ConfigError, MoejaxError, unknown


class Must(NamedTuple):
    """A condition on a value beyond its type, as metadata in `Annotated`: in code and in words.

    `{key}` in the words stands for the field's key.
    """

    test: Callable[[Any], bool]
    words: str


def at_least(least: int, why: str = "") -> Must:
    """Returns the condition on an integer, with the reason in brackets where one is given."""
    return Must(lambda n: n >= least, f"an integer of at least {least}" + (f" ({why})" if why else ""))


class Among(NamedTuple):
    """The valid names of a text, as metadata in `Annotated`, and the word for what they name."""

    names: Iterable[str]
    word: str = "value"


PositiveInt = Annotated[int, at_least(1)]
NonNegativeInt = Annotated[int, at_least(0)]
Seed = Annotated[int, Must(lambda n: 0 <= n < 2**32, f"an integer between 0 and {2**32 - 1}")]
# An integer may be larger than any float, and is no infinity.
_LARGEST = sys.float_info.max
PositiveNumber = Annotated[float, Must(lambda x: 0 < x <= _LARGEST, "a positive number")]
NonNegativeNumber = Annotated[float, Must(lambda x: 0 <= x <= _LARGEST, "a number of at least 0")]
Share = Annotated[float, Must(lambda x: 0 <= x <= 1, "a number in [0, 1]")]
OpenShare = Annotated[float, Must(lambda x: 0 < x < 1, "a number above 0 and below 1")]
TracePath = Annotated[str, Must(bool, "the path of a routing trace (.npz) or of a run's folder")]
Name = Annotated[str, Must(lambda text: bool(text.strip()), "a string that is not empty")]


class Checked:
    """Base of a dataclass that checks all its fields, in their order, when an object is made.

    Class keywords: `section` stands before the keys in messages; `error` is the class of what is raised. A
    subclass's own `__post_init__` calls this one, then checks what must fit together.
    """

    _section: ClassVar[str] = ""
    _error: ClassVar[type[MoejaxError]] = ConfigError

    def __init_subclass__(cls, *, section: str = "", error: type[MoejaxError] | None = None) -> None:
        cls._section = f"{section}." if section else cls._section
        cls._error = error or cls._error

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        known: dict[str, Any] = getattr(cls, "__dataclass_fields__", {})
        for name in fields.keys() - known.keys():
            raise cls._error(f"{cls.__name__}: {unknown('keyword', name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name, key, rule in _rules(cls):
            value = getattr(self, name)
            try:
                stored = rule.take(key, value)
            except _Misfit as misfit:
                raise self._error(str(misfit)) from None
            if stored is not value:
                object.__setattr__(self, name, stored)


def check(key: str, value: Any, hint: Any) -> None:
    """Raises `ConfigError` unless `value` is what the annotation `hint` accepts."""
    try:
        _rule(hint).take(key, value)
    except _Misfit as misfit:
        raise ConfigError(str(misfit)) from None


class _Misfit(ValueError):
    """Says which key (a field's, or that of an item in it) has what wrong value."""

    def __init__(self, key: str, fault: str) -> None:
        super().__init__(key + fault)
        self.key = key


class _Rule(NamedTuple):
    """An annotation as code: `take(key, value)` returns the value as it is stored, or raises `_Misfit`."""

    words: str
    take: Callable[[str, Any], Any]


@functools.cache
def _rules(cls: Any) -> list[tuple[str, str, _Rule]]:
    """Returns (name, key, rule) of each field."""
    hints = get_type_hints(cls, include_extras=True)
    return [(f.name, cls._section + f.name, _rule(hints[f.name])) for f in dataclasses.fields(cls)]


def _rule(hint: Any) -> _Rule:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated and isinstance(args[1], Among):
        return _choice(tuple(args[1].names), args[1].word)
    if origin is Annotated:
        return _one_of([_rule(args[0])], args[1].words, args[1].test)
    if origin in (Union, types.UnionType):
        arms = [_rule(arg) for arg in args if arg is not types.NoneType]
        return _one_of(arms, " or ".join(arm.words for arm in arms), optional=types.NoneType in args)
    if origin is Literal:
        return _choice(args)
    if origin in (list, tuple):
        return _items(origin, args[0])
    return _Rule("anything", lambda key, value: value) if hint is Any else _instance(origin or hint)


def _instance(kind: type) -> _Rule:
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    words, accepted, convert = _SCALARS.get(kind, (f"{article} {kind.__name__}", kind, None))

    def take(key: str, value: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise _Misfit(key, f" must be {words}, got {value!r}")
        return value if convert is None or isinstance(value, (kind, int)) else convert(value)

    return _Rule(words, take)


_SCALARS: dict[type, tuple[str, Any, Callable[[Any], Any] | None]] = {
    bool: ("True or False", bool, None),
    int: ("an integer", (int, Integral), operator.index),
    float: ("a number", (float, int, Real), float),
    str: ("a string", (str, os.PathLike), os.fspath),
}


def _one_of(
    arms: list[_Rule], words: str, test: Callable[[Any], bool] | None = None, optional: bool = False
) -> _Rule:
    """Returns the first of several rules that takes the value, and a condition on what it returns."""

    def take(key: str, value: Any) -> Any:
        if value is None and optional:
            return None
        for arm in arms:
            try:
                stored = arm.take(key, value)
            except _Misfit as misfit:
                if (len(arms) == 1 and test is None) or misfit.key != key:
                    raise  # which says more: of a choice, or of one item
            else:
                if test is None or test(stored):
                    return stored
        raise _Misfit(key, f" must be {words.replace('{key}', key)}, got {value!r}")

    return _Rule(words, take)


def _choice(choices: tuple[Any, ...], word: str = "value") -> _Rule:
    words = " or ".join(map(str, choices))

    def take(key: str, value: Any) -> Any:
        if value in choices and not (isinstance(value, bool) and bool not in map(type, choices)):
            return value
        if isinstance(choices[0], str):
            raise _Misfit(key, f": {unknown(word, str(value), choices)}")
        raise _Misfit(key, f" must be {words}, got {value!r}")

    return _Rule(words, take)


def _items(kind: type, hint: Any) -> _Rule:
    item = _rule(hint)
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    texts = plain is str or get_origin(plain) is Literal
    words = f"a list, each {item.words}"

    def take(key: str, value: Any) -> Any:
        values = [value] if texts and isinstance(value, str) else value
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise _Misfit(key, f" must be {words}, got {value!r}")
        values = list(values)
        stored = [item.take(f"{key}[{place}]", one) for place, one in enumerate(values)]
        unchanged = type(value) is kind and all(map(operator.is_, stored, values))
        return value if unchanged else kind(stored)

    return _Rule(words, take)
