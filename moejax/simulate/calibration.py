"""Constants of an engine's stack on a device kind, and how far off its operations' times may be."""

import functools
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from moejax.core.config import ModelConfig
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


def kind_of(model: ModelConfig) -> str:
    """Returns the kind of models whose constants are a model's: "moe" or "dense"."""
    return "moe" if any(model.moe_layers) else "dense"


def load_calibration(device: str, stack: str, models: str) -> Calibration:
    """Returns what is known of a stack on a device kind: its own constants for such models; without them for
    the other kind of models; without these the stack's on another device; without these the defaults of
    `HostCosts`. Widths are the kind's own, or `SPREADS`.

    Raises:
        ConfigError: the file of constants cannot be read.
    """
    content = _content()
    spreads = content["spreads"].get(device, SPREADS)
    known = [entry for entry in content["stacks"] if entry["stack"] == stack]
    known.sort(key=lambda entry: (entry["device"] != device, entry["models"] != models))
    if not known:
        return Calibration(HostCosts(), spreads, "default")
    entry, told = known[0], {"moe": "models with experts", "dense": "dense models"}
    origin = f"{stack} on {entry['device']}, {told[entry['models']]}, {content['date']}"
    return Calibration(HostCosts(**entry["host"]), spreads, origin)


@functools.cache
def _content() -> dict[str, Any]:
    path = FOLDER / FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return {name: content[name] for name in ("date", "stacks", "spreads")}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} holds no constants: {type(error).__name__} {error}") from None
