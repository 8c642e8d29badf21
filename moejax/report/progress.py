"""A progress bar on stderr, or a line in a cell, for anything longer than two seconds. No JAX here."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Task:
    """The handle by which the body of `progress` moves its bar."""

    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def advance(self, steps: float = 1) -> None:
        """Moves the bar on by `steps`."""
        self._bar.advance(self._task, steps)

    def describe(self, text: str) -> None:
        """Replaces the text before the bar."""
        self._bar.update(self._task, description=text)

    def to(self, share: float, text: str) -> None:
        """Sets a bar whose total is 1 to a share, with a new text."""
        self._bar.update(self._task, completed=share, description=text)


class CellTask(Task):
    """The same in a notebook: a line below the cell, renewed once a second at most, since work that is being
    timed may move it.

    Args:
        line: a `DisplayHandle` of IPython.
    """

    def __init__(self, line: Any, text: str, total: float | None) -> None:
        self._line, self._text, self._total = line, text, total
        self._done, self._began, self._shown = 0.0, time.monotonic(), 0.0
        line.display({"text/plain": text}, raw=True)

    def advance(self, steps: float = 1) -> None:
        self._done += steps
        self._show()

    def describe(self, text: str) -> None:
        self._text = text
        self._show()

    def to(self, share: float, text: str) -> None:
        self._done, self._text = share, text
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown < 1:
            return
        self._shown = now
        share = f" {100 * self._done / self._total:.0f} %" if self._total else ""
        self._line.update({"text/plain": f"{self._text}{share}, {now - self._began:.0f} s"}, raw=True)

    def clear(self) -> None:
        """At the end nothing is left of the line."""
        self._line.update({"text/plain": "", "text/html": ""}, raw=True)


def _cell_line() -> Any:
    """Where the running cell can show a line; None outside Jupyter."""
    module = sys.modules.get("IPython")  # never imported for this
    shell = module.get_ipython() if module is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import DisplayHandle

    return DisplayHandle()


@contextmanager
def progress(description: str, total: float | None = None, console: Console | None = None) -> Iterator[Task]:
    """`with progress("warming up", total=10) as task: … task.advance()`.

    Without a terminal nothing is printed at all, so that logs stay clean; in Jupyter a line of text is shown.
    A total of None shows that something goes on, without an end.
    """
    if console is None and (line := _cell_line()) is not None:
        cell = CellTask(line, description, total)
        try:
            yield cell
        finally:
            cell.clear()
        return
    console = console or Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Task(bar, bar.add_task(description, total=total))
