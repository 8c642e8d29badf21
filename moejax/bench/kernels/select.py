"""Finds the operations and specs that a configuration names."""

from collections.abc import Sequence
from dataclasses import dataclass

from moejax.bench.kernels.config import KernelSelection
from moejax.core.errors import ConfigError, unknown
from pallas_kernels.op import Op, Spec
from pallas_kernels.registry import OPS, load_op


@dataclass(frozen=True)
class Selected:
    """An operation with the implementations and specs that were asked for."""

    op: Op
    implementations: tuple[str, ...]
    specs: tuple[Spec, ...]

    def wanted(self, implementation: str, spec: Spec) -> bool:
        return implementation in self.implementations and spec in self.specs


def select(config: KernelSelection) -> list[Selected]:
    """Returns the operations that a configuration names.

    Raises:
        ConfigError: an unknown operation or implementation, a part that no spec's name has, or nothing that
            has all of them.
    """
    for name in config.ops:
        if name not in OPS:
            raise ConfigError(f"ops: {unknown('kernel', name, OPS)}")
    ops = [load_op(name) for name in config.ops or OPS]
    selected = narrow(config, [(op, op.specs) for op in ops])
    for part in config.specs:
        if not any(part in spec.name for op in ops for spec in op.specs):
            parts = {name for op in ops for spec in op.specs for name in spec.name.split("/")}
            raise ConfigError(f"specs: {unknown('part of a spec', part, parts)}")
    if not selected:
        raise ConfigError(
            f"ops, implementations and specs: no operation has {' or '.join(config.implementations)}"
            f" and a spec with {' or '.join(config.specs)} in its name"
        )
    return selected


def narrow(config: KernelSelection, specs: Sequence[tuple[Op, Sequence[Spec]]]) -> list[Selected]:
    """Returns of operations with their specs the implementations and specs that a configuration names.

    Raises:
        ConfigError: an implementation that no operation has.
    """
    known = sorted({name for op, _ in specs for name in op.implementations})
    for name in config.implementations:
        if name not in known:
            raise ConfigError(f"implementations: {unknown('implementation', name, known)}")
    selected = []
    for op, every in specs:
        names = tuple(n for n in op.implementations if n in (config.implementations or known))
        named = tuple(s for s in every if not config.specs or any(part in s.name for part in config.specs))
        if names and named:
            selected.append(Selected(op, names, named))
    return selected
