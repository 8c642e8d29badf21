"""Tables for the terminal. They go wherever the caller's console does, by default to stderr: stdout is for
what programs read. No JAX here."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moejax.report.style import case_label, has_peers, mode_label, run_title, tail_key
from moejax.results.machine import DOUBTS, is_share_of_roof
from moejax.results.metric_names import LATENCIES, column_head, unit_of
from moejax.results.metrics import objectives

# rich takes 80 columns where there is no terminal, and would cut numbers off in a log.
_LOG_WIDTH = 140
_BARS, _MOST_HISTOGRAMS = " ▁▂▃▄▅▆▇█", 4
_MUCH_PADDING = 0.5  # share of the computed tokens from which on the buckets' keys are named


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


def rounded(value: float, *limits: float) -> str:
    """A cell of two digits after the point, one less from each of `limits` on; "–" for what is not finite."""
    if isinstance(value, int):
        return f"{value:,}"
    digits = 2 - sum(abs(value) >= limit for limit in limits)
    return f"{value:,.{digits}f}" if math.isfinite(value) else "–"


def three_digits(value: Any) -> str:
    """A cell of about three digits: eleven must fit 80 columns."""
    small = not isinstance(value, float) or 0 < value < 0.01
    return number(value) if small else rounded(value, 10, 100)


def share(value: Any) -> str:
    """A cell of a share, in per cent."""
    return f"{100 * value:.{1 if 0 < value < 0.01 else 0}f}" if isinstance(value, float) else number(value)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its heading.
        key: the field of a row that it shows, or what reads the value from a row.
        scale: what a number is multiplied with.
        cell: writes a value.
        left: whether it is aligned to the left, as words are.
        fold: whether long words go on in the next line; otherwise a cell is one line.
        once: whether a cell is empty below an equal one.
    """

    title: str
    key: str | Callable[[Any], Any]
    scale: float = 1
    cell: Callable[[Any], str] = number
    left: bool = False
    fold: bool = False
    once: bool = False

    def value(self, row: Any) -> Any:
        """Returns what the column shows of a row; None where the row has no value."""
        return self.key(row) if callable(self.key) else row.get(self.key)

    def text(self, row: Any) -> str | Text:
        """Returns a row's cell, "–" where the row has no value; a styled text is a cell already."""
        value = self.value(row)
        if isinstance(value, Text):
            return value
        return "–" if value is None else self.cell(value if self.scale == 1 else value * self.scale)


def plain_table(title: str | None = None, caption: str | None = None, **look: Any) -> Table:
    """Returns an empty table in the look of all tables here; `look` is Rich's."""
    usual = {"title_justify": "left", "caption_justify": "left", "box": box.SIMPLE_HEAD, "pad_edge": False}
    return Table(title=title, caption=caption, **{**usual, "collapse_padding": True, **look})


def filled(columns: Iterable[Column], rows: Sequence[Any]) -> list[Column]:
    """Returns the columns that any row fills; another would only take width. A 99th percentile's column is
    the maximum's, and says so, where a row has too few values for the percentile."""
    shown = []
    for column in columns:
        if isinstance(column.key, str) and (tail := tail_key(column.key, rows)) != column.key:
            column = replace(column, key=tail, title=column.title.replace("p99", "max"))
        if any(column.value(row) is not None for row in rows):
            shown.append(column)
    return shown


def column_table(
    title: str | None,
    columns: Iterable[Column],
    rows: Sequence[Any],
    caption: str | None = None,
    *,
    section: Callable[[Any], Any] | None = None,
    style: Callable[[Any], str | None] | None = None,
    **look: Any,
) -> Table:
    """Returns a table with a line per row, under the columns that any row fills.

    Args:
        section: a row's section, which a rule sets apart from the next; None: there are none.
        style: a row's style of Rich's; None: no row has one.
        look: for `plain_table`.
    """
    table, kept = plain_table(title, caption, **look), filled(columns, rows)
    for column in kept:
        overflow: Any = "fold" if column.fold else "ellipsis"
        justify: Any = "left" if column.left or column.fold else "right"
        table.add_column(column.title, justify=justify, no_wrap=not column.fold, overflow=overflow)
    for above, row in zip((None, *rows), rows, strict=False):
        if section is not None and above is not None and section(above) != section(row):
            table.add_section()
        again = [c.once and above is not None and c.value(above) == c.value(row) for c in kept]
        cells = ["" if same else column.text(row) for column, same in zip(kept, again, strict=True)]
        table.add_row(*cells, style=None if style is None else style(row))
    return table


