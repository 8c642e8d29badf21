"""A new placement that moves few weights from the one in use, and is as balanced as asked.

Arrays only: `placement.plan_placement(keep=…)` and `adjust_placement` are the interface.
Host only: numpy and scipy, no JAX.

Axes: L layers, E experts, P physical slots = devices · slots a device; a row is a node of a layer.
"""

import numpy as np
from numpy.typing import NDArray

from moejax.core.scheduling import RebalanceConfig
from moejax.moe.eplb import Floats, Ints, count, part_loads, refine, replicate


def copies_on(slots: Ints, parts: int, num_experts: int) -> Ints:
    """Returns the copies of each expert on each device (or node) `[L, parts, E]` of slots `[L, P]`."""
    return count(slots.reshape(len(slots) * parts, -1), num_experts).reshape(len(slots), parts, -1)


def moved_slots(new: Ints, old: Ints, devices: int, num_experts: int) -> NDArray[np.bool_]:
    """Returns whether each slot of `new` `[L, P]` has an expert that is not on its device in `old`."""
    there = copies_on(old, devices, num_experts) > 0
    return ~np.take_along_axis(there, new.reshape(len(new), devices, -1), 2).reshape(new.shape)


def settle(new: Ints, old: Ints, loads: Floats, limit: Floats, devices: int, nodes: int, groups: int) -> Ints:
    """Returns, of the placements whose heaviest device is within the limit, one close to `old`: `[L, P]`.

    Tried a layer: `new` with its devices and nodes renamed, which always fits; `old` after swaps; `old` with
    other numbers of copies, then swaps. Swaps stop at the limit.

    Args:
        new: `[L, P]`, the fresh plan.
        old: `[L, P_old]`, in use; with another number of slots only `new` can be taken.
        loads: `[L, E]`.
        limit: `[L]`, load of the heaviest device; at least that of `new`.
    """
    E = loads.shape[1]
    best = _rename(new, old, devices, nodes, E)
    if new.shape != old.shape:
        return best
    moved = moved_slots(best, old, devices, E).sum(1)
    limit = limit * (1.0 + 1e-12)  # sums in another order
    # An old placement that was planned for other nodes or groups is no place to start from.
    node_of = _node_of_groups(old, E, nodes, groups)
    layers = np.flatnonzero((node_of >= 0).all(1) & (moved > 0))
    if not len(layers):
        return _align(best, old, devices)
    on_node = np.argsort(node_of[layers], axis=1, kind="stable").reshape(len(layers), nodes, -1)
    by_group = loads[layers].reshape(len(layers), groups, -1).sum(-1)
    # Half-way between the limit and the mean, because the devices of a node will not be equal.
    node_limit = (limit[layers] * (devices // nodes) + by_group.sum(1) / nodes) / 2.0
    row_limit = np.repeat(limit[layers], nodes)
    for grouping in (on_node, refine(by_group, on_node, node_limit)):
        experts = (grouping[..., None] * (E // groups) + np.arange(E // groups)).reshape(len(row_limit), -1)
        node_loads = np.take_along_axis(np.repeat(loads[layers], nodes, axis=0), experts, 1)
        slots = _indices(old[layers].reshape(len(experts), -1), experts, E)
        if grouping is not on_node:
            slots = _with_copies(slots, node_loads, devices // nodes)
        slots = _swapped(slots, node_loads, row_limit, devices // nodes)
        candidate = np.take_along_axis(experts, slots, 1).reshape(len(layers), -1)
        heaviest = part_loads(loads[layers], candidate, devices).max(1)
        moves = moved_slots(candidate, old[layers], devices, E).sum(1)
        take = (heaviest <= limit[layers]) & (moves < moved[layers])
        best[layers[take]], moved[layers[take]] = candidate[take], moves[take]
    return _align(best, old, devices)


def adjust(old: Ints, loads: Floats, devices: int, rule: RebalanceConfig) -> Ints:
    """Returns `old` `[L, P]` with other replicas, then swapped; see `placement.adjust_placement`."""
    slots = old.copy()
    device = np.arange(old.shape[1]) // (old.shape[1] // devices)
    for table, load in zip(slots, loads, strict=True):
        while load.any():
            copies = count(table[None], len(load))[0]
            share = load / copies
            hottest = share.argmax()
            free = (copies[table] > 1) & (share[table] < rule.remove_below * load.mean())
            free &= ~np.isin(device, device[table == hottest])
            if share[hottest] <= rule.replicate_above * load.mean() or not free.any():
                break
            on_device = np.bincount(device, share[table])
            table[np.where(free, on_device[device], np.inf).argmin()] = hottest
    limit = loads.sum(1) / devices * (1.0 + rule.min_gain)
    plain, new = (_align(_swapped(before, loads, limit, devices), old, devices) for before in (old, slots))
    moves = [moved_slots(after, old, devices, loads.shape[1]).sum(1) for after in (plain, new)]
    enough = (part_loads(loads, plain, devices).max(1) <= limit) & (moves[0] < moves[1])
    return np.where(enough[:, None], plain, new)


def _node_of_groups(old: Ints, num_experts: int, nodes: int, groups: int) -> Ints:
    """Returns the node of each group `[L, G]`; -1 in a layer where a group is split or shares are unequal."""
    there = copies_on(old, nodes, num_experts) > 0
    node = there.argmax(1).reshape(len(old), groups, -1)
    sound = (there.sum(1) == 1).all(1) & (node == node[..., :1]).all((1, 2))
    sound &= (there.sum(2) == num_experts // nodes).all(1)
    return np.where(sound[:, None], node[..., 0], -1)


def _indices(slots: Ints, experts: Ints, num_experts: int) -> Ints:
    """Returns slots `[rows, P / n]` as indices into their node's experts; -1 for one of another node."""
    index = np.full((len(experts), num_experts), -1)
    np.put_along_axis(index, experts, np.broadcast_to(np.arange(experts.shape[1]), experts.shape), 1)
    return np.take_along_axis(index, slots, 1)


def _swapped(slots: Ints, loads: Floats, limit: Floats, devices: int) -> Ints:
    share = np.take_along_axis(loads / count(slots, loads.shape[1]), slots, 1)
    packed = np.tile(np.arange(slots.shape[1]).reshape(devices, -1), (len(slots), 1, 1))
    return np.take_along_axis(slots, refine(share, packed, limit).reshape(slots.shape), 1)


def _with_copies(slots: Ints, loads: Floats, devices: int) -> Ints:
    """Gives free slots (-1) and surplus copies' to missing copies, the heaviest to the lightest device.

    Args:
        slots: `[rows, P / n]`.
        loads: of experts `[rows, E / n]`, for which the copies are counted anew.
    """
    replicas = replicate(loads, slots.shape[1], devices)
    result = slots.reshape(len(slots), devices, -1).copy()
    for table, copies, share in zip(result, replicas, loads / replicas, strict=True):
        free = table < 0
        before = np.bincount(table[~free], minlength=len(copies))
        for expert in np.flatnonzero(before > copies):
            free[tuple(np.argwhere(table == expert)[copies[expert] :].T)] = True
        load = np.where(free, 0.0, share[table]).sum(1)
        missing = np.repeat(np.arange(len(copies)), np.maximum(copies - before, 0))
        for expert in missing[np.argsort(-share[missing], kind="stable")]:
            device = np.where(free.any(1), load, np.inf).argmin()
            slot = free[device].argmax()
            table[device, slot], free[device, slot] = expert, False
            load[device] += share[expert]
    return result.reshape(slots.shape)


def _rename(new: Ints, old: Ints, devices: int, nodes: int, num_experts: int) -> Ints:
    """Renames the devices of `new` within nodes, and its nodes, so that most copies stay where they are."""
    from scipy.optimize import linear_sum_assignment  # slow to import, and only needed here

    L, D = len(new), devices // nodes
    slots = new.reshape(L, nodes, D, -1)
    there = copies_on(old, devices, num_experts) > 0
    stay = copies_on(new, devices, num_experts).astype(np.float32) @ there.transpose(0, 2, 1)
    stay = stay.reshape(L, nodes, D, nodes, D).transpose(0, 1, 3, 2, 4)
    result = np.empty_like(slots)
    for layer in range(L):
        # For each pair of nodes the best naming of devices, then the best naming of nodes.
        kept, name = np.zeros((nodes, nodes)), {}
        for a, b in np.ndindex(nodes, nodes):
            rows, name[a, b] = linear_sum_assignment(-stay[layer, a, b])
            kept[a, b] = stay[layer, a, b, rows, name[a, b]].sum()
        for a, b in enumerate(linear_sum_assignment(-kept)[1]):
            result[layer, b, name[a, b]] = slots[layer, a]
    return result.reshape(new.shape)


def _align(new: Ints, old: Ints, devices: int) -> Ints:
    """Orders the slots of `new` `[L, P]` within each device so that an expert that stays keeps its slot."""
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
