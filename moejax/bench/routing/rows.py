"""From a trace to the rows that the result and its tables have. No JAX here."""

from typing import Any

import numpy as np

from moejax.core.config import ModelConfig
from moejax.perf.sizes import DTYPE_BYTES, expert_params
from moejax.routing import analysis, difference, locality
from moejax.routing.capture import RoutingCapture


def expert_bytes(model: ModelConfig) -> float:
    """Returns the bytes of one expert of one layer, in the configuration's dtype."""
    return float(expert_params(model) * DTYPE_BYTES[model.dtype])


def layer_rows(capture: RoutingCapture) -> list[dict[str, Any]]:
    """A row for each layer with experts; see `moejax.routing.analysis` for what the figures are."""
    counts = capture.counts()
    skew = analysis.skew(counts)
    phases = {name: analysis.skew(capture.phase(name).counts()).max_over_mean for name in analysis.PHASES}
    burst = analysis.burstiness(capture)
    zipf = analysis.zipf_exponent(counts)
    near = locality.temporal_locality(capture)
    hits = _hits(capture)
    rows = []
    for at, layer in enumerate(capture.layers):
        last = at + 1 == len(capture.layers)
        table = None if last else analysis.transition(capture, layer, visited=True)
        rows.append(
            {
                "layer": layer,
                **{name: float(value[at]) for name, value in skew._asdict().items()},
                **{f"{name}_max_over_mean": float(value[at]) for name, value in phases.items()},
                "zipf_exponent": float(zipf[at]),
                "burstiness": float(burst[at]),
                "reuse": float(near.reuse[at]),
                "reuse_by_chance": float(near.chance[at]),
                "next_layer_bits": None if table is None else analysis.mutual_information(table),
                **{f"{name}_hits": float(value[at]) for name, value in hits.items()},
                "unused_experts": int((counts[at] == 0).sum()),
            }
        )
    return rows


def trace_row(
    capture: RoutingCapture, layers: list[dict[str, Any]], model: ModelConfig | None
) -> dict[str, Any]:
    """The whole trace in one row: its size, and the layers' figures in the mean (and the worst skew)."""
    row: dict[str, Any] = {
        "origin": capture.origin,
        "rows": capture.num_rows,
        "requests": len(capture.requests),
        "steps": capture.num_steps,
        "prefill_rows": int(capture.prefill.sum()),
        "moe_layers": len(capture.layers),
        "experts": capture.num_experts,
        "experts_per_token": capture.top_k,
        "trace_bytes": capture.nbytes,
        "bytes_per_row": capture.nbytes / max(capture.num_rows, 1),
    }
    for name in layers[0]:
        if name != "layer":
            row[name] = _mean([line[name] for line in layers])
    loaded = [line["max_over_mean"] for line in layers if np.isfinite(line["max_over_mean"])]
    row["max_over_mean_worst"] = max(loaded, default=None)
    if model is not None:
        size = expert_bytes(model)
        row["expert_bytes"] = size
        for phase in analysis.PHASES:
            if row[f"{phase}_hits"] is not None:
                row[f"{phase}_bytes_per_step"] = row[f"{phase}_hits"] * len(capture.layers) * size
    return row


def working_sets(capture: RoutingCapture, model: ModelConfig | None) -> dict[str, Any]:
    """By unit: `windows`, `experts` `[L, W]`; with a model's configuration `bytes` `[W]` of all layers."""
    sets = {}
    for unit in ("tokens", "steps"):
        curve = locality.working_set(capture, unit=unit)
        sets[unit] = {"windows": curve.windows, "experts": curve.experts}
        if model is not None:
            sets[unit]["bytes"] = curve.nbytes(expert_bytes(model))
    return sets


def differences(captures: dict[str, RoutingCapture]) -> list[dict[str, Any]]:
    """Each further trace beside the first; those of another shape say so."""
    (first, one), *others = captures.items()
    rows = []
    for name, other in others:
        row: dict[str, Any] = {"first": first, "second": name, "reason": None}
        mine, theirs = ((c.layers, c.num_experts, c.top_k) for c in (one, other))
        if mine != theirs:
            row["reason"] = "of another shape"
        else:
            compared = difference.compare_captures(one, other)
            row |= {
                "load_divergence_bits": _mean(compared.divergence.tolist()),
                "matched_rows": compared.matched,
                "flips": _mean(compared.flips.tolist()),
                "overlap": _mean(compared.overlap.tolist()),
            }
        rows.append(row)
    return rows


def _hits(capture: RoutingCapture) -> dict[str, np.ndarray]:
    """Phase → float `[L]`: experts visited by a step's tokens of that phase, in the mean over steps."""
    mean_hits = {}
    for name in analysis.PHASES:
        part = capture.phase(name)
        hits = locality.hits_per_step(part)
        mean_hits[name] = hits.mean(0) if len(hits) else np.full(len(capture.layers), np.nan)
    return mean_hits


def _mean(values: list[float | None]) -> float | None:
    """Returns the mean of the values that are numbers; None without any."""
    sound = [value for value in values if value is not None and np.isfinite(value)]
    return float(np.mean(sound)) if sound else None
