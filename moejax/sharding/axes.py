"""Names of mesh axes by what is split over them, for code that runs once per device inside `shard_map`.

Modules hold an `Axes` and speak of `axes.tensor`, never of a mesh. On one device all names are empty, and
every function here gives back what it was given: the same program as without it.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

Names = tuple[str, ...]


@dataclass(frozen=True)
class Axes:
    """Axis names, each major to minor; empty where nothing is split.

    Attributes:
        sizes: every axis of the mesh with its number of devices.
        data: requests and caches.
        node, local: the expert axis, between and within nodes.
        tp: the experts' hidden dimension.
        tensor: heads, vocabulary and dense hidden dimensions.
        kv: key/value heads; the first of `tensor`, which has copies beyond them.
    """

    sizes: tuple[tuple[str, int], ...] = ()
    data: Names = ()
    node: Names = ()
    local: Names = ()
    tp: Names = ()
    tensor: Names = ()
    kv: Names = ()

    @property
    def expert(self) -> Names:
        """The experts: node, then local."""
        return self.node + self.local

    @property
    def exchange(self) -> Names:
        """Axes over which tokens travel to their experts: none where all expert ranks see all tokens."""
        return self.expert if set(self.expert) <= set(self.data) else ()

    def size(self, names: Names) -> int:
        """Devices along these axes together."""
        sizes = dict(self.sizes)
        return math.prod(sizes[name] for name in names)


SINGLE = Axes()


def psum(x: jax.Array, names: Names) -> jax.Array:
    """Returns the sum over all devices along the axes."""
    return jax.lax.psum(x, names) if names else x


def all_gather(x: jax.Array, names: Names, axis: int = 0) -> jax.Array:
    """Returns all devices' parts one after another along an array axis."""
    return jax.lax.all_gather(x, names, axis=axis % x.ndim, tiled=True) if names else x


def reduce_scatter(x: jax.Array, names: Names) -> jax.Array:
    """Returns the sum over all devices, of which each keeps its part of the first axis."""
    return jax.lax.psum_scatter(x, names, scatter_dimension=0, tiled=True) if names else x


def all_to_all(x: jax.Array, names: Names) -> jax.Array:
    """Sends row r of `[R, …]` to the axes' device r; returns `[R, …]`, row r from device r."""
    return jax.lax.all_to_all(x, names, 0, 0, tiled=True) if names else x


def pmax(x: jax.Array, names: Names) -> jax.Array:
    """Returns the greatest value over all devices along the axes."""
    return jax.lax.pmax(x, names) if names else x


def index(names: Names) -> jax.Array:
    """Returns int32: this device's number along the axes."""
    return jax.lax.axis_index(names) if names else jnp.zeros((), jnp.int32)
