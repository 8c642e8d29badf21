"""Tables of `experiments.kernels`. No JAX here."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from moejax.report.tables import number


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
    """A line per spec and kernel: registers, spills, shared memory, occupancy and products on each target."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    table = _table(
        op,
        "reg: registers a thread (+ spilled bytes); KB: shared memory; occ: warps resident, by what is"
        " limited (r, s, w, b);\nmma: mma.sync or wgmma in the code; cp: cp.async; µs: least time on"
        " A100 (sm_80), H100 (sm_90)",
    )
    for name in ("spec", "kernel", "tile"):
        table.add_column(name, overflow="fold")
    for target in targets:
        for name in (f"{target}\nreg", "\nKB", "\nocc", "\nmma", "\ncp", "\nµs"):
            table.add_column(name, justify="right", no_wrap=True)
    lines: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["implementation"], row["spec"], row["kernel"])
        lines.setdefault(key, {})[row["target"]] = row
    for (_, spec, kernel), found in lines.items():
        any_row = next(iter(found.values()))
        cells = [cell for target in targets for cell in _static_cells(found.get(target))]
        table.add_row(spec, kernel or any_row["implementation"], _tile(any_row["config"]), *cells)
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


def bench_table(op: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Implementations of each spec, one below another, and each one's time over our fastest."""
    table = _table(
        op,
        "µs: median; ±: half the interquartile range, %; bound: least µs at this device's measured rates;"
        " of it: bound over time, %;\nx ours: time over our fastest; err: distance from the reference",
    )
    for name in ("spec", "implementation"):
        table.add_column(name, overflow="fold")
    for name in ("µs", "±", "bound", "of it", "x ours", "err"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        same = [r for r in rows if r["spec"] == row["spec"]]
        best = min((r["median_us"] for r in same if r["ours"] and r.get("median_us")), default=None)
        spec = "" if row["spec"] == previous else row["spec"]
        previous = row["spec"]
        if row["error"]:
            table.add_row(spec, row["implementation"], "–", "", "", "", "", row["error"][:60])
            continue
        table.add_row(
            spec,
            row["implementation"],
            number(row["median_us"]),
            number(100 * row["spread"]),
            number(row["bound_us"]),
            number(100 * row["bound_share"]),
            "–" if best is None else f"{row['median_us'] / best:.2f}",
            "–" if row.get("relative_error") is None else f"{row['relative_error']:.1e}",
        )
    return table


def print_tuned(result: Mapping[str, Any], console: Console) -> None:
    """A line per spec: the winner, and what it saves over the heuristic's configuration."""
    timed = result["metrics"]["timed"]
    what = "timed" if timed else "by the static model, untimed"
    table = _table(f"tuned, {what}", "x: the heuristic's time over the winner's")
    for name in ("kernel", "spec", "winner"):
        table.add_column(name, overflow="fold")
    for name in ("sound", "tried", "µs", "x"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["cases"]:
        base = row["heuristic_us"]
        table.add_row(
            f"{row['op']} {row['implementation']}",
            row["spec"],
            _tile(json.dumps(row["config"])),
            number(row["sound"]),
            number(row["tried"]),
            number(row["us"]),
            "–" if base is None or not row["us"] else f"{base / row['us']:.2f}",
        )
    console.print(table)


def _table(title: str, caption: str) -> Table:
    return Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
