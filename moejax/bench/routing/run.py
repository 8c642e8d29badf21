"""The routing experiment: traces side by side, and one made up for a model's shape.

traces → loads, skew, bursts, co-activation, locality, working sets, placement, differences → tables, plots,
result.json, tracker. A made-up trace is written as `routing.npz`, which the engine replays and every
other experiment with a trace's key takes.
"""

import dataclasses
from typing import Any

from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.routing.config import RoutingSelection, needs_model
from moejax.bench.routing.over_time import over_time_rows
from moejax.bench.routing.placement import placement_row
from moejax.bench.routing.rows import differences, layer_rows, trace_row, working_sets
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.report.progress import progress
from moejax.results.result import Result
from moejax.routing.capture import CAPTURE_FILE, RoutingCapture
from moejax.routing.generate import generate
from moejax.routing.source import open_trace, trace_names

_METRICS = (
    "rows", "steps", "max_over_mean", "max_over_mean_worst", "entropy", "gini", "top_share",
    "zipf_exponent", "burstiness", "reuse", "reuse_by_chance", "next_layer_bits", "prefill_hits",
    "decode_hits", "unused_experts", "decode_bytes_per_step", "contiguous_imbalance",
    "planned_imbalance", "replicated_imbalance", "replicated_holdout_imbalance",
)  # fmt: skip


def run_routing(selection: RoutingSelection, model: ModelConfig | None, run: ExperimentRun) -> Result:
    """Runs the experiment and finishes `run`; `cases` has a row for each trace, `layers` one for each of its
    layers. The flat metrics are the first trace's; `<figure>_<trace>` are the others'.

    Args:
        model: whose shape is generated, which all traces have to fit, and whose experts' bytes are counted.

    Raises:
        ConfigError: a trace that is none or does not fit the model, or a generator's parameters.
    """
    captures = open_traces(selection, model, run.model)
    placed = {
        label: placement_row(capture, selection.placement, model) for label, capture in captures.items()
    }
    label, capture = next(iter(captures.items()))
    over_time = over_time_rows(capture, selection.placement.rebalance, placed[label], model)
    run.start(seeds={"generate": selection.seed}, variant="+".join(captures))
    files = []
    if selection.generate.kind is not None:
        files = [captures["generated"].save(run.out_dir / CAPTURE_FILE)]
    cases: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    details: dict[str, Any] = {}
    with progress("traces", total=len(captures)) as task:
        for label, capture in captures.items():
            task.describe(label)
            by_layer = layer_rows(capture)
            cases.append({"trace": label, **trace_row(capture, by_layer, model), **placed[label]})
            layers += [{"trace": label, **row} for row in by_layer]
            details[label] = working_sets(capture, model)
            task.advance()
    result = run.result(
        metrics=_metrics(cases, over_time),
        cases=cases,
        routing={"counts": next(iter(captures.values())).counts()},
        layers=layers,
        differences=differences(captures),
        placement_over_time=over_time,
        working_sets=details,
        loads={label: capture.counts() for label, capture in captures.items()},
    )
    return run.finish(result, plot_data={"captures": captures, "model": model}, files=files)


def open_traces(
    selection: RoutingSelection, model: ModelConfig | None, name: str | None = None
) -> dict[str, RoutingCapture]:
    """Every trace by its short name, the made-up one last, as "generated".

    Raises:
        ConfigError: see `run_routing`.
    """
    captures: dict[str, RoutingCapture] = {}
    for label, path in zip(trace_names(selection.paths), selection.paths, strict=True):
        captures["generated_trace" if label == "generated" else label] = open_trace("trace", path, model)
    if selection.generate.kind is not None:
        captures["generated"] = _generate(selection, model, name)
    return captures


def _generate(selection: RoutingSelection, model: ModelConfig | None, name: str | None) -> RoutingCapture:
    section = selection.generate
    if model is None:
        raise needs_model(str(section.kind))
    layers = [i for i, sparse in enumerate(model.moe_layers) if sparse]
    if not layers:
        raise ConfigError("generate: the model has no layers with experts, so there is nothing to route")
    trace = generate(
        str(section.kind),
        num_experts=model.num_experts,
        top_k=model.num_experts_per_tok,
        layers=layers,
        requests=section.requests,
        prompt_len=section.prompt_len,
        output_len=section.output_len,
        seed=selection.seed,
        **section.params,
    )
    return dataclasses.replace(trace, meta={**trace.meta, "model": name})


def _metrics(cases: list[dict[str, Any]], over_time: list[dict[str, Any]]) -> dict[str, Any]:
    metrics: dict[str, Any] = {"traces": len(cases)}
    for row in over_time:
        metrics |= {f"{row['placement']}_{name}": row[name] for name in ("imbalance", "moved")}
    for number, case in enumerate(cases):
        end = f"_{case['trace']}" if number else ""
        metrics |= {f"{name}{end}": case[name] for name in _METRICS if case.get(name) is not None}
    return metrics
