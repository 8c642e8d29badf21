"""Tables and plots of `experiments.program`. No JAX here."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from moejax.core.words import byte_words
from moejax.report.figure import legend_below, new_figure
from moejax.report.style import COLORS, nth_color
from moejax.report.tables import Column, column_table, number, print_lines

_COLUMNS = (
    Column("rows", "bucket", left=True),
    Column("launches\n/ layer", "launches_per_layer"),
    Column("/ step", "launches_per_step"),
    Column("outside\ngraphs", "launches_outside"),
    Column("host\nwaits", "host_syncs"),
    Column("kernels\n(spill)", lambda r: f"{r['kernel_count']} ({number(r['kernels_with_spills'])})"),
    Column("pool\ncopies", "copies_of_pool_bytes", cell=byte_words),
    Column("f32 of\nweights", "f32_weight_copy_bytes", cell=byte_words),
    Column("temp", "temp_bytes", cell=byte_words),
    Column("bound\nms", "bound_ms"),
    Column("modelled\nms", "modelled_ms"),
    Column("%", "modelled_bound_percent", cell="{:.0f}".format),
)
_COLLECTIVES = (
    Column("rows", "bucket", left=True),
    Column("collectives", "collectives"),
    Column("nothing beside", "collectives_exposed"),
    Column("sent by a device", "collective_bytes", cell=byte_words),
)
_MOST = 8  # kernels and buffers that are named


def print_program(result: Mapping[str, Any], console: Console) -> None:
    """A row a bucket; launches by operation; spills, collectives, memory; what is assumed."""
    target, rows, section = result["target"], result["cases"], result["config"]["program"]
    depth = " and ".join(str(count) for count in rows[0]["layers_compiled"])
    whole = f"{rows[0]['layers']} layers"
    how = f"compiled with {depth} layers, extrapolated to {whole}" if "and" in depth else f"{depth} layers"
    console.print(
        column_table(
            f"Steps compiled for {target['devices']} × {target['device']} ({how})",
            _COLUMNS,
            rows,
            f"rows: that decode, + prompt tokens; modelled at {section['context_len']} tokens of context,"
            f" {section['launch_us']:g} µs a launch\n%: the bound's share of the modelled time",
        )
    )
    console.print(_operations(result))
    if any(row["collectives"] for row in rows):
        console.print(column_table("Collectives of a step", _COLLECTIVES, rows))
    spilling = [k for k in result["kernels"] if k["spill_stores"] or k["spill_loads"]]
    lines = [
        f"{k['name']} ({k['bucket']}): spills {k['spill_stores']} + {k['spill_loads']} bytes,"
        f" {k['registers']} registers"
        for k in spilling[:_MOST]
    ]
    print_lines(console, lines, "yellow")
    memory = [f"{row['bucket']}: {byte_words(row['peak_bytes'])}" for row in rows]
    limit = f", of {byte_words(target['memory'])}" if target["memory"] else ""
    warn = "yellow" if any(row["fits"] is False for row in rows) else None
    lines = [f"memory of a device with the cache of the configuration{limit}: {'; '.join(memory)}"]
    seconds = [f"{row['bucket']}: {row['trace_s']:.0f} + {row['lower_s']:.0f} s" for row in rows]
    print_lines(console, lines, warn)
    print_lines(console, [f"tracing + lowering on this machine, all layers: {'; '.join(seconds)}"])
    print_lines(console, [f"note: {note}" for note in result["notes"]])


def _operations(result: Mapping[str, Any]) -> Any:
    """Returns the table of launches by operation: of a layer, or of the step where there is no difference."""
    buckets = [row["bucket"] for row in result["cases"]]
    extrapolated = len(result["cases"][0]["layers_compiled"]) == 2
    key = "launches_per_layer" if extrapolated else "launches_per_step"
    by_operation: dict[str, dict[str, Any]] = {}
    for row in result["operations"]:
        line = by_operation.setdefault(row["operation"], {"operation": row["operation"]})
        line[row["bucket"]] = row[key]
        line[f"once {row['bucket']}"] = row["launches_per_step"]
    columns = [Column("operation", "operation", left=True)]
    columns += [Column(f"rows\n{bucket}", bucket) for bucket in buckets]
    if extrapolated:
        columns += [Column(f"step\n{bucket}", f"once {bucket}") for bucket in buckets]
    title = "Launches by operation, of a layer and of the step" if extrapolated else "Launches by operation"
    return column_table(title, columns, list(by_operation.values()))


def launches_plot(result: Mapping[str, Any]) -> Figure | None:
    """Launches of each bucket's step, stacked by operation."""
    buckets = [row["bucket"] for row in result["cases"]]
    counts = {(row["bucket"], row["operation"]): row["launches_per_step"] for row in result["operations"]}
    names = list(dict.fromkeys(row["operation"] for row in result["operations"]))
    figure, (axis,) = new_figure("Launches of a step by operation", result, 7.5, 4.8)
    bottom = [0.0] * len(buckets)
    for number_, name in enumerate(names):
        values = [counts.get((bucket, name), 0) for bucket in buckets]
        hatch = "//" if number_ >= len(COLORS) else None
        axis.bar(range(len(buckets)), values, 0.6, bottom=bottom, label=name, hatch=hatch,
                 color=nth_color(number_), edgecolor="white")  # fmt: skip
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axis.set_xticks(range(len(buckets)), buckets)
    axis.set_xlabel("rows + prompt tokens")
    legend_below(figure, [axis])
    return figure


def memory_plot(result: Mapping[str, Any], programs: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Temporary memory over each program's schedule, with the largest values at its peak."""
    figure, axes = new_figure(
        "Temporary memory over the schedule", result, 9, 2.6 * len(programs), len(programs)
    )  # fmt: skip
    for axis, program in zip(axes, programs, strict=True):
        use = [size / 1e6 for size in program["temporary_bytes"]]
        axis.fill_between(range(len(use)), use, step="post", color=COLORS[0], alpha=0.6)
        axis.axhline(program["memory"]["temp"] / 1e6, color="#444444", linewidth=1, linestyle="--")
        alive = program["alive_at_peak"][:3]
        text = "\n".join(
            f"{b['operation'] or '?'}: {b['shape'].split('{')[0]}, {byte_words(b['size'])}" for b in alive
        )
        axis.annotate(f"peak:\n{text}", (0.01, 0.95), xycoords="axes fraction", va="top", fontsize=7)
        axis.set_ylabel("MB")
        axis.set_title(f"{program['bucket']} ({program['layers']} layers; dashed: as allocated)", fontsize=9)
    axes[-1].set_xlabel("instruction of the schedule")
    return figure
