"""From two compiled depths of a model to a row for the whole: counts and bytes by layer, a modelled time."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from moejax.bench.program.config import ProgramSection
from moejax.bench.program.dump import alive, occupancy
from moejax.bench.program.job import Bucket, Compiled, Opened
from moejax.core.config import ModelConfig
from moejax.core.hardware import Hardware
from moejax.perf.operation_costs import OpCost, attribute, bounds, by_operation, total
from moejax.sharding.pipeline import stage_config

_SHOWN = 12
"""Buffers that are named at the peak."""


def layer_counts(model: ModelConfig) -> tuple[int, ...]:
    """Returns the two numbers of first layers to compile, which differ by whole periods of the model's kinds
    of layer and by two layers at least; all of its layers where that saves nothing."""
    kinds = list(zip(model.moe_layers, model.sliding_windows, model.paged_layers, strict=True))
    L = len(kinds)
    sizes = [(q, p) for p in range(1, L) for q in range(L - p) if kinds[q : L - p] == kinds[q + p :]]
    first, period = min(sizes, key=sum, default=(0, L))
    step = period * -(-2 // period)
    return (first + step, first + 2 * step) if first + 2 * step < L else (L,)


def stage_counts(model: ModelConfig, stages: Sequence[range]) -> tuple[int, ...]:
    """Returns the numbers of first layers to compile of each pipeline stage: the two that do for all of them,
    or the most that one has."""
    counts, sizes = max(layer_counts(stage_config(model, stage)) for stage in stages), list(map(len, stages))
    return counts if counts[-1] < min(sizes) else (max(sizes),)


def row_of(
    compiled: Sequence[Compiled], opened: Opened, section: ProgramSection, hardware: Hardware | None
) -> dict[str, Any]:
    """Returns a step's row of `cases`, from one program of all layers or two to extrapolate from."""
    last, kernels = compiled[-1], {launch.kernel: launch for launch in compiled[-1].dump.launches}.values()
    spills = [(k.spill_stores or 0) + (k.spill_loads or 0) for k in kernels if k.registers]
    per_layer, whole = _extrapolate(compiled, map(_facts, compiled))
    row: dict[str, Any] = {
        "bucket": last.name, "decode_rows": last.bucket.rows, "chunk_tokens": last.bucket.tokens,
        "layers": last.whole if len(compiled) == 2 else last.layers,
        "layers_compiled": [one.layers for one in compiled],
        "launches_per_layer": per_layer.get("launches_per_step"), **whole,
        "kernel_count": len(kernels),
        "kernels_with_spills": sum(map(bool, spills)) if spills else None,
        "spill_bytes": sum(spills) if spills else None,
        "command_buffers": last.dump.command_buffers, "host_syncs": last.dump.host_syncs,
        **{f"{phase}_s": seconds for phase, seconds in last.seconds.items()},
    }  # fmt: skip
    return row | modelled(opened, last.bucket, row, section, hardware)


def _extrapolate(
    compiled: Sequence[Compiled], figures: Iterable[Mapping[Any, float]]
) -> tuple[dict[Any, float], dict[Any, float]]:
    """Returns what a layer adds to each figure of the programs, and the figures of all layers. With one
    program nothing is known of a layer, and the figures are its own."""
    first, *_, last = list(figures) * 2
    if len(compiled) == 1:
        return {}, dict(last)
    added = compiled[1].layers - compiled[0].layers
    per_layer = {name: (last[name] - first.get(name, 0)) / added for name in last}
    whole = {name: last[name] + per_layer[name] * (compiled[1].whole - compiled[1].layers) for name in last}
    return _plain(per_layer), _plain(whole)


def _plain(values: Mapping[Any, float]) -> dict[Any, float]:
    """Returns whole numbers as integers."""
    return {name: int(value) if float(value).is_integer() else value for name, value in values.items()}


def _facts(one: Compiled) -> dict[str, float]:
    """Returns what grows by layers."""
    launches, memory = one.dump.launches, one.memory
    collectives = [launch for launch in launches if launch.beside is not None]
    return {
        "launches_per_step": len(launches),
        "launches_outside": sum(not launch.captured for launch in launches),
        "copies": sum(launch.kind == "kCopy" for launch in launches),
        "copies_of_pool_bytes": one.dump.pool_copies,
        "f32_weight_copy_bytes": one.dump.f32_copies,
        "passed_bytes": sum(launch.passed_bytes for launch in launches),
        "temp_bytes": memory["temp"],
        "peak_bytes": memory["argument"] + memory["temp"] + memory["output"] - memory["alias"],
        "donated_bytes": one.dump.donated_bytes,
        "collectives": len(collectives),
        "collectives_exposed": sum(not launch.beside for launch in collectives),
        **one.sent,
    }


def modelled(
    opened: Opened, bucket: Bucket, row: Mapping[str, Any], section: ProgramSection, hardware: Hardware | None
) -> dict[str, float | None]:
    """Returns the bytes that a step must move, its bound and its modelled time: operations' own bounds in
    turn, values between kernels at full bandwidth, and a cost for each launch. None without known peaks."""
    dtype, ops = opened.config.dtype, step_costs(opened, bucket, section.context_len)
    times: dict[str, float | None] = dict.fromkeys(("bound_ms", "modelled_ms", "modelled_bound_percent"))
    if hardware is not None and hardware.bandwidth and dtype in hardware.flops:
        least, outside = bounds(by_operation(ops), hardware, dtype), row["launches_outside"]
        within = row["launches_per_step"] - outside
        launching = (within * section.launch_us + outside * section.launch_outside_us) / 1e6
        seconds = least.in_turn + row["passed_bytes"] / hardware.bandwidth + launching
        percent = 100 * least.whole.seconds / seconds
        times = dict(zip(times, (1e3 * least.whole.seconds, 1e3 * seconds, percent), strict=True))
    return {"least_bytes": total(ops).bytes, **times}


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


def grouped_rows(
    compiled: Sequence[Compiled], labels: Sequence[str], figures: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns sums of figures of launches by labels, of a layer and of the whole step. Launches to which a
    figure does not apply (None) are left out."""
    sums: list[Counter[Any]] = [Counter() for _ in compiled]
    for one, mine in zip(compiled, sums, strict=True):
        for launch in one.dump.launches:
            label = tuple(getattr(launch, name) or "not known" for name in labels)
            values = {(label, name): getattr(launch, name) for name in figures}
            mine.update({} if None in values.values() else values)
    per_layer, whole = _extrapolate(compiled, sums)
    rows = []
    for label in dict.fromkeys(label for label, _ in whole):
        row = {"bucket": compiled[-1].name, **dict(zip(labels, label, strict=True))}
        for name in figures:
            row |= {name: whole[label, name], f"{name}_per_layer": per_layer.get((label, name), 0)}
        rows.append(row)
    return rows


def detail_of(one: Compiled) -> dict[str, Any]:
    """Returns all that is known of a program, for program.json and the plots."""
    use = occupancy(one.dump.buffers)
    peak = use.index(max(use)) if use else 0
    return {
        "bucket": one.name, "layers": one.layers, "launches": [asdict(x) for x in one.dump.launches],
        "temporary_bytes": use, "peak": peak, "memory": one.memory, "seconds": one.seconds,
        "alive_at_peak": [asdict(buffer) for buffer in alive(one.dump.buffers, peak)[:_SHOWN]],
        "flows": {name: asdict(flow) for name, flow in one.dump.flows.items()},
        "temporaries": [asdict(buffer) for buffer in one.dump.buffers if buffer.memory == "temporary"],
    }  # fmt: skip
