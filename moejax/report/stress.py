"""The table and plot of a stress run. No JAX here."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console

from moejax.report.figure import new_figure
from moejax.report.style import COLORS, nth_color, run_title
from moejax.report.tables import Column, column_table, metric_columns, number, print_lines

_COLUMNS = (
    *metric_columns("phase", "requests", "done", "aborted", "left", "failed", "tokens", cell=number),
    Column("tok/s", "output_throughput", cell="{:,.0f}".format),
    *metric_columns("preemptions", "cache_use_peak", "probe_tpot_ratio"),
    Column("", "passed", cell=lambda passed: "ok" if passed else "[red]FAILED[/red]", left=True),
)


def print_stress(result: Mapping[str, Any], console: Console) -> None:
    """A line per phase, all rounds together; growth a round, and every fault in red."""
    note = "cache: most blocks in use; TPOT ratio: of the probes, most after the phase over before all"
    console.print(column_table(f"stress: {run_title(result)}", _COLUMNS, result["cases"], note))
    metrics = result["metrics"]
    growth = (
        f"growth a round: {metrics['rss_mb_per_round']:+.2f} MB resident, "
        f"{metrics['live_mb_per_round']:+.3f} MB and {metrics['live_arrays_per_round']:+.2f} JAX arrays, "
        f"{metrics['programs_per_round']:+.2f} compiled steps"
    )
    print_lines(console, [growth])
    for row in result["cases"]:
        if row["phase"] == "memory" and not row["preemptions"]:
            scarce = "no sequence was preempted, the cache is not scarce: lower engine.num_blocks"
            print_lines(console, [f"memory: {scarce}"], "yellow")
        print_lines(console, [f"{row['phase']}: {fault}" for fault in row["faults"]], "red")
    print_lines(console, result["faults"], "red")


def stress_figure(result: Mapping[str, Any]) -> Figure | None:
    """Over the rounds: resident memory and JAX's arrays, and the probes' drift after each phase."""
    rounds, probes = result.get("rounds") or [], result.get("probes") or {}
    if not rounds:
        return None
    figure, (memory, speed) = new_figure("Stress", result, 9.0, 4.0, 1, 2)
    places = range(1, len(rounds) + 1)
    for key, label, color in (
        ("rss_bytes", "resident memory", COLORS[0]), ("live_bytes", "JAX arrays", COLORS[1])
    ):  # fmt: skip
        memory.plot(places, [item[key] / 1e6 for item in rounds], "o-", color=color, label=label)
    memory.set_title("held when idle, MB", fontsize=10)
    for index, (phase, times) in enumerate(probes.items()):
        look: dict[str, Any] = {"color": nth_color(index), "label": f"after {phase}", "markersize": 4}
        speed.plot(range(1, len(times) + 1), times, "o-", **look)
    band = (result["config"].get("stress") or {}).get("tpot_band")
    speed.axhline(1.0, color="black", linewidth=1)
    if band:
        speed.axhline(band, color="black", linestyle="--", linewidth=1, label="allowed")
    speed.set_title("TPOT of the probes over before", fontsize=10)
    for axis in (memory, speed):
        axis.set(xlabel="round", ylim=(0, None))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend(frameon=False, fontsize=8)
    return figure
