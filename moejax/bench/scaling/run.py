"""The scaling experiment: layouts side by side, modelled for a GPU cluster and measured on virtual devices.

model → per layout: memory, bytes by axis, modelled steps; a decode step run on virtual CPU devices → table,
plots, result.json, tracker. A layout that does not fit the model is a row with the reason.
"""

import math
from typing import Any

import jax

from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.scaling.config import ScalingSection
from moejax.bench.scaling.measured import measure_layout
from moejax.bench.scaling.modelled import exchange_of, layout_row
from moejax.bench.scaling.routed import routed_row
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.hardware import KNOWN
from moejax.core.parallel import PRESETS, ParallelConfig
from moejax.engine.opening.resolve import find_model
from moejax.models.decoder import Decoder
from moejax.nn.param import num_params
from moejax.report.progress import progress
from moejax.results.result import Result
from moejax.routing.analysis import PHASES
from moejax.routing.capture import RoutingCapture
from moejax.routing.source import open_trace

MEASURED_BYTES = 1e9
"""Most float32 weights of a model that "auto" runs."""


def run_scaling(
    source: Any,
    section: ScalingSection,
    run: ExperimentRun,
    *,
    load_format: Any = "auto",
    dtype: str = "bfloat16",
    block_size: int = 32,
    seed: int = 0,
) -> Result:
    """Runs the experiment and finishes `run`; `cases` has a row per layout.

    The device that is modelled, in nodes of eight, is `run.hardware_kind` ("auto" is the A100).

    Args:
        source: what `LLM` opens.
        dtype: of weights, cache and activations there.

    Raises:
        ConfigError: an unknown model or device.
    """
    kind = "a100_80gb" if run.hardware_kind == "auto" else run.hardware_kind
    if kind not in KNOWN or KNOWN[kind].bandwidth is None:
        known = ", ".join(k for k, v in KNOWN.items() if v.bandwidth is not None)
        raise ConfigError(f"hardware.kind={kind}: scaling models a GPU with known rates: {known}")
    _, model = find_model(source, load_format)
    model = model.replace(dtype=dtype)
    capture = open_trace("scaling.routing", section.routing, model) if section.routing else None
    measure = section.measure == "on"
    if section.measure == "auto":
        measure = 4 * num_params(Decoder(model)) <= MEASURED_BYTES and jax.default_backend() == "cpu"
    run.start(seeds={"engine": seed})
    rows: list[dict[str, Any]] = []
    with progress("layouts", total=len(section.layouts)) as task:
        for layout in section.layouts:
            task.describe(layout)
            parallel = PRESETS[layout]
            row: dict[str, Any] = {"layout": layout, "error": None}
            try:
                row |= layout_row(model, parallel, KNOWN[kind], section, block_size)
            except ConfigError as error:
                row |= {"devices": parallel.num_devices, "error": str(error)}
            else:
                try:
                    if measure:
                        row |= measure_layout(source, model, parallel, section, load_format, seed)
                except ConfigError as error:
                    row["not_measured"] = str(error)
                row |= _routed(capture, model, parallel) if capture is not None else {}
            rows.append(row)
            task.advance()
    result = run.result(
        metrics=_metrics(rows),
        cases=rows,
        hardware=KNOWN[kind],
        routing_trace=None if capture is None else _about(capture, section.routing),
    )
    return run.finish(result, tables={"layouts": result["cases"]})


def _routed(capture: RoutingCapture, model: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    """The trace on a layout, by the exchange that the layout would choose for the trace's own steps."""
    methods = {}
    for phase in PHASES:
        part = capture.phase(phase)
        tokens = math.ceil(part.num_rows / max(part.num_steps, 1) / parallel.data_groups)
        methods[phase] = exchange_of(model, parallel, max(tokens, 1))[0].method
    row = routed_row(capture, model, parallel, methods)
    return row | {f"routed_{phase}_exchange": method for phase, method in methods.items() if row}


def _about(capture: RoutingCapture, path: str | None) -> dict[str, Any]:
    """For the record: which trace, and how large its steps are."""
    return {
        "path": path, "origin": capture.origin, "requests": len(capture.requests),
        "steps": capture.num_steps, "rows": capture.num_rows, "prefill_rows": int(capture.prefill.sum()),
    }  # fmt: skip


def _metrics(rows: list[dict[str, Any]]) -> dict[str, Any]:
    sound = [row for row in rows if row["error"] is None]
    fits = [row for row in sound if row["fits"]]
    best = max(fits, key=lambda row: row["tokens_per_s_device"], default=None)
    fastest = min(fits, key=lambda row: row["decode_ms"], default=None)
    checked = [row["formulas_agree"] for row in sound if row.get("formulas_agree") is not None]
    return {
        "layouts": len(sound),
        "best_tokens_per_s_device": best["tokens_per_s_device"] if best else None,
        "best_layout": best["layout"] if best else None,
        "least_decode_ms": fastest["decode_ms"] if fastest else None,
        "fastest_layout": fastest["layout"] if fastest else None,
        "formulas_agree": all(checked) if checked else None,
    }
