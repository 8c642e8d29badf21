"""Finds the operations and specs that a configuration names."""

from collections.abc import Sequence
from dataclasses import dataclass

from moejax.core.errors import ConfigError, unknown
from pallas_kernels.op import Op, Spec
from pallas_kernels.registry import OPS, load_op


@dataclass(frozen=True)
class Selected:
    """An operation with the implementations and specs that were asked for."""

    op: Op
    implementations: tuple[str, ...]
    specs: tuple[Spec, ...]


def select(ops: Sequence[str], implementations: Sequence[str], specs: Sequence[str]) -> list[Selected]:
    """Returns the operations that are named, as `KernelSelection`'s fields of these names name them.

    Raises:
        ConfigError: an unknown operation or implementation, a part that no spec's name has, or nothing that
            has all of them.
    """
    for name in ops:
        if name not in OPS:
            raise ConfigError(f"ops: {unknown('kernel', name, OPS)}")
    loaded = [load_op(name) for name in ops or OPS]
    selected = narrow(implementations, specs, [(op, op.specs) for op in loaded])
    for part in specs:
        if not any(part in spec.name for op in loaded for spec in op.specs):
            parts = {name for op in loaded for spec in op.specs for name in spec.name.split("/")}
            raise ConfigError(f"specs: {unknown('part of a spec', part, parts)}")
    if not selected:
        raise ConfigError(
            f"ops, implementations and specs: no operation has {' or '.join(implementations)}"
            f" and a spec with {' or '.join(specs)} in its name"
        )
    return selected


def narrow(
    implementations: Sequence[str], specs: Sequence[str], among: Sequence[tuple[Op, Sequence[Spec]]]
) -> list[Selected]:
    """Returns of operations with their specs the implementations, and the specs with a part, that are named.

    Raises:
        ConfigError: an implementation that no operation has.
    """
    known = sorted({name for op, _ in among for name in op.implementations})
    for name in implementations:
        if name not in known:
            raise ConfigError(f"implementations: {unknown('implementation', name, known)}")
    selected = []
    for op, every in among:
        names = tuple(n for n in op.implementations if n in (implementations or known))
        named = tuple(s for s in every if not specs or any(part in s.name for part in specs))
        if names and named:
            selected.append(Selected(op, names, named))
    return selected
