"""Where runs lie: what is a run's folder, and short names for several. It reads no run."""

import os
from collections.abc import Sequence
from pathlib import Path

from moejax.core.errors import ConfigError, os_errors
from moejax.results.result import RESULT_FILE
from moejax.results.wandb_runs import find_log

# What a run leaves behind before it has a result: its folder is one of ours, though no run to compare.
_TRACES = {"run.log", "metrics.jsonl", ".hydra", "routing.npz"}


def run_names(paths: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The shortest ends of the runs' folders that tell them apart; the same folder twice gets a number."""
    folders = [Path(p).parent if Path(p).suffix in (".json", ".wandb") else Path(p) for p in paths]
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max((len(p) for p in parts), default=1) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(set(parts)):
            break
    return tuple(f"{n} ({names[:i].count(n) + 1})" if n in names[:i] else n for i, n in enumerate(names))


def check_run(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a run; False for a folder of ours whose run has no result yet.

    Raises:
        ConfigError: it is neither; the line says what was looked for.
    """
    place = Path(path)
    if place.is_file():
        if place.suffix in (".json", ".wandb"):
            return True
        raise ConfigError(f"{place} is no run: expected a run folder, a {RESULT_FILE} or a *.wandb file")
    if not place.exists():
        raise ConfigError(f"there is no run at {place}: no such file or folder")
    if (place / RESULT_FILE).is_file() or find_log(place) is not None:
        return True
    with os_errors(ConfigError, f"cannot read {place}"):
        inside = {item.name for item in place.iterdir()}
    if not inside or inside & _TRACES:
        return False
    text = f"there is no {RESULT_FILE} in it and no W&B log run-*.wandb"
    below = [*place.glob(f"*/{RESULT_FILE}"), *place.glob("*/run-*.wandb")]
    if below:
        text += f"; {len(below)} of its folders are runs: give {place}/*"
    raise ConfigError(f"{place} is no run: {text}")


def usable_runs(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[Path], list[str]]:
    """The runs among `paths`, and a line for each folder left out because its run has no result.

    Raises:
        ConfigError: fewer than two runs, or a path that is none.
    """
    kept: list[Path] = []
    left: list[Path] = []
    for path in paths:
        (kept if check_run(path) else left).append(Path(path))
    lines = [f"{path}: no {RESULT_FILE}: the run failed or is not finished" for path in left]
    if len(kept) < 2:
        if left:
            raise ConfigError(f"nothing to compare with: {lines[0]}")
        raise ConfigError(
            f"compare needs at least two runs, got {len(kept)}: give run folders, {RESULT_FILE} files or"
            " offline W&B runs"
        )
    return kept, lines
