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

from moejax.core.errors import ConfigError, MoejaxError, did_you_mean, unknown

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
    """The dataclass `cls` that a composed config describes, its interpolations resolved.

    Raises `ConfigError` for a value that is no choice of its `Literal`, and whatever `MoejaxError` a
    `__post_init__` raises; OmegaConf's own errors for a missing value or a broken interpolation.
    """
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return _build(cls, values, "")


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
    """Of a dictionary: name → section."""
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
        # The library's class does not always know where in the config it stands.
        parent, _, section = path.rpartition(".")
        if not path or path in str(error):
            raise
        where = f"{parent}." if parent and str(error).startswith(f"{section}.") else f"{path}: "
        raise type(error)(f"{where}{error}") from error


def _build_value(hint: Any, value: Any, key: str) -> Any:
    inner, _ = _split_optional(hint)
    if value is None:
        return None
    if _is_union(inner) and isinstance(value, dict):
        # A number or a section: what is written as a section is that dataclass.
        inner = next((arg for arg in get_args(inner) if dataclasses.is_dataclass(arg)), inner)
    origin, args = get_origin(inner), get_args(inner)
    if dataclasses.is_dataclass(inner):
        return _build(inner, value, key)
    if origin is Literal and value not in args:
        raise ConfigError(f"{key}: {unknown('value', str(value), map(str, args))}")
    if origin in (list, tuple) and args:
        return origin(_build_value(args[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if origin is dict and _holds_sections(args):
        return {name: _build_value(args[1], item, f"{key}.{name}") for name, item in value.items()}
    return value
