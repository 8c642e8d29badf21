"""Placements over the time of a trace: each is decided on the load of some steps and judged on the next."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moejax.bench.routing.rows import expert_bytes
from moejax.bench.scaling.config import ScalingSection
from moejax.bench.scaling.modelled import layout_row
from moejax.core.config import ModelConfig
from moejax.core.hardware import KNOWN
from moejax.core.parallel import ParallelConfig
from moejax.core.scheduling import RebalanceConfig
from moejax.moe.placement import Placement, adjust_placement, balancedness, compare, plan_placement
from moejax.routing.analysis import load_over_time
from moejax.routing.capture import RoutingCapture

DEVICE = "a100_80gb"


def over_time_rows(
    capture: RoutingCapture, rule: RebalanceConfig, placed: Mapping[str, Any], model: ModelConfig | None
) -> list[dict[str, Any]]:
    """A row for each way to place experts, the twin that leaves them as they start first; none without
    `rule.every_steps` or where `placed` (`placement_row`) is empty, which says the devices.

    "kept": in order, replicas of the first ones; "once": planned on the first window of `rule.every_steps`;
    "anew": planned on every window, near to the placement in use; "adjusted": what the engine does by `rule`.

    Returns:
        `imbalance`: load of the heaviest device over the mean, mean over layers and windows after the first;
        `imbalance_max` of the worst window, `imbalances` of each; `moved` experts, and `moved_at` in which
        windows; with a model also `moved_bytes`, the modelled `prefill_ms` (`layout_row`; a decode step reads
        the experts' weights, and takes no longer) and `prefill_ratio`, how many times as fast as the twin.
    """
    if not rule.every_steps or not placed:
        return []
    devices, redundant = placed["devices"], placed["redundant"]
    loads = load_over_time(capture, max(2, capture.num_steps // rule.every_steps))[0]
    start = Placement.contiguous(loads.shape[1], capture.num_experts, devices, redundant=redundant)
    sizes: dict[str, Any] = {"devices": devices, "redundant": redundant}
    ways: dict[str, Callable[[np.ndarray, Placement], Placement]] = {
        "kept": lambda load, now: now,
        "once": lambda load, now: plan_placement(load, **sizes) if now is start else now,
        "anew": lambda load, now: plan_placement(load, **sizes, keep=now, min_gain=rule.min_gain),
        "adjusted": lambda load, now: adjust_placement(load, now, rule),
    }
    rows: list[dict[str, Any]] = []
    for name, way in ways.items():
        now, rests_until, moved = start, 0, [0] * len(loads)
        imbalances = []
        for window, load in enumerate(loads):
            imbalances.append(float(balancedness(load, now).mean()))
            new = way(load, now) if window >= rests_until else now
            moved[window] = int(compare(now, new, load).moved.sum())
            if new != now:
                now, rests_until = new, window + math.ceil(rule.cooldown_steps / rule.every_steps)
        row: dict[str, Any] = {
            "placement": name,
            "imbalance": float(np.mean(imbalances[1:])),
            "imbalance_max": max(imbalances[1:]),
            "imbalances": imbalances,
            "moved": sum(moved),
            "moved_at": [window for window, count in enumerate(moved) if count],
        }
        if model is not None:
            layout = ParallelConfig(ep=devices, attention="data", redundant_experts=redundant)
            shape, load = model.replace(dtype="bfloat16"), row["imbalance"]
            times = layout_row(shape, layout, KNOWN[DEVICE], ScalingSection(), 32, imbalance=load)
            row |= {"prefill_ms": times["prefill_ms"], "moved_bytes": sum(moved) * expert_bytes(shape)}
            row["prefill_ratio"] = (rows or [row])[0]["prefill_ms"] / row["prefill_ms"]
        rows.append(row)
    return rows
