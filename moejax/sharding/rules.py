"""Sharding rules: the mesh axes of each logical axis, and so where each tensor lies."""

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.core.errors import ConfigError
from moejax.perf.memory import Declared
from moejax.sharding.axes import Axes, Names

Rules = Mapping[str, Names]


def make_rules(axes: Axes) -> Rules:
    """Returns the mesh axes of each logical axis. What is not named is whole on every device."""
    return {
        "vocab": axes.tensor,
        "heads": axes.tensor,
        "kv_heads": axes.kv,
        "mlp": axes.tensor,
        "expert": axes.expert,
        "expert_mlp": axes.tp,
    }


def partition(name: str, spec: Declared, rules: Rules, axes: Axes) -> PartitionSpec:
    """Returns the mesh axes over which a tensor's dimensions are split.

    Raises:
        ConfigError: a dimension does not divide, or two of them would be split over the same mesh axis.
    """
    parts: list[Names] = [rules.get(axis or "", ()) for axis in spec.axes]
    used: dict[str, str | None] = {}
    for axis, size, part in zip(spec.axes, spec.shape, parts, strict=True):
        for mesh_axis in part:
            if mesh_axis in used:
                raise ConfigError(
                    f"{name}: the axes {used[mesh_axis]!r} and {axis!r} are both split over mesh axis "
                    f"{mesh_axis!r}"
                )
            used[mesh_axis] = axis
        if size % axes.size(part):
            raise ConfigError(
                f"{name}: axis {axis!r} of {size} does not divide over {axes.size(part)} devices "
                f"({'·'.join(part)})"
            )
    return PartitionSpec(*(part or None for part in parts))


def shardings(specs: Mapping[str, Declared], mesh: Mesh, axes: Axes) -> dict[str, NamedSharding]:
    """Returns the sharding of every tensor by dotted path.

    Raises:
        ConfigError: see `partition`.
    """
    rules = make_rules(axes)
    return {name: NamedSharding(mesh, partition(name, spec, rules, axes)) for name, spec in specs.items()}
