"""From the names in a configuration to operations and specs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moejax.core.errors import ConfigError, unknown
from pallas_kernels.op import Op, Spec
from pallas_kernels.registry import OPS, load_op


@dataclass(frozen=True)
class Selected:
    """An operation and what of it was asked for."""

    op: Op
    implementations: tuple[str, ...]
    specs: tuple[Spec, ...]

    def wanted(self, implementation: str, spec: Spec) -> bool:
        return implementation in self.implementations and spec in self.specs


class Names(Protocol):
    """What is read of a `moejax.bench.kernels.config.KernelSelection`."""

    @property
    def ops(self) -> Sequence[str]: ...
    @property
    def implementations(self) -> Sequence[str]: ...
    @property
    def specs(self) -> Sequence[str]: ...


def select(config: Names) -> list[Selected]:
    """Returns the operations that a configuration names.

    Raises:
        ConfigError: an unknown operation or implementation, a part that no spec's name has, or nothing that
            has all of them.
    """
    for name in config.ops:
        if name not in OPS:
            raise ConfigError(f"ops: {unknown('kernel', name, OPS)}")
    ops = [load_op(name) for name in config.ops or OPS]
    known = sorted({name for op in ops for name in op.implementations})
    for name in config.implementations:
        if name not in known:
            raise ConfigError(f"implementations: {unknown('implementation', name, known)}")
    found = []
    for op in ops:
        asked = config.implementations
        names = tuple(n for n in op.implementations if not asked or n in asked)
        specs = tuple(s for s in op.specs if not config.specs or any(part in s.name for part in config.specs))
        if names and specs:
            found.append(Selected(op, names, specs))
    for part in config.specs:
        if not any(part in spec.name for op in ops for spec in op.specs):
            parts = {name for op in ops for spec in op.specs for name in spec.name.split("/")}
            raise ConfigError(f"specs: {unknown('part of a spec', part, parts)}")
    if not found:
        raise ConfigError(
            f"ops, implementations and specs: no operation has {' or '.join(config.implementations)}"
            f" and a spec with {' or '.join(config.specs)} in its name"
        )
    return found
