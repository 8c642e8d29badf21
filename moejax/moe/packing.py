"""Replicas of hot items, and packing items into bins of equal size, for many independent rows at once.

The numeric core of `placement`: a row is a layer, or a layer's share on one node; items are experts or copies
of experts; a bin is a device with a fixed number of slots, all of them filled. It knows nothing of layers or
nodes. No JAX here.

Axes: R rows, E experts, N items (= slots = D · S), D bins, S slots a bin. Loads are float64.

The start is greedy replication and longest-processing-time-first packing (LPT; Graham 1969), which is also
what DeepSeek's EPLB does (github.com/deepseek-ai/EPLB). From there on the heaviest bin only ever gets
lighter: swaps between bins, then other numbers of replicas where swaps do not reach the bound. So a row's
result is at least as balanced as that start. All work is bounded by rounds, never by time: the same loads
give the same result.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CLOSE_ENOUGH = 1e-4  # a heaviest bin within this of its bound is not worked on: load statistics are no better
_WORTH_COPIES = 2e-3  # beyond its target by this part, a row is packed anew with other numbers of copies
_EPSILON = 1e-12  # a swap must gain this part of its bin's load, or rounding errors would swap for ever
_PAIR_ROUNDS = 24
_SINGLE_ROUNDS = 64
_SPREAD_ROUNDS = 64
_TRANSFER_ROUNDS = 8
_CHUNK = 1 << 19  # elements of a swap table at once: more leaves the cache
_CANDIDATE_SLOTS = 1 << 15  # slots packed a second time with other replicas, over all rows and candidates


def replicate(loads: Floats, slots: int, *, most: int | None = None, among: int | None = None) -> Ints:
    """How often to hold each expert: every further copy goes to the expert with the most load a copy.

    Args:
        loads: `[R, E]`.
        slots: copies in total, at least E.
        most: copies that one expert may have, where that leaves room for all; None: no limit.
        among: only this many of the hottest experts get further copies, as far as `most` allows.

    Returns:
        `[R, E]`, at least 1 each, `slots` a row.
    """
    R, E = loads.shape
    counts = np.ones((R, E), np.int64)
    if slots == E:
        return counts
    # Experts without load come last, and among themselves those with the fewest copies first.
    positive = np.where(loads > 0, loads, np.inf).min(axis=1, keepdims=True)
    weight = np.where(loads > 0, loads, np.where(np.isfinite(positive), positive, 1.0) / (2.0 * slots))
    if among is not None and among < E:
        rest = np.argsort(-weight, axis=1, kind="stable")[:, among:]
        # So small that they only get what `most` denies to the hottest.
        np.put_along_axis(weight, rest, np.take_along_axis(weight, rest, 1) * 1e-30, 1)
    share = weight.copy()
    rows = np.arange(R)
    for _ in range(slots - E):
        hottest = share.argmax(axis=1)
        held = counts[rows, hottest] + 1
        counts[rows, hottest] = held
        share[rows, hottest] = weight[rows, hottest] / held
        if most is not None:
            share[rows, hottest] = np.where(held < most, share[rows, hottest], -1.0)
    return counts


def copies(counts: Ints) -> Ints:
    """Experts, each as often as `counts` `[R, E]` says: `[R, N]`, ascending."""
    R, E = counts.shape
    return np.repeat(np.tile(np.arange(E), R), counts.reshape(-1)).reshape(R, -1)


def count(held: NDArray[np.integer], num_experts: int) -> Ints:
    """Copies of each expert `[R, E]` in `held` `[R, …]`: what `copies` undoes."""
    counts = np.zeros((len(held), num_experts), np.int64)
    np.add.at(counts, (np.arange(len(held))[:, None], held.reshape(len(held), held[:1].size)), 1)
    return counts


def lpt(loads: Floats, bins: int) -> Ints:
    """Longest processing time first: the heaviest item left goes to the lightest bin with a free slot.

    Args:
        loads: `[R, N]`; N is a multiple of `bins`.

    Returns:
        `[R, D, S]`: the items in each bin, heaviest first.
    """
    R, N = loads.shape
    size = N // bins
    order = np.argsort(-loads, axis=1, kind="stable")
    sorted_loads = np.ascontiguousarray(np.take_along_axis(loads, order, 1).T)  # [N, R]
    chosen = np.empty((N, R), np.int64)
    chosen[:bins] = np.arange(bins)[:, None]  # the first ones meet empty bins
    key = np.ascontiguousarray(sorted_loads[:bins].T)  # a bin's load; infinite once it is full
    if size == 1:
        key[...] = np.inf
    flat, used = key.reshape(-1), np.ones(R * bins, np.int64)
    first = np.arange(R) * bins
    for k in range(bins, N):
        chosen[k] = key.argmin(axis=1)
        at = first + chosen[k]
        flat[at] += sorted_loads[k]
        count = used[at] + 1
        used[at] = count
        flat[at[count == size]] = np.inf
    by_bin = np.argsort(chosen.T, axis=1, kind="stable")
    return np.take_along_axis(order, by_bin, 1).reshape(R, bins, size)


def bin_loads(loads: Floats, packed: Ints) -> Floats:
    """Load of each slot: `loads` `[R, N]` at `packed` `[R, D, S]`."""
    return np.take_along_axis(loads, packed.reshape(len(packed), -1), 1).reshape(packed.shape)


def heaviest(loads: Floats, packed: Ints) -> Floats:
    """Load of each row's heaviest bin, `[R]`."""
    return bin_loads(loads, packed).sum(-1).max(-1)


