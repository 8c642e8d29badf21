"""A comparison of runs on the terminal and in files: tables, comparison.json, plots, page."""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from moejax.core.files import atomic_write_text, dump_json, shown_path
from moejax.report.compare_plots import save_compare_plots
from moejax.report.compare_tables import comparison_tables
from moejax.report.html import write_report
from moejax.report.parts import Parts
from moejax.report.tables import print_lines, stderr_console
from moejax.results.compare import RunComparison, compare
from moejax.results.result import print_ending
from moejax.results.run_folders import usable_runs

COMPARISON_FILE = "comparison.json"


def compare_and_print(
    paths: Sequence[str | os.PathLike[str]],
    metrics: Sequence[str] | None,
    out_dir: Path,
    *,
    across: Iterable[str] = (),
    floor: float | None = None,
    html: bool = False,
) -> RunComparison:
    """Keeps the comparison in `out_dir/comparison.json`, with plots and, with `html`, a `report.html`, and
    prints its tables and outcome on stderr and how many verdicts there are of each kind on stdout. Folders
    whose run has no result are left out, and said to be.

    Raises:
        ConfigError: as `compare`.
        OutputError: some of the files cannot be written; the rest is.
    """
    kept, left = usable_runs(paths)
    comparison = compare(kept, metrics, across=across, floor=floor)
    notes = (*(f"left out {line}" for line in left), *comparison.notes)
    comparison = dataclasses.replace(comparison, notes=notes)
    parts, page = Parts(), None
    with parts.part(COMPARISON_FILE):
        atomic_write_text(out_dir / COMPARISON_FILE, dump_json(comparison.to_dict()) + "\n")
    with parts.part("plots"):
        save_compare_plots(comparison, out_dir)
    if html:
        with parts.part("report.html"):
            page = write_report(kept, out_dir / "report.html")
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
    if page is not None:
        print_lines(console, [f"open {shown_path(page)} in a browser"])
    counts = Counter(verdict.outcome.replace(" ", "_") for verdict in comparison.verdicts)
    print_ending("compare", out_dir, {"runs": len(kept), **counts})
    parts.check(out_dir / COMPARISON_FILE)
    return comparison
