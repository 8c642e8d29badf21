"""Holds every result that a test writes against the glossary of metrics."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moejax.results import result as results
from moejax.results.metric_names import find_metric

_LABELS = ("name", "trace", "layout", "variant")
_write = results.write_result


def unknown_names(result: Mapping[str, Any]) -> list[str]:
    """Returns the flat metrics and the cases' fields that the glossary lacks."""
    labels = {str(case[key]) for case in result["cases"] for key in _LABELS if key in case}
    names = dict.fromkeys([*result["metrics"], *(name for case in result["cases"] for name in case)])
    return [name for name in names if find_metric(name, labels) is None]


def check_written_results() -> None:
    """Lets `write_result` refuse names that moejax/assets/metrics.toml does not define. It must be called
    before other modules import the function."""

    def write(result: Mapping[str, Any], directory: Any) -> Path:
        unknown = unknown_names(result)
        assert not unknown, f"{', '.join(unknown)}: define them in moejax/assets/metrics.toml"
        return _write(result, directory)

    results.write_result = write