def print_lines(console: Console, lines: Iterable[str], style: str | None = None) -> None:
    """Prints lines as they are: neither marked up nor coloured by what they hold, nor broken."""
    for line in lines:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


_LATENCY = (
    "batch_size", "prompt_len", "output_len", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms",
    "p99_tpot_ms", "p99_itl_ms", "median_e2el_ms", "p99_e2el_ms", "output_throughput", "roofline_percent",
)  # fmt: skip
_THROUGHPUT = (
    "batching", "concurrency", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms",
    "request_throughput", "request_goodput", "output_throughput", "prefix_hit_rate", "mean_batch_size",
    "cache_use_peak", "padding_waste",
)  # fmt: skip
# Where other engines were measured too: fewer figures of each, and what it is to the first one.
_LATENCY_BESIDE = (
    "backend", "batch_size", "prompt_len", "output_len", "median_ttft_ms", "median_tpot_ms",
    "output_throughput", "roofline_percent", "ttft_ratio", "tpot_ratio", "tokens_agree_percent",
)  # fmt: skip
_THROUGHPUT_BESIDE = (
    "backend", "batching", "concurrency", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms",
    "request_throughput", "request_goodput", "output_throughput", "output_ratio", "tokens_agree_percent",
)  # fmt: skip


_SCALES = {"share": 100, "bytes": 1e-6}  # per cent, MB


def metric_columns(*keys: str, cell: Callable[[Any], str] = three_digits) -> list[Column]:
    """Returns the columns of a case's fields and metrics, headed as the glossary says; shares are in per
    cent. A heading's first line that is the same as the column's before is left out."""
    columns, before = [], ""
    for key in keys:
        unit, head = unit_of(key), column_head(key)
        first, _, below = head.partition("\n")
        title = f"\n{below}" if below and first == before else head
        look = share if unit == "share" and cell is three_digits else cell
        scale = 1 if look is share else _SCALES.get(unit, 1)
        read = partial(roof_cell, key=key) if is_share_of_roof(key) else key
        columns.append(Column(title, read, scale, look, left=unit == "name"))
        before = first
    return columns


def case_notes(result: Mapping[str, Any]) -> str:
    """Returns the end of a caption: what a goodput's objectives are, and how many values a row's latencies
    are of."""
    rows, texts = result["cases"], []
    for name in ("ttft", "tpot", "itl"):
        counts = [int(row[f"{name}_samples"]) for row in rows if row.get(f"{name}_samples")]
        ends = sorted({min(counts), max(counts)}) if counts else []
        texts += [f"{name.upper()} {' to '.join(map(number, ends))}"] if ends else []
    goal, samples = objectives(result), ", ".join(texts)
    text = f"\ngood: requests with {goal}" if goal else ""
    of = "round" if "variants" in result else "row"
    return text + (f"\nvalues a {of}: {samples}; max: of under 100, which have no p99" if samples else "")


def roof_cell(row: Mapping[str, Any], key: str = "roofline_percent") -> Any:
    """Returns a row's share of the roof, in its place the word for why it has none that is true."""
    word, _ = DOUBTS.get(row.get("roofline_doubt", ""), (None, None))
    return row.get(key) if row.get(key) is not None else word


