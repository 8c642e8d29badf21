"""A progress bar on stderr for anything longer than two seconds. No JAX here."""

from collections.abc import Iterator
from contextlib import contextmanager

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
    """What the body of `progress` holds to move its bar."""

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


@contextmanager
def progress(description: str, total: float | None = None, console: Console | None = None) -> Iterator[Task]:
    """`with progress("warming up", total=10) as task: … task.advance()`.

    Without a terminal nothing is printed at all, so that logs stay clean. A total of None shows that
    something goes on, without an end.
    """
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
