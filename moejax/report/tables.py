"""Tables for the terminal. They go wherever the caller's console does, by default to stderr: stdout is for
what programs read. No JAX here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from moejax.report.style import has_peers, mode_label, run_title

# rich takes 80 columns where there is no terminal, and would cut numbers off in a log.
_LOG_WIDTH = 140


def stderr_console() -> Console:
    """A console on stderr; without a terminal it is wide enough for any table here."""
    # In Jupyter too: rich would show tables past stderr, where nobody can redirect them.
    console = Console(stderr=True, force_jupyter=False)
    return console if console.is_terminal else Console(stderr=True, force_jupyter=False, width=_LOG_WIDTH)


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


def three_digits(value: Any) -> str:
    """A cell of about three digits: eleven must fit 80 columns."""
    if not isinstance(value, float) or 0 < value < 0.01:
        return number(value)
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def share(value: Any) -> str:
    """A cell of a share, in per cent."""
    return f"{100 * value:.{1 if 0 < value < 0.01 else 0}f}" if isinstance(value, float) else number(value)


@dataclass(frozen=True)
class Column:
    """A column of a table of rows.

    Attributes:
        title: its heading.
        key: in a row.
        scale: what a number is multiplied with.
        cell: writes a value.
        left: whether it is aligned to the left, as words are.
    """

    title: str
    key: str
    scale: float = 1
    cell: Callable[[Any], str] = number
    left: bool = False

    def text(self, row: Mapping[str, Any]) -> str:
        """Returns a row's cell, "–" where the row has no value."""
        value = row.get(self.key)
        return "–" if value is None else self.cell(value if self.scale == 1 else value * self.scale)


def plain_table(title: str | None = None, caption: str | None = None, **look: Any) -> Table:
    """Returns an empty table in the look of all tables here; `look` is Rich's."""
    usual = {"title_justify": "left", "caption_justify": "left", "box": box.SIMPLE_HEAD, "pad_edge": False}
    return Table(title=title, caption=caption, **{**usual, "collapse_padding": True, **look})


