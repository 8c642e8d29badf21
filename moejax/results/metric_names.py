"""Looks metrics' names up in the glossary, `assets/metrics.toml`: what each means, its unit, whether less of
it is better, and how to write it in a table."""

import re
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

STATISTICS = ("mean", "median", "std", "p90", "p95", "p99", "min", "max")
LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
"""What every request's times give, and how tables and plots call it."""

CASE_FIELDS = (
    "variant", "backend", "batching", "request_rate", "concurrency", "bucket", "batch_size", "prompt_len",
    "output_len",
)  # fmt: skip
"""Fields of a case's row that say what was asked for or of whom, in the order in which they are shown."""

RATES = ("output_throughput", "request_throughput", "total_token_throughput", "request_goodput")
"""Rates that a throughput run notes of each iteration."""

SERVICE = ("slo_attainment", "service_gap", "jain_index")
"""What a pass notes where its requests are of several classes or tenants."""

JUDGED = (
    "median_ttft_ms", "median_tpot_ms", "p99_itl_ms", "median_e2el_ms", "output_throughput",
    "request_goodput",
)  # fmt: skip
"""The metrics that runs are judged by unless others are asked for: few, since each costs the others power,
and nearly all others follow from them."""

_FILE = Path(__file__).resolve().parents[1] / "assets" / "metrics.toml"
_TIMES, _SIZES = ("ms", "us", "s"), ("bytes", "MB", "bits", "J", "J/token", "currency")


@dataclass(frozen=True)
class Metric:
    """An entry of the glossary.

    Attributes:
        name: as results have it, a regular expression with `{statistic}` for each of `STATISTICS`.
        section: heading of its group.
        means: the definition.
        unit: of its value; "share" is a number from 0 to 1.
        of: its scope: run, case, process, device, machine, operation or change (of layout).
        better: None where neither less nor more is.
        exact: counted or computed, not timed: a difference is one, however often it is measured.
        label, head: in words, and over a table's column; None: its name.
    """

    name: str
    section: str
    means: str
    unit: str
    of: str
    better: Literal["less", "more"] | None = None
    exact: bool = False
    label: str | None = None
    head: str | None = None


GLOSSARY = tuple(
    Metric(name, section, **entry)
    for section, entries in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
    for name, entry in entries.items()
)
EXACT = tuple(metric.name for metric in GLOSSARY if metric.exact)
_PATTERNS = [
    (re.compile(metric.name.replace("{statistic}", f"({'|'.join(STATISTICS)})")), metric)
    for metric in sorted(GLOSSARY, key=lambda metric: not metric.name.isidentifier())
]


def find_metric(name: str, labels: Collection[str] | None = None) -> Metric | None:
    """Returns the glossary's entry for a name that results have; None if there is none.

    NAME_low and NAME_high are the ends of NAME's interval, and a flat NAME_LABEL is NAME of the method, trace
    or variant LABEL: one of `labels`, or if they are not known any.
    """
    base = re.sub(r"_(low|high)$", "", name)
    if entry := next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(base)), None):
        return entry
    ends = [base.rpartition("_")[2]] if labels is None else labels
    shorter = [base.removesuffix(f"_{end}") for end in ends if base.endswith(f"_{end}")]
    return next((entry for short in shorter if (entry := find_metric(short, labels))), None)


def lower_is_better(name: str) -> bool | None:
    """True for times, sizes, losses and failures, False for rates and shares of a bound, None where neither
    is known to be better (a batch size, a clock, the end of an interval)."""
    metric = None if name.endswith(("_low", "_high")) else find_metric(name)
    return {"less": True, "more": False}.get(metric.better or "") if metric else None


def latency_name(name: str) -> tuple[str, str] | None:
    """Returns the statistic and the latency of `p99_itl_ms` and its like; None for other names."""
    match = re.fullmatch(rf"({'|'.join(STATISTICS)})_({'|'.join(LATENCIES)}|queue)_ms", name)
    return (match[1], match[2]) if match else None


def percentile_of(statistic: str) -> float | None:
    """50 for `median`, 99 for `p99`; None for mean, std, min and max."""
    if statistic == "median":
        return 50.0
    return float(statistic[1:]) if re.fullmatch(r"p\d+", statistic) else None


def least_samples(statistic: str) -> int:
    """Returns how many values a statistic needs: 10 for p90, 20 for p95 and 100 for p99, since of fewer such
    a percentile would be their largest, which is `max`; 1 for all others."""
    rank = percentile_of(statistic) or 0.0
    return round(100 / (100 - rank)) if rank > 50 else 1


def short_name(name: str) -> str:
    """As a table has it: `TTFT p50 (ms)`, `output tok/s`."""
    return _written(name, "label")


def unit_of(name: str) -> str:
    """The unit; of a name that is not in the glossary an empty one."""
    metric = find_metric(name)
    return metric.unit if metric else ""


def column_head(name: str) -> str:
    """A column's heading, of one line or two."""
    return _written(name, "head")


def _written(name: str, field: str) -> str:
    metric = find_metric(name)
    text: str = (metric and getattr(metric, field)) or name
    statistic = name.partition("_")[0]
    return text.replace("{statistic}", "p50" if statistic == "median" else statistic)


def better_word(name: str, *, better: bool) -> str:
    """`faster` or `slower` for a time, `higher` or `lower` for a rate, `less` or `more` for a size,
    `better` or `worse` for the rest."""
    lower, unit = lower_is_better(name), unit_of(name)
    if lower is False:
        return "higher" if better else "lower"
    if lower and unit in _TIMES:
        return "faster" if better else "slower"
    if lower and unit in _SIZES:
        return "less" if better else "more"
    return "better" if better else "worse"
