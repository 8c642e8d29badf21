"""Finding traces that a configuration names. Numpy only."""

import re
from collections.abc import Iterable
from pathlib import Path

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.routing.capture import CAPTURE_FILE, RoutingCapture, load_capture


def check_trace(key: str, path: object) -> str:
    """Checks that a path is an .npz file or a run's folder with one; returns it as text. For configurations,
    so that a wrong path is found before anything is done; what is in the file is `open_trace`'s to say.

    Raises:
        ConfigError: it is no path, or there is nothing, or the folder holds none.
    """
    if not isinstance(path, (str, Path)) or not str(path):
        raise ConfigError(f"{key} must be the path of a routing trace or of a run's folder, got {path!r}")
    if Path(path).is_dir():
        if not (Path(path) / CAPTURE_FILE).exists():
            raise ConfigError(
                f"{key}={path}: the folder holds no {CAPTURE_FILE}; run it with engine.capture_routing=true,"
                " or make a trace with python -m experiments.routing generate.kind=zipf model=NAME"
            )
    elif not Path(path).exists():
        raise ConfigError(f"{key}={path}: there is no such file or folder")
    return str(path)


def open_trace(key: str, path: str, model: ModelConfig | None = None) -> RoutingCapture:
    """Reads the computed rows of the trace that a configuration names under `key`.

    Raises:
        ConfigError: it is no trace, has no rows, or `model` could not have made it.
    """
    capture = load_capture(path).computed()
    capture.require_rows(f"{key}={path}")
    if model is not None:
        capture.check_fits(model, f"{key}={path}")
    return capture


def trace_names(paths: Iterable[str]) -> list[str]:
    """Returns a short name for each: the folder's or the file's, numbered where several would be the same."""
    names: list[str] = []
    for path in paths:
        place = Path(path).resolve()
        stem = place.parent if place.name == CAPTURE_FILE else place
        name = re.sub(r"[^\w.-]+", "_", stem.name.removesuffix(".npz")) or "trace"
        number, first = 2, name
        while name in names:
            name, number = f"{first}_{number}", number + 1
        names.append(name)
    return names
