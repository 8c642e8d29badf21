"""A progress bar on stderr, a line in a cell or lines in a log, for what takes seconds. No JAX here."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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

_LOG_EVERY = 10.0  # seconds


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


class LineTask(Task):
    """The same as lines of text, one in so many seconds at most, since work that is being timed may move it.

    Args:
        write: shows a line.
        every: seconds from one line to the next.
    """

    def __init__(self, write: Callable[[str], None], every: float, text: str, total: float | None) -> None:
        self._write, self._every, self._text, self._total = write, every, text, total
        self._done, self._began = 0.0, time.monotonic()
        self._shown = self._began

    def advance(self, steps: float = 1) -> None:
        self.to(self._done + steps, self._text)

    def describe(self, text: str) -> None:
        self.to(self._done, text)

    def to(self, share: float, text: str) -> None:
        self._done, self._text, now = share, text, time.monotonic()
        if now - self._shown >= self._every:
            self._shown = now
            done = f" {100 * share / self._total:.0f} %" if self._total else ""
            self._write(f"{text}{done}, {now - self._began:.0f} s")


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

    Without a terminal a line is printed every ten seconds; in Jupyter one is renewed every second. A total of
    None shows that something goes on, without an end.
    """
    if console is None and (cell := _cell_line()) is not None:
        cell.display({"text/plain": description}, raw=True)
        try:
            yield LineTask(lambda text: cell.update({"text/plain": text}, raw=True), 1, description, total)
        finally:  # nothing is left of the line
            cell.update({"text/plain": "", "text/html": ""}, raw=True)
        return
    console = console or Console(stderr=True)
    if not console.is_terminal:
        plain = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        yield LineTask(plain, _LOG_EVERY, description, total)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield Task(bar, bar.add_task(description, total=total))
