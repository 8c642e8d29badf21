"""A run of an experiment for tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moejax.bench.experiment_run import ExperimentRun
from moejax.tracking.base import TrackerConfig


def run_into(
    out: Path, experiment: str = "latency", config: Mapping[str, Any] | None = None, **fields: Any
) -> ExperimentRun:
    """Returns a run without a tracker; `fields` are those of `ExperimentRun`."""
    fields = {"model": "small", "tracking": TrackerConfig(kind="none"), **fields}
    return ExperimentRun(experiment, out, config or {}, **fields)
