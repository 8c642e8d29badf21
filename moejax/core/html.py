"""Small HTML for notebooks: a card with a title, facts and a note. Everything that it is given is escaped.

No style sheet, script or other resource: a card must look the same in Jupyter, in VS Code and in an exported
page, and take its colours from whatever it stands in (light or dark). Knows nothing of what it shows.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from moejax.core.words import cut

_ONE_LINE = 60  # characters of a cell that is not broken
_MOST = 4000  # characters of any one text
_CARD = (
    "border:1px solid #8886;border-radius:6px;padding:.5em .9em;"
    "max-width:75em;line-height:1.4;overflow-x:auto"
)
_TITLE = "font-weight:600"
_MUTED = "opacity:.7;font-size:.9em;white-space:pre-line"
_CELL = "padding:.05em 1em .05em 0;vertical-align:top;background:none"


def text(value: object) -> str:
    """Returns `value` escaped."""
    return escape(cut(value, _MOST))


def note(value: object, *, color: str | None = None, strong: bool = False) -> str:
    """Returns a line below the rest, in small print unless it is strong or has a CSS colour."""
    style = _MUTED if color is None and not strong else "white-space:pre-line"
    style += f";color:{escape(color)}" if color else ""
    style += ";font-weight:600" if strong else ""
    return f'<div style="{style}">{text(value)}</div>'


def heading(value: object) -> str:
    """Returns the heading of a part of a card."""
    return f'<div style="margin-top:.5em;{_TITLE};font-size:.95em;white-space:pre-line">{text(value)}</div>'


def facts(pairs: Mapping[str, object]) -> str:
    """Returns a line per name and value; those whose value is None are left out."""
    rows = [[name, value] for name, value in pairs.items() if value is not None]
    return table((), rows, right=())


def table(
    header: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    right: Iterable[int] | None = None,
    strong: Iterable[int] = (),
) -> str:
    """Cells as text. `right`: columns set flush right, None all but the first; `strong`: rows in bold."""
    rows = [list(row) for row in rows]
    width = len(header) or max((len(row) for row in rows), default=0)
    flush = set(range(1, width) if right is None else right)
    bold = set(strong)

    def cells(tag: str, values: Sequence[object], extra: str = "") -> str:
        styles = [
            f"{_CELL};white-space:{'pre-wrap' if len(str(value)) > _ONE_LINE else 'pre'}"
            f";text-align:{'right' if i in flush else 'left'}{extra}"
            for i, value in enumerate(values)
        ]
        return "".join(
            f'<{tag} style="{style}">{text(value)}</{tag}>'
            for style, value in zip(styles, values, strict=True)
        )

    head = f"<thead><tr>{cells('th', header, ';vertical-align:bottom')}</tr></thead>" if header else ""
    body = "".join(
        f"<tr>{cells('td', row, ';font-weight:600' if i in bold else '')}</tr>" for i, row in enumerate(rows)
    )
    return f'<table style="border-collapse:collapse;margin:.2em 0">{head}<tbody>{body}</tbody></table>'


def card(title: object, *parts: str) -> str:
    """Returns `parts`, HTML from this module, in a frame under a title."""
    return f'<div style="{_CARD}"><div style="{_TITLE}">{text(title)}</div>{"".join(parts)}</div>'
