"""Results as cards in a notebook: the tables of the terminal, as HTML.

What an experiment prints at its end goes through a console that keeps HTML instead, so that a table is laid
out in one place. No JAX here.
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moejax.core import html
from moejax.report.experiments import print_result
from moejax.report.style import run_title

# Readable on white and on black, as the terminal's own are not.
_COLORS = {"red": "#d03a2b", "yellow": "#b07500", "green": "#2c8f4f"}
_MOST_ROWS = 60  # of a table in a notebook; the rest is in the result
_MOST_METRICS = 24


class HtmlConsole(Console):
    """A console whose `print` keeps tables and lines as HTML, for a card of this title."""

    def __init__(self, title: str = "") -> None:
        super().__init__(quiet=True)
        self.title, self.parts = title, list[str]()

    def print(self, *objects: Any, style: Any = None, markup: bool | None = None, **_: Any) -> None:
        """Keeps `objects`: a table as a table, anything else as a line of small print in `style`'s colour."""
        for item in objects:
            if isinstance(item, Table):
                self.parts.append(table_html(item, without=self.title))
            else:
                words = str(style or "").split()
                color = next((_COLORS[word] for word in words if word in _COLORS), None)
                plain = str(item) if markup is False else _plain(item)
                if not plain.strip() or plain == self.title:
                    continue
                self.parts.append(html.note(plain, color=color, strong="bold" in words))


def table_html(source: Table, *, without: str = "") -> str:
    """A terminal's table as HTML: title, header, rows, caption. `without`: what its title need not repeat."""
    columns = source.columns
    cells = [[_plain(cell) for cell in column.cells] for column in columns]
    rows = list(zip(*cells, strict=True))
    shown = rows[:_MOST_ROWS]
    strong = [i for i, row in enumerate(source.rows[:_MOST_ROWS]) if "bold" in str(row.style or "")]
    right = [i for i, column in enumerate(columns) if column.justify == "right"]
    header = [_plain(column.header) for column in columns] if source.show_header else []
    parts = [html.table(header, shown, right=right, strong=strong)]
    if title := _plain(source.title or "").removeprefix(without).strip():
        parts.insert(0, html.heading(title))
    if len(rows) > len(shown):
        parts.append(html.note(f"… {len(rows) - len(shown):,} more rows"))
    if source.caption:
        parts.append(html.note(_plain(source.caption)))
    return "".join(parts)


def _plain(item: Any) -> str:
    """A renderable's text without markup and styles."""
    return item.plain if isinstance(item, Text) else Text.from_markup(str(item)).plain


def result_card(result: Mapping[str, Any], folder: object = None) -> str:
    """The card of a result.json's content: its experiment's tables, or its first metrics where it has none.

    Args:
        folder: where it was read from, shown below.
    """
    experiment = "ramp" if "ramp" in result else str(result.get("experiment", "result"))
    about = run_title(result)
    console = HtmlConsole(f"{experiment}: {about}" if about else experiment)
    try:
        printed = print_result(result, console)
    except (KeyError, TypeError, IndexError) as error:
        # A result of another version: it loads, but the tables want what it does not have.
        console.parts = [html.note(f"no tables: this result lacks {error}", color=_COLORS["yellow"])]
        printed = False
    if not printed:
        metrics = {k: v for k, v in result.get("metrics", {}).items() if v is not None}
        console.parts.append(html.facts(dict(list(metrics.items())[:_MOST_METRICS])))
        if len(metrics) > _MOST_METRICS:
            console.parts.append(html.note(f"… {len(metrics) - _MOST_METRICS} more in ['metrics']"))
    if folder is not None:
        console.parts.append(html.note(f"results: {folder}"))
    return html.card(console.title, *console.parts)
