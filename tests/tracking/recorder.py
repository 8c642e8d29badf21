"""A tracker that remembers what it was told."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax.tracking.dashboard import Panel


def shown(panel: Panel) -> set[str]:
    """The names of the logged metrics, tables and pictures that a panel of a workspace shows."""
    return {name for name in (*panel.y, panel.x) if name and not name.startswith("config.")}


class Recorder:
    """`names`: everything that a workspace could refer to."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, Any]]] = []
        self.final: dict[str, Any] = {}
        self.defined: dict[str, dict[str, str | None]] = {}
        self.tables: dict[str, tuple[list[str], list[list[Any]]]] = {}
        self.images: list[str] = []
        self.artifacts: dict[str, list[str]] = {}

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def summary(self, metrics: Mapping[str, Any]) -> None:
        self.final.update(metrics)

    def define_metric(self, name: str, *, step_metric: str | None = None, summary: str | None = None) -> None:
        self.defined[name] = {"step_metric": step_metric, "summary": summary}

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        assert all(len(row) == len(columns) for row in rows)
        self.tables[name] = (list(columns), [list(row) for row in rows])

    def image(self, name: str, path: Path) -> None:
        assert Path(path).is_file()
        self.images.append(name)

    def artifact(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        self.artifacts[name] = [Path(path).name for path in paths]

    def finish(self, exit_code: int = 0) -> None:
        pass

    def hints(self) -> list[str]:
        return []

    @property
    def names(self) -> set[str]:
        history = {name for _, row in self.rows for name in row}
        return history | self.final.keys() | self.tables.keys() | set(self.images)

    def column(self, name: str) -> list[Any]:
        return [row[name] for _, row in self.rows if name in row]
