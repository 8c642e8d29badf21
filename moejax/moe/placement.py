"""Placement of experts on devices: replicas for hot experts, balanced devices, and what a change costs.

Expert parallelism waits for the most loaded device, so the figure is balancedness: the load of the heaviest
device over the mean (1 is best). `plan_placement` takes counted loads and returns a `Placement` by DeepSeek's
EPLB (`moejax.moe.eplb`), or one close to that in use (`moejax.moe.placement_moves`); `compare` says what it
gains and which weights must move. Applying it is the engine's business. Host only: numpy, no JAX.

Axes: L layers (those with experts), E logical experts, P physical slots = devices · slots a device; the slots
of a device are contiguous, and so are the devices of a node.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moejax.core.errors import ConfigError
from moejax.core.scheduling import RebalanceConfig
from moejax.moe.eplb import Floats, Ints, count, hierarchical, part_loads
from moejax.moe.placement_moves import adjust, moved_slots, settle

_MAX_LOAD = 1e100  # larger ones could not be added up


@dataclass(frozen=True, eq=False)
class Placement:
    """Expert of each physical slot. Immutable, equal by value.

    Attributes:
        physical_to_logical: int32 `[L, P]`.
        num_experts: logical experts, E.
        devices: the P slots belong to devices 0, 1, … in equal contiguous runs.
    """

    physical_to_logical: Ints
    num_experts: int
    devices: int

    def __post_init__(self) -> None:
        table = np.array(self.physical_to_logical)
        if table.dtype.kind not in "iu":
            raise ConfigError(f"placement: physical_to_logical is {table.dtype}, expected integers")
        if table.ndim != 2 or self.num_experts < 1 or self.devices < 1:
            raise ConfigError(
                f"placement: physical_to_logical has shape {list(table.shape)} for {self.num_experts} "
                f"experts on {self.devices} devices, expected [layers, slots] and at least 1 of each"
            )
        if not table.shape[1] or table.shape[1] % self.devices:
            raise ConfigError(
                f"placement: {table.shape[1]} slots are not a multiple of {self.devices} devices"
            )
        wrong = np.argwhere((table < 0) | (table >= self.num_experts))
        if len(wrong):
            layer, slot = wrong[0]
            raise ConfigError(
                f"placement: layer {layer}, slot {slot} holds expert {table[layer, slot]}, "
                f"valid are 0 to {self.num_experts - 1}"
            )
        table = table.astype(np.int32)
        table.setflags(write=False)
        object.__setattr__(self, "physical_to_logical", table)
        missing = np.argwhere(self.replicas == 0)
        if len(missing):
            layer, expert = missing[0]
            raise ConfigError(
                f"placement: expert {expert} of layer {layer} is on no device"
                + (f", and {len(missing) - 1} more are missing" if len(missing) > 1 else "")
            )

    @classmethod
    def contiguous(
        cls, num_layers: int, num_experts: int, devices: int, *, redundant: int = 0
    ) -> "Placement":
        """Returns experts in order, then second copies of the first: what expert parallelism starts from.

        Raises:
            ConfigError: experts + redundant not divisible by devices.
        """
        _require_equal_slots(num_experts, devices, redundant)
        slots = np.arange(num_experts + redundant) % num_experts
        return cls(np.tile(slots, (num_layers, 1)), num_experts, devices)

    @property
    def num_layers(self) -> int:
        return self.physical_to_logical.shape[0]

    @property
    def num_slots(self) -> int:
        """P."""
        return self.physical_to_logical.shape[1]

    @property
    def slots_per_device(self) -> int:
        return self.num_slots // self.devices

    @cached_property
    def replicas(self) -> NDArray[np.int32]:
        """Returns int32 `[L, E]`: copies of each expert."""
        return count(self.physical_to_logical, self.num_experts).astype(np.int32)

    def logical_to_physical(self, width: int) -> NDArray[np.int32]:
        """Returns int32 `[L, E, width]`: each expert's slots, ascending, then -1.

        For a compiled program that outlives this placement take 1 + redundant slots: no plan needs more.

        Raises:
            ConfigError: an expert has more than `width` replicas.
        """
        most = int(self.replicas.max())
        if width < most:
            raise ConfigError(f"placement: an expert has {most} replicas, a table of {width} is too narrow")
        order = np.argsort(self.physical_to_logical, axis=1, kind="stable")
        layer, expert, copy = np.nonzero(np.arange(width) < self.replicas[..., None])
        result = np.full((self.num_layers, self.num_experts, width), -1, np.int32)
        result[layer, expert, copy] = order.reshape(-1)
        return result

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Placement)
            and (self.num_experts, self.devices) == (other.num_experts, other.devices)
            and np.array_equal(self.physical_to_logical, other.physical_to_logical)
        )


def _require_equal_slots(num_experts: int, devices: int, redundant: int) -> None:
    if devices < 1:
        raise ConfigError(f"placement: devices={devices} must be at least 1")
    if redundant < 0:
        raise ConfigError(f"placement: redundant={redundant} must not be negative")
    slots = num_experts + redundant
    if slots % devices:
        raise ConfigError(
            f"placement: {num_experts} experts + redundant={redundant} are {slots} slots, not a multiple of "
            f"{devices} devices; the next redundant that fits is {redundant + -slots % devices}"
        )


def _checked_loads(loads: ArrayLike) -> Floats:
    values = np.asarray(loads, np.float64)
    if values.ndim != 2 or not values.size:
        raise ConfigError(f"placement: loads have shape {list(values.shape)}, expected [layers, experts]")
    wrong = np.argwhere(~((values >= 0) & (values <= _MAX_LOAD)))
    if len(wrong):
        layer, expert = wrong[0]
        raise ConfigError(
            f"placement: the load of layer {layer}, expert {expert} is {values[layer, expert]}, "
            f"expected 0 to {_MAX_LOAD}"
        )
    return values


def _require_nodes(num_experts: int, devices: int, nodes: int, groups: int, redundant: int) -> None:
    if nodes < 1 or groups < 1:
        raise ConfigError(f"placement: nodes={nodes} and groups={groups} must be at least 1")
    if devices % nodes:
        raise ConfigError(f"placement: {devices} devices are not a multiple of nodes={nodes}")
    if num_experts % groups:
        raise ConfigError(f"placement: {num_experts} experts are not a multiple of groups={groups}")
    if groups % nodes:
        raise ConfigError(
            f"placement: groups={groups} are not a multiple of nodes={nodes}, so they cannot be spread "
            "equally; nodes=1 plans without regard to nodes"
        )
    slots, there = (num_experts + redundant) // devices, num_experts // nodes
    if slots > there:
        raise ConfigError(
            f"placement: {num_experts} experts + redundant={redundant} on {devices} devices are {slots} "
            f"slots a device, more than the {there} experts of a node: a device would hold one twice; "
            f"the largest useful redundant is {there * devices - num_experts}"
        )


def plan_placement(
    loads: ArrayLike,
    *,
    devices: int,
    nodes: int = 1,
    groups: int | None = None,
    redundant: int = 0,
    keep: Placement | None = None,
    min_gain: float = 0.0,
) -> Placement:
    """Plans a balanced placement for these loads. The same arguments give the same placement.

    Args:
        loads: `[L, E]`, counted or expected, finite and >= 0. A layer without load is planned as if all its
            experts were equally loaded.
        devices: D; each gets (E + redundant) / D slots.
        nodes: 1: flat, without regard to nodes. More: hierarchical, all replicas of an expert are on one
            node, and devices are numbered node by node.
        groups: expert groups of E / groups consecutive experts that stay on one node; by default each expert
            is a group of its own. In a flat plan they only decide between experts of equal load.
        redundant: physical slots beyond one an expert, in total.
        keep: the placement in use: move few weights away from it. Devices (and nodes) are renamed, and layers
            start from what they hold, as long as they reach the limit that `min_gain` sets.
        min_gain: with `keep`: how much less balanced than the best plan a layer may be so that fewer weights
            move; 0.05: its heaviest device 5 % heavier. 0: no less balanced at all.

    Raises:
        ConfigError: numbers that do not divide, loads that are not finite, negative or zero throughout, or
            `keep` with other layers, experts or devices.
    """
    values = _checked_loads(loads)
    L, E = values.shape
    groups = (E if nodes > 1 else 1) if groups is None else groups
    _require_equal_slots(E, devices, redundant)
    _require_nodes(E, devices, nodes, groups, redundant)
    if not values.any():
        raise ConfigError(
            f"placement: the loads of all {L} layers × {E} experts are zero: count some steps first, "
            "or take Placement.contiguous"
        )
    if not 0.0 <= min_gain < np.inf:
        raise ConfigError(f"placement: min_gain={min_gain} must not be negative")
    planned = np.where(values.any(axis=1, keepdims=True), values, 1.0)
    slots = hierarchical(planned, E + redundant, devices, nodes, groups)
    if keep is not None:
        _require_same("keep", keep, L, E, devices)
        limit = part_loads(values, slots, devices).max(axis=1) * (1.0 + min_gain)
        slots = settle(slots, keep.physical_to_logical, values, limit, devices, nodes, groups)
    return Placement(slots, E, devices)


def adjust_placement(loads: ArrayLike, keep: Placement, rule: RebalanceConfig) -> Placement:
    """Changes a placement in use a little; layers where that gains less than `rule.min_gain` stay.

    The expert with the most load a replica gets another one while that load is above `replicate_above` times
    the mean of its layer's experts. It takes, on the lightest device without that expert, the slot of a
    replica with less than `remove_below` times the mean, of an expert that has others. Then experts of the
    heaviest device and another are swapped, the best swap first, until it is within `min_gain` of the mean.
    Where swaps alone get there, and move fewer weights, there are no new replicas.

    Args:
        loads: `[L, E]`, counted, finite and >= 0.

    Raises:
        ConfigError: loads that are not finite or negative, or of other layers or experts than `keep`.
    """
    values, old = _checked_loads(loads), keep.physical_to_logical
    layers, experts = values.shape
    _require_same("keep", keep, layers, experts, keep.devices)
    new = adjust(old, values, keep.devices, rule)
    before, after = (part_loads(values, slots, keep.devices).max(axis=1) for slots in (old, new))
    gains = (after < before) & (after <= before * (1.0 - rule.min_gain))
    return Placement(np.where(gains[:, None], new, old), keep.num_experts, keep.devices)


def _require_same(name: str, placement: Placement, layers: int, experts: int, devices: int) -> None:
    has = (placement.num_layers, placement.num_experts, placement.devices)
    if has != (layers, experts, devices):
        raise ConfigError(
            f"placement: {name} has {has[0]} layers, {has[1]} experts and {has[2]} devices, "
            f"expected {layers}, {experts} and {devices}"
        )


def balancedness(loads: ArrayLike, placement: Placement) -> Floats:
    """Returns float64 `[L]`: load of the heaviest device over the mean; 1 for a layer without load."""
    values = _checked_loads(loads)
    L, E = values.shape
    _require_same("the placement", placement, L, E, placement.devices)
    device_loads = part_loads(values, placement.physical_to_logical, placement.devices)
    mean = device_loads.mean(axis=1)
    return np.divide(device_loads.max(axis=1), mean, out=np.ones_like(mean), where=mean > 0)


@dataclass(frozen=True)
class Comparison:
    """Gain and cost of a change of placement.

    Attributes:
        before, after: float64 `[L]`, balancedness on the same loads.
        moved: bool `[L, P]`: slots of the new placement whose expert is not on their device yet.
        bytes_moved: of those.
        replicated, removed: replicas that experts get and lose, over all layers.
    """

    before: Floats
    after: Floats
    moved: NDArray[np.bool_]
    bytes_moved: int
    replicated: int
    removed: int


def compare(old: Placement, new: Placement, loads: ArrayLike, *, bytes_per_expert: int = 0) -> Comparison:
    """Returns the balance on `loads` before and after, and the expert weights that must move.

    Args:
        bytes_per_expert: of one expert of one layer, with its scales if it is quantized.

    Raises:
        ConfigError: the two differ in layers, experts or devices (the number of slots may differ).
    """
    _require_same("the new placement", new, old.num_layers, old.num_experts, old.devices)
    moved = moved_slots(new.physical_to_logical, old.physical_to_logical, new.devices, new.num_experts)
    before, after = balancedness(loads, old), balancedness(loads, new)
    more = new.replicas - old.replicas
    gained, lost = (int(side.clip(0).sum()) for side in (more, -more))
    return Comparison(before, after, moved, int(moved.sum()) * bytes_per_expert, gained, lost)
