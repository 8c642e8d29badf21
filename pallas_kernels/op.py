"""Parts of an operation: a contract, implementations, named shapes.

    reference        plain jnp; what every implementation is tested against
    implementations  by name; each has a configuration class, a heuristic and a space to search
    specs            the shapes that tests, tuner, static report and benchmark share

A configuration is found in this order: the one given, the one tuned for this very problem on this device, the
one tuned for the nearest problem, the heuristic's. Which it was is part of the answer.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

Problem = Mapping[str, int | str]
"""Properties that a configuration may depend on: dimensions and dtypes, by name."""


def make_problem(**properties: Any) -> Problem:
    """Returns a problem: numbers and names as they are, flags as 0 or 1, dtypes by their names."""

    def plain(value: Any) -> int | str:
        if isinstance(value, str):
            return value
        return int(value) if isinstance(value, int) else str(jnp.dtype(value))

    return {name: plain(value) for name, value in properties.items()}


@dataclass(frozen=True)
class Cost:
    """The least work a spec needs.

    Attributes:
        flops: floating-point (or integer) operations, a multiply-add counting two.
        bytes: of device memory, each needed input read once and each output written once.
        unit: dtype of the products, which sets the peak rate: "bfloat16", "float32", "int8".
    """

    flops: float
    bytes: float
    unit: str = "bfloat16"


@dataclass(frozen=True)
class Spec:
    """A named problem.

    Attributes:
        name: `model/phase_size/routing`, unique within the operation.
        make: PRNG key → the operation's array arguments by name. It is traceable: data of any size is made
            on the device, and shapes come from `jax.eval_shape`.
        static: the other keyword arguments.
        problem: what configurations are looked up by.
        tags: for choosing subsets: model, "decode" or "prefill", "balanced" or "skewed", …
    """

    name: str
    make: Callable[[jax.Array], dict[str, jax.Array]]
    static: Mapping[str, Any]
    problem: Problem
    cost: Cost
    tags: frozenset[str] = field(default=frozenset())

    @cached_property
    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the array arguments; makes no data."""
        return jax.eval_shape(self.make, jax.ShapeDtypeStruct((2,), "uint32"))


TRITON_TYPES = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int8": "*i8",
    "float8_e5m2": "*fp8e5",
}
"""Pointers to arrays in Triton's signatures, by the arrays' dtype."""


@dataclass(frozen=True)
class TritonSource:
    """A `@triton.jit` kernel to compile ahead of time: what `triton.compiler.ASTSource` wants.

    Attributes:
        name, module: of the function, whose module imports triton.
    """

    name: str
    module: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    grid: tuple[int, ...]

    def function(self) -> Any:
        """Returns the `@triton.jit` function. Imports triton."""
        return getattr(importlib.import_module(self.module), self.name)


@dataclass(frozen=True)
class Implementation:
    """One way of running an operation on a GPU.

    Attributes:
        run: `run(**arrays, **static, config=…, interpret=None)`; the reference's results.
        heuristic: a configuration for any problem that `supports` allows, with no table. It may ask for
            `device` as well, a name as `tuned.device_key` gives it, where that is known.
        space: configurations worth trying for a problem, the heuristic's among them.
        config_type: the frozen dataclass of both, flat, JSON-able fields.
        sources: for `@triton.jit` twins: kernels of a spec, for compiling without a GPU.
        supports: why a problem cannot run here, or None.
    """

    run: Callable[..., Any]
    config_type: type
    heuristic: Callable[[Problem], Any]
    space: Callable[[Problem], Iterable[Any]]
    sources: Callable[[Spec, Any], list[TritonSource]] | None = None
    supports: Callable[[Problem], str | None] = lambda problem: None

    @classmethod
    def of(cls, run: Callable[..., Any], module: Any, **others: Any) -> "Implementation":
        """Returns `run` with the `Config`, `heuristic` and `space` of a module."""
        return cls(run, module.Config, module.heuristic, module.space, **others)


@dataclass(frozen=True)
class Op:
    """An operation.

    Attributes:
        sizes: keys of a problem that count work (tokens, context): "nearest" is in their logarithms, all
            other keys must be equal.
        carries: argument → index of the output that replaces it, for what is updated in place.
    """

    name: str
    reference: Callable[..., Any]
    implementations: Mapping[str, Implementation]
    specs: tuple[Spec, ...]
    sizes: tuple[str, ...] = ()
    carries: Mapping[str, int] = field(default_factory=dict)
