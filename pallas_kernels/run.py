"""Runs an implementation that was asked for by name, with the configuration that applies."""

from collections.abc import Mapping
from typing import Any, TypedDict

from pallas_kernels.errors import KernelError
from pallas_kernels.op import Op, Problem
from pallas_kernels.tuned import configure


class Options(TypedDict, total=False):
    """Options of every operation: which implementation runs, and how.

    Attributes:
        implementation: a name, "pallas_triton" unless another is given.
        config: of that implementation's `Config`; None: see `pallas_kernels.tuned`.
        interpret: whether to interpret; None: on CPU only.
    """

    implementation: str
    config: Any
    interpret: bool | None


def run(
    op: Op,
    problem: Problem,
    arguments: Mapping[str, Any],
    *,
    implementation: str = "pallas_triton",
    config: Any = None,
    interpret: bool | None = None,
) -> Any:
    """Returns `op`'s result by that implementation, or by its reference; never by another.

    Raises:
        KernelError: an unknown implementation, or one that does not support the problem.
    """
    if implementation == "reference":
        return op.reference(**arguments)
    if implementation not in op.implementations:
        known = ", ".join(["reference", *op.implementations])
        raise KernelError(op.name, "implementation", repr(implementation), f"one of {known}")
    kind = op.implementations[implementation]
    reason = kind.supports(problem)
    if reason is not None:
        raise KernelError(op.name, f"implementation {implementation}", dict(problem), reason)
    chosen = configure(op, implementation, problem, config=config).config
    return kind.run(**arguments, config=chosen, interpret=interpret)
