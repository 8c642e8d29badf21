"""Which device holds which experts: replicas for hot experts, balanced devices, and what a change costs.

Expert parallelism waits for the most loaded device, so the figure is balancedness: the load of the heaviest
device over the mean (1 is best). `plan_placement` takes counted loads (`load_window.LoadWindow`) and returns
a `Placement`; `compare` says what it gains and which weights must move. The plan follows DeepSeek's EPLB
(github.com/deepseek-ai/EPLB; DeepSeek-V3, arXiv 2412.19437, section 3.4): greedy replicas, packing of equally
many copies on each device, and with several nodes expert groups on nodes first, because group-limited routing
then sends a token to few nodes. Swaps and other numbers of replicas follow, see `packing`; a layer is never
less balanced than by EPLB's method.

Host only: numpy, no JAX. Applying a placement is the engine's business.

Axes: L layers (those with experts), E logical experts, P physical slots = devices · slots a device; the slots
of a device are contiguous, and so are the devices of a node.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moejax.core.errors import ConfigError
from moejax.moe.load_window import Beyond, beyond
from moejax.moe.packing import CLOSE_ENOUGH, Floats, Ints, count, heaviest, lpt, pack, refine
from moejax.moe.replan import moved_slots, settle

_MAX_LOAD = 1e100


@dataclass(frozen=True, eq=False)
class Placement:
    """Which expert each physical slot holds. Immutable, equal by value.

    Attributes:
        physical_to_logical: int32 `[L, P]`.
        num_experts: logical experts, E.
        devices: the P slots belong to devices 0, 1, … in equal contiguous runs.
    """

    physical_to_logical: NDArray[np.int32]
    num_experts: int
    devices: int

    def __post_init__(self) -> None:
        table = np.array(self.physical_to_logical)
        if table.dtype.kind not in "iu":
            raise ConfigError(f"placement: physical_to_logical is {table.dtype}, expected integers")
        if table.size and np.abs(table.astype(np.int64)).max() > np.iinfo(np.int32).max:
            raise ConfigError("placement: physical_to_logical does not fit int32")
        table = table.astype(np.int32)
        table.setflags(write=False)
        object.__setattr__(self, "physical_to_logical", table)
        self.check()

    def check(self) -> None:
        """Raises ConfigError: a wrong shape, slots not divisible by devices, a wrong id, a missing expert."""
        table = self.physical_to_logical
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
        """Experts in order, then second copies of the first ones: what expert parallelism starts from.

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
        """int32 `[L, E]`: copies of each expert."""
        return count(self.physical_to_logical, self.num_experts).astype(np.int32)

    @cached_property
    def logical_to_physical(self) -> NDArray[np.int32]:
        """int32 `[L, E, R]`: each expert's slots, ascending, then -1; R is the largest number of replicas."""
        return self.padded(int(self.replicas.max()))

    def padded(self, width: int) -> NDArray[np.int32]:
        """`logical_to_physical` with R = `width`, for a compiled program that outlives this placement.

        No plan with `redundant` extra slots needs more than 1 + redundant.

        Raises:
            ConfigError: an expert has more replicas than that.
        """
        most = int(self.replicas.max())
        if width < most:
            raise ConfigError(f"placement: an expert has {most} replicas, a table of {width} is too narrow")
        table = self.physical_to_logical
        order = np.argsort(table, axis=1, kind="stable")
        expert = np.take_along_axis(table, order, 1)
        start = np.cumsum(self.replicas, axis=1) - self.replicas
        nth = np.arange(self.num_slots) - np.take_along_axis(start, expert, 1)
        result = np.full((self.num_layers, self.num_experts, width), -1, np.int32)
        result[np.arange(self.num_layers)[:, None], expert, nth] = order
        return result

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Placement)
            and (self.num_experts, self.devices) == (other.num_experts, other.devices)
            and np.array_equal(self.physical_to_logical, other.physical_to_logical)
        )

    def __hash__(self) -> int:
        return hash((self.num_experts, self.devices, self.physical_to_logical.tobytes()))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` takes it back."""
        return {
            "num_experts": self.num_experts,
            "devices": self.devices,
            "physical_to_logical": self.physical_to_logical.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Placement":
        """Raises ConfigError: a key is missing or unknown, or the placement is not sound."""
        keys = {"num_experts", "devices", "physical_to_logical"}
        if set(data) != keys:
            raise ConfigError(f"placement: keys are {sorted(data)}, expected {sorted(keys)}")
        numbers = data["num_experts"], data["devices"]
        if not all(isinstance(n, int) for n in numbers):
            raise ConfigError(f"placement: num_experts and devices are {numbers}, expected integers")
        try:
            table = np.array(data["physical_to_logical"])
        except ValueError:
            raise ConfigError("placement: the rows of physical_to_logical differ in length") from None
        return cls(table, *numbers)


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
    wrong = np.argwhere(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        layer, expert = wrong[0]
        raise ConfigError(
            f"placement: the load of layer {layer}, expert {expert} is {values[layer, expert]}, "
            "expected a finite number >= 0"
        )
    if values.max() > _MAX_LOAD:
        raise ConfigError(
            f"placement: a load of {values.max():.3g} is too large to add up, at most {_MAX_LOAD}"
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
    """A balanced placement for these loads. The same arguments give the same placement.

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
    slots = _hierarchical(planned, E + redundant, devices, nodes, groups)
    if keep is not None:
        _require_same("keep", keep, L, E, devices)
        limit = _device_loads(values, slots, devices).max(axis=1) * (1.0 + min_gain)
        before = keep.physical_to_logical.astype(np.int64)
        slots = settle(slots, before, values, limit, devices, nodes, groups)
    return Placement(slots.astype(np.int32), E, devices)


def _hierarchical(loads: Floats, slots: int, devices: int, nodes: int, groups: int) -> Ints:
    """Groups on nodes, then replicas and packing within each node: `[L, P]`. One node makes it flat."""
    L, E = loads.shape
    by_group = loads.reshape(L, groups, -1).sum(-1)
    members = np.arange(E).reshape(groups, -1)

    def plan(rows: Any, grouping: Ints) -> Ints:
        # In the order of packing, as EPLB has them: it decides between experts of equal load.
        experts = members[grouping].reshape(*grouping.shape[:2], -1)
        return _within_nodes(loads[rows], experts, slots, devices)

    first = lpt(by_group, nodes)
    result = plan(slice(None), first)
    # Nodes by LPT are usually as even as they can be; where swaps make them more so, plan those layers again.
    even = loads.sum(1) / devices * (1.0 + CLOSE_ENOUGH)
    load = _device_loads(loads, result, devices).max(1)
    second = refine(by_group, first, loads.sum(1) / nodes)
    again = np.flatnonzero((heaviest(by_group, second) < heaviest(by_group, first)) & (load > even))
    if len(again):
        other = plan(again, second[again])
        better = _device_loads(loads[again], other, devices).max(1) < load[again]
        result[again[better]] = other[better]
    return result


def _within_nodes(loads: Floats, experts: Ints, slots: int, devices: int) -> Ints:
    """Replicas and packing in each node by itself: experts `[L, n, E / n]` -> slots `[L, P]`."""
    L, nodes, size = experts.shape
    rows = np.take_along_axis(loads, experts.reshape(L, -1), 1).reshape(L * nodes, size)
    # The heaviest node sets what the layer can reach; the others need not do better.
    target = rows.sum(1).reshape(L, nodes).max(1) / (devices // nodes) * (1.0 + CLOSE_ENOUGH)
    packed = pack(rows, slots // nodes, devices // nodes, np.repeat(target, nodes))
    held = np.take_along_axis(experts.reshape(L * nodes, size), packed.reshape(L * nodes, -1), 1)
    return np.sort(held.reshape(L, devices, -1), axis=-1).reshape(L, slots)


def _device_loads(loads: Floats, slots: Ints, devices: int) -> Floats:
    L = len(slots)
    return np.take_along_axis(loads / count(slots, loads.shape[1]), slots, 1).reshape(L, devices, -1).sum(-1)


def _require_same(name: str, placement: Placement, layers: int, experts: int, devices: int) -> None:
    has = (placement.num_layers, placement.num_experts, placement.devices)
    if has != (layers, experts, devices):
        raise ConfigError(
            f"placement: {name} has {has[0]} layers, {has[1]} experts and {has[2]} devices, "
            f"expected {layers}, {experts} and {devices}"
        )


def device_loads(loads: ArrayLike, placement: Placement) -> Floats:
    """float64 `[L, devices]`: a replica takes its expert's load / replicas."""
    values = _checked_loads(loads)
    L, E = values.shape
    _require_same("the placement", placement, L, E, placement.devices)
    return _device_loads(values, placement.physical_to_logical.astype(np.int64), placement.devices)


def balancedness(loads: ArrayLike, placement: Placement) -> Floats:
    """float64 `[L]`: load of the heaviest device over the mean; 1 for a layer without load."""
    return beyond(device_loads(loads, placement), 1.0).ratio.max(axis=1)


def devices_over(loads: ArrayLike, placement: Placement, factor: float, under: float | None = None) -> Beyond:
    """Devices beyond `factor` × the mean of their layer, or below `under` × it (by default 1 / factor)."""
    return beyond(device_loads(loads, placement), factor, under)


@dataclass(frozen=True)
class Comparison:
    """What a change of placement gains and costs.

    Attributes:
        before, after: float64 `[L]`, balancedness on the same loads.
        moved: bool `[L, P]`: slots of the new placement whose expert is not on their device yet.
        bytes_moved: of those.
    """

    before: Floats
    after: Floats
    moved: NDArray[np.bool_]
    bytes_moved: int

    @property
    def weights_moved(self) -> int:
        """Slots that must receive an expert, over all layers."""
        return int(self.moved.sum())

    def summary(self) -> dict[str, float]:
        """Flat figures for a tracker."""
        return {
            "balancedness_mean_before": float(self.before.mean()),
            "balancedness_mean_after": float(self.after.mean()),
            "balancedness_max_before": float(self.before.max()),
            "balancedness_max_after": float(self.after.max()),
            "expert_weights_moved": float(self.weights_moved),
            "expert_bytes_moved": float(self.bytes_moved),
        }


def compare(old: Placement, new: Placement, loads: ArrayLike, *, bytes_per_expert: int = 0) -> Comparison:
    """Balance on `loads` before and after, and the expert weights that must move.

    Args:
        bytes_per_expert: of one expert of one layer, with its scales if it is quantized.

    Raises:
        ConfigError: the two differ in layers, experts or devices (the number of slots may differ).
    """
    _require_same("the new placement", new, old.num_layers, old.num_experts, old.devices)
    after, before = (p.physical_to_logical.astype(np.int64) for p in (new, old))
    moved = moved_slots(after, before, new.devices, new.num_experts)
    return Comparison(
        balancedness(loads, old), balancedness(loads, new), moved, int(moved.sum()) * bytes_per_expert
    )
