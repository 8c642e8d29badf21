"""Tables for the terminal. They go wherever the caller's console does, by default to stderr: stdout is for
what programs read. No JAX here."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from moejax.report.style import run_title

# Column title and key in a case's row. Short, because eleven of them must fit 80 columns.
_LATENCY_COLUMNS: tuple[tuple[str, str], ...] = (
    ("batch", "batch_size"),
    ("in", "prompt_len"),
    ("out", "output_len"),
    ("TTFT\np50", "median_ttft_ms"),
    ("\np99", "p99_ttft_ms"),
    ("TPOT\np50", "median_tpot_ms"),
    ("\np99", "p99_tpot_ms"),
    ("ITL\np99", "p99_itl_ms"),
    ("E2E\np50", "median_e2el_ms"),
    ("\np99", "p99_e2el_ms"),
    ("tok/s", "output_throughput"),
    ("% of\nroof", "roofline_percent"),
)

# rich takes 80 columns where there is no terminal, and would cut numbers off in a log.
_LOG_WIDTH = 140


def stderr_console() -> Console:
    """A console on stderr; without a terminal it is wide enough for any table here."""
    console = Console(stderr=True)
    return console if console.is_terminal else Console(stderr=True, width=_LOG_WIDTH)


def number(value: Any) -> str:
    """A cell: thousands set apart, digits after the point by size, "–" for None."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if 0 < size < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.{0 if size >= 1000 or size == 0 else 1 if size >= 100 else 2 if size >= 1 else 4}f}"


def latency_table(result: Mapping[str, Any]) -> Table:
    """One line per case: TTFT, TPOT, ITL and E2E at the median and the 99th percentile, and tokens/s."""
    table = Table(
        title=f"{result.get('experiment', '')}: {run_title(result)}",
        caption="in, out: tokens per request; times in ms; tok/s: output tokens;\n"
        "roof: the least time per output token that memory and compute allow, over the measured",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    # A column that no case fills would only take width.
    columns = [c for c in _LATENCY_COLUMNS if any(case.get(c[1]) is not None for case in result["cases"])]
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for case in result["cases"]:
        table.add_row(*(number(case.get(key)) for _, key in columns))
    return table


def metrics_table(metrics: Mapping[str, Any], title: str = "metrics") -> Table:
    """Flat metrics, a line each."""
    table = Table(title=title, title_justify="left")
    table.add_column("metric", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    for name, value in metrics.items():
        table.add_row(name, number(value))
    return table


def rows_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Any rows (a compile ledger, timed variants) under the keys that occur, in order of appearance."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    numeric = {k for k in keys if all(isinstance(row.get(k), (int, float, type(None))) for row in rows)}
    table = Table(title=title, title_justify="left")
    for key in keys:
        table.add_column(key, justify="right" if key in numeric else "left")
    for row in rows:
        table.add_row(*(number(row.get(key)) for key in keys))
    return table


def print_latency(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints `latency_table`."""
    (console or stderr_console()).print(latency_table(result))
