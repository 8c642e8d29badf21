"""From two compiled depths of a model to a row for the whole: counts and bytes by layer, a modelled time."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from moejax.bench.program.config import ProgramSection
from moejax.bench.program.dump import alive, occupancy
from moejax.bench.program.job import Bucket, Compiled, Opened
from moejax.core.config import ModelConfig
from moejax.core.hardware import Hardware
from moejax.perf.operation_costs import OPERATIONS, OpCost, attribute, bounds, by_operation, total

_SHOWN = 12
"""Buffers that are named at the peak."""


def layer_counts(model: ModelConfig, least: int = 2) -> tuple[int, ...]:
    """Returns the two numbers of first layers to compile, which differ by whole periods of the model's kinds
    of layer and are at least `least` apart; all of its layers where that saves nothing."""
    kinds = list(zip(model.moe_layers, model.sliding_windows, strict=True))
    L = len(kinds)
    sizes = [(q, p) for p in range(1, L) for q in range(L - p) if kinds[q : L - p] == kinds[q + p :]]
    first, period = min(sizes, key=sum, default=(0, L))
    step = period * -(-least // period)
    return (first + step, first + 2 * step) if first + 2 * step < L else (L,)


def row_of(
    compiled: Sequence[Compiled],
    opened: Opened,
    section: ProgramSection,
    hardware: Hardware | None,
    devices: int,
    memory: float | None,
) -> dict[str, Any]:
    """Returns a bucket's row of `cases`.

    Args:
        compiled: of rising numbers of layers: one, the whole model, or two to extrapolate from.
        opened: the whole model's engine.
        memory: bytes of a device of the target.
    """
    L, last = opened.config.num_layers, compiled[-1]
    facts = [_facts(one) for one in compiled]
    per_layer, whole = {}, dict(facts[-1])
    if len(compiled) == 2:
        added = last.layers - compiled[0].layers
        per_layer = {name: (facts[1][name] - facts[0][name]) / added for name in facts[0]}
        whole = {n: plain(facts[1][n] + per_layer[n] * (L - last.layers)) for n in facts[1]}
    kernels = last.dump.kernels
    told = all(kernel.registers is not None for kernel in kernels)
    spilling = [kernel for kernel in kernels if kernel.spill_stores or kernel.spill_loads]
    row: dict[str, Any] = {
        "bucket": last.bucket.name, "decode_rows": last.bucket.rows, "chunk_tokens": last.bucket.tokens,
        "num_devices": devices, "layers": L, "layers_compiled": [one.layers for one in compiled],
        "launches_per_layer": per_layer.get("launches_per_step"), **whole,
        "kernel_count": len(kernels), "kernels_with_spills": len(spilling) if told else None,
        "spill_bytes": sum((k.spill_stores or 0) + (k.spill_loads or 0) for k in kernels) if told else None,
        "most_registers": max((k.registers or 0 for k in kernels), default=0) if told else None,
        "command_buffers": last.dump.command_buffers, "host_syncs": last.dump.host_syncs,
        "fits": None if memory is None else whole["peak_bytes"] <= memory,
    }  # fmt: skip
    return row | modelled(opened, last.bucket, row, section, hardware if devices == 1 else None)


def plain(value: float) -> float:
    """Returns a number without the rounding of differences: whole ones as integers."""
    value = round(value, 6)
    return int(value) if float(value).is_integer() else value


def _facts(one: Compiled) -> dict[str, float]:
    """Returns what grows by layers."""
    dump, memory = one.dump, one.memory
    return {
        "launches_per_step": len(dump.launches),
        "launches_outside": sum(not launch.captured for launch in dump.launches),
        "copies": sum(launch.kind == "kCopy" for launch in dump.launches),
        "copies_of_pool_bytes": dump.pool_copies,
        "f32_weight_copy_bytes": dump.f32_copies,
        "passed_bytes": sum(launch.passed_bytes for launch in dump.launches),
        "temp_bytes": memory["temp"],
        "peak_bytes": memory["argument"] + memory["temp"] + memory["output"] - memory["alias"],
        "donated_bytes": dump.donated,
        "collectives": len(dump.collectives),
        "collectives_exposed": sum(not collective.between for collective in dump.collectives),
        "collective_bytes": sum(collective.bytes for collective in dump.collectives),
        **{f"{name}_s": seconds for name, seconds in one.seconds.items()},
    }


def modelled(
    opened: Opened, bucket: Bucket, row: Mapping[str, Any], section: ProgramSection, hardware: Hardware | None
) -> dict[str, float | None]:
    """Returns a step's bound and its modelled time: each operation's own bound in turn, values between
    kernels written and read at full bandwidth, and a cost for each launch. None without known peaks."""
    names = ("bound_ms", "modelled_ms", "modelled_bound_percent")
    dtype = opened.config.dtype
    if hardware is None or not hardware.bandwidth or dtype not in hardware.flops:
        return dict.fromkeys(names)
    least = bounds(by_operation(step_costs(opened, bucket, section.context_len)), hardware, dtype)
    outside = row["launches_outside"]
    launching = (row["launches_per_step"] - outside) * section.launch_us + outside * section.launch_outside_us
    seconds = least.in_turn + row["passed_bytes"] / hardware.bandwidth + launching / 1e6
    values = (1e3 * least.whole.seconds, 1e3 * seconds, 100 * least.whole.seconds / seconds)
    return dict(zip(names, values, strict=True))


def step_costs(opened: Opened, bucket: Bucket, context: int) -> list[OpCost]:
    """Returns the least work of a step under even routing: rows with that context, and a prompt's chunk."""
    model, tokens = opened.config, bucket.rows + bucket.tokens
    share = model.num_experts_per_tok / max(model.num_experts, 1)
    hits = model.num_experts * (1 - (1 - share) ** tokens) * np.asarray(model.moe_layers)
    chunk = [bucket.tokens] if bucket.tokens else []
    return attribute(
        model, new_tokens=[1] * bucket.rows + chunk, context=[context] * bucket.rows + chunk,
        phase="mixed" if chunk else "decode", hits=hits, logits=bucket.rows, kv_dtype=opened.kv_dtype,
        weights=opened.weights,
    )  # fmt: skip


