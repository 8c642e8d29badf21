"""Defines what a tracker takes from an experiment. No tracker's library is imported here.

A tracker gets aggregates: a few numbers a step, never one call per token and never inside a timed region.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

from moejax.core.checked import Among, Checked, Name, PositiveNumber

logger = logging.getLogger(__name__)

Scalar = float | int | bool | str | None


@dataclass(frozen=True)
class TrackerConfig(Checked, section="tracker"):
    """Which tracker runs beside the JSONL file, and where.

    Attributes:
        kind: `none`, `wandb_offline`, or `wandb` (online: needs a key and a server, never falls back).
        project, entity, group, job_type, tags: W&B's own words. group and job_type None take the run's.
        dir: the folder in which W&B keeps its `wandb/` folder; None takes $WANDB_DIR, else the run's own.
        timeout_s: most seconds that starting an online run may take.
        finish_timeout_s: most seconds that uploading what is left may take at the end.
    """

    kind: Annotated[str, Among(("none", "wandb_offline", "wandb"))] = "wandb_offline"
    project: Name = "moejax"
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    dir: str | None = None
    timeout_s: PositiveNumber = 30.0
    finish_timeout_s: PositiveNumber = 120.0


@dataclass(frozen=True)
class RunInfo:
    """Which run is tracked. `config` is the resolved configuration."""

    experiment: str
    name: str
    output_dir: Path
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


class Tracker:
    """Takes a run's numbers; this base keeps none. All calls are cheap, but `finish` may wait for an upload,
    for a bounded time."""

    def log(self, metrics: Mapping[str, Scalar], step: int | None = None) -> None:
        """One row of the history. Steps must not fall."""

    def summary(self, metrics: Mapping[str, Scalar]) -> None:
        """The run's final numbers; a later value replaces an earlier one."""

    def define_metric(self, name: str, *, step_metric: str | None = None, summary: str | None = None) -> None:
        """How a metric is to be drawn: against which other metric, and what its summary is (min, max, mean,
        last, none)."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table of plain values."""

    def image(self, name: str, path: Path) -> None:
        """A picture file."""

    def artifact(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        """Files to keep with the run, as one named and versioned thing."""

    def finish(self, exit_code: int = 0) -> None:
        """Ends the run; further calls are errors, a second `finish` does nothing."""

    def hints(self) -> list[str]:
        """Shell lines, exact and ready to paste, with which the user sees this run."""
        return []


class CompositeTracker(Tracker):
    """Says everything to several trackers. One that fails ends neither the others nor what is measured:
    `finish` raises it. As a context manager it finishes them, with exit code 1 if the body raised."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers: tuple[Tracker, ...] = tuple(trackers)
        self._failure: Exception | None = None

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for tracker in self.trackers:
            try:
                call(tracker)
            except Exception as error:
                if self._failure is None:
                    logger.error("tracker: %s", error)
                self._failure = self._failure or error

    def log(self, metrics: Mapping[str, Scalar], step: int | None = None) -> None:
        self._tell(lambda tracker: tracker.log(metrics, step))

    def summary(self, metrics: Mapping[str, Scalar]) -> None:
        self._tell(lambda tracker: tracker.summary(metrics))

    def define_metric(self, name: str, *, step_metric: str | None = None, summary: str | None = None) -> None:
        self._tell(lambda tracker: tracker.define_metric(name, step_metric=step_metric, summary=summary))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._tell(lambda tracker: tracker.table(name, columns, rows))

    def image(self, name: str, path: Path) -> None:
        self._tell(lambda tracker: tracker.image(name, path))

    def artifact(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        self._tell(lambda tracker: tracker.artifact(name, kind, paths))

    def finish(self, exit_code: int = 0) -> None:
        """Finishes all, also when one of them fails; the first failure since the start is then raised."""
        self._tell(lambda tracker: tracker.finish(exit_code))
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def hints(self) -> list[str]:
        return [line for tracker in self.trackers for line in tracker.hints()]

    def __enter__(self) -> "CompositeTracker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.finish(0 if error is None else 1)
        except Exception:
            if error is None:
                raise
            # It must not hide what went wrong first, and is told already.


def plain_scalars(metrics: Mapping[str, Any]) -> dict[str, Scalar]:
    """Metrics as Python's own numbers; 0-d arrays are fetched.

    Raises:
        TypeError: a value is not a scalar; its name is in the text.
    """
    plain: dict[str, Scalar] = {}
    for name, value in metrics.items():
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()
        if not (value is None or isinstance(value, (bool, int, float, str))):
            raise TypeError(f"metric {name!r} must be a scalar, got {type(value).__name__}")
        plain[name] = value
    return plain
