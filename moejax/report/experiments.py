"""The one list of experiments: what prints an experiment's result, and what draws it. No JAX here.

Functions are named and imported when they are used, so that a table needs no plots.
"""

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from moejax.report.parts import Parts
from moejax.results.machine import machine_lines


@dataclass(frozen=True)
class Report:
    """How an experiment's results are shown; functions as `module:function` below `moejax.report`.

    Attributes:
        table: prints (result, console); None: what ran it prints its outcome itself.
        plots: name → what draws it: of the result and of as much other data as its parameters name.
    """

    table: str | None
    plots: Mapping[str, str] = field(default_factory=dict)


EXPERIMENTS: Mapping[str, Report] = {
    "latency": Report(
        "tables:print_latency",
        {
            "latency": "plots:latency_percentiles",
            "itl": "plots:inter_token_latency",
            "throughput": "plots:throughput_by_batch",
            "expert_load": "plots:expert_load",
            "backends": "plot_peers:backends_beside",
        },
    ),
    "throughput": Report(
        "tables:print_throughput",
        {
            "latency": "throughput_plots:latency_distributions",
            "load": "throughput_plots:load_over_time",
            "cache": "throughput_plots:cache_over_time",
            "tokens": "throughput_plots:tokens_over_time",
            "requests": "throughput_plots:request_spans",
            "backends": "plot_peers:backends_beside",
        },
    ),
    "ramp": Report("ramp:print_ramp", {"ramp": "ramp:ramp_figure", "pareto": "ramp:pareto_figure"}),
    "ablation": Report("ablation:print_ablation", {"waterfall": "ablation:waterfall_plot"}),
    "ab": Report("ab:print_ab", {"ratios": "ab:ratios_plot", "rounds": "ab:rounds_plot"}),
    "stress": Report("stress:print_stress", {"stress": "stress:stress_figure"}),
    "profile": Report(
        "roofline:print_profile",
        {"roofline": "roofline:roofline_figure", "residuals": "roofline:residual_figure"},
    ),
    "quantization": Report(
        "quantization:print_quantization",
        {
            "pareto": "quantization:pareto_plot",
            "routing": "quantization:heatmaps",
            "popularity": "quantization:popularity_plot",
            "replay": "quantization:replay_plot",
        },
    ),
    "routing_policies": Report(
        "routing_policies:print_routing_policies", {"pareto": "routing_policies:pareto_plot"}
    ),
    "offload": Report("offload:print_offload", {"hits": "offload:hits_plot"}),
    "scaling": Report(
        "scaling:print_scaling", {"scaling": "scaling:layouts_plot", "routing": "scaling:routed_plot"}
    ),
    "program": Report(
        "program:print_program",
        {"launches": "program:launches_plot", "memory": "program:memory_plot"},
    ),
    "routing": Report(
        "routing_tables:print_routing",
        {
            "load": "routing:load_heatmap",
            "co_activation": "routing:co_activation_heatmap",
            "working_set": "routing:working_set_plot",
            "temporal_locality": "routing:temporal_locality_plot",
            "load_over_time": "routing:load_over_time_plot",
            "placement": "routing:placement_over_time_plot",
        },
    ),
    "simulate stages": Report("simulate:print_stages", {"waterfall": "ablation:waterfall_plot"}),
    "simulate run": Report("simulate:print_simulate", {"simulate": "simulate:simulate_plot"}),
    "simulate plan": Report("simulate:print_plan"),
    "simulate validate": Report("simulate:print_validation"),
    "simulate calibrate": Report("simulate:print_calibration"),
    "simulate machine": Report("simulate:print_machine"),
    "train": Report(None, {"training": "plots:training_curve", "expert_load": "plots:expert_load"}),
    "kernels static": Report("kernel_tables:print_static"),
    "kernels bench": Report("kernel_tables:print_bench"),
    "kernels tune": Report("kernel_tables:print_tuned"),
}


def report_of(result: Mapping[str, Any]) -> Report | None:
    """Returns the report of a result's experiment, None where it has none.

    A result with `ramp` is a throughput run of several rates, one with `variants` a latency or a throughput
    run in turns; kernels have a report for each mode.
    """
    experiment = str(result.get("experiment"))
    special = [
        kind for kind, key in (("ablation", "stages"), ("ab", "variants"), ("ramp", "ramp")) if key in result
    ]
    config = result.get("config") or {}
    mode = config.get("mode") or (config.get(experiment) or {}).get("mode")
    staged = (f"{experiment} stages",) if "stages" in result else ()
    kinds = (*staged, *special, experiment, f"{experiment} {mode}")
    return next((EXPERIMENTS[kind] for kind in kinds if kind in EXPERIMENTS), None)


def print_result(result: Mapping[str, Any], console: Console) -> bool:
    """Prints the tables of a result's experiment, below them what the machine was, and the goals; returns
    False where the experiment has no tables."""
    report = report_of(result)
    table = None if report is None else report.table
    if table is not None:
        _function(table)(result, console)
        _function("tables:print_lines")(console, machine_lines(result), "yellow")
    if goals := result.get("goals"):
        console.print(_function("goals:goals_table")(goals, f"goals, {_function('goals:stands_on')(result)}"))
    return table is not None


def save_plots(
    result: Mapping[str, Any], out_dir: str | os.PathLike[str], *, parts: Parts | None = None, **data: Any
) -> list[Path]:
    """Draws a result into `out_dir`, a file `NAME.png` for each plot that there is data for.

    Args:
        parts: of which each plot is one; None: what fails is raised, after the others are drawn.
        data: what plots show besides the result, by their parameters' names: `requests`, rows of
            requests.jsonl; a routing trace's `captures` and `model`; quantization's `details`; training's
            `steps`, rows of metrics.jsonl.

    Returns:
        The files.

    Raises:
        OutputError: one cannot be written.
    """
    report, mine = report_of(result), parts or Parts()
    known = {"result": result, **data}
    files: list[Path] = []
    for name, target in report.plots.items() if report is not None else ():
        with mine.part(f"{name}.png"):
            from moejax.report.figure import save_figures

            plot = _function(target)
            arguments = {key: known[key] for key in inspect.signature(plot).parameters if key in known}
            files += save_figures({name: plot(**arguments)}, out_dir)
    if parts is None:
        mine.check(Path(out_dir))
    return files


def _function(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(f"moejax.report.{module}"), name)
