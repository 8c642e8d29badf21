"""Chooses and starts the trackers of a run."""

import importlib
from collections.abc import Callable

from moejax.tracking.base import TRACKERS, CompositeTracker, RunInfo, Tracker, TrackerConfig
from moejax.tracking.jsonl import JsonlTracker


def make_tracker(config: TrackerConfig, info: RunInfo) -> CompositeTracker:
    """Returns the always-on JSONL tracker in `info.output_dir` and the one that `config.kind` names.

    Raises:
        OutputError: the output folder or the tracker's own cannot be written.
        TrackingError: the tracker cannot be started; there is no falling back to another.
    """
    trackers: list[Tracker] = [JsonlTracker(info)]
    target = TRACKERS[config.kind]
    if target is not None:
        module, _, attribute = target.partition(":")
        factory: Callable[[TrackerConfig, RunInfo], Tracker] = getattr(
            importlib.import_module(module), attribute
        )
        try:
            trackers.append(factory(config, info))
        except BaseException:
            trackers[0].finish(1)
            raise
    return CompositeTracker(trackers)
