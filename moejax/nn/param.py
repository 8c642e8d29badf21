"""One declaration per tensor: shape, dtype, logical axes and initialiser together.

Modules are built abstract: every `nnx.Param` first holds a `jax.ShapeDtypeStruct` and carries its
`ParamSpec`. Loading, random initialisation and sharding all walk these declarations, so there is
one place that says what a tensor is.
"""

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from moejax.core.errors import ConfigError

Init = Literal["normal", "zeros", "ones"]
Array = TypeVar("Array", jax.Array, np.ndarray)


@dataclass(frozen=True)
class ParamSpec:
    """Declaration of a tensor.

    Attributes:
        shape: its dimensions.
        axes: one logical axis name per dimension (docs/architecture.md, Axes).
        dtype: its storage dtype.
        init: initialiser of a fresh model; `normal` has standard deviation `scale`.
        scale: standard deviation of `normal`.
        transposed: the tensor is stored with its last two dimensions swapped against the order that the key
            tables and initialisers speak of; `shape` and `axes` are as stored.
        padding: zeros at the end of the axis "vocab", which let it divide by the devices. They count in
            `shape`, and are no part of the model: nothing draws, reads or writes them.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: Any
    init: Init = "normal"
    scale: float = 0.02
    transposed: bool = False
    padding: int = 0

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)

    @property
    def canonical_shape(self) -> tuple[int, ...]:
        """The shape in the order that the key tables speak of, without padding."""
        shape = self.true_shape
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The canonical shape without the experts' axis: of a matrix, or of a vector."""
        return self.canonical_shape["expert" in self.axes :]

    @property
    def true_shape(self) -> tuple[int, ...]:
        """The shape as stored, without padding."""
        return tuple(n - self._added(axis) for n, axis in zip(self.shape, self.axes, strict=True))

    def padded(self, padding: int) -> "ParamSpec":
        """Pads the tensor with so many zeros at the end of its axis "vocab", if it has one."""
        if "vocab" not in self.axes:
            return self
        spec = replace(self, padding=padding)
        shape = (n + spec._added(axis) for n, axis in zip(self.shape, self.axes, strict=True))
        return replace(spec, shape=tuple(shape))

    def with_padding(self, value: jax.Array) -> jax.Array:
        """Turns `true_shape` into `shape`."""
        return jnp.pad(value, [(0, self._added(axis)) for axis in self.axes]) if self.padding else value

    def without_padding(self, value: Array) -> Array:
        """Turns `shape` into `true_shape`."""
        return value[tuple(slice(n) for n in self.true_shape)] if self.padding else value

    def canonical(self, stored: Array) -> Array:
        """Turns a value as it is stored into `canonical_shape`."""
        value = self.without_padding(stored)
        return value.swapaxes(-1, -2) if self.transposed else value

    def stored(self, canonical: jax.Array) -> jax.Array:
        """Turns `canonical_shape` into a value as it is stored, in `dtype`."""
        value = canonical.swapaxes(-1, -2) if self.transposed else canonical
        return self.with_padding(value.astype(self.dtype))

    def _added(self, axis: str | None) -> int:
        return self.padding if axis == "vocab" else 0

    def struct(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


def declare(spec: ParamSpec) -> nnx.Param:
    """Returns an abstract parameter that carries its declaration as the metadata `spec`."""
    return nnx.Param(spec.struct(), spec=spec)


def path_name(path: tuple[Any, ...]) -> str:
    """Maps `("layers", 0, "moe")` to `"layers.0.moe"`."""
    return ".".join(str(part) for part in path)


def iter_params(model: nnx.Module) -> Iterator[tuple[str, nnx.Param]]:
    """Yields every parameter of `model` with its dotted path, in a stable order."""
    for path, node in sorted(nnx.iter_graph(model), key=lambda item: [str(p) for p in item[0]]):
        if isinstance(node, nnx.Param):
            yield path_name(path), node


def specs(model: nnx.Module) -> dict[str, ParamSpec]:
    """Returns the declaration by dotted path of every parameter."""
    return {name: param.get_metadata("spec") for name, param in iter_params(model)}


ExpertOf = Mapping[str, Sequence[int]]
"""Path of a parameter with an expert axis → the expert that each of its slots holds.

Where experts have replicas, a model has more slots than experts. A path that is not there holds expert i in
slot i.
"""


def slots_of(name: str, spec: ParamSpec, expert_of: ExpertOf | None) -> tuple[int, ...] | None:
    """Returns the expert in each slot of a parameter; None for one that `expert_of` does not name.

    Raises:
        ConfigError: it names another number of slots than there are, or leaves out an expert below its
            highest.
    """
    if expert_of is None or name not in expert_of:
        return None
    slots = tuple(int(expert) for expert in expert_of[name])
    if len(slots) != spec.shape[0] or set(slots) != set(range(max(slots) + 1)):
        raise ConfigError(
            f"expert_of[{name!r}] must name an expert for each of {spec.shape[0]} slots, and every expert at "
            f"least once; got {list(slots)}"
        )
    return slots


OnValue = Callable[[str, nnx.Param, jax.Array], None]
"""Takes a parameter's value when it is there: path, parameter, value."""


Skip = Callable[[str], bool]
"""Tells of a parameter, by its path, whether its value is not wanted, and neither drawn nor read."""


def assign(name: str, param: nnx.Param, value: jax.Array) -> None:
    """Stores a value as it is: the `OnValue` of a model that is not quantized on the way."""
    param.set_value(value)


def initialize(
    model: nnx.Module,
    seed: int,
    shardings: Mapping[str, Sharding] | None = None,
    *,
    expert_of: ExpertOf | None = None,
    store: OnValue = assign,
    skip: Skip = lambda name: False,
) -> None:
    """Fills every parameter in place by its initialiser.

    A tensor's values depend on (seed, its path) only, never on the order of construction or where they lie.

    Args:
        shardings: path → sharding; each device then draws its own part. None: all on the default device.
        expert_of: for a model with replicas of experts, which one each slot holds; slots with the same expert
            get the same values.
        store: takes each value as soon as it is drawn, before the next.
        skip: parameters that stay without values.

    Raises:
        ConfigError: `expert_of` does not fit.
    """
    programs: dict[Any, Any] = {}
    for name, param in iter_params(model):
        if skip(name):
            continue
        spec = param.get_metadata("spec")
        slots, path = slots_of(name, spec, expert_of), np.uint32(zlib.crc32(name.encode()))
        if shardings is None:
            store(name, param, _initial_value(spec, seed, path, slots))
            continue
        sharding = shardings[name]
        if not sharding.addressable_devices:  # another process's pipeline stage
            empty = jax.make_array_from_single_device_arrays(spec.shape, sharding, [], dtype=spec.dtype)
            store(name, param, empty)
            continue
        program = programs.get((spec, slots, sharding))
        if program is None:
            draw = functools.partial(_initial_value, spec, seed, slots=slots, sharding=sharding)
            program = programs[spec, slots, sharding] = jax.jit(draw, out_shardings=sharding)
        store(name, param, program(path))


def _initial_value(
    spec: ParamSpec,
    seed: int,
    path: np.uint32 | jax.Array,
    slots: tuple[int, ...] | None,
    sharding: Sharding | None = None,
) -> jax.Array:
    if spec.init == "zeros":
        return jnp.zeros(spec.shape, spec.dtype)
    if spec.init == "ones":
        return jnp.ones(spec.shape, spec.dtype)
    key = jax.random.fold_in(jax.random.key(seed), path)
    shape = spec.canonical_shape if slots is None else (max(slots) + 1, *spec.canonical_shape[1:])
    # Drawn in canonical order, so that a seed gives the same model in either layout. The barrier keeps XLA
    # from merging this factor with the generator's own, so that a compiled draw rounds as one that is not.
    value = jax.lax.optimization_barrier(jax.random.normal(key, shape, jnp.float32))
    value = (spec.scale * value).astype(spec.dtype)
    value = jnp.swapaxes(value, -1, -2) if spec.transposed else value
    if slots is None:
        return spec.with_padding(value)
    between = _whole_experts(sharding, value.shape)
    if between is not None:
        value = jax.lax.with_sharding_constraint(value, between)
    value = value[np.asarray(slots)]
    return value if between is None else jax.lax.with_sharding_constraint(value, between)


def _whole_experts(sharding: Sharding | None, shape: tuple[int, ...]) -> NamedSharding | None:
    """Returns `sharding` with its first axis's parts moved to another that is whole, so that experts can be
    copied from slot to slot within each device. None where there is no such axis."""
    if not isinstance(sharding, NamedSharding):
        return None
    parts = list(sharding.spec) + [None] * (len(shape) - len(sharding.spec))
    for axis in range(1, len(shape)):
        if parts[axis] is None:
            parts[0], parts[axis] = None, parts[0]
            between = NamedSharding(sharding.mesh, PartitionSpec(*parts))
            return between if shape[axis] % between.num_devices == 0 else None
    return None


def num_params(model: nnx.Module) -> int:
    """Returns the number of scalar parameters, padding left out; works on abstract models too."""
    return sum(math.prod(spec.true_shape) for spec in specs(model).values())
