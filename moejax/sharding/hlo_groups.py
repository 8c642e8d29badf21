"""Groups of mesh devices that a collective joins, read from every way in which HLO text spells them.

Device numbers in HLO are positions in the mesh, row by row, whatever the devices' own ids.
"""

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax.sharding.hlo_syntax import HloError

_GROUPS = re.compile(r"\breplica_groups=(\{(?:\{[\d,]*\},?)*\})")
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"\breplica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'?([^',:=]+)'?(?::\((\d+)\)(\d+))?$")
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


class Grid:
    """Positions in a mesh, and the axes along which sets of them lie."""

    def __init__(self, mesh: Any) -> None:
        self.names = tuple(mesh.axis_names)
        self.shape = tuple(mesh.devices.shape)
        self.size = math.prod(self.shape)
        self.places = np.stack(np.unravel_index(np.arange(self.size), self.shape), axis=1)

    def participants(self, kind: str, attributes: str, name: str) -> tuple[int, tuple[str, ...] | None]:
        """Returns (devices that take part together, the axes of size above 1 that they lie along or None)."""
        if kind == "collective-permute":
            pairs = _PAIRS.search(attributes)
            if pairs is None:
                raise HloError(f"{name}: no source_target_pairs in {attributes!r}")
            return self._moved([numbers(pair) for pair in re.findall(r"\{(.*?)\}", pairs[1])])
        groups = _groups(attributes, name)
        # Without global ids and with a channel, these kinds' groups are of replicas, of which there is one.
        by_replica = kind in ("all-reduce", "all-gather", "reduce-scatter") and "channel_id=" in attributes
        if not groups or (by_replica and "use_global_device_ids=true" not in attributes):
            groups = [list(range(self.size))]
        return self._spanned(groups, name)

    def _spanned(self, groups: Sequence[Sequence[int]], name: str) -> tuple[int, tuple[str, ...] | None]:
        """Returns (devices of a group, the axes whose product the groups are)."""
        devices = sorted(itertools.chain.from_iterable(groups))
        if devices != list(range(self.size)):
            raise HloError(
                f"{name}: its groups {groups} are not the {self.size} devices of the mesh, each once"
            )
        size = max(len(group) for group in groups)
        first = self.places[list(groups[0])]
        along = [len(set(first[:, axis])) > 1 for axis in range(len(self.shape))]
        whole = math.prod(n for n, on in zip(self.shape, along, strict=True) if on)
        others = self.places[:, [not on for on in along]]
        for group in groups:
            if len(group) != whole or (others[list(group)] != others[group[0]]).any():
                return size, None
        return size, tuple(axis for axis, on in zip(self.names, along, strict=True) if on)

    def _moved(self, pairs: Sequence[Sequence[int]]) -> tuple[int, tuple[str, ...]]:
        """Returns (devices within the axes that some pair moves on, those axes)."""
        ends = np.asarray(pairs, np.int64).reshape(-1, 2)
        changed = (self.places[ends[:, 0]] != self.places[ends[:, 1]]).any(axis=0)
        size = math.prod(n for n, on in zip(self.shape, changed, strict=True) if on)
        return size, tuple(axis for axis, on in zip(self.names, changed, strict=True) if on)


def _groups(attributes: str, name: str) -> list[list[int]]:
    """Returns the groups in any of HLO's three spellings; empty for "all devices"."""
    if match := _GROUPS.search(attributes):
        return [numbers(group) for group in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := _IOTA.search(attributes):
        return _iota(match[2], match[3]).reshape(numbers(match[1])).tolist()
    if match := _MESH.search(attributes):
        return _mesh_groups(match[1], match[2], match[3], name)
    raise HloError(f"{name}: no replica_groups that can be read in {attributes!r}")


def _mesh_groups(mesh: str, ids: str | None, axes: str, name: str) -> list[list[int]]:
    """Reads `mesh['a'=2,'b'=4] {'a','b':(2)2}`: whole axes, and parts of one as `:(stride before it)size`."""
    sizes = {key.strip(" '"): int(size) for key, size in (item.split("=") for item in mesh.split(","))}
    total = math.prod(sizes.values())
    order = _ORDER.fullmatch(ids or f"[{total}]")
    if order and math.prod(numbers(order[1])) == total:
        devices = _iota(order[1], order[2]).tolist()
    else:
        devices = [int(number) for number in re.findall(r"\d+", ids or "")]
    places = dict(zip(sizes, np.unravel_index(np.arange(total), tuple(sizes.values())), strict=True))
    rest = {axis: place.copy() for axis, place in places.items()}
    for item in filter(None, axes.split(",")):
        axis = _AXIS.match(item.strip())
        if axis is None or axis[1] not in sizes:
            raise HloError(f"{name}: the axis {item!r} is not one of mesh[{mesh}]")
        before, size = (int(axis[2]), int(axis[3])) if axis[2] else (1, sizes[axis[1]])
        step = sizes[axis[1]] // (before * size)
        rest[axis[1]] -= places[axis[1]] // step % size * step
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, key in zip(devices, zip(*(rest[axis].tolist() for axis in sizes), strict=True), strict=True):
        groups.setdefault(key, []).append(device)
    return list(groups.values())


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Returns 0, 1, … laid out by `dims`, read in the order of dimensions `order` (None: as they are)."""
    shape = numbers(dims)
    laid = np.arange(math.prod(shape)).reshape(shape)
    return laid.transpose(numbers(order) if order else range(len(shape))).reshape(-1)


def numbers(text: str) -> list[int]:
    """Maps `"0,2,4"` to `[0, 2, 4]`."""
    return [int(number) for number in text.split(",") if number]
