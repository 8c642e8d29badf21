"""How evenly a trace loads the devices that its experts are on: as they come, and placed by its own load."""

import time
from typing import Any

import numpy as np

from moejax.bench.routing.config import PlacementSection
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.moe.placement import Placement, balancedness, plan_placement
from moejax.routing.capture import RoutingCapture

_USUAL = (8, 4, 2)


def placement_row(
    capture: RoutingCapture, section: PlacementSection, model: ModelConfig | None = None
) -> dict[str, Any]:
    """Balancedness (load of the heaviest device over the mean, 1 is best) of three placements, over layers.

    "contiguous": experts in order, what expert parallelism starts from. "planned": placed anew for this load.
    "replicated": the same with redundant experts. A plan is judged on the load that it was made for; what is
    left of it on a load that it has not seen is `…_holdout`: planned on the first half of the steps, judged
    on the second. On several nodes the groups of a `model` stay together.

    Returns:
        flat fields; empty where placement is left out.

    Raises:
        ConfigError: experts, devices and redundant experts that do not divide.
    """
    loads = capture.counts()
    E = capture.num_experts
    devices = section.devices
    if devices is None:
        devices = next((n for n in _USUAL if E % n == 0 and E > n), 1)
    if devices == 1 or not loads.any():
        return {}
    redundant = devices if section.redundant is None else section.redundant
    if E % devices:
        raise ConfigError(f"placement.devices={devices} does not divide the trace's {E} experts evenly")
    row: dict[str, Any] = {"devices": devices, "redundant": redundant, "nodes": section.nodes}
    before = Placement.contiguous(len(loads), E, devices)
    row |= _balance("contiguous", loads, before)
    halves = _halves(capture)
    for name, extra in (("planned", 0), ("replicated", redundant)):
        plan: dict[str, Any] = {"devices": devices, "nodes": section.nodes, "redundant": extra}
        plan["groups"] = None if model is None else model.router.groups_on(section.nodes)
        before_plan = time.perf_counter()
        placed = plan_placement(loads, **plan)
        row[f"{name}_plan_ms"] = (time.perf_counter() - before_plan) * 1e3
        row |= _balance(name, loads, placed)
        if halves is not None:
            row |= _balance(f"{name}_holdout", halves[1], plan_placement(halves[0], **plan))
    if halves is not None:
        row |= _balance("contiguous_holdout", halves[1], before)
    return row


def _balance(name: str, loads: np.ndarray, placement: Placement) -> dict[str, float]:
    imbalance = balancedness(loads, placement)
    return {f"{name}_imbalance": float(imbalance.mean()), f"{name}_imbalance_max": float(imbalance.max())}


def _halves(capture: RoutingCapture) -> tuple[np.ndarray, np.ndarray] | None:
    """Loads of the first and the second half of the steps; None where one has none."""
    starts = capture.step_starts
    if len(starts) < 2:
        return None
    row = int(starts[len(starts) // 2])
    at = np.arange(capture.num_rows)
    first, second = (capture.select(part).counts() for part in (at < row, at >= row))
    return (first, second) if first.any() and second.any() else None