def add_columns(table: Table, columns: Iterable[Column], rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Adds the columns that any row fills, another would only take width, and returns them."""
    kept = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    for column in kept:
        table.add_column(column.title, justify="left" if column.left else "right", no_wrap=True)
    return kept


# Titles are short, because tables must fit 80 columns.
_LATENCY_COLUMNS: tuple[Column, ...] = (
    Column("batch", "batch_size"),
    Column("in", "prompt_len"),
    Column("out", "output_len"),
    Column("TTFT\np50", "median_ttft_ms"),
    Column("\np99", "p99_ttft_ms"),
    Column("TPOT\np50", "median_tpot_ms"),
    Column("\np99", "p99_tpot_ms"),
    Column("ITL\np99", "p99_itl_ms"),
    Column("E2E\np50", "median_e2el_ms"),
    Column("\np99", "p99_e2el_ms"),
    Column("tok/s", "output_throughput"),
    Column("% of\nroof", "roofline_percent"),
)

_THROUGHPUT_COLUMNS: tuple[Column, ...] = (
    Column("batching", "batching", left=True),
    Column("TTFT\np50", "median_ttft_ms", cell=three_digits),
    Column("\np99", "p99_ttft_ms", cell=three_digits),
    Column("TPOT\np50", "median_tpot_ms", cell=three_digits),
    Column("ITL\np99", "p99_itl_ms", cell=three_digits),
    Column("req/s", "request_throughput", cell=three_digits),
    Column("good\nreq/s", "request_goodput", cell=three_digits),
    Column("tok/s", "output_throughput", cell=three_digits),
    Column("seqs", "mean_batch_size", cell=three_digits),
    Column("cache\n%", "cache_use_peak", cell=share),
    Column("pad\n%", "padding_waste", cell=share),
)

# Where other engines were measured too: fewer figures of each, and what it is to the first one.
_LATENCY_BESIDE: tuple[Column, ...] = (
    Column("backend", "backend", left=True),
    Column("batch", "batch_size", cell=three_digits),
    Column("in", "prompt_len", cell=three_digits),
    Column("out", "output_len", cell=three_digits),
    Column("TTFT\np50", "median_ttft_ms", cell=three_digits),
    Column("TPOT\np50", "median_tpot_ms", cell=three_digits),
    Column("tok/s", "output_throughput", cell=three_digits),
    Column("% of\nroof", "roofline_percent", cell=three_digits),
    Column("TTFT\nratio", "ttft_ratio", cell=three_digits),
    Column("TPOT\nratio", "tpot_ratio", cell=three_digits),
    Column("same\ntok %", "tokens_agree_percent", cell=three_digits),
)
_THROUGHPUT_BESIDE: tuple[Column, ...] = (
    Column("backend", "backend", left=True),
    Column("batching", "batching", left=True),
    Column("TTFT\np50", "median_ttft_ms", cell=three_digits),
    Column("\np99", "p99_ttft_ms", cell=three_digits),
    Column("TPOT\np50", "median_tpot_ms", cell=three_digits),
    Column("req/s", "request_throughput", cell=three_digits),
    Column("good\nreq/s", "request_goodput", cell=three_digits),
    Column("tok/s", "output_throughput", cell=three_digits),
    Column("tok/s\nratio", "output_ratio", cell=three_digits),
    Column("same\ntok %", "tokens_agree_percent", cell=three_digits),
)


def latency_table(result: Mapping[str, Any]) -> Table:
    """One line per case: TTFT, TPOT, ITL and E2E at the median and the 99th percentile, and tokens/s; beside
    peers a line for each backend, with ratios."""
    caption = "in, out: tokens per request; times in ms; tok/s: output tokens;\n"
    if any(case.get("roofline_percent") is not None for case in result["cases"]):
        caption += "roof: the least time per output token that memory and compute allow, over the measured"
    beside = has_peers(result)
    table = plain_table(
        f"{result.get('experiment', '')}: {run_title(result)}",
        caption.rstrip(";\n") + _beside_caption(result),
    )
    columns = add_columns(table, _LATENCY_BESIDE if beside else _LATENCY_COLUMNS, result["cases"])
    before = None
    for case in result["cases"]:
        shape = tuple(case.get(key) for key in ("batch_size", "prompt_len", "output_len"))
        if beside and before not in (None, shape):
            table.add_section()
        before = shape
        table.add_row(*(column.text(case) for column in columns))
    return table


def _beside_caption(result: Mapping[str, Any]) -> str:
    """Explains the columns beside peers; nothing without peers."""
    cases = result["cases"]
    text = ""
    if any(case.get("tpot_ratio") is not None or case.get("output_ratio") is not None for case in cases):
        text += f"\nratio: over {cases[0]['backend']}'s, median of the iterations in turns"
    if any(case.get("tokens_agree_percent") is not None for case in cases):
        text += "\nsame tok: share of the greedy tokens that agree, up to the first that does not"
    return text


def throughput_table(result: Mapping[str, Any]) -> Table:
    """One line per batching mode, and below two of them the first one's figures over the second's; beside
    peers a line for each backend, with ratios."""
    cases, beside = result["cases"], has_peers(result)
    caption = (
        "times in ms; tok/s: output tokens; seqs: mean sequences in a step;\n"
        "cache: most blocks in use; pad: padding in computed tokens"
    )
    table = plain_table(
        f"{result.get('experiment', '')}: {run_title(result)}\n{_traffic(cases[0])}",
        "times in ms; tok/s: output tokens" + _beside_caption(result) if beside else caption,
    )
    columns = add_columns(table, _THROUGHPUT_BESIDE if beside else _THROUGHPUT_COLUMNS, cases)
    for case in cases:
        table.add_row(*(column.text(case) for column in columns))
    if len(cases) == 2 and not beside:
        table.add_section()
        ratios = [_ratio(cases[0].get(column.key), cases[1].get(column.key)) for column in columns[1:]]
        table.add_row("ratio", *ratios, style="bold")
    return table


def _traffic(case: Mapping[str, Any]) -> str:
    """Describes the requests of a throughput case in words."""
    rate = case.get("request_rate")
    arrival = "from a trace" if rate is None else "all at once" if rate == "inf" else f"at {rate:g}/s"
    return (
        f"{number(case['num_requests'])} requests {arrival}"
        + (f", at most {case['max_num_seqs']} running" if case["max_num_seqs"] else "")
        + f"; mean {case['prompt_len']} in, {case['output_len']} out"
    )


def _ratio(value: float | None, base: float | None) -> str:
    return "–" if value is None or not base else f"{value / base:.2f}"


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


def backends_table(result: Mapping[str, Any]) -> Table | None:
    """The engines measured beside ours: versions, dtype, threads, bytes of weights and of the process at its
    peak. None without peers."""
    if not has_peers(result):
        return None
    table = plain_table()
    for name in ("backend", "versions", "weights as", "threads", "weights\nMB", "process\npeak MB"):
        table.add_column(name, justify="right" if "MB" in name or name == "threads" else "left")
    for backend in result.get("backends", []):
        versions = ", ".join(f"{name} {version}" for name, version in backend.get("versions", {}).items())
        sizes = [backend.get(key) for key in ("weight_bytes", "host_peak_bytes")]
        cells = (backend.get("name"), versions, backend.get("dtype"), backend.get("threads"))
        table.add_row(
            *("–" if cell is None else str(cell) for cell in cells),
            *("–" if size is None else f"{size / 1e6:,.0f}" for size in sizes),
        )
    return table


def print_latency(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints `latency_table`, the peers, and in yellow the assignments that were dropped."""
    console = console or stderr_console()
    console.print(latency_table(result))
    _print_backends(result, console)
    if dropped := result["metrics"].get("dropped_assignments"):
        console.print(
            f"{dropped} expert assignments dropped for lack of capacity (recorded pass)", style="yellow"
        )


def _print_backends(result: Mapping[str, Any], console: Console) -> None:
    if (table := backends_table(result)) is not None:
        console.print(table)


def print_throughput(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints `throughput_table`, and in red what did not end well: it is in no other figure."""
    console = console or stderr_console()
    console.print(throughput_table(result))
    _print_backends(result, console)
    for case in result["cases"]:
        counts = (
            (case["failed"], "failed"), (case["aborted"], "aborted"), (case["failed_steps"], "failed steps")
        )  # fmt: skip
        lost = ", ".join(f"{count} {what}" for count, what in counts if count)
        if lost:
            reason = f"; first error: {case['first_error']}" if case.get("first_error") else ""
            total = f"of {number(case['completed'] + case['failed'] + case['aborted'])} requests"
            console.print(f"{mode_label(result, case)}: {lost} {total}{reason}", style="red", markup=False)


def print_closing(
    console: Console, out_dir: Path, hints: Iterable[str], compile_ledger: Iterable[Mapping[str, Any]] = ()
) -> None:
    """Prints the end of a run: compilations that were none of the measurement's business, where the results
    are, and the tracker's lines, ready to paste."""
    for entry in compile_ledger:
        if entry["after_warmup"]:
            text = f"recompiled while measuring: {entry['function']} {entry['key']} ({entry['cause']})"
            console.print(text, style="red", markup=False)
    console.print(f"results: {shown_path(out_dir)}", soft_wrap=True, highlight=False)
    for line in hints:
        console.print(line, soft_wrap=True, highlight=False)


def shown_path(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    here, there = Path.cwd().resolve(), path.resolve()
    return str(there.relative_to(here)) if there.is_relative_to(here) else str(path)
