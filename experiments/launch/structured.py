"""From the library's dataclasses to OmegaConf's structured configs and back.

The library describes its configuration with frozen dataclasses that use `Literal`, unions and tuples;
OmegaConf knows none of the three and makes a frozen dataclass read-only. So `mirror` derives a plain twin
that OmegaConf accepts, field by field, and `build` turns a composed config into the library's own
dataclasses. The library's dataclasses stay the one source of names, types and defaults.
"""

import copy
import dataclasses
import functools
import pydoc
import types
import typing
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moejax.core.errors import ConfigError, MoejaxError, did_you_mean

T = TypeVar("T")
_TWIN = "mirror$"
_PRIMITIVES = (bool, int, float, str)


@functools.cache
def mirror(cls: type) -> type:
    """A mutable twin of dataclass `cls` as OmegaConf accepts it; mandatory fields are `MISSING`."""
    hints = get_type_hints(cls)
    fields: list[tuple[str, Any, Any]] = []
    for item in dataclasses.fields(cls):
        default = MISSING
        if item.default is not dataclasses.MISSING:
            default = item.default
        elif item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        factory = functools.partial(copy.deepcopy, _mirror_value(default))
        fields.append((item.name, _mirror_type(hints[item.name]), dataclasses.field(default_factory=factory)))
    twin = dataclasses.make_dataclass(cls.__name__, fields)
    twin.__module__ = __name__
    twin.__qualname__ = _TWIN + f"{cls.__module__}.{cls.__qualname__}".replace(".", "$")
    return twin


def __getattr__(name: str) -> type:
    """The twin by the name under which it is pickled: a sweep's other processes make the same class."""
    if not name.startswith(_TWIN):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    cls = pydoc.locate(name.removeprefix(_TWIN).replace("$", "."))
    return mirror(typing.cast(type, cls))


def build(cls: type[T], config: DictConfig) -> T:
    """Returns the dataclass `cls` that a composed config describes, its interpolations resolved.

    Raises:
        ConfigError: a value is missing, or an interpolation cannot be resolved.
        MoejaxError: whatever a `__post_init__` raises, with the key's place in the config.
    """
    try:
        for key in sorted(OmegaConf.missing_keys(config)):
            mend = "every item of that list needs one" if "[" in key else f"add {key}=VALUE"
            raise ConfigError(f"{key!r} has no value yet: {mend}")
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        line = f"cannot resolve the interpolation: {str(error).strip().splitlines()[0]}"
        raise ConfigError(f"{error.full_key or 'a value'}: {line}") from error
    return _build(cls, values, "")


def expected(cls: type, key: str) -> str | None:
    """Returns in words what values a dotted key of dataclass `cls` takes; None for one that is no field."""
    arms: tuple[Any, ...] = (cls,)
    for name in key.split("."):
        hints = [_field_hint(arm, name) for arm in arms]
        hint = next((hint for hint in hints if hint is not None), None)
        if hint is None:
            return None
        inner, _ = _split_optional(hint)
        arms = get_args(inner) if _is_union(inner) else (inner,)
    return " or ".join(_in_words(arm) for arm in arms)


def _field_hint(hint: Any, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return get_type_hints(hint).get(name)
    args = get_args(hint)
    return args[1] if get_origin(hint) is dict and _holds_sections(args) else None


def _in_words(hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return f"a section with keys {', '.join(item.name for item in dataclasses.fields(hint))}"
    if get_origin(hint) is list and dataclasses.is_dataclass(get_args(hint)[0]):
        return f"a list, each {_in_words(get_args(hint)[0])}"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
    containers = {list: "a list", tuple: "a list", dict: "a section"}
    return words.get(hint) or containers.get(get_origin(hint) or hint) or "another value"


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _split_optional(hint: Any) -> tuple[Any, bool]:
    """`X | None` → (X, True); every other hint → (hint, False)."""
    if not _is_union(hint) or types.NoneType not in get_args(hint):
        return hint, False
    rest = tuple(arg for arg in get_args(hint) if arg is not types.NoneType)
    return Union[rest], True  # noqa: UP007 (a computed union has no `|` form)


def _mirror_type(hint: Any) -> Any:
    inner, optional = _split_optional(hint)
    mirrored = _mirror_plain(inner)
    return typing.Optional[mirrored] if optional and mirrored is not Any else mirrored  # noqa: UP045


def _mirror_plain(hint: Any) -> Any:
    if hint in _PRIMITIVES:
        return hint
    if dataclasses.is_dataclass(hint):
        return mirror(typing.cast(type, hint))
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        kinds = {type(arg) for arg in args}
        return kinds.pop() if len(kinds) == 1 else Any
    if origin in (list, tuple):
        return list[_mirror_plain(args[0])] if args else list[Any]  # type: ignore[misc]
    if origin is dict:
        return dict[str, mirror(args[1])] if _holds_sections(args) else dict[str, Any]  # type: ignore[misc]
    return Any  # unions such as int | list[int]: the dataclass checks them itself


def _holds_sections(args: tuple[Any, ...]) -> bool:
    """Says whether a dictionary maps names to sections."""
    return len(args) == 2 and dataclasses.is_dataclass(args[1])


def _mirror_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = {f.name: _mirror_value(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return mirror(type(value))(**pairs)
    if isinstance(value, dict):
        return {name: _mirror_value(item) for name, item in value.items()}
    return [_mirror_value(item) for item in value] if isinstance(value, (list, tuple)) else value


def _build(cls: Any, values: Any, path: str) -> Any:
    hints = get_type_hints(cls)
    names = [item.name for item in dataclasses.fields(cls)]
    prefix = f"{path}." if path else ""
    for name in values:
        if name not in names:  # only `+key=value` gets one past OmegaConf's own check
            raise ConfigError(
                f"unknown key {prefix + name!r}{did_you_mean(name, names)} (known: {', '.join(names)})"
            )
    kwargs = {n: _build_value(hints[n], values[n], prefix + n) for n in names if n in values}
    try:
        return cls(**kwargs)
    except MoejaxError as error:
        # The library's class names its keys by its own section, wherever in the config it stands.
        text, section = str(error), getattr(cls, "_section", "")
        if not path or path in text:
            raise
        inside = bool(section) and text.startswith(section)
        raise type(error)(prefix + text.removeprefix(section) if inside else f"{path}: {text}") from error


def _build_value(hint: Any, value: Any, key: str) -> Any:
    """Builds the sections in a value; all else is the dataclasses' own to check and to convert."""
    inner, _ = _split_optional(hint)
    args = get_args(inner)
    if isinstance(value, dict) and get_origin(inner) is dict and _holds_sections(args):
        return {name: _build_value(args[1], item, f"{key}.{name}") for name, item in value.items()}
    # A number or a section: what is written as a section is that dataclass.
    section = next((arm for arm in (inner, *args) if dataclasses.is_dataclass(arm)), None)
    if section is not None and isinstance(value, list):
        return [_build(section, item, f"{key}[{place}]") for place, item in enumerate(value)]
    return _build(section, value, key) if section is not None and isinstance(value, dict) else value
