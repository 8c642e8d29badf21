"""Tables of `experiments.kernels`. No JAX here."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from moejax.report.tables import Column, column_table, number, plain_table, print_lines


def print_static(result: Mapping[str, Any], console: Console) -> None:
    """A table per operation, the targets side by side, then what fails the gate, in red."""
    for op, rows in _by_operation(result):
        console.print(static_table(op, rows))
    made = Counter(row["compiler"] for row in result["cases"])
    compilers = ", ".join(f"{count} by {name}" for name, count in sorted(made.items()) if name)
    print_lines(console, [f"{result['metrics']['kernels']} kernels: {compilers}", *result["notes"]])
    print_lines(console, [*result["failures"], *result["grown"]], "red")


def _by_operation(result: Mapping[str, Any]) -> Iterable[tuple[str, list[Mapping[str, Any]]]]:
    """(operation, its rows), in the rows' order."""
    by_op: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["cases"]:
        by_op.setdefault(row["op"], []).append(row)
    return by_op.items()


def static_table(op: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per kernel and spec: registers, spills, shared memory, occupancy and products on each target.

    Kernels and models are headings of their own, or names would leave no room for figures at 100 columns.
    """
    targets = list(dict.fromkeys(row["target"] for row in rows))
    table = plain_table(
        op,
        "reg: registers a thread (+ spilled bytes); KB: shared memory; occ: % of the warps, and what\n"
        "limits it; mma: mma.sync or wgmma in the code; cp: cp.async;\n"
        "µs: least time on A100 (sm_80), H100 (sm_90)",
    )
    table.add_column("spec\nand tile", overflow="fold")
    for target in targets:
        for name in (f"{target}\nreg", "\nKB", "\nocc", "\nmma", "\ncp", "\nµs"):
            table.add_column(name, justify="right", no_wrap=True)
    kernels: dict[tuple[str, str], dict[str, dict[str, Mapping[str, Any]]]] = {}
    for row in rows:
        specs = kernels.setdefault((row["implementation"], row["kernel"]), {})
        specs.setdefault(row["spec"], {})[row["target"]] = row
    for (implementation, kernel), specs in kernels.items():
        first_config = next(row["config"] for by_target in specs.values() for row in by_target.values())
        sizes = " x ".join(_split_config(first_config)[0])
        table.add_row(f"{kernel or implementation}\n {sizes}", style="bold")
        model = None
        for spec, by_target in specs.items():
            first, _, rest = spec.partition("/")
            if first != model and rest:
                table.add_row(f" {first}", style="dim")
            model = first
            cells = [cell for target in targets for cell in _static_cells(by_target.get(target))]
            tile = _tile(next(iter(by_target.values()))["config"])
            table.add_row(f"  {rest or first}\n   {tile}", *cells)
    return table


def _static_cells(row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return ["–"] * 6
    if row["error"]:
        return ["error", "", "", "", "", ""]
    spill = row["spill_stores"] + row["spill_loads"]
    products = row["mma_sync"] or row["wgmma"]
    return [
        f"{row['registers']}" + (f"+{spill}" if spill else ""),
        f"{row['shared'] / 1024:.0f}",
        f"{100 * row['occupancy']:.0f}\n{row['limiter'].removeprefix('shared ').replace('registers', 'reg')}",
        f"{products}" if products else "!" if row["products"] else "–",
        str(row["cp_async"]) if row["cp_async"] else "–",
        number(row["roofline_us"]),
    ]


def _tile(config: str) -> str:
    """A configuration's numbers, in their order: `16x64x128, 4 warps, 3 stages`."""
    tile, counts = _split_config(config)
    words = [f"{count} {name.removeprefix('num_')}" for name, count in counts.items()]
    return ", ".join(["x".join(map(str, tile.values())), *words])


def _split_config(config: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a configuration's tile sizes, and its counts of warps and stages."""
    values = json.loads(config)
    counts = {name: values.pop(name) for name in ("num_warps", "num_stages") if values.get(name)}
    return values, counts


def print_bench(result: Mapping[str, Any], console: Console) -> None:
    """A line per implementation: time, bound, shares; what did not run, with its reason."""
    metrics = result["metrics"]
    rates = (
        f"measured: copy {metrics['copy_bandwidth'] / 1e9:,.0f} GB/s,"
        f" bfloat16 product {metrics['matmul_bfloat16'] / 1e12:,.0f} TFLOP/s,"
        f" int8 {metrics['matmul_int8'] / 1e12:,.0f}"
    )
    print_lines(console, [rates])
    for op, rows in _by_operation(result):
        console.print(bench_table(op, rows))
        for line, style in bench_faults(rows):
            print_lines(console, [line], style)


_WRONG = "wrong result"


def bench_table(op: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Implementations of each spec, one below another, and each one's time over our fastest.

    What has no time is marked; `bench_faults` says why.
    """
    fastest: dict[str, float] = {}
    for row in rows:
        if row["ours"] and row.get("median_us") and not row["error"]:
            fastest[row["spec"]] = min(row["median_us"], fastest.get(row["spec"], math.inf))

    def shown(row: Mapping[str, Any]) -> Mapping[str, Any]:
        best = fastest.get(row["spec"])
        if not row["error"]:
            return {**row, "over_ours": None if best is None else row["median_us"] / best}
        failed = {name: row[name] for name in ("spec", "implementation", "error")}
        if not row["error"].startswith(_WRONG):
            return {**failed, "style": "dim"}
        # JSON has no word for infinity: there it is null.
        error = math.inf if row.get("relative_error") is None else row["relative_error"]
        name = f"{row['implementation']} WRONG"
        return {**failed, "implementation": name, "relative_error": error, "style": "red"}

    columns = (
        Column("spec", "spec", fold=True, once=True),
        Column("implementation", "implementation", fold=True),
        Column("µs", "median_us"),
        Column("±", "spread", 100),
        Column("bound", "bound_us"),
        Column("of it", "bound_share", 100),
        Column("x ours", "over_ours", 1, "{:.2f}".format),
        Column("err", "relative_error", 1, "{:.1e}".format),
        Column("x bf16", "speedup_over_bf16", 1, "{:.2f}".format),
    )
    gains = any(row.get("speedup_over_bf16") for row in rows)
    return column_table(
        op,
        columns,
        [shown(row) for row in rows],
        "µs: median; ±: half the interquartile range, %; bound: least µs at this device's measured rates;\n"
        "of it: bound over time, %; x ours: time over our fastest; err: distance from the reference"
        + (";\nx bf16: the bf16 row's time over it" if gains else ""),
        style=lambda row: row.get("style"),
    )


def bench_faults(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Why implementations have no time, those of one reason together: lines, styles; wrong results first."""
    specs: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["error"]:
            specs.setdefault((row["implementation"], row["error"]), []).append(row["spec"])
    lines = []
    for (name, reason), where in specs.items():
        wrong = reason.startswith(_WRONG)
        place = where[0] if len(where) == 1 else f"{len(where)} specs"
        lines.append((f"{name}, {place}: {reason}", "red" if wrong else "dim"))
    return sorted(lines, key=lambda line: line[1] != "red")


def print_tuned(result: Mapping[str, Any], console: Console) -> None:
    """A line per spec: the winner, and what it saves over the heuristic's configuration."""

    def winner(row: Mapping[str, Any]) -> str:
        return ("= " if row["is_heuristic"] else "") + _tile(json.dumps(row["config"]))

    def saved(row: Mapping[str, Any]) -> float | None:
        return row["heuristic_us"] / row["us"] if row["us"] and row["heuristic_us"] is not None else None

    columns = (
        Column("kernel", lambda row: f"{row['op']} {row['implementation']}", fold=True),
        Column("spec", "spec", fold=True),
        Column("winner", winner, fold=True),
        Column("sound", "sound"),
        Column("tried", "tried"),
        Column("µs", "us"),
        Column("x", saved, 1, "{:.2f}".format),
    )
    caption = "x: the heuristic's time over the winner's; =: the winner is the heuristic's configuration"
    console.print(column_table("tuned", columns, result["cases"], caption))