def latency_table(result: Mapping[str, Any]) -> Table:
    """One line per case: TTFT, TPOT, ITL and E2E at the median and the 99th percentile, and tokens/s; beside
    peers a line for each backend, with ratios."""
    cases, beside = result["cases"], has_peers(result)
    caption = "in, out: tokens per request; times in ms; tok/s: output tokens"
    if any(roof_cell(case) is not None for case in cases):
        caption += ";\n% of roof: the least time per token that memory and compute allow, over the measured"
    columns = metric_columns(*_LATENCY_BESIDE) if beside else metric_columns(*_LATENCY, cell=number)
    return column_table(
        f"{result.get('experiment', '')}: {run_title(result)}",
        columns,
        cases,
        caption + case_notes(result) + _beside_caption(result),
        section=case_label if beside else None,
    )


def _beside_caption(result: Mapping[str, Any]) -> str:
    """Explains the columns beside peers; nothing without peers."""
    cases = result["cases"]
    text = ""
    if any(case.get("tpot_ratio") is not None or case.get("output_ratio") is not None for case in cases):
        text += f"\nratio: over {cases[0]['backend']}'s, median of the iterations in turns"
    if any(case.get("tokens_agree_percent") is not None for case in cases):
        text += "\nsame tok: share of the greedy tokens that agree, up to the first that does not"
    return text


