"""Verdicts of a `quantization_config` on each linear layer of a checkpoint."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from moejax.core.errors import CheckpointError, ConfigError
from moejax.quantization.checkpoints.scheme import Index, Scheme, Shape

Role = Literal["linear", "router", "shared_gate", "head", "embedding"]
"""Kind of a module: the router is no `Linear` for some writers, and no list of modules counts it."""

Excluded = Literal["yes", "perhaps", "no"]


class Verdict(NamedTuple):
    """A module's quantization according to the configuration.

    Attributes:
        scheme: how it is quantized; None where it must be in full precision.
        must: it is quantized; otherwise it may be.
    """

    scheme: Scheme | None
    must: bool = True


@dataclass(frozen=True)
class Convention(ABC):
    """A parsed `quantization_config`.

    Attributes:
        method: as `quant_method` names it.
        notes: what the checkpoint asks for and does not get, for a warning.
    """

    method: str
    notes: tuple[str, ...] = field(default=(), kw_only=True)

    @abstractmethod
    def verdict(self, module: str, role: Role) -> Verdict:
        """Returns the verdict on a module such as `model.layers.0.mlp.experts.3.gate_proj`."""

    def parts(self, shapes: Mapping[str, Shape]) -> dict[str, tuple[str, Index]]:
        """Returns what schemes know by another name: name → stored tensor (of `shapes`) and part of it."""
        return {}


class QuantFields:
    """A `quantization_config` whose fields are taken one at a time, with errors that name them."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source = raw, source

    def take(self, *names: str, default: Any = None) -> Any:
        """Returns the first that is there and not null."""
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), default)

    def integer(self, *names: str, default: int | None = None) -> int:
        value = self.take(*names, default=default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{self.source}.{names[0]} must be an integer, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name, default=default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.source}.{name} must be true or false, got {value!r}")
        return value

    def names(self, *fields: str) -> tuple[str, ...]:
        """Returns a list of strings, or nothing; those that start with "re:" are patterns."""
        value = self.take(*fields, default=[])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"{self.source}.{fields[0]} must be a list of names, got {value!r}")
        for item in (item for item in value if item.startswith("re:")):
            try:
                re.compile(item[3:])
            except re.error as error:
                raise CheckpointError(f"{self.source}: {item!r} is no pattern ({error})") from None
        return tuple(value)

    def group(self, default: int | None = None) -> int:
        """Returns `group_size`; 0 for -1, which is one group of all inputs."""
        size = self.integer("group_size", "q_group_size", default=default)
        if size < -1 or size == 0:
            raise CheckpointError(
                f"{self.source}.group_size must be positive, or -1 for channels, got {size}"
            )
        return max(size, 0)

    def one_of(self, name: str, value: Any, known: Iterable[Any], of: str) -> None:
        """Raises `ConfigError` for what exists but is not read here."""
        if value not in known:
            choices = ", ".join(map(repr, known))
            raise ConfigError(
                f"{self.source}.{name}={value!r} is not supported for {of}; supported: {choices}"
            )


def excluded(module: str, names: Iterable[str]) -> Excluded:
    """Returns whether a list of modules that are not quantized names this one.

    Libraries look for the names anywhere in a module's, so that "gate" would reach `gate_proj`; what was
    meant is the part of the path `gate`. Where only the former holds, the tensors decide.
    """
    verdict: Excluded = "no"
    for name in names:
        if name.startswith("re:"):
            if re.match(name[3:], module):
                return "yes"
        elif f".{name.strip('.')}." in f".{module}.":
            return "yes"
        elif name in module:
            verdict = "perhaps"
    return verdict


@dataclass(frozen=True)
class Listed(Convention):
    """A configuration with one scheme, which names the modules that are in full precision.

    Router, shared expert's gate and output projection are so without being named, unless they are not.
    """

    scheme: Scheme
    left_out: tuple[str, ...]

    def verdict(self, module: str, role: Role) -> Verdict:
        if role == "embedding":
            return Verdict(None)
        left = excluded(module, self.left_out)
        return Verdict(None) if left == "yes" else Verdict(self.scheme, role == "linear" and left == "no")
