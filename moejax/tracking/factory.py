"""Chooses and starts the trackers of a run."""

from moejax.tracking.base import CompositeTracker, RunInfo, Tracker, TrackerConfig
from moejax.tracking.jsonl import METRICS_FILE, JsonlTracker


def check_tracker(config: TrackerConfig) -> None:
    """Raises `TrackingError` where an online tracker has no key or no server; takes a second where it has."""
    if config.kind == "wandb":
        from moejax.tracking.wandb import require_login

        require_login(config.timeout_s)


def make_tracker(config: TrackerConfig, info: RunInfo) -> CompositeTracker:
    """Returns the always-on JSONL tracker in `info.output_dir` and the one that `config.kind` names.

    Raises:
        OutputError: the output folder or the tracker's own cannot be written.
        TrackingError: the tracker cannot be started; there is no falling back to another.
    """
    trackers: list[Tracker] = [JsonlTracker(info)]
    if config.kind != "none":
        try:
            from moejax.tracking.wandb import WandbTracker  # imports wandb, which takes a second

            trackers.append(WandbTracker(config, info))
        except BaseException:
            trackers[0].finish(1)
            (info.output_dir / METRICS_FILE).unlink(missing_ok=True)  # a run that never began leaves nothing
            raise
    return CompositeTracker(trackers)
