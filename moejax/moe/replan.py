"""A new placement that moves few weights from the old one, and is no less balanced than asked.

Arrays only, no `Placement`: `placement.plan_placement(keep=…)` is the interface. No JAX here.

Axes: L layers, E experts, P physical slots = devices · S slots a device, n nodes, D devices a node; a row is
a node of a layer.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from moejax.moe.packing import Floats, Ints, count, refine, replicate

_EPSILON = 1e-12


def held(slots: Ints, devices: int, num_experts: int) -> NDArray[np.int64]:
    """How many copies each device holds: `[L, P]` -> `[L, devices, E]`."""
    L, P = slots.shape
    counts = np.zeros((L, devices, num_experts), np.int64)
    device = np.arange(P) // (P // devices)
    np.add.at(counts, (np.arange(L)[:, None], device, slots), 1)
    return counts


def moved_slots(new: Ints, old: Ints, devices: int, num_experts: int) -> NDArray[np.bool_]:
    """Slots of `new` whose expert is not on their device in `old`: bool `[L, P]`."""
    L, P = new.shape
    there = held(old, devices, num_experts) > 0
    device = np.arange(P) // (P // devices)
    return ~there[np.arange(L)[:, None], device, new]


def settle(new: Ints, old: Ints, loads: Floats, limit: Floats, devices: int, nodes: int, groups: int) -> Ints:
    """Of the placements whose heaviest device is within the limit, one that moves few weights from `old`.

    Tried a layer: `old` as it is; `old` after swaps; `old` with other numbers of copies, then swaps; `new`
    with its devices and nodes renamed. The last one always fits.

    Args:
        new: `[L, P]`, the fresh plan.
        old: `[L, P_old]`, in use; with another number of slots only `new` can be taken.
        loads: `[L, E]`.
        limit: `[L]`, load of the heaviest device; at least that of `new`.

    Returns:
        `[L, P]`; an expert that stays on its device keeps its slot, if the number of slots is the same.
    """
    E = loads.shape[1]
    best = _rename(new, old, E, devices, nodes)
    if new.shape != old.shape:
        return best
    moved = moved_slots(best, old, devices, E).sum(1)
    limit = limit * (1.0 + _EPSILON)
    # An old placement that was planned for other nodes or groups is no place to start from.
    node_of = _node_of_groups(old, E, nodes, groups)
    sound = np.flatnonzero((node_of >= 0).all(1) & (moved > 0))
    if not len(sound):
        return best
    # Each node's groups as they are; and after the swaps between nodes that the limit needs, if it needs any.
    grouping = np.argsort(node_of[sound], axis=1, kind="stable").reshape(len(sound), nodes, -1)
    by_group = loads[sound].reshape(len(sound), groups, -1).sum(-1)
    # Half-way between the limit and the mean, because the devices of a node will not be equal.
    room = (limit[sound] * (devices // nodes) + by_group.sum(1) / nodes) / 2.0
    regrouped = refine(by_group, grouping, room)
    for packed in (grouping, regrouped)[: 1 + (regrouped != grouping).any()]:
        size = E // groups
        sets = (packed[..., None] * size + np.arange(size)).reshape(len(sound) * nodes, -1)
        row_loads = np.take_along_axis(np.repeat(loads[sound], nodes, axis=0), sets, 1)
        places = _places(old[sound], sets, E)
        for candidate in _warm(places, row_loads, np.repeat(limit[sound], nodes), devices // nodes):
            experts = np.take_along_axis(sets, candidate, 1).reshape(len(sound), -1)
            share = np.take_along_axis(loads[sound] / count(experts, E), experts, 1)
            load = share.reshape(len(sound), devices, -1).sum(-1).max(-1)
            moves = moved_slots(experts, old[sound], devices, E).sum(1)
            take = (load <= limit[sound]) & (moves < moved[sound])
            best[sound[take]] = experts[take]
            moved[sound[take]] = moves[take]
    return _align(best, old, devices)


def _node_of_groups(old: Ints, num_experts: int, nodes: int, groups: int) -> Ints:
    """The node of each group `[L, G]`; -1 in a layer where a group is split or shares are unequal."""
    there = held(old, nodes, num_experts) > 0
    node = there.argmax(1).reshape(len(old), groups, -1)
    sound = (there.sum(1) == 1).all(1) & (node == node[..., :1]).all((1, 2))
    sound &= (there.sum(2) == num_experts // nodes).all(1)
    return np.where(sound[:, None], node[..., 0], -1)


def _places(slots: Ints, sets: Ints, num_experts: int) -> Ints:
    """Slots `[rows, P / n]` as indices into their row's set; -1 where the expert is not in it any more."""
    place = np.full((len(sets), num_experts), -1)
    np.put_along_axis(place, sets, np.broadcast_to(np.arange(sets.shape[1]), sets.shape), 1)
    return np.take_along_axis(place, slots.reshape(len(sets), -1), 1)


