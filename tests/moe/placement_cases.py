"""Placement's oracle, loads and checks; and a table of balance and time against the oracle.

python -m tests.moe.placement_cases     # timings are no test, because the machine is shared
"""

import statistics
import time
from collections.abc import Iterator

import numpy as np

from moejax.moe.placement import Placement, balancedness, plan_placement

# Sums of the same loads in another order: a few hundred float64 additions.
SLACK = 1e-9

# (devices, nodes, groups, redundant) for 256 experts; the first three are those of docs/log.md.
LARGE = [(32, 1, 8, 32), (32, 4, 8, 32), (8, 1, 1, 0), (32, 4, 256, 32), (8, 1, 1, 8)]


# ---- The oracle: DeepSeek's EPLB, written from its description, one layer at a time ------------------------


def packed_evenly(weights: np.ndarray, packs: int) -> list[list[int]]:
    """Longest processing time first: heaviest item left to the lightest pack that is not full."""
    members: list[list[int]] = [[] for _ in range(packs)]
    totals = [0.0] * packs
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        open_packs = [p for p in range(packs) if len(members[p]) < len(weights) // packs]
        lightest = min(open_packs, key=lambda p: totals[p])
        members[lightest].append(item)
        totals[lightest] += weights[item]
    return members


def eplb_device_loads(
    loads: np.ndarray, slots: int, devices: int, nodes: int, groups: int, one_a_device: bool
) -> np.ndarray:
    """Loads of the devices `[D]` under EPLB's placement of one layer's `[E]`."""
    by_group = loads.reshape(groups, -1)
    result = []
    for chosen in packed_evenly(by_group.sum(1), nodes):
        experts = by_group[chosen].reshape(-1)
        copies = np.ones(len(experts), int)
        for _ in range(slots // nodes - len(experts)):
            more = copies < devices // nodes if one_a_device else True
            copies[np.argmax(np.where(more, experts / copies, -1.0))] += 1
        shares = np.repeat(experts / copies, copies)
        result += [shares[members].sum() for members in packed_evenly(shares, devices // nodes)]
    return np.array(result)


def eplb_balancedness(
    loads: np.ndarray, redundant: int, devices: int, nodes: int, groups: int, one_a_device: bool = True
) -> np.ndarray:
    """Heaviest device over the mean `[L]`.

    Args:
        one_a_device: an expert has no more copies than there are devices for it, which EPLB does not mind.
    """
    ratios = []
    for layer in loads:
        slots = len(layer) + redundant
        device = eplb_device_loads(layer, slots, devices, nodes, groups, one_a_device)
        ratios.append(device.max() / device.mean() if device.any() else 1.0)
    return np.array(ratios)


# ---- Loads -------------------------------------------------------------------------------------------------


def zipf(rng: np.random.Generator, L: int, E: int, exponent: float) -> np.ndarray:
    return rng.permuted(np.tile(1.0 / np.arange(1, E + 1) ** exponent, (L, 1)), axis=1)


def counts_of_deepseek(seed: int) -> np.ndarray:
    """58 layers × 256 experts, as many as DeepSeek-V3 has: Poisson counts over Zipf loads."""
    rng = np.random.default_rng(seed)
    shares = zipf(rng, 58, 256, 0.86)
    return rng.poisson(shares / shares.sum(1, keepdims=True) * 4096 * 8 * 4).astype(np.float64)


def families(rng: np.random.Generator, L: int, E: int) -> Iterator[tuple[str, np.ndarray]]:
    hot = np.zeros((L, E))
    hot[np.arange(L), rng.integers(0, E, L)] = 1.0
    yield "uniform", rng.random((L, E))
    yield "equal", np.ones((L, E))
    for exponent in (0.5, 0.86, 1.0, 1.5):
        yield f"zipf {exponent}", zipf(rng, L, E, exponent)
    yield "one hot", 1e6 * hot
    yield "one hot over a floor", 1e3 * hot + 1.0
    yield "bursty", rng.poisson(1.0, (L, E)) * rng.choice([1.0, 1.0, 1.0, 100.0], (L, E)) + hot
    yield "correlated layers", rng.lognormal(0, 1.5, E)[None] * rng.lognormal(0, 0.2, (L, E))
    neighbours = np.repeat(rng.lognormal(0, 1, (L, -(-E // 4))), 4, axis=1)[:, :E]
    yield "correlated neighbours", neighbours * rng.lognormal(0, 0.3, (L, E))
    yield "small counts", rng.integers(0, 4, (L, E)) + hot


def check_plan(
    placement: Placement, loads: np.ndarray, devices: int, nodes: int, groups: int, redundant: int
):
    """What holds of every plan."""
    L, E = loads.shape
    table, P = placement.physical_to_logical, E + redundant
    assert table.shape == (L, P) and table.dtype == np.int32
    assert placement.slots_per_device * devices == P
    assert (placement.replicas.sum(1) == P).all() and (placement.replicas >= 1).all()
    for layer in range(L):
        np.testing.assert_array_equal(np.bincount(table[layer], minlength=E), placement.replicas[layer])
        if nodes > 1:
            node = [
                {p // (P // nodes) for p in np.flatnonzero(table[layer] // (E // groups) == g)}
                for g in range(groups)
            ]
            assert all(len(n) == 1 for n in node), "a group is on one node"
    back = placement.logical_to_physical(redundant + 1)
    assert back.shape == (L, E, redundant + 1) and back.dtype == np.int32
    for layer, expert in np.ndindex(L, E):
        mine = back[layer, expert]
        n = placement.replicas[layer, expert]
        np.testing.assert_array_equal(mine[:n], np.flatnonzero(table[layer] == expert))
        assert (mine[n:] == -1).all()
    shares = np.zeros((L, devices))
    for layer, slot in np.ndindex(L, P):
        expert = table[layer, slot]
        shares[layer, slot // (P // devices)] += loads[layer, expert] / placement.replicas[layer, expert]
    ratio = [s.max() / s.mean() if s.any() else 1.0 for s in shares]
    np.testing.assert_allclose(balancedness(loads, placement), ratio, rtol=SLACK)


def _table() -> None:
    """Balance (mean and worst of 58 layers × 256 experts) and milliseconds (median of 7)."""
    loads = counts_of_deepseek(0)
    print("devices nodes groups redundant |          ours |          EPLB |    contiguous |   ms")
    for devices, nodes, groups, redundant in LARGE:
        times = []
        for _ in range(7):
            start = time.perf_counter()
            placement = plan_placement(
                loads, devices=devices, nodes=nodes, groups=groups, redundant=redundant
            )
            times.append(1e3 * (time.perf_counter() - start))
        columns = (
            balancedness(loads, placement),
            eplb_balancedness(loads, redundant, devices, nodes, groups, one_a_device=False),
            balancedness(loads, Placement.contiguous(58, 256, devices)),
        )
        print(
            f"{devices:7} {nodes:5} {groups:6} {redundant:9} | "
            + " | ".join(f"{c.mean():.4f} {c.max():.4f}" for c in columns)
            + f" | {statistics.median(times):4.0f}"
        )


if __name__ == "__main__":
    _table()
