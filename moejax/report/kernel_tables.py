"""Tables of `experiments.kernels`. No JAX here."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from moejax.report.tables import number, plain_table


def print_static(result: Mapping[str, Any], console: Console) -> None:
    """A table per operation, the targets side by side, then what fails the gate, in red."""
    by_op: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["cases"]:
        by_op.setdefault(row["op"], []).append(row)
    for op, rows in by_op.items():
        console.print(static_table(op, rows))
    about, metrics = result["compiler"], result["metrics"]
    console.print(
        f"{metrics['kernels']} kernels, triton {about['triton']}, jax {about['jax']}", highlight=False
    )
    for line in [*result["failures"], *result["grown"]]:
        console.print(line, style="red", markup=False, soft_wrap=True)


def static_table(op: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A line per kernel and spec: registers, spills, shared memory, occupancy and products on each target.

    Kernels and models are headings of their own, or names would leave no room for figures at 100 columns.
    """
    targets = list(dict.fromkeys(row["target"] for row in rows))
    table = plain_table(
        op,
        "reg: registers a thread (+ spilled bytes); KB: shared memory; occ: warps resident, by what is\n"
        "limited (r, s, w, b); mma: mma.sync or wgmma in the code; cp: cp.async;\n"
        "µs: least time on A100 (sm_80), H100 (sm_90)",
    )
    for name in ("spec", "tile"):
        table.add_column(name, overflow="fold")
    for target in targets:
        for name in (f"{target}\nreg", "\nKB", "\nocc", "\nmma", "\ncp", "\nµs"):
            table.add_column(name, justify="right", no_wrap=True)
    kernels: dict[tuple[str, str], dict[str, dict[str, Mapping[str, Any]]]] = {}
    for row in rows:
        specs = kernels.setdefault((row["implementation"], row["kernel"]), {})
        specs.setdefault(row["spec"], {})[row["target"]] = row
    for (implementation, kernel), specs in kernels.items():
        table.add_row(kernel or implementation, style="bold")
        model = None
        for spec, by_target in specs.items():
            first, _, rest = spec.partition("/")
            if first != model and rest:
                table.add_row(f" {first}", style="dim")
            model = first
            cells = [cell for target in targets for cell in _static_cells(by_target.get(target))]
            table.add_row(f"  {rest or first}", _tile(next(iter(by_target.values()))["config"]), *cells)
    return table


def _static_cells(row: Mapping[str, Any] | None) -> list[str]:
    if row is None:
        return ["–"] * 6
    if row["error"]:
        return ["error", "", "", "", "", ""]
    spill = row["spill_stores"] + row["spill_loads"]
    products = row["mma_sync"] or row["wgmma"]
    missed = "!" if row["products_missed"] else ""
    return [
        f"{row['registers']}" + (f"+{spill}" if spill else ""),
        f"{row['shared'] / 1024:.0f}",
        f"{100 * row['occupancy']:.0f}{row['limiter'][0]}",
        f"{products}{missed}" if row["products"] else "–",
        str(row["cp_async"]) if row["cp_async"] else "–",
        number(row["roofline_us"]),
    ]


def _tile(config: str) -> str:
    """A configuration's numbers, in their order: `16x64x128 w4s3`."""
    values = json.loads(config)
    warps, stages = values.pop("num_warps", None), values.pop("num_stages", None)
    tile = "x".join(str(value) for value in values.values())
    return f"{tile} w{warps}s{stages}" if warps else tile


def print_bench(result: Mapping[str, Any], console: Console) -> None:
    """A line per implementation: time, bound, shares; what did not run, with its reason."""
    metrics = result["metrics"]
    console.print(
        f"measured: copy {metrics['copy_bandwidth'] / 1e9:,.0f} GB/s,"
        f" bfloat16 product {metrics['matmul_bfloat16'] / 1e12:,.0f} TFLOP/s,"
        f" int8 {metrics['matmul_int8'] / 1e12:,.0f}",
        highlight=False,
    )
    by_op: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["cases"]:
        by_op.setdefault(row["op"], []).append(row)
    for op, rows in by_op.items():
        console.print(bench_table(op, rows))
        for line, style in bench_faults(rows):
            console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


_WRONG = "wrong result"


def bench_table(op: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Implementations of each spec, one below another, and each one's time over our fastest.

    What has no time is marked; `bench_faults` says why.
    """
    gains = any(row.get("speedup_over_bf16") for row in rows)
    table = plain_table(
        op,
        "µs: median; ±: half the interquartile range, %; bound: least µs at this device's measured rates;\n"
        "of it: bound over time, %; x ours: time over our fastest; err: distance from the reference"
        + (";\nx bf16: the bf16 row's time over it" if gains else ""),
    )
    for name in ("spec", "implementation"):
        table.add_column(name, overflow="fold")
    names = ("µs", "±", "bound", "of it", "x ours", "err", *(["x bf16"] if gains else []))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        same = [r for r in rows if r["spec"] == row["spec"]]
        best = min(
            (r["median_us"] for r in same if r["ours"] and r.get("median_us") and not r["error"]),
            default=None,
        )
        spec = "" if row["spec"] == previous else row["spec"]
        previous = row["spec"]
        error = row.get("relative_error")
        distance = "–" if error is None else f"{error:.1e}"
        if row["error"]:
            wrong = row["error"].startswith(_WRONG)
            # JSON has no word for infinity: there it is null.
            distance = "inf" if wrong and (error is None or error == float("inf")) else distance
            name, style = f"{row['implementation']}{' WRONG' if wrong else ''}", "red" if wrong else "dim"
            table.add_row(spec, name, "–", "", "", "", "", distance if wrong else "", style=style)
            continue
        gain = row.get("speedup_over_bf16")
        table.add_row(
            spec,
            row["implementation"],
            number(row["median_us"]),
            number(100 * row["spread"]) if row["spread"] is not None else "–",
            number(row["bound_us"]),
            number(100 * row["bound_share"]) if row["bound_share"] is not None else "–",
            "–" if best is None else f"{row['median_us'] / best:.2f}",
            distance,
            *([] if not gains else ["" if gain is None else f"{gain:.2f}"]),
        )
    return table


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
    timed = result["metrics"]["timed"]
    what = "timed" if timed else "by the static model, untimed"
    table = plain_table(
        f"tuned, {what}",
        "x: the heuristic's time over the winner's; =: the winner is the heuristic's configuration",
    )
    for name in ("kernel", "spec", "winner"):
        table.add_column(name, overflow="fold")
    for name in ("sound", "tried", "µs", "x"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["cases"]:
        base = row["heuristic_us"]
        table.add_row(
            f"{row['op']} {row['implementation']}",
            row["spec"],
            ("= " if row["is_heuristic"] else "") + _tile(json.dumps(row["config"])),
            number(row["sound"]),
            number(row["tried"]),
            number(row["us"]),
            "–" if base is None or not row["us"] else f"{base / row['us']:.2f}",
        )
    console.print(table)