def bound(loads: Floats, bins: int) -> Floats:
    """No packing of these items has a lighter heaviest bin: `[R]`.

    The mean; or the heaviest item beside the lightest that can fill up its bin, which is what binds where
    there are no replicas.
    """
    size = loads.shape[1] // bins
    ascending = np.sort(loads, axis=1)
    return np.maximum(loads.sum(1) / bins, ascending[:, -1] + ascending[:, : size - 1].sum(1))


def refine(loads: Floats, packed: Ints, target: Floats) -> Ints:
    """Swap items between bins until the heaviest is at the target, or no swap makes it lighter.

    Args:
        loads: `[R, N]`, item loads.
        packed: `[R, D, S]`, as `lpt` returns; not changed.
        target: `[R]`, load of the heaviest bin that is good enough. Bins below it are left alone, so that a
            packing in use changes little.

    Returns:
        `[R, D, S]`. The heaviest bin of a row is never heavier than before.
    """
    packed = packed.copy()
    _, D, S = packed.shape
    if D == 1 or S == 0:
        return packed
    target = np.maximum(target, bound(loads, D))
    todo = np.flatnonzero(heaviest(loads, packed) > target * (1.0 + _EPSILON))
    for chunk in np.array_split(todo, -(-len(todo) * D * S * S // (2 * _CHUNK)) or 1):
        if len(chunk):
            weight = bin_loads(loads[chunk], packed[chunk])
            items = packed[chunk]
            _swap_pairs(weight, items, target[chunk])
            _swap_heaviest(weight, items, target[chunk])
            packed[chunk] = items
    return packed


def _exchange(weight: Floats, items: Ints, left: tuple, right: tuple) -> None:
    for array in (weight, items):
        array[left], array[right] = array[right], array[left]


def _swap_pairs(weight: Floats, items: Ints, target: Floats) -> None:
    """Rounds of one swap a pair: the heaviest bin with the lightest, the second heaviest with the second, …

    In place. Every round moves the pairing on by one; a row rests when it met all pairings without a swap.
    """
    D, S = items.shape[1:]
    half = D // 2
    active, idle = np.arange(len(items)), np.zeros(len(items), np.int64)
    for turn in range(_PAIR_ROUNDS):
        w = weight[active]
        total = w.sum(-1)
        keep = (total.max(-1) > target[active] * (1.0 + _EPSILON)) & (idle[active] < half)
        if not keep.all():
            active, w, total = active[keep], w[keep], total[keep]
        if not len(active):
            return
        order = np.argsort(-total, axis=1, kind="stable")
        heavy, light = order[:, :half], np.roll(order[:, ::-1][:, :half], turn, axis=1)
        load = np.take_along_axis(total, heavy, 1)
        middle = (load - np.take_along_axis(total, light, 1)) / 2.0
        # A swap moves the difference of two items; the best moves half the gap between the two bins.
        a = np.take_along_axis(w, heavy[..., None], 1) - middle[..., None]
        b = np.take_along_axis(w, light[..., None], 1)
        miss = np.abs(a[..., :, None] - b[..., None, :]).reshape(*middle.shape, S * S)
        best = miss.argmin(-1)
        missed = np.take_along_axis(miss, best[..., None], -1)[..., 0]
        swap = (middle - missed > _EPSILON * load) & (load > target[active][:, None])
        row, pair = np.nonzero(swap)
        idle[active] = np.where(swap.any(-1), 0, idle[active] + 1)
        where, slot = active[row], best[row, pair]
        _exchange(weight, items, (where, heavy[row, pair], slot // S), (where, light[row, pair], slot % S))


def _swap_heaviest(weight: Floats, items: Ints, target: Floats) -> None:
    """Rounds of the best swap of the heaviest bin with any other, in place."""
    D, S = items.shape[1:]
    active = np.arange(len(items))
    for _ in range(_SINGLE_ROUNDS):
        w = weight[active]
        total = w.sum(-1)
        keep = total.max(-1) > target[active] * (1.0 + _EPSILON)
        if not keep.all():
            active, w, total = active[keep], w[keep], total[keep]
        if not len(active):
            return
        row = np.arange(len(active))
        top = total.argmax(-1)
        load = total[row, top]
        # The heavier bin of the two after the swap.
        given, taken = w[row, top], w
        moved = given[:, :, None, None] - taken[:, None]
        after = np.maximum(load[:, None, None, None] - moved, total[:, None, :, None] + moved)
        after[row, :, top] = np.inf
        after = after.reshape(len(active), -1)
        best = after.argmin(-1)
        gains = load - after[row, best] > _EPSILON * load
        active, top, best = active[gains], top[gains], best[gains]
        if not len(active):
            return
        out, other, slot = np.unravel_index(best, (S, D, S))
        _exchange(weight, items, (active, top, out), (active, other, slot))


def pack(loads: Floats, slots: int, bins: int, target: Floats) -> Ints:
    """Experts with replicas, packed into bins.

    Args:
        loads: `[R, E]`.
        slots: copies in total a row, at least E and a multiple of `bins`.
        target: `[R]`, load of the heaviest bin that is good enough.

    Returns:
        `[R, D, S]`: an expert for every slot. A copy takes its expert's load / copies. The heaviest bin is at
        most as heavy as after greedy replication and LPT. A second copy in a bin is rare, but possible.
    """
    greedy = replicate(loads, slots)
    held, load, start = _pack_counts(loads, greedy, bins, target)
    if slots == loads.shape[1]:
        return held

    def offer(rows: Ints, counts: Ints, margin: float) -> None:
        packed, lighter, _ = _pack_counts(loads[rows], counts, bins, target[rows])
        take = lighter <= load[rows] * (1.0 + margin)
        held[rows[take]], load[rows[take]] = packed[take], lighter[take]

    # Copies beyond the number of bins are wasted: take them away where that costs no balance.
    wasteful = np.flatnonzero((greedy > bins).any(1))
    if len(wasteful):
        offer(wasteful, replicate(loads[wasteful], slots, most=bins), _EPSILON)
    # Fewer experts with more copies each: an expert with a copy in every bin costs no balance at all.
    left = _CANDIDATE_SLOTS // slots
    for among in (1 << k for k in range(int((greedy > 1).sum(1).max()).bit_length())):
        rows = _worst(load, target, left)
        counts = replicate(loads[rows], slots, most=bins, among=among)
        new = (counts != greedy[rows]).any(1)
        if new.any():
            offer(rows[new], counts[new], -_EPSILON)
            left -= int(new.sum())
    # Then copies from one expert to another, as long as that helps.
    rows = _worst(load, target, _CANDIDATE_SLOTS // slots // _neighbours(slots) + 1)
    for _ in range(_TRANSFER_ROUNDS):
        if not len(rows):
            break
        row, counts = _transfers(loads[rows], held[rows])
        if not len(row):
            break
        packed, lighter, _ = _pack_counts(loads[rows[row]], counts, bins, target[rows[row]])
        # The lightest of each row: the first of it in this order.
        order = np.lexsort((lighter, row))
        chosen = order[np.flatnonzero(np.diff(row[order], prepend=-1))]
        chosen = chosen[lighter[chosen] < load[rows[row[chosen]]] * (1.0 - _EPSILON)]
        rows, packed, lighter = rows[row[chosen]], packed[chosen], lighter[chosen]
        held[rows], load[rows] = packed, lighter
        rows = rows[lighter > target[rows] * (1.0 + _WORTH_COPIES)]
    return _spread(loads, held, np.maximum(load, np.minimum(start, target)))


def _worst(load: Floats, target: Floats, most: int) -> Ints:
    """Rows so far beyond their target that other numbers of copies are worth trying, the worst first."""
    stuck = np.flatnonzero(load > target * (1.0 + _WORTH_COPIES))
    return stuck[np.argsort(-(load / target)[stuck], kind="stable")][:most]


def _neighbours(slots: int) -> int:
    """How many numbers of copies a row tries in a round: all there are in a small row, few in a large one."""
    return max(16, 2048 // slots)


def _transfers(loads: Floats, held: Ints) -> tuple[Ints, Ints]:
    """Neighbours in numbers of copies: one copy goes from an expert that has several to another.

    Returns:
        `[n]` row and `[n, E]` copies; at most `_neighbours` a row.
    """
    R, D, S = held.shape
    E = loads.shape[1]
    counts = count(held, E)
    share = loads / counts
    top = np.take_along_axis(share, held.reshape(R, -1), 1).reshape(held.shape).sum(-1).argmax(-1)
    rows = np.arange(R)
    few = int(_neighbours(D * S) ** 0.5)
    # Takers: first those in the heaviest bin, of them and of the others the heaviest.
    appeal = share.copy()
    appeal[rows[:, None], held[rows, top]] += loads.sum(1, keepdims=True)
    takers = np.argsort(-appeal, axis=1, kind="stable")[:, :few]
    # Givers: where a copy less leaves the lightest copies.
    after = np.where(counts > 1, loads / np.maximum(counts - 1, 1), np.inf)
    givers = np.argsort(after, axis=1, kind="stable")[:, :few]
    row, taker, giver = (
        np.broadcast_to(a, (R, takers.shape[1], givers.shape[1])).reshape(-1)
        for a in (rows[:, None, None], takers[:, :, None], givers[:, None, :])
    )
    sound = (counts[row, giver] > 1) & (counts[row, taker] < D) & (taker != giver)
    row, taker, giver = row[sound], taker[sound], giver[sound]
    result = counts[row]
    result[np.arange(len(row)), taker] += 1
    result[np.arange(len(row)), giver] -= 1
    return row, result


def _pack_counts(loads: Floats, counts: Ints, bins: int, target: Floats) -> tuple[Ints, Floats, Floats]:
    """LPT and swaps for given numbers of copies.

    Returns:
        Experts `[R, D, S]`; the heaviest bin's load `[R]`; what that was before the swaps.
    """
    experts = copies(counts)
    share = np.take_along_axis(loads / counts, experts, 1)
    start = lpt(share, bins)
    packed = refine(share, start, target)
    held = np.take_along_axis(experts, packed.reshape(len(packed), -1), 1).reshape(packed.shape)
    return held, heaviest(share, packed), heaviest(share, start)


def _spread(loads: Floats, held: Ints, limit: Floats) -> Ints:
    """Swap second copies of an expert out of their bin, as far as no bin gets heavier than `limit` `[R]`."""
    held = held.copy()
    R, D, S = held.shape
    share = loads / count(held, loads.shape[1])
    given_up = np.zeros((R, D * S), bool)
    rows = np.arange(R)
    for _ in range(_SPREAD_ROUNDS):
        same = held[rows][..., :, None] == held[rows][..., None, :]
        second = np.tril(same, -1).any(-1).reshape(len(rows), -1) & ~given_up[rows]
        rows, second = rows[second.any(1)], second[second.any(1)]
        if not len(rows):
            break
        slot = second.argmax(1)
        here, flat = slot // S, held[rows].reshape(len(rows), -1)
        i = np.arange(len(rows))
        expert = flat[i, slot]
        weight = np.take_along_axis(share[rows], flat, 1).reshape(len(rows), D, S)
        total = weight.sum(-1)
        moved = share[rows, expert][:, None, None] - weight
        after = np.maximum(total[i, here][:, None, None] - moved, total[..., None] + moved)
        bins = flat.reshape(len(rows), D, S)
        has = (bins == expert[:, None, None]).any(-1)  # bins that hold the expert already, its own among them
        known = (bins[:, :, :, None] == bins[i, here][:, None, None, :]).any(-1)
        after[has[..., None] | known] = np.inf
        after = after.reshape(len(rows), -1)
        best = after.argmin(1)
        fits = after[i, best] <= limit[rows]
        given_up[rows[~fits], slot[~fits]] = True
        row, a, b = rows[fits], slot[fits], best[fits]
        all_slots = held.reshape(R, -1)
        all_slots[row, a], all_slots[row, b] = all_slots[row, b], all_slots[row, a]
    return held
