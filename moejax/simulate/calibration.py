"""Constants of an engine's stack on a device kind, and how far off its operations' times may be."""

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from moejax.core.errors import ConfigError
from moejax.simulate.step import HostCosts
from moejax.simulate.tables import FOLDER

FILE = "calibration.json"

SPREADS: Mapping[str, Mapping[str, float]] = {
    "gemm": {"table": 0.05, "interpolated": 0.15, "nearest": 0.2, "roofline": 0.4},
    "experts": {"table": 0.05, "interpolated": 0.12, "nearest": 0.25, "roofline": 0.4},
    "attention": {"table": 0.05, "interpolated": 0.15, "nearest": 0.25, "roofline": 0.5},
    "collective": {"table": 0.05, "interpolated": 0.15, "nearest": 0.3, "roofline": 0.4},
    "small": {"roofline": 0.4},
    "host": {"roofline": 0.5},
}


class Calibration(NamedTuple):
    """Costs of the host, half of the relative width of each operation's 90 % interval by source, and where
    they come from."""

    host: HostCosts
    spreads: Mapping[str, Mapping[str, float]]
    origin: str


def load_calibration(device: str, stack: str) -> Calibration:
    """Returns what is known of a stack on a device kind: its own constants; without them the stack's on
    another kind; without these the defaults of `HostCosts`. Widths are the kind's own, or `SPREADS`.

    Raises:
        ConfigError: the file of constants cannot be read.
    """
    content = _content()
    spreads = content["spreads"].get(device, SPREADS)
    known = [entry for entry in content["stacks"] if entry["stack"] == stack]
    known = [entry for entry in known if entry["device"] == device] or known[:1]
    if not known:
        return Calibration(HostCosts(), spreads, "default")
    (entry,) = known
    return Calibration(
        HostCosts(**entry["host"]), spreads, f"{stack} on {entry['device']}, {content['date']}"
    )


@functools.cache
def _content() -> dict[str, Any]:
    path = FOLDER / FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return {name: content[name] for name in ("date", "stacks", "spreads")}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} holds no constants: {type(error).__name__} {error}") from None
