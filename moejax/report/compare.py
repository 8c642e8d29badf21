"""Several results side by side: metrics with their ratio to the first, and what differs in how they came
about. No JAX here."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from moejax.bench.result import RESULT_FILE, load_result
from moejax.core.errors import ConfigError, unknown
from moejax.core.files import atomic_write_text, dump_json
from moejax.report.tables import number, stderr_console

DEFAULT_METRICS: tuple[str, ...] = (
    "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "median_itl_ms", "p99_itl_ms",
    "median_e2el_ms", "p99_e2el_ms", "request_throughput", "output_throughput", "total_token_throughput",
    "request_goodput", "p99_queue_ms", "mean_batch_size", "cache_use_mean", "padding_waste", "preemptions",
    "failed", "speedup_over_static",
)  # fmt: skip

# Differences in these say nothing about the numbers.
_IGNORED_PROVENANCE = ("config", "config_hash", "time_utc", "argv")


@dataclass(frozen=True)
class MetricRow:
    """One metric of every run. `ratios[i]` is value i over the first; None where it is not defined."""

    name: str
    values: tuple[float | None, ...]
    ratios: tuple[float | None, ...]

    @property
    def lower_is_better(self) -> bool | None:
        """True for times and losses, False for rates, None where neither is known to be better."""
        if self.name.endswith(
            ("_ms", "_s", "_bytes", "loss", "perplexity", "_waste", "preemptions", "failed")
        ):
            return True
        return False if self.name.endswith(("throughput", "goodput", "speedup_over_static")) else None


@dataclass(frozen=True)
class RunComparison:
    """Runs by name; their metrics; configuration and provenance keys (dotted) whose values are not all
    equal. A key that a run lacks has the value `MISSING`."""

    names: tuple[str, ...]
    metrics: tuple[MetricRow, ...]
    config: dict[str, tuple[Any, ...]]
    provenance: dict[str, tuple[Any, ...]]


MISSING = "(none)"


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; lists stay values, and so do empty mappings."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            flat.update(flatten(item, f"{name}."))
        else:
            flat[name] = item
    return flat


def differences(values: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Dotted keys whose values are not all equal, with the value of each mapping."""
    flats = [flatten(value) for value in values]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    rows = {key: tuple(flat.get(key, MISSING) for flat in flats) for key in keys}
    return {key: row for key, row in rows.items() if any(item != row[0] for item in row)}


def run_names(paths: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The shortest ends of the runs' folders that tell them apart; the same folder twice gets a number."""
    folders = [Path(p).parent if Path(p).name == RESULT_FILE else Path(p) for p in paths]
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max((len(p) for p in parts), default=1) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            break
    return tuple(f"{n} ({names[:i].count(n) + 1})" if n in names[:i] else n for i, n in enumerate(names))


def _metric_row(name: str, results: Sequence[Mapping[str, Any]]) -> MetricRow:
    values = tuple(result["metrics"].get(name) for result in results)
    base = values[0]
    return MetricRow(name, values, tuple(None if v is None or not base else v / base for v in values))


def compare_results(
    paths: Sequence[str | os.PathLike[str]], metrics: Sequence[str] | None = None
) -> RunComparison:
    """Loads and compares results.

    Args:
        paths: result.json files or their folders; the first is what ratios refer to.
        metrics: names to compare; None takes those of `DEFAULT_METRICS` that any run has, or else all
            numeric ones.

    Raises:
        ConfigError: no path, a file that is no result, or a metric that no run has.
    """
    if not paths:
        raise ConfigError("compare needs at least one result.json or run folder")
    results = [load_result(path) for path in paths]
    known = {
        name: None
        for result in results
        for name, value in result["metrics"].items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if metrics is None:
        chosen = [name for name in DEFAULT_METRICS if name in known] or list(known)
    else:
        chosen = list(metrics)
        for name in chosen:
            if name not in known:
                raise ConfigError(unknown("metric", name, known))
    kept = [{k: v for k, v in r["provenance"].items() if k not in _IGNORED_PROVENANCE} for r in results]
    return RunComparison(
        names=run_names(paths),
        metrics=tuple(_metric_row(name, results) for name in chosen),
        config=differences([result["config"] for result in results]),
        provenance=differences(kept),
    )


def _cell(row: MetricRow, index: int) -> Text:
    text = Text(number(row.values[index]))
    ratio = row.ratios[index]
    if index == 0 or ratio is None:
        return text
    style = "dim"
    # Within two per cent is noise on most machines; it gets no colour.
    if row.lower_is_better is not None and abs(ratio - 1) > 0.02:
        style = "green" if (ratio < 1) == row.lower_is_better else "red"
    return text.append(f"  {ratio:.2f}x", style=style)


def comparison_tables(comparison: RunComparison) -> list[Table]:
    """The metrics' table, and one for each of configuration and provenance that differ."""
    metrics = Table(title="metrics, with ratio to the first run", title_justify="left")
    metrics.add_column("metric", no_wrap=True)
    for name in comparison.names:
        metrics.add_column(name, justify="right", overflow="fold")
    for row in comparison.metrics:
        metrics.add_row(row.name, *(_cell(row, index) for index in range(len(comparison.names))))
    tables = [metrics]
    for title, rows in (("configuration", comparison.config), ("provenance", comparison.provenance)):
        if rows:
            table = Table(title=f"{title}: what differs", title_justify="left")
            table.add_column("key", overflow="fold")
            for name in comparison.names:
                table.add_column(name, overflow="fold")
            for key, values in rows.items():
                cells = (Text(str(v), style="" if v == values[0] else "bold yellow") for v in values)
                table.add_row(key, *cells)
            tables.append(table)
    return tables


def compare_and_print(
    paths: Sequence[str | os.PathLike[str]], metrics: Sequence[str] | None, out_dir: Path
) -> RunComparison:
    """Prints the tables on stderr, the comparison as one JSON line on stdout, and keeps the line in
    `out_dir/comparison.json`."""
    comparison = compare_results(paths, metrics)
    console = stderr_console()
    for table in comparison_tables(comparison):
        console.print(table)
    line = dump_json(dataclasses.asdict(comparison))
    atomic_write_text(out_dir / "comparison.json", line + "\n")
    print(line)
    return comparison
