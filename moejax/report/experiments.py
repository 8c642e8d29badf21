"""The one list of experiments: what prints an experiment's result, and what draws it. No JAX here.

Functions are named and imported when they are used, so that a table needs no plots.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console


@dataclass(frozen=True)
class Report:
    """How an experiment's results are shown; functions as `module:function` below `moejax.report`.

    Attributes:
        table: prints (result, console).
        plots: draws (result, out_dir, …) and returns the files; None: there is nothing to draw.
    """

    table: str
    plots: str | None = None


EXPERIMENTS: Mapping[str, Report] = {
    "latency": Report("tables:print_latency", "plots:save_latency_plots"),
    "throughput": Report("tables:print_throughput", "throughput_plots:save_throughput_plots"),
    "ramp": Report("ramp:print_ramp", "ramp:save_ramp_plots"),
    "ab": Report("ab:print_ab", "ab:save_ab_plots"),
    "stress": Report("stress:print_stress", "stress:save_stress_plots"),
    "profile": Report("roofline:print_profile", "roofline:save_profile_plots"),
    "quantization": Report("quantization:print_quantization", "quantization:save_quantization_plots"),
    "scaling": Report("scaling:print_scaling", "scaling:save_scaling_plots"),
    "routing": Report("routing_tables:print_routing", "routing:save_routing_plots"),
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
    special = [kind for kind, key in (("ab", "variants"), ("ramp", "ramp")) if key in result]
    mode = (result.get("config") or {}).get("mode")
    kinds = (*special, experiment, f"{experiment} {mode}")
    return next((EXPERIMENTS[kind] for kind in kinds if kind in EXPERIMENTS), None)


def print_result(result: Mapping[str, Any], console: Console) -> bool:
    """Prints the tables of a result's experiment; returns False where it has none."""
    report = report_of(result)
    if report is None:
        return False
    _function(report.table)(result, console)
    return True


def save_plots(result: Mapping[str, Any], out_dir: Path, *data: Any) -> list[Path]:
    """Draws a result into `out_dir` and returns the files; `data` is what its plots show besides the result.

    Raises:
        OutputError: one cannot be written.
    """
    report = report_of(result)
    return [] if report is None or report.plots is None else _function(report.plots)(result, out_dir, *data)


def _function(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(f"moejax.report.{module}"), name)
