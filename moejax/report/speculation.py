"""The table of drafts of an A/B result (`moejax.bench.ab.speculation`). No JAX here."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from moejax.report.tables import Column, column_table, metric_columns, number
from moejax.results.compare.samples import short_case_name

_LOOPS = ("plain", "overlapped")
_NOTE = (
    "(x): over a step without drafts; step: a step's time over the plain and the overlapped loop's,"
    "\nas many tokens as break even; even: drafts that must be right for that; speed over: 2 is twice as fast"
)


def speculation_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a line for each variant and case: what its drafts gave, what a step with them computes and
    takes, and how fast that is beside the loops without drafts."""
    several = len({row["case"] for row in rows}) > 1
    columns = [
        Column("variant", "variant", left=True),
        *([Column("case", short_case_name, left=True)] if several else []),
        *metric_columns("tokens_per_step", "draft_acceptance"),
        Column("right by\nplace (%)", lambda row: _joined(row["acceptance_by_place"], 100), left=True),
        Column("rows\na step", "rows_per_step"),
        Column("experts\nhit", partial(_over, name="mean_experts_hit", over="experts_over_plain")),
        Column("MB\na step", partial(_over, name="decode_step_mbytes", over="bytes_over_plain")),
        Column("step (x)\nplain, ov.", lambda row: _joined(_of_loops(row, "step_time"), 1, ".2f")),
        Column("even (%)\nplain, ov.", lambda row: _joined(_of_loops(row, "break_even"), 100)),
        *(Column(f"speed over\n{loop}", partial(_speed, loop=loop)) for loop in _LOOPS),
    ]
    return column_table("speculative decoding", columns, rows, _NOTE)


def _of_loops(row: Mapping[str, Any], what: str) -> list[float | None]:
    return [row.get(f"{what}_over_{loop}") for loop in _LOOPS]


def _joined(values: Sequence[float | None], scale: float, form: str = ".0f") -> str | None:
    if all(value is None for value in values):
        return None
    return " ".join("–" if value is None else format(scale * value, form) for value in values)


def _over(row: Mapping[str, Any], name: str, over: str) -> str | None:
    value, ratio = row[name], row.get(over)
    return None if value is None else number(value) + (f" ({ratio:.2f}x)" if ratio else "")


def _speed(row: Mapping[str, Any], loop: str) -> Text | None:
    """How many times as fast as a loop without drafts, with its interval; green if faster, red if slower."""
    ratio, low, high = (row.get(f"speed_over_{loop}{end}") for end in ("", "_low", "_high"))
    if ratio is None:
        return None
    if low is None or high is None:
        return Text(f"{ratio:.2f}")
    style = "green" if low > 1 else "red" if high < 1 else ""
    return Text(f"{ratio:.2f} [{low:.2f}, {high:.2f}]", style=style)
