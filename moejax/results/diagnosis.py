"""Findings of checks, and what bounded a finished run by what its result holds. No JAX here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from moejax.core.words import one_line
from moejax.results.machine import DOUBTS, busy_line, pace_line

State = Literal["ok", "warn", "fail", "unknown"]
Answer = tuple[State, str, str]
"""A check's state, the reason, and the command or config key that mends it (empty: nothing to mend)."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """The answer of the check of that name; "unknown" is what the machine or the result does not tell."""

    check: str
    state: State
    reason: str
    remedy: str


def run_checks(checks: Mapping[str, Callable[[], Answer]]) -> list[Finding]:
    """Runs checks by name. One that cannot read what it needs finds "unknown", with the reason."""
    rows = []
    for name, check in checks.items():
        try:
            state, reason, remedy = check()
        except Exception as error:
            state, reason, remedy = "unknown", f"cannot be read: {one_line(error)}", ""
        rows.append(Finding(name, state, reason, "" if state == "ok" else remedy))
    return rows


def diagnose(result: Mapping[str, Any]) -> list[Finding]:
    """Returns what bounded a run, by the content of its result.json, and which key to change."""
    return run_checks({name: partial(check, result) for name, check in RUN_CHECKS.items()})


def bound(result: Mapping[str, Any]) -> Answer:
    """Compares decode steps with their roofline; the case furthest from it decides."""
    rows = [row for row in result["cases"] if row.get("roofline_percent") is not None]
    if not rows:
        doubts = [DOUBTS[row["roofline_doubt"]][1] for row in result["cases"] if row.get("roofline_doubt")]
        return "unknown", [*doubts, "it measured no roofline"][0], "python -m experiments.latency measures it"
    row = min(rows, key=lambda row: row["roofline_percent"])
    told = f"decode steps reach {row['roofline_percent']:.0f} % of the {row['roofline_limit']} roof"
    mend = "python -m experiments.profile names the operations; engine.overlap hides the host's part"
    near = row["roofline_percent"] >= 50
    return (
        ("ok", f"{told}, which bounds them", "") if near else ("warn", f"{told}: something else does", mend)
    )


def contention(result: Mapping[str, Any]) -> Answer:
    lines = [line for line in (busy_line(result), pace_line(result)) if line]
    return (
        "warn" if lines else "ok",
        "; ".join(lines) or "others left it alone",
        "host.cpus; a quieter machine",
    )


def _figure(
    value: str | Callable[[Row], float | None], most: float, state: State, words: str, remedy: str
) -> Callable[[Row], Answer]:
    """Returns a check of the largest that the run or a case has of a figure, bad from above `most` on."""

    def check(result: Row) -> Answer:
        rows = [result["metrics"], *result["cases"]]
        found = [row.get(value) if isinstance(value, str) else value(row) for row in rows]
        largest = max((figure for figure in found if figure is not None), default=None)
        if largest is None:
            return "unknown", "the run did not measure it", ""
        return state if largest > most else "ok", words.format(largest), remedy

    return check


def _gap(of: str, name: str) -> Callable[[Row], float | None]:
    return lambda row: None if None in (row.get(of), row.get(name)) else row[of] - row[name]


def _queued(row: Row) -> float | None:
    return row["median_queue_ms"] / row["median_e2el_ms"] if row.get("median_queue_ms") else None


RUN_CHECKS: dict[str, Callable[[Row], Answer]] = {
    "bound": bound,
    "compilation": _figure("recompiles_after_warmup", 0, "fail", "{} steps compiled after the warm-up",
        "engine.seq_buckets, engine.token_buckets; engine.strict_compile=true refuses it"),
    "contention": contention,
    "waiting": _figure(_queued, 0.5, "warn", "{:.0%} of a median request's time is waiting",
        "engine.max_num_seqs, engine.num_blocks; or a lower workload.request_rate"),
    "cache": _figure("cache_use_saturated", 0.95, "warn", "{:.0%} of the cache in use while requests wait",
        "engine.num_blocks; quant.kv_cache=int8"),
    "preemption": _figure("preemptions", 0, "warn", "{} times a sequence lost its blocks",
        "engine.num_blocks; quant.kv_cache=int8"),
    "padding": _figure("padding_waste", 0.3, "warn", "{:.0%} of the computed tokens were padding",
        "finer engine.seq_buckets and engine.token_buckets"),
    "prefix misses": _figure(_gap("prefix_hit_rate_ideal", "prefix_hit_rate"), 0.1, "warn",
        "{:.0%} of the prompts' tokens were known and had been given up", "engine.num_blocks"),
    "expert misses": _figure(lambda row: 1 - row["hit_rate"] if row.get("hit_rate") is not None else None,
        0.2, "warn", "{:.0%} of the experts that were needed had no slot", "engine.experts.resident"),
    "slowdown": _figure("gpu_slowdown_percent", 1.0, "warn", "{:.1f} % of the time below its GPU's clock",
        "nvidia-smi -q -d PERFORMANCE says why (power, heat)"),
    "failures": _figure("failed", 0, "fail", "{} requests failed", "first_error in result.json's cases"),
}  # fmt: skip
"""Checks of a result by name."""
