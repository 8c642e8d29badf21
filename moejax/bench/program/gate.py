"""The gate of programs: faults that none may have, and committed figures that none may exceed."""

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax.core.errors import ConfigError, MoejaxError
from moejax.core.files import atomic_write_text, dump_json
from moejax.tracking.naming import model_word, parallel_word, quant_words

FAULTS = ("kernels_with_spills", "copies_of_pool_bytes", "f32_weight_copy_bytes")
"""Figures that are 0, whichever version of the compiler made the program."""

LIMITS = (
    "launches_per_layer", "launches_per_step", "launches_outside", "host_syncs", "command_buffers",
    "temp_bytes",
)  # fmt: skip
"""Figures that are at most the baseline's, of programs by the same version."""


class ProgramGateError(MoejaxError, RuntimeError):
    """A program exceeds the gate; the results have been written."""


def baseline_file(folder: str, config: Mapping[str, Any]) -> Path:
    """Returns the file of a baseline, named by its model, layers, quantization, layout and target."""
    layers = config["program"]["layers"]
    words = [
        model_word(config) or "custom", *([f"{layers}_layers"] if layers else []), *quant_words(config),
        parallel_word(config), Path(config["target"]).stem,
    ]  # fmt: skip
    return Path(folder) / ("-".join(word.replace(" ", "_") for word in words if word) + ".json")


def read_baseline(path: Path, buckets: Sequence[str]) -> dict[str, Any]:
    """Returns a baseline: "jaxlib" and "steps", a row by bucket.

    Raises:
        ConfigError: there is none, or it lacks one of the buckets.
    """
    hint = "program.update_baseline=true writes it"
    if (baseline := find_baseline(path)) is None:
        raise ConfigError(f"no baseline of programs in {path}; {hint}")
    if missing := [name for name in buckets if name not in baseline["steps"]]:
        known = ", ".join(baseline["steps"])
        raise ConfigError(f"{path} has no step {', '.join(missing)}; it has {known}; {hint}")
    return baseline


def find_baseline(path: Path) -> dict[str, Any] | None:
    """Returns the baseline in a file, None if there is no file.

    Raises:
        ConfigError: the file is no baseline.
    """
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        return {"jaxlib": content["jaxlib"], "steps": dict(content["steps"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} is no baseline of programs ({why}); restore or remove it") from error


def is_comparable(baseline: Mapping[str, Any]) -> bool:
    """Returns whether a baseline is of the installed jaxlib."""
    return bool(baseline["jaxlib"] == importlib.metadata.version("jaxlib"))


def baseline_of(rows: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the baseline that these programs are: limits, and the operations on matrix units, by bucket."""
    steps = {
        row["bucket"]: {name: row[name] for name in LIMITS} | {"matrix_units": _on_matrix_units(row, kernels)}
        for row in rows
    }
    return {"jaxlib": importlib.metadata.version("jaxlib"), "steps": steps}


def exceeded(
    rows: Sequence[Mapping[str, Any]],
    kernels: Sequence[Mapping[str, Any]],
    baseline: Mapping[str, Any] | None,
) -> list[str]:
    """Returns a line for each fault, each figure above the baseline's, and each operation that has lost its
    matrix instructions. Of another jaxlib's baseline nothing is compared; without one neither."""
    made = baseline_of(rows, kernels)
    known = baseline["steps"] if baseline and is_comparable(baseline) else {}
    wrong = []
    for row in rows:
        name = row["bucket"]
        wrong += [f"step {name}: {fault} is {row[fault]}, not 0" for fault in FAULTS if row[fault]]
        if row[FAULTS[0]] is None:
            wrong.append(f"step {name}: no ptxas was found, which tells what spills")
        before, after = known.get(name, {}), made["steps"][name]
        wrong += [
            f"step {name}: {limit} grew from {before[limit]} to {after[limit]}"
            for limit in LIMITS
            if before and (after[limit] or 0) > (before[limit] or 0)
        ]
        lost = sorted(set(before.get("matrix_units", ())) - set(after["matrix_units"]))
        wrong += [f"step {name}: {operation} has no matrix instructions any more" for operation in lost]
    return wrong


def write_baseline(path: Path, made: Mapping[str, Any]) -> None:
    """Writes a baseline; other steps of the same jaxlib in the file stay.

    Raises:
        OutputError: it cannot be written.
        ConfigError: the file is no baseline.
    """
    steps = made["steps"]
    if (old := find_baseline(path)) and is_comparable(old):
        steps = old["steps"] | steps
    atomic_write_text(path, dump_json({"jaxlib": made["jaxlib"], "steps": steps}, indent=1) + "\n")


def _on_matrix_units(row: Mapping[str, Any], kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    mine = [kernel for kernel in kernels if kernel["bucket"] == row["bucket"] and kernel["products"]]
    return sorted({kernel["operation"] for kernel in mine if kernel["operation"]})
