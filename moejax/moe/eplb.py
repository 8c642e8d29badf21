"""DeepSeek's EPLB on arrays: replicas of hot experts, equally many copies on each device, groups on nodes.

Greedy replication, longest-processing-time-first packing (LPT; Graham 1969) and, with several nodes, expert
groups on nodes first (github.com/deepseek-ai/EPLB; DeepSeek-V3, arXiv 2412.19437, section 3.4). Two things
differ: an expert has at most one copy a device, and best swaps follow, so that no layer is less balanced than
by LPT alone. Host only: numpy, no JAX. `placement.plan_placement` is the interface.

Axes: L layers, E experts, P physical slots, R rows (a layer, or its share on one node), N items (experts,
groups or copies) = D bins · S slots a bin; a bin is a device or a node. Loads are float64.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.integer]

_EVEN = 1e-3  # a bin within this of the mean is not worked on: load statistics are no better
_MIN_GAIN = 1e-12  # a swap gains at least this part of its bin's load, or rounding would swap for ever
_MAX_SWAPS = 256  # a row
_MOST_ITEMS = 256  # of a bin that swaps are sought among: all pairs of 4,096 would take gigabytes


def hierarchical(loads: Floats, slots: int, devices: int, nodes: int, groups: int) -> Ints:
    """Returns experts `[L, slots]`: groups on nodes, then copies on the devices of each node.

    One node makes it flat. Within a device experts ascend.
    """
    L, E = loads.shape
    members = np.arange(E).reshape(groups, -1)
    experts = members[lpt(loads.reshape(L, groups, -1).sum(-1), nodes)].reshape(L * nodes, -1)
    node_loads = np.take_along_axis(np.repeat(loads, nodes, axis=0), experts, 1)
    counts = replicate(node_loads, slots // nodes, devices // nodes)
    copies = np.nonzero(np.arange(devices // nodes) < counts[..., None])[1].reshape(L * nodes, -1)
    share = np.take_along_axis(node_loads / counts, copies, 1)
    even = share.sum(1) / (devices // nodes) * (1.0 + _EVEN)
    packed = refine(share, lpt(share, devices // nodes), even).reshape(L * nodes, -1)
    result = np.take_along_axis(experts, np.take_along_axis(copies, packed, 1), 1)
    return np.sort(result.reshape(L, devices, -1), axis=-1).reshape(L, slots)


def replicate(loads: Floats, slots: int, most: int) -> Ints:
    """Returns copies of each expert `[R, E]`, `slots` a row: each further one for the most load a copy.

    Args:
        loads: `[R, E]`.
        slots: copies in total, E to E · most.
        most: copies that one expert may have.
    """
    counts = np.ones(loads.shape, np.int64)
    share = np.where(most > 1, loads, -1.0)
    rows = np.arange(len(loads))
    for _ in range(slots - loads.shape[1]):
        hottest = share.argmax(axis=1)
        copies = counts[rows, hottest] + 1
        counts[rows, hottest] = copies
        share[rows, hottest] = np.where(copies < most, loads[rows, hottest] / copies, -1.0)
    return counts


def count(slots: Ints, num_experts: int) -> Ints:
    """Returns the copies of each expert `[R, E]` in `slots` `[R, P]`."""
    counts = np.zeros((len(slots), num_experts), np.int64)
    np.add.at(counts, (np.arange(len(slots))[:, None], slots), 1)
    return counts


def part_loads(loads: Floats, slots: Ints, parts: int) -> Floats:
    """Returns the load of each of the equal parts (devices) `[R, parts]` of slots `[R, P]`.

    A copy takes its expert's load / copies.
    """
    share = np.take_along_axis(loads / count(slots, loads.shape[1]), slots, 1)
    return share.reshape(len(slots), parts, -1).sum(-1)


def lpt(loads: Floats, bins: int) -> Ints:
    """Packs the heaviest item left into the lightest bin with a free slot: `[R, N]` → items `[R, D, S]`."""
    R, N = loads.shape
    size = N // bins
    packed = np.empty((R, bins, size), np.int64)
    total, used, rows = np.zeros((R, bins)), np.zeros((R, bins), np.int64), np.arange(R)
    for item in np.argsort(-loads, axis=1, kind="stable").T:
        lightest = np.where(used < size, total, np.inf).argmin(1)
        packed[rows, lightest, used[rows, lightest]] = item
        total[rows, lightest] += loads[rows, item]
        used[rows, lightest] += 1
    return packed


def refine(loads: Floats, packed: Ints, limit: Floats) -> Ints:
    """Swaps items of the heaviest bin and another, always the best swap, until it is within the limit; of
    large bins the best among items of `_MOST_ITEMS` evenly chosen ranks.

    Args:
        loads: item loads `[R, N]`.
        packed: `[R, D, S]`; not changed.
        limit: `[R]`, load of the heaviest bin. A row within it is left as it is.

    Returns:
        `[R, D, S]`. The heaviest bin of a row is never heavier than before; above the limit where no swap
        makes it lighter.
    """
    R, D, S = packed.shape
    packed = packed.copy()
    weight = np.take_along_axis(loads, packed.reshape(R, -1), 1).reshape(R, D, S)
    active = np.arange(R)
    ranks = np.linspace(0, S - 1, min(S, _MOST_ITEMS)).round().astype(np.int64)
    for _ in range(_MAX_SWAPS):
        active = active[weight[active].sum(-1).max(-1) > limit[active]]
        row, total = np.arange(len(active)), weight[active].sum(-1)
        slots = np.argsort(weight[active], axis=-1, kind="stable")[..., ranks]
        bins = np.take_along_axis(weight[active], slots, -1)
        heaviest = total.argmax(-1)
        load = total[row, heaviest]
        gives = bins[row, heaviest][:, :, None, None] - bins[:, None]  # [rows, ranks, D, ranks]
        after = np.maximum(load[:, None, None, None] - gives, total[:, None, :, None] + gives)
        after[row, :, heaviest] = np.inf
        after = after.reshape(len(active), len(ranks) * D * len(ranks))
        best = after.argmin(-1)
        gains = load - after[row, best] > _MIN_GAIN * load
        active, heaviest, best, slots = active[gains], heaviest[gains], best[gains], slots[gains]
        if not len(active):
            break
        mine, other, theirs = np.unravel_index(best, (len(ranks), D, len(ranks)))
        row = np.arange(len(active))
        here, there = (
            (active, heaviest, slots[row, heaviest, mine]),
            (active, other, slots[row, other, theirs]),
        )
        for array in (weight, packed):
            array[here], array[there] = array[there], array[here]
    return packed