def histogram_lines(result: Mapping[str, Any], label: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """Returns a line for each latency of up to four cases: its ten bins as bars from the least to the most;
    no line of more cases, which plots show better."""
    found = list(zip(result["cases"], result.get("histograms") or (), strict=False))
    lines = []
    for case, bins in found if len(found) <= _MOST_HISTOGRAMS else ():
        for name, one in bins.items():
            top = max(one["counts"])
            bars = "".join(_BARS[math.ceil(8 * count / top)] for count in one["counts"])
            low, high = (number(one["edges_ms"][end]) for end in (0, -1))
            lines.append(f"{LATENCIES[name]:<4} {low:>7} ▕{bars}▏ {high} ms  {label(case)}".rstrip())
    return lines


def throughput_table(result: Mapping[str, Any]) -> Table:
    """One line per batching mode, and below two of them the first one's figures over the second's; beside
    peers a line for each backend, with ratios."""
    cases, beside = result["cases"], has_peers(result)
    caption = "times in ms; tok/s: output tokens"
    if not beside:
        caption += "; seqs: mean sequences in a step;\ncache: most blocks in use; pad: padding in tokens"
    columns = filled(metric_columns(*(_THROUGHPUT_BESIDE if beside else _THROUGHPUT)), cases)
    table = column_table(
        f"{result.get('experiment', '')}: {run_title(result)}\n{_traffic(cases[0])}",
        columns,
        cases,
        caption + case_notes(result) + (_beside_caption(result) if beside else ""),
    )
    if len(cases) == 2 and not beside and cases[0]["batching"] != cases[1]["batching"]:
        table.add_section()
        ratios = [_ratio(column.value(cases[0]), column.value(cases[1])) for column in columns[1:]]
        table.add_row("ratio", *ratios, style="bold")
    return table


def groups_table(result: Mapping[str, Any]) -> Table | None:
    """One line per class and per tenant of each mode or variant; None where all requests are alike."""
    rows = result.get("groups") or []
    first = "variant" if rows and "variant" in rows[0] else "batching"
    columns = [
        *metric_columns(first),
        Column("who", "group", left=True),
        Column("requests", "requests"),
        *metric_columns(
            "slo_attainment", "median_ttft_ms", "p99_ttft_ms", "median_e2el_ms", "p99_e2el_ms",
            "total_output_tokens",
        ),
    ]  # fmt: skip
    note = "times in ms; kept: completed before the deadline and within the class's objectives, in per cent"
    return column_table("by class and tenant", columns, rows, note) if rows else None


def _traffic(case: Mapping[str, Any]) -> str:
    """Describes the requests of a throughput case in words."""
    rate, timed = case.get("request_rate"), "of users in turn" if "concurrency" in case else "from a trace"
    arrival = timed if rate is None else "all at once" if rate == "inf" else f"at {rate:g}/s"
    return (
        f"{number(case['num_requests'])} requests {arrival}"
        + (f", at most {case['max_num_seqs']} running" if case["max_num_seqs"] else "")
        + f"; mean {case['prompt_len']} in, {case['output_len']} out"
    )


def _ratio(value: float | None, base: float | None) -> str:
    return "–" if value is None or not base else f"{value / base:.2f}"


def metrics_table(metrics: Mapping[str, Any], title: str = "metrics") -> Table:
    """Flat metrics, a line each."""
    columns = Column("metric", lambda item: item[0], left=True), Column("value", lambda item: number(item[1]))
    return column_table(title, columns, list(metrics.items()))


def rows_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Any rows (a compile ledger, timed variants) under the keys that occur, in order of appearance."""
    keys = dict.fromkeys(key for row in rows for key in row)
    words = {key for key in keys if any(isinstance(row.get(key), str) for row in rows)}
    return column_table(title, [Column(key, key, left=key in words) for key in keys], rows)


def backends_table(result: Mapping[str, Any]) -> Table | None:
    """The engines measured beside ours: versions, dtype, threads, bytes of weights and of the process at its
    peak. None without peers."""
    if not has_peers(result):
        return None

    def versions(backend: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} {version}" for name, version in backend.get("versions", {}).items())

    columns = (
        Column("backend", "name", fold=True),
        Column("versions", versions, fold=True),
        Column("weights as", "dtype", fold=True),
        Column("threads", "threads"),
        Column(column_head("model_bytes"), "model_bytes", 1e-6, "{:,.0f}".format),
        Column(column_head("process_peak_bytes"), "process_peak_bytes", 1e-6, "{:,.0f}".format),
    )
    return column_table(None, columns, result.get("backends", []))


def print_latency(result: Mapping[str, Any], console: Console) -> None:
    """Prints `latency_table`, the peers, and in yellow the assignments that were dropped."""
    console.print(latency_table(result))
    _print_backends(result, console)
    print_lines(console, histogram_lines(result, partial(case_label, separator=" ", named=has_peers(result))))
    if dropped := result["metrics"].get("dropped_assignments"):
        text = f"{dropped} expert assignments dropped for lack of capacity (recorded pass)"
        print_lines(console, [text], "yellow")


def _print_backends(result: Mapping[str, Any], console: Console) -> None:
    if (table := backends_table(result)) is not None:
        console.print(table)


def print_throughput(result: Mapping[str, Any], console: Console) -> None:
    """Prints `throughput_table`, in red what did not end well, which is in no other figure, and in yellow the
    keys against much padding."""
    console.print(throughput_table(result))
    if (groups := groups_table(result)) is not None:
        console.print(groups)
    _print_backends(result, console)
    print_lines(console, histogram_lines(result, partial(mode_label, result)))
    for case in result["cases"]:
        counts = (
            (case["failed"], "failed"), (case["aborted"], "aborted"), (case["failed_steps"], "failed steps")
        )  # fmt: skip
        lost = ", ".join(f"{count} {what}" for count, what in counts if count)
        if lost:
            reason = f"; first error: {case['first_error']}" if case.get("first_error") else ""
            total = f"of {number(case['completed'] + case['failed'] + case['aborted'])} requests"
            print_lines(console, [f"{mode_label(result, case)}: {lost} {total}{reason}"], "red")
        if (padding := case.get("padding_waste") or 0) >= _MUCH_PADDING:
            text = f"{mode_label(result, case)}: {share(padding)} % of the computed tokens are padding; finer"
            text += " engine.token_buckets (prompt tokens of a step) or engine.seq_buckets (sequences) help"
            print_lines(console, [text], "yellow")


def print_closing(
    console: Console, hints: Iterable[str], compile_ledger: Iterable[Mapping[str, Any]] = ()
) -> None:
    """Prints the end of a run: compilations that were none of the measurement's business, and the tracker's
    lines, ready to paste."""
    late = [entry for entry in compile_ledger if entry["after_warmup"]]
    recompiled = [f"{entry['function']} {entry['key']} ({entry['cause']})" for entry in late]
    print_lines(console, [f"recompiled while measuring: {text}" for text in recompiled], "red")
    print_lines(console, hints)
