"""A function that is written for one device, run on all devices of a mesh; and arrays placed for it.

The function sees each array's part on its device and speaks to the others by `moejax.sharding.axes`. Arrays
whose first dimension is "by group" have a part for each data-parallel group, one after another.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.sharding._compat import compiles_only
from moejax.sharding.axes import SINGLE, Axes, all_gather, psum
from moejax.sharding.distributed import settle


class SingleDevice:
    """No mesh: everything is as the function sees it."""

    axes: Axes = SINGLE
    groups: int = 1

    def zeros(self, shape: tuple[int, ...], dtype: Any, *split: Any) -> jax.Array:
        """Zeros of a per-device shape. `split` says, of the dimensions after the first, along which axes the
        whole array is cut; the first is by group."""
        return jnp.zeros(shape, dtype)

    def struct(self, shape: tuple[int, ...], dtype: Any, *split: Any) -> Any:
        """Returns the shape, dtype and sharding of what `zeros` returns."""
        return jax.ShapeDtypeStruct(shape, dtype)

    def put(self, by_group: np.ndarray) -> Any:
        """Returns a host array, by group, as a function's argument."""
        return by_group

    def ready(self, tree: Any) -> Any:
        """Waits for a call's result where needed, see `moejax.sharding.distributed.settle`."""
        return tree

    def gather_groups(self, tree: Any) -> Any:
        """Inside the function, joins the groups' values one after another, equal on all devices."""
        return jax.tree.map(lambda x: all_gather(x, self.axes.data), tree)

    def sum_groups(self, x: jax.Array) -> jax.Array:
        """Inside the function, returns the sum over the groups."""
        return psum(x, self.axes.data)

    def compiled(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        donate: int,
        output: bool,
        by_group: Any = False,
    ) -> jax.stages.Wrapped:
        """Returns `function`, ready to be lowered for such arguments.

        Args:
            arguments: trees of arrays or of what `struct` gives.
            donate: the argument that is device state: donated, and returned anew.
            output: the function returns `(state, output)`; else the state.
            by_group: of the output's parts (a tree of which it is a prefix), which are by group; the others
                are equal on all devices.
        """
        return jax.jit(function, donate_argnums=(donate,))


class MeshDevices(SingleDevice):
    """All devices of a mesh. On devices that programs are only compiled for, arrays are shapes."""

    def __init__(self, mesh: Mesh, axes: Axes) -> None:
        self.mesh, self.axes = mesh, axes
        self.groups = axes.size(axes.data)
        self._zeros: dict[Any, Any] = {}
        self._compiles_only = compiles_only(mesh.devices.flat[0])

    @property
    def here(self) -> bool:
        """True if any of its devices is this process's."""
        return any(device.process_index == jax.process_index() for device in self.mesh.devices.flat)

    def sharding(self, *parts: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*parts))

    def zeros(self, shape: tuple[int, ...], dtype: Any, *split: Any) -> jax.Array:
        struct = self.struct(shape, dtype, *split)
        if self._compiles_only:
            return struct
        key = (struct.shape, struct.dtype, struct.sharding)
        if key not in self._zeros:
            self._zeros[key] = jax.jit(
                lambda: jnp.zeros(struct.shape, struct.dtype), out_shardings=struct.sharding
            )
        return self._zeros[key]()

    def everywhere(self, x: jax.Array) -> Any:
        """Returns an array on all devices; only its shape where they are devices to compile for."""
        if self._compiles_only:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding())
        return jax.device_put(x, self.sharding())

    def struct(self, shape: tuple[int, ...], dtype: Any, *split: Any) -> Any:
        parts = (self.axes.data or None, *(names or None for names in split))
        whole = [shape[0] * self.groups]
        for size, names in zip(shape[1:], (*split, *((),) * len(shape)), strict=False):
            whole.append(size * self.axes.size(names or ()))
        return jax.ShapeDtypeStruct(tuple(whole), dtype, sharding=self.sharding(*parts))

    def put(self, by_group: np.ndarray) -> Any:
        sharding = self.sharding(self.axes.data or None)
        return jax.make_array_from_callback(by_group.shape, sharding, lambda index: by_group[index])

    def ready(self, tree: Any) -> Any:
        return settle(tree)

    def compiled(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        donate: int,
        output: bool,
        by_group: Any = False,
    ) -> jax.stages.Wrapped:
        given, tree = jax.tree.flatten(arguments)
        state, state_tree = jax.tree.flatten(arguments[donate])
        state_specs = tuple(leaf.sharding.spec for leaf in state)
        data = self.axes.data or None
        output_specs = jax.tree.map(lambda x: PartitionSpec(data) if x else PartitionSpec(), by_group)

        def per_device(*leaves: jax.Array) -> Any:
            result = function(*jax.tree.unflatten(tree, leaves))
            new, extra = result if output else (result, ())
            return tuple(jax.tree.leaves(new)), extra

        mapped = jax.shard_map(
            per_device,
            mesh=self.mesh,
            in_specs=tuple(leaf.sharding.spec for leaf in given),
            out_specs=(state_specs, output_specs),
            # What is equal on all devices by construction (sums, gathered rows) cannot be proven to be so.
            check_vma=False,
        )

        def whole(*arguments: Any) -> Any:
            new, extra = mapped(*jax.tree.leaves(arguments))
            new = jax.tree.unflatten(state_tree, new)
            return (new, extra) if output else new

        return jax.jit(whole, donate_argnums=(donate,))
