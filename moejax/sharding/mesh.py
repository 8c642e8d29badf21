"""Meshes of a `ParallelConfig`, one per pipeline stage, and the axes' names.

    device number = ((((pp · dp) · node) · local) · tp), the last fastest

Key/value heads may be fewer than the devices of a tensor group. They are split over the first of its axes;
the one where they run out is cut in two ("ep" 8 → "ep" 4 × "ep_copy" 2): copies are an axis like any other.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from moejax.core.errors import ConfigError, DeviceError
from moejax.core.parallel import ParallelConfig
from moejax.sharding.axes import Axes, Names


class MeshPlan(NamedTuple):
    """A mesh for each pipeline stage, all with the same axes, and the axes' roles."""

    stages: tuple[Mesh, ...]
    axes: Axes


def make_mesh(
    parallel: ParallelConfig, num_kv_heads: int, devices: Sequence[jax.Device] | None = None
) -> MeshPlan:
    """Returns the first `num_devices` of the devices (None: all that JAX has) as meshes.

    Raises:
        ConfigError: there are too few, or the key/value heads do not divide along the axes.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < parallel.num_devices:
        raise ConfigError(f"parallel: {parallel.num_devices} devices are needed and {len(devices)} are there")
    axes = make_axes(parallel, num_kv_heads)
    shape = [size for _, size in axes.sizes]
    names = [name for name, _ in axes.sizes]
    grid = np.asarray(devices[: parallel.num_devices], dtype=object).reshape(parallel.pp, *shape)
    kinds = (AxisType.Auto,) * len(names)
    return MeshPlan(tuple(Mesh(stage, names, axis_types=kinds) for stage in grid), axes)


def make_axes(parallel: ParallelConfig, num_kv_heads: int) -> Axes:
    """Names and sizes of the axes of one stage."""
    nodes = parallel.expert_nodes
    sizes = {"dp": parallel.dp, "node": nodes, "ep": parallel.ep // nodes, "tp": parallel.tp}
    roles: dict[str, Names] = {name: (name,) for name in sizes}
    tensor = ["node", "ep", "tp"] if parallel.attention == "tensor" else ["tp"]
    kv, left = [], parallel.kv_split(num_kv_heads)
    for name in tensor:
        size = sizes[name]
        if left == 1:
            break
        if left % size == 0:
            left //= size
        elif size % left == 0:
            copies = f"{name}_copy"
            sizes = _cut(sizes, name, left, copies)
            roles[name] = (name, copies)
            left = 1
        else:
            raise ConfigError(
                f"parallel: num_key_value_heads {num_kv_heads} cannot be split over {parallel.tensor_size} "
                f"devices: {left} parts do not fit the {name} axis of {size}"
            )
        kv.append(name)

    def split(*names: str) -> Names:
        return tuple(part for name in names for part in roles[name] if sizes[part] > 1)

    data = ("dp",) if parallel.attention == "tensor" else ("dp", "node", "ep")
    return Axes(
        sizes=tuple(sizes.items()),
        data=split(*data),
        node=split("node"),
        local=split("ep"),
        tp=split("tp"),
        tensor=split(*tensor),
        kv=tuple(name for name in kv if sizes[name] > 1),
    )


def _cut(sizes: dict[str, int], name: str, first: int, rest: str) -> dict[str, int]:
    """Returns `sizes` with an axis cut into `first` devices times the rest."""
    sizes_after: dict[str, int] = {}
    for other, size in sizes.items():
        sizes_after |= {name: first, rest: size // first} if other == name else {other: size}
    return sizes_after


def virtual_devices(count: int) -> None:
    """Makes JAX's CPU backend have `count` devices; all share this machine's cores. A number that XLA_FLAGS
    sets stays.

    Raises:
        DeviceError: JAX has started with fewer, as it has in a notebook once anything has run.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if jax.default_backend() == "cpu" and jax.device_count() < count:
            raise DeviceError(
                f"JAX has started with {jax.device_count()} CPU device(s) and {count} are wanted: start anew"
                f" and do this first, or set XLA_FLAGS=--xla_force_host_platform_device_count={count} before"
            ) from None
