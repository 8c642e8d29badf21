"""A comparison of runs on the terminal and in files: tables, comparison.json, plots, page."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from moejax.core.files import atomic_write_text, dump_json
from moejax.report.compare_plots import save_compare_plots
from moejax.report.compare_tables import comparison_tables
from moejax.report.html import write_report
from moejax.report.tables import print_lines, shown_path, stderr_console
from moejax.results.compare import RunComparison, compare
from moejax.results.run_folders import usable_runs


def save_comparison(comparison: RunComparison, out_dir: str | os.PathLike[str]) -> list[Path]:
    """Writes `comparison.json` and the plots into `out_dir`; returns the files.

    Raises:
        OutputError: they cannot be written.
    """
    file = atomic_write_text(Path(out_dir) / "comparison.json", dump_json(comparison.to_dict()) + "\n")
    return [file, *save_compare_plots(comparison, out_dir)]


def compare_and_print(
    paths: Sequence[str | os.PathLike[str]],
    metrics: Sequence[str] | None,
    out_dir: Path,
    *,
    across: Iterable[str] = (),
    floor: float | None = None,
    html: bool = False,
) -> RunComparison:
    """Prints the tables on stderr, the comparison as one JSON line on stdout, and keeps both, with plots, in
    `out_dir`; with `html` also a `report.html`. Folders whose run has no result are left out, and said to be.

    Raises:
        ConfigError: as `compare`.
        OutputError: the files cannot be written.
    """
    kept, left = usable_runs(paths)
    comparison = compare(kept, metrics, across=across, floor=floor)
    notes = (*(f"left out {line}" for line in left), *comparison.notes)
    comparison = dataclasses.replace(comparison, notes=notes)
    save_comparison(comparison, out_dir)
    page = write_report(kept, out_dir / "report.html") if html else None
    print_comparison(comparison, out_dir, page)
    print(dump_json(comparison.to_dict()))
    return comparison


def print_comparison(comparison: RunComparison, out_dir: Path, page: Path | None) -> None:
    """The tables, what is to be known, the outcome in words and where the files are."""
    console = stderr_console()
    for table in comparison_tables(comparison):
        console.print(table)
    print_lines(console, comparison.notes, "yellow")
    for line in comparison.lines():
        style = "" if line.startswith(" ") else "bold"
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=False)
    if any(v.outcome == "no winner" and "session" in v.text for v in comparison.verdicts):
        hint = "smaller differences show where variants take turns in one session: experiment=ab"
        console.print(hint, style="dim", highlight=False)
    few = [v.text for v in comparison.verdicts if v.text.startswith("too few iterations")]
    if few:
        needed = max(int(text.rpartition(" ")[2]) for text in few)
        console.print(f"enough would be: workload.iterations={needed}", style="dim", highlight=False)
    opened = [] if page is None else [f"open {shown_path(page)} in a browser"]
    print_lines(console, [f"results: {shown_path(out_dir)}", *opened])