def operation_rows(compiled: Sequence[Compiled], layers: int) -> list[dict[str, Any]]:
    """Returns launches and bytes by operation, of a layer in the mean and of the whole step."""
    counts: list[dict[str, Counter[str]]] = []
    for one in compiled:
        sums: dict[str, Counter[str]] = {"launches": Counter(), "passed_bytes": Counter()}
        for launch in one.dump.launches:
            sums["launches"][launch.operation or "other"] += 1
            sums["passed_bytes"][launch.operation or "other"] += launch.passed_bytes
        counts.append(sums)
    rows, last = [], compiled[-1]
    for operation in (*OPERATIONS, "other") if "other" not in OPERATIONS else OPERATIONS:
        row: dict[str, Any] = {"bucket": last.bucket.name, "operation": operation}
        for name in ("launches", "passed_bytes"):
            value = counts[-1][name][operation]
            added = value - counts[0][name][operation]
            per_layer = added / (last.layers - compiled[0].layers) if len(compiled) == 2 else None
            row |= {
                f"{name}_per_layer": None if per_layer is None else plain(per_layer),
                f"{name}_per_step": plain(value + (per_layer or 0) * (layers - last.layers)),
            }
        if row["launches_per_step"]:
            rows.append(row)
    return rows


def detail_of(one: Compiled) -> dict[str, Any]:
    """Returns all that is known of a program, for program.json and the plots."""
    use = occupancy(one.dump.buffers)
    peak = use.index(max(use)) if use else 0
    names = ("launches", "kernels", "collectives")
    facts = {name: [asdict(x) for x in getattr(one.dump, name)] for name in names}
    return {
        "bucket": one.bucket.name, "layers": one.layers, **facts, "temporary_bytes": use, "peak": peak,
        "alive_at_peak": [asdict(buffer) for buffer in alive(one.dump.buffers, peak)[:_SHOWN]],
        "memory": one.memory, "seconds": one.seconds,
    }  # fmt: skip


def least_bytes(opened: Opened, bucket: Bucket, context: int) -> float:
    """Returns the bytes of weights and cache that a step has to move."""
    return total(step_costs(opened, bucket, context)).bytes
