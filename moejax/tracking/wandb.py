"""Weights & Biases: offline by default, online only when asked for. The only module that imports wandb.

Online never prompts, never hangs and never becomes offline by itself: it works or it raises `TrackingError`
within a bounded time. wandb's own console output is switched off; `hints()` has the lines that matter.
"""

import logging
import netrc
import os
import shlex
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import wandb

from moejax.core.errors import TrackingError
from moejax.core.files import ensure_writable, shown_path, to_jsonable
from moejax.core.words import first_line
from moejax.tracking.base import RunInfo, Scalar, Tracker, TrackerConfig, plain_scalars

logger = logging.getLogger(__name__)

MAX_TABLE_ROWS = 10_000
"""wandb.Table drops what is beyond; we cut there ourselves and say so."""

_OFFLINE_INSTEAD = "or use tracker=wandb_offline"


class WandbTracker(Tracker):
    """One W&B run, started by the constructor.

    Raises:
        OutputError: W&B's folder cannot be written.
        TrackingError: online without a key, with a key that the server refuses, without an answering
            server, or with WANDB_MODE saying otherwise.
    """

    def __init__(self, config: TrackerConfig, info: RunInfo) -> None:
        self._online = config.kind == "wandb"
        # wandb would move to the system's temporary folder with no more than a warning.
        root = ensure_writable(config.dir or os.environ.get("WANDB_DIR") or info.output_dir)
        settings = wandb.Settings(
            silent=True,
            quiet=True,
            console="off",
            init_timeout=config.timeout_s,
            finish_timeout=config.finish_timeout_s,
            finish_timeout_raises=True,
            use_dot_wandb=False,
        )
        if self._online:
            require_login(config.timeout_s)
        with tracking_errors("W&B run cannot be started", f" ({_OFFLINE_INSTEAD})"):
            self._run = wandb.init(
                mode="online" if self._online else "offline",
                project=config.project,
                entity=config.entity,
                group=config.group or info.group,
                job_type=config.job_type or info.job_type or info.experiment,
                tags=list(dict.fromkeys((*info.tags, *config.tags))),
                name=info.name,
                config=to_jsonable(dict(info.config)),
                dir=str(root.resolve()),
                settings=settings,
            )
        self.run_dir = Path(self._run.settings.sync_dir)
        self._last_step = 0
        self._finished = False

    def log(self, metrics: Mapping[str, Scalar], step: int | None = None) -> None:
        if step is not None:
            if step < self._last_step:
                # wandb would drop the row with a warning that we have silenced.
                raise ValueError(f"step {step} after step {self._last_step}: W&B's steps cannot fall")
            self._last_step = step
        self._run.log(plain_scalars(metrics), step=step)

    def summary(self, metrics: Mapping[str, Scalar]) -> None:
        self._run.summary.update(plain_scalars(metrics))

    def define_metric(self, name: str, *, step_metric: str | None = None, summary: str | None = None) -> None:
        self._run.define_metric(name, step_metric=step_metric, summary=summary)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        if len(rows) > MAX_TABLE_ROWS:
            logger.warning("W&B table %r: kept the first %d of %d rows", name, MAX_TABLE_ROWS, len(rows))
            self._run.summary.update({f"{name}_rows_total": len(rows), f"{name}_rows_kept": MAX_TABLE_ROWS})
        data = [[to_jsonable(cell) for cell in row] for row in rows[:MAX_TABLE_ROWS]]
        # Columns of None and numbers mixed are usual here (no TPOT for one token), so types are not checked.
        with tracking_errors(f"W&B table {name!r} cannot be logged"):
            self._run.log({name: wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)})

    def image(self, name: str, path: Path) -> None:
        with tracking_errors(f"W&B image {path} cannot be logged"):
            self._run.log({name: wandb.Image(str(path))})

    def artifact(self, name: str, kind: str, paths: Sequence[Path], aliases: list[str] | None = None) -> None:
        with tracking_errors(f"W&B artifact {name!r} cannot be logged"):
            artifact = wandb.Artifact(name, type=kind)
            for path in paths:
                if Path(path).is_dir():
                    artifact.add_dir(str(path), name=Path(path).name, skip_cache=True)
                else:
                    artifact.add_file(str(path), name=Path(path).name, skip_cache=True)
            self._run.log_artifact(artifact, aliases=aliases)

    def finish(self, exit_code: int = 0) -> None:
        """Raises `TrackingError` if the upload does not end in time; the data is then still on disk."""
        if self._finished:
            return
        self._finished = True
        with tracking_errors(
            "W&B upload is incomplete", f"; the run is on disk, send it with: {self._sync()}"
        ):
            self._run.finish(exit_code=exit_code)

    def hints(self) -> list[str]:
        lines = [f"{_command()} leet {_shell_path(self.run_dir)}"]
        return [*lines, f"{_command()} leet {self._run.url}"] if self._online else [*lines, self._sync()]

    def _sync(self) -> str:
        return f"{_command()} sync {_shell_path(self.run_dir)}"


