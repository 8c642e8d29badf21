"""What follows a measurement: files, plots, tracking, tables, each a part that costs no other if it fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moejax.core.errors import MoejaxError, OutputError, ReportError
from moejax.core.words import one_line
from moejax.report.tables import print_lines, stderr_console


class Parts:
    """Parts of a run's end, and which of them have failed."""

    def __init__(self) -> None:
        self._failures: dict[str, Exception] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Says on stderr that the part failed, and why, in place of raising it."""
        try:
            yield
        except Exception as error:
            self._failures.setdefault(name, error)
            kind = "" if isinstance(error, MoejaxError) else f"{type(error).__name__}: "
            print_lines(stderr_console(), [f"failed: {name}: {kind}{one_line(error)}"], "red")

    def check(self, kept: Path) -> None:
        """Raises for the parts that failed, once there is nothing left to do.

        Args:
            kept: the file with the numbers.

        Raises:
            ReportError: the numbers are written, but not all that shows them.
            OutputError: nor are the numbers.
            Exception: a part failed with a defect, and not over a disk or a server; it is that one.
        """
        for error in self._failures.values():
            if not isinstance(error, MoejaxError | OSError):
                raise error
        names = ", ".join(self._failures)
        if kept.name in self._failures:
            raise OutputError(f"{kept} is not written (failed: {names}); what is printed is all there is")
        if names:
            raise ReportError(f"failed after the measurement: {names}; its numbers are kept in {kept}")
