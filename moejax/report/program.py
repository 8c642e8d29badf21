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
    Column("kernels\n(spill)", lambda r: f"{r['kernel_count']} ({number(r['kernels_with_spills'])})"),
    Column("pool\ncopies", "copies_of_pool_bytes", cell=byte_words),
    Column("f32 of\nweights", "f32_weight_copy_bytes", cell=byte_words),
    Column("temp", "temp_bytes", cell=byte_words),
    Column("least\nms", "bound_ms"),
    Column("model\nms", "modelled_ms"),
    Column("%", "modelled_bound_percent", cell="{:.0f}".format),
)
_COLLECTIVES = (
    Column("rows", "bucket", left=True),
    Column("collective", "kind", left=True),
    Column("operation", "operation", left=True),
    Column("bytes", "read_bytes", cell=byte_words),
    Column("/ step", "launches"),
    Column("with work\nbeside", "overlapped"),
    Column("launches\nbeside", "beside"),
    Column("could", "independent"),
)
_MOST = 8  # kernels that are named


def print_program(result: Mapping[str, Any], console: Console) -> None:
    """A row a bucket; launches by operation; spills, collectives, memory; what is assumed."""
    target, rows, section = result["target"], result["cases"], result["config"]["program"]
    depth = " and ".join(str(count) for count in rows[0]["layers_compiled"])
    title = f"Steps of {rows[0]['layers']} layers for {target['devices']} × {target['device']}"
    caption = f"compiled with {depth} layers, the rest extrapolated\n" if "and" in depth else ""
    caption += (
        f"rows: that decode, + prompt tokens; modelled with {section['context_len']} tokens of context and"
        f" {section['launch_us']:g} µs a launch\n%: least time / modelled time"
    )
    console.print(column_table(title, _COLUMNS, rows, caption))
    console.print(_operations(result))
    spilling = [kernel for kernel in result["kernels"] if kernel["spill_stores"] or kernel["spill_loads"]]
    spills = [
        f"{kernel['kernel']} ({kernel['bucket']}) spills {kernel['spill_stores']} bytes, has"
        f" {kernel['registers']} registers"
        for kernel in spilling
    ]
    print_lines(console, spills[:_MOST], "yellow")
    waits = [f"{r['bucket']}: the host waits {r['host_syncs']} times" for r in rows if r["host_syncs"]]
    print_lines(console, waits, "yellow")
    if result["collectives"]:
        title = "Collectives of a step, and launches between their start and their end"
        caption = "could: launches that neither feed it nor need it"
        console.print(column_table(title, _COLLECTIVES, result["collectives"], caption))
    for row in (row for row in rows if row["collectives"]):
        names = ("collective_bytes", "collective_formula_bytes", "stage_bytes")
        words = "{}: collectives of {}, by formula {}; {} to the next stage"
        print_lines(console, [words.format(row["bucket"], *(byte_words(row[name]) for name in names))])
    memory = ", ".join(f"{row['bucket']}: {byte_words(row['peak_bytes'])}" for row in rows)
    phases = ("trace_s", "lower_s", "compile_s")
    seconds = [f"{r['bucket']}: {' + '.join(f'{r[phase]:.1f}' for phase in phases)} s" for r in rows]
    lines = [
        f"memory of a device, of {byte_words(target['memory'])}: {memory}",
        f"tracing + lowering + compiling {rows[0]['layers_compiled'][-1]} layers: {', '.join(seconds)}",
        *(f"note: {note}" for note in result["notes"]),
    ]
    print_lines(console, lines)


def _operations(result: Mapping[str, Any]) -> Any:
    """Returns the table of launches by operation: of a layer, where that is known, and of the step."""
    lines: dict[str, dict[str, Any]] = {}
    for row in result["operations"]:
        line = lines.setdefault(row["operation"], {"operation": row["operation"]})
        line[f"layer {row['bucket']}"] = row["launches_per_layer"] or None
        line[f"step {row['bucket']}"] = row["launches"]
    names = [f"{part} {row['bucket']}" for part in ("layer", "step") for row in result["cases"]]
    columns = [Column("operation", "operation", left=True), *(Column(n.replace(" ", "\n"), n) for n in names)]
    return column_table("Launches by operation: of a layer, of the step", columns, list(lines.values()))


def launches_plot(result: Mapping[str, Any]) -> Figure | None:
    """Launches of each bucket's step, stacked by operation."""
    buckets = [row["bucket"] for row in result["cases"]]
    counts = {(row["operation"], row["bucket"]): row["launches"] for row in result["operations"]}
    figure, (axis,) = new_figure("Launches of a step by operation", result, 7.5, 4.8)
    bottom = [0.0] * len(buckets)
    for index, name in enumerate(dict.fromkeys(operation for operation, _ in counts)):
        values = [counts.get((name, bucket), 0) for bucket in buckets]
        bars = axis.bar(buckets, values, 0.6, bottom=bottom, label=name, color=nth_color(index))
        for bar in bars:
            bar.set(edgecolor="white", hatch="//" if index >= len(COLORS) else "")
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axis.set_xlabel("rows + prompt tokens")
    legend_below(figure, [axis])
    return figure


def memory_plot(result: Mapping[str, Any], programs: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Temporary memory over each program's schedule, with the largest values at its peak."""
    title, count = "Temporary memory over the schedule", len(programs)
    figure, axes = new_figure(title, result, 9, 2.6 * count, count)
    for axis, program in zip(axes, programs, strict=True):
        use = [size / 1e6 for size in program["temporary_bytes"]]
        axis.fill_between(range(len(use)), use, step="post", color=nth_color(0), alpha=0.6)
        axis.axhline(program["memory"]["temp"] / 1e6, color="#444444", linewidth=1, linestyle="--")
        alive = [
            f"{value['operation']}: {value['shape'].split('{')[0]}, {byte_words(value['size'])}"
            for value in program["alive_at_peak"][:3]
        ]
        text = "\n".join(["at the peak:", *alive])
        axis.annotate(text, (0.01, 0.95), xycoords="axes fraction", va="top", fontsize=7)
        about = f"{program['layers']} layers; dashed: as allocated"
        axis.set_title(f"rows {program['bucket']} ({about})", fontsize=9)
        axis.set_ylabel("MB")
    axes[-1].set_xlabel("instruction of the schedule")
    return figure