def _command() -> str:
    """Returns what this shell calls wandb by: its name if it is on the path, else this environment's file."""
    beside = Path(sys.executable).parent / "wandb"
    on_path = shutil.which("wandb")
    if on_path and Path(on_path).resolve() == beside.resolve():
        return "wandb"
    return _shell_path(beside) if beside.is_file() else "wandb"


@contextmanager
def tracking_errors(what: str, remedy: str = "") -> Iterator[None]:
    """Turns wandb's errors, and those of the network and disk below it, into one line of ours."""
    try:
        yield
    except (wandb.errors.Error, TimeoutError, OSError) as error:
        raise TrackingError(f"{what}: {first_line(error)}{remedy}") from error


def require_login(timeout_s: float, remedy: str = _OFFLINE_INSTEAD) -> None:
    """Checks that there is a key and that the server takes it, without a prompt.

    Raises:
        TrackingError: one line that ends in `remedy`.
    """
    mode = os.environ.get("WANDB_MODE", "online")
    if mode not in ("online", "run", "shared"):
        raise TrackingError(f"this needs W&B online but WANDB_MODE={mode}; unset it, {remedy}")
    wandb.setup(settings=wandb.Settings(silent=True, quiet=True))
    url = str(wandb.setup().settings.base_url)
    key = wandb.setup().settings.api_key or os.environ.get("WANDB_API_KEY") or netrc_key(url)
    # Asked before wandb does: its service goes on trying a dead server and holds up the interpreter's exit.
    if key and (reason := _unreachable(url, timeout_s)):
        raise TrackingError(f"W&B at {url}: {reason}; mend that, {remedy}")
    try:
        known = wandb.login(prompt=False, verify=True)
    except (wandb.errors.Error, TimeoutError, OSError) as error:
        reason = _unreachable(url, timeout_s) or f"the server refused the login ({first_line(error)})"
        raise TrackingError(f"W&B at {url}: {reason}; mend that, {remedy}") from error
    if not known:
        raise TrackingError(f"W&B at {url}: no API key; set WANDB_API_KEY or run `wandb login`, {remedy}")


def default_entity() -> str | None:
    """The login's own entity, where the server names one. Raises `TrackingError`."""
    with tracking_errors("W&B cannot be asked for the login's entity"):
        return wandb.Api().default_entity


def netrc_key(url: str) -> str | None:
    """The key that `wandb login` has left in the user's netrc file."""
    try:
        entry = netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(url).hostname or "")
    except (OSError, netrc.NetrcParseError):
        return None
    return entry[2] if entry else None


def _unreachable(url: str, timeout_s: float) -> str | None:
    """Why `url` does not answer, or None if it does: wandb reports both as "failed to authenticate"."""
    try:
        urllib.request.urlopen(url, timeout=min(timeout_s, 5.0)).close()
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, ValueError) as error:
        return f"the server does not answer ({first_line(getattr(error, 'reason', error))})"
    return None


def _shell_path(path: Path) -> str:
    return shlex.quote(shown_path(path))


def publish_model(project: str, folder: Path, name: str, alias: str) -> None:
    """Sends a model's folder to W&B as a version of artifact `name`, in a run of its own.

    Args:
        project: PROJECT or ENTITY/PROJECT.

    Raises:
        TrackingError: see `WandbTracker`.
    """
    with tempfile.TemporaryDirectory() as out:
        entity, _, own = project.rpartition("/")
        config = TrackerConfig(kind="wandb", project=own, entity=entity or None)
        tracker = WandbTracker(config, RunInfo("models", f"{name}-{folder.name}", Path(out)))
        try:
            tracker.artifact(name, "model", [folder], aliases=[alias])
        finally:
            tracker.finish()


def set_alias(project: str, name: str, alias: str, moved: str) -> None:
    """Gives an alias to the version of artifact `name` that has another one; raises `TrackingError`."""
    with tracking_errors(f"W&B artifact {project}/{name}:{alias} cannot be given the alias {moved}"):
        artifact = wandb.Api().artifact(f"{project}/{name}:{alias}", type="model")
        artifact.aliases += [moved] * (moved not in artifact.aliases)
        artifact.save()
