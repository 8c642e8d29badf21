"""Says of results what the machine was: the roof that their shares are of, and who else used it."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_BUSY = 15.0  # per cent of the cores, by others, from which a timing is suspect
_MOVED = 1.25  # of the spread of reads between iterations, likewise
DOUBTS = {
    "exceeded": ("above", "faster than the roof allows, as weights are that stay in the processor's caches"),
    "unstable": ("moved", "the roof's readings lie over 20 % apart; measure again on a quieter machine"),
}
"""Why a share of the roof is none: the word for it that fits a column, and what the word means."""


def is_share_of_roof(name: str) -> bool:
    """Whether a metric is a share of the device's peaks, such as `mbu_percent`."""
    return re.search(r"roofline_percent|percent_of_bound|(^|_)m[fb]u_percent(_|$)", name) is not None


def has_same_roof(results: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the shares of all results are of the same peaks: a data sheet's are, measured ones are not."""
    known = [result.get("hardware") or {} for result in results]
    return all(roof.get(key) == known[0].get(key) for roof in known for key in ("bandwidth", "flops"))


def roof_line(result: Mapping[str, Any]) -> str | None:
    """Returns the bandwidth of the roof and how it was got; None where it is not known."""
    roof = result.get("hardware") or {}
    if not roof.get("bandwidth"):
        return None
    how = f"data sheet of {roof.get('kind')}"
    if roof.get("source") == "configured":
        how += " as configured, not this run's device"
    if roof.get("source") == "measured":
        each = [f"{reading['bandwidth'] / 1e9:,.1f}" for reading in roof.get("readings") or ()]
        how = f"best of {', '.join(each)} before and after the cases" if each[1:] else "measured once"
    return f"roof: {roof['bandwidth'] / 1e9:,.1f} GB/s, {how}"


def machine_lines(result: Mapping[str, Any]) -> list[str]:
    """Returns what stands under a result's table: the roof where the table has shares of it, why some of them
    are words, what was chosen by time, and how busy others kept the machine."""
    cases = result.get("cases") or ()
    told = any(name in row for row in cases for name in ("roofline_percent", "decode_percent_of_bound"))
    doubts = {row.get("roofline_doubt") for row in cases}
    lines = [f"{word}: {meaning}" for doubt, (word, meaning) in DOUBTS.items() if doubt in doubts]
    roof = roof_line(result) if told else None
    return [line for line in (roof, *lines, tuned_line(result), busy_line(result), pace_line(result)) if line]


def tuned_line(result: Mapping[str, Any]) -> str | None:
    """Returns which products of experts were chosen by time, and their gain; None where rules chose."""
    chosen = (result.get("resolved") or {}).get("engine.autotune") or {"value": "rules"}
    if chosen["value"] == "rules":
        return None
    return f"experts' products by time: {chosen['value']} ({chosen['reason'].partition(';')[0]})"


def busy_line(result: Mapping[str, Any]) -> str | None:
    """Returns how much CPU others took while it was measured (where telemetry was off, when it began), in per
    cent of a core; None where it was too little to matter."""
    provenance = result.get("provenance") or {}
    cores = (provenance.get("cpu") or {}).get("usable_cores") or 1
    others, when = result["metrics"].get("mean_other_cpu_percent"), "while it was measured"
    if others is None:
        others = cores * ((provenance.get("state") or {}).get("busy_percent") or 0.0)
        when = "when the run began"
    return f"machine busy: {others:.0f} % of other CPU {when}" if others > _BUSY * cores else None


def pace_line(result: Mapping[str, Any]) -> str | None:
    """Returns how far the machine's own pace moved while it was measured; None where it was too little."""
    metrics = result["metrics"]
    spread = metrics.get("cache_read_spread") or 1.0
    if spread <= _MOVED:
        return None
    return (
        f"machine's pace moved {spread:.2f} times while it was measured (reads of 4 MiB between iterations, "
        f"median {metrics['cache_read_gb_s']:.1f} GB/s): times moved with it"
    )