def _warm(slots: Ints, loads: Floats, limit: Floats, devices: int) -> Iterator[Ints]:
    """Candidates `[rows, slots]` that start from the packing in use."""
    wanted = replicate(loads, slots.shape[1], most=devices)
    refilled = _refill(slots, wanted, loads / wanted, devices)
    # A row with new experts has no other way than to fill the slots that those gone have left.
    slots = np.where((slots < 0).any(1, keepdims=True), refilled, slots)
    yield slots
    yield _swapped(slots, loads / count(slots, loads.shape[1]), limit, devices)
    yield _swapped(refilled, loads / wanted, limit, devices)


def _swapped(slots: Ints, share: Floats, limit: Floats, devices: int) -> Ints:
    rows, P = slots.shape
    packed = np.broadcast_to(np.arange(P), (rows, P)).reshape(rows, devices, -1)
    order = refine(np.take_along_axis(share, slots, 1), packed, limit).reshape(rows, P)
    return np.take_along_axis(slots, order, 1)


def _refill(slots: Ints, wanted: Ints, share: Floats, devices: int) -> Ints:
    """Free the slots of surplus copies; fill all that are free, heaviest copy first, on the lightest device.

    `slots` `[rows, P / n]` holds -1 where a slot is free already.
    """
    rows, P = slots.shape
    S = P // devices
    slots = slots.copy()
    counts = count(slots + 1, wanted.shape[1] + 1)  # of -1 too, in column 0
    # Which copy of its expert a slot holds, in slot order.
    order = np.argsort(slots, axis=1, kind="stable")
    start = np.cumsum(counts, axis=1) - counts
    nth = np.empty_like(slots)
    np.put_along_axis(nth, order, np.arange(P) - np.take_along_axis(start, np.sort(slots, axis=1) + 1, 1), 1)
    free = (slots < 0) | (nth >= np.take_along_axis(wanted, np.maximum(slots, 0), 1))
    counts = counts[:, 1:]
    missing = np.maximum(wanted - counts, 0)
    row, expert = np.nonzero(missing)
    row, expert = (np.repeat(a, missing[row, expert]) for a in (row, expert))
    by_weight = np.lexsort((-share[row, expert], row))
    row, expert = row[by_weight], expert[by_weight]
    turn = np.arange(len(row)) - np.searchsorted(row, row)
    weight = (
        np.where(free, 0.0, np.take_along_axis(share, np.maximum(slots, 0), 1))
        .reshape(rows, devices, S)
        .sum(-1)
    )
    open_slots = free.reshape(rows, devices, S)
    for k in range(int(turn.max(initial=-1)) + 1):
        r, e = row[turn == k], expert[turn == k]
        device = np.where(open_slots[r].any(-1), weight[r], np.inf).argmin(1)
        slot = open_slots[r, device].argmax(1)
        slots[r, device * S + slot] = e
        open_slots[r, device, slot] = False
        weight[r, device] += share[r, e]
    return slots


def _rename(new: Ints, old: Ints, num_experts: int, devices: int, nodes: int) -> Ints:
    """`new` with its devices renamed within nodes, and its nodes, so that most copies stay where they are."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and only needed here

    L, D = len(new), devices // nodes
    slots = new.reshape(L, nodes, D, -1)
    copies = held(new, devices, num_experts).astype(np.float32)
    there = (held(old, devices, num_experts) > 0).astype(np.float32)
    stay = (copies @ there.transpose(0, 2, 1)).reshape(L, nodes, D, nodes, D).transpose(0, 1, 3, 2, 4)
    result = np.empty_like(slots)
    for layer in range(L):
        # For each pair of nodes the best naming of devices, then the best naming of nodes.
        kept, name = np.zeros((nodes, nodes)), {}
        for a, b in np.ndindex(nodes, nodes):
            rows, name[a, b] = linear_sum_assignment(-stay[layer, a, b])
            kept[a, b] = stay[layer, a, b, rows, name[a, b]].sum()
        for a, b in enumerate(linear_sum_assignment(-kept)[1]):
            result[layer, b, name[a, b]] = slots[layer, a]
    renamed = result.reshape(new.shape)
    return _align(renamed, old, devices) if new.shape == old.shape else renamed


def _align(new: Ints, old: Ints, devices: int) -> Ints:
    """`new` `[L, P]` with the slots within each device in such order that what stays keeps its slot."""
    shape = (len(new), devices, -1)
    contents, before = new.reshape(shape), old.reshape(shape)
    unused = np.ones(contents.shape, bool)
    result = np.full(contents.shape, -1, new.dtype)
    for slot in range(contents.shape[2]):
        match = unused & (contents == before[..., slot : slot + 1])
        layer, device = np.nonzero(match.any(-1))
        unused[layer, device, match.argmax(-1)[layer, device]] = False
        result[layer, device, slot] = before[layer, device, slot]
    result[result < 0] = contents[unused]  # as many a device on both sides, in the same order
    return result.reshape(new.shape)
