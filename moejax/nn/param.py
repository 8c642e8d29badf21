"""One declaration per tensor: shape, dtype, logical axes and initialiser together.

Modules are built abstract: every `nnx.Param` first holds a `jax.ShapeDtypeStruct` and carries its
`ParamSpec`. Loading, random initialisation and (later) sharding all walk these declarations, so there is
one place that says what a tensor is.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

Init = Literal["normal", "zeros", "ones"]


@dataclass(frozen=True)
class ParamSpec:
    """What a tensor is.

    Attributes:
        shape: its dimensions.
        axes: one logical axis name per dimension (see `moejax.core.types`).
        dtype: its storage dtype.
        init: initialiser of a fresh model; `normal` has standard deviation `scale`.
        scale: standard deviation of `normal`.
        transposed: the tensor is stored with its last two dimensions swapped against the order that the key
            tables and initialisers speak of; `shape` and `axes` are as stored.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: Any
    init: Init = "normal"
    scale: float = 0.02
    transposed: bool = False

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        """The shape in the order that the key tables speak of."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape

    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


def declare(spec: ParamSpec) -> nnx.Param:
    """An abstract parameter that carries its declaration as the metadata `spec`."""
    return nnx.Param(spec.struct(), spec=spec)


def path_name(path: tuple[Any, ...]) -> str:
    """`("layers", 0, "moe")` → `"layers.0.moe"`."""
    return ".".join(str(part) for part in path)


def iter_params(model: nnx.Module) -> Iterator[tuple[str, nnx.Param]]:
    """Every parameter of `model` with its dotted path, in a stable order."""
    for path, node in sorted(nnx.iter_graph(model), key=lambda item: [str(p) for p in item[0]]):
        if isinstance(node, nnx.Param):
            yield path_name(path), node


def specs(model: nnx.Module) -> dict[str, ParamSpec]:
    """Dotted path → declaration of every parameter."""
    return {name: param.get_metadata("spec") for name, param in iter_params(model)}


def initialize(model: nnx.Module, seed: int) -> None:
    """Fills every parameter in place by its initialiser.

    A tensor's values depend on (seed, its path) only, never on the order of construction.
    """
    root = jax.random.key(seed)
    for name, param in iter_params(model):
        spec = param.get_metadata("spec")
        key = jax.random.fold_in(root, zlib.crc32(name.encode()))
        param.set_value(_initial_value(spec, key))


def _initial_value(spec: ParamSpec, key: jax.Array) -> jax.Array:
    if spec.init == "zeros":
        return jnp.zeros(spec.shape, spec.dtype)
    if spec.init == "ones":
        return jnp.ones(spec.shape, spec.dtype)
    # Drawn in canonical order, so that a seed gives the same model in either layout.
    value = (spec.scale * jax.random.normal(key, spec.canonical_shape, jnp.float32)).astype(spec.dtype)
    return jnp.swapaxes(value, -1, -2) if spec.transposed else value


def num_params(model: nnx.Module) -> int:
    """Number of scalar parameters; works on abstract models too."""
    total = 0
    for spec in specs(model).values():
        size = 1
        for dim in spec.shape:
            size *= dim
        total += size
    return total
