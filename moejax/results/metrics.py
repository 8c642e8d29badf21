"""Latency and throughput of a set of requests, under the names of vLLM's serving benchmark.

Tokens are counted, never chunks: a request's `token_times` holds one instant per output token, however
the tokens were delivered. All latencies are in milliseconds here, while `RequestMetrics` is in seconds.
It knows nothing of engines, files or JAX.
"""

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from moejax.core.checked import Checked, Must, PositiveInt, check
from moejax.core.errors import ConfigError
from moejax.engine.requests.api import FinishReason, RequestMetrics, RequestOptions, RequestOutput
from moejax.results.metric_names import CASE_FIELDS, LATENCIES, STATISTICS, least_samples, percentile_of

BROKEN_OFF = ("time", "interrupt", "abort", "error")

Metrics = dict[str, float | int | None]


@dataclass(frozen=True)
class RequestRecord:
    """One measured request.

    Attributes:
        request_id: the engine's name for it.
        case: index of its row in the result's `cases`.
        prompt_len: tokens in the prompt.
        output_len: tokens generated; `metrics.token_times` holds one instant for each.
        metrics: its arrival and token instants, in seconds.
        finish_reason: why it ended; one that was broken off counts in no latency or rate.
        options: its class, deadline and tenant.
    """

    request_id: str
    case: int
    prompt_len: int
    output_len: int
    metrics: RequestMetrics
    finish_reason: FinishReason | None = None
    options: RequestOptions = field(default_factory=RequestOptions)

    def __post_init__(self) -> None:
        if self.completed and len(self.metrics.token_times) != self.output_len:
            raise ValueError(
                f"request {self.request_id}: {len(self.metrics.token_times)} token times for "
                f"{self.output_len} output tokens; there must be one per token"
            )

    @classmethod
    def from_output(
        cls, output: RequestOutput, case: int = 0, options: RequestOptions | None = None
    ) -> "RequestRecord":
        """The record of a finished request's first sample. A token that a stop string cut off was still
        generated and is counted."""
        return cls(
            request_id=output.request_id,
            case=case,
            prompt_len=len(output.prompt_token_ids),
            output_len=len(output.metrics.token_times),
            metrics=output.metrics,
            finish_reason=output.outputs[0].finish_reason,
            options=options or RequestOptions(),
        )

    @property
    def completed(self) -> bool:
        """Whether it ended by itself with at least one token."""
        return self.finish_reason not in BROKEN_OFF and self.output_len > 0


Milliseconds = Annotated[
    float, Must(lambda ms: 0 < ms < math.inf, "a positive number of milliseconds, or null to ask nothing")
]


@dataclass(frozen=True)
class Slo(Checked, section="slo"):
    """Service-level objectives in milliseconds; None asks nothing. Goodput counts the requests within all."""

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2el_ms: Milliseconds | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ttft_ms is not None and self.e2el_ms is not None and self.ttft_ms > self.e2el_ms:
            raise ConfigError(
                f"slo.ttft_ms={self.ttft_ms:g} allows the first token later than slo.e2el_ms={self.e2el_ms:g}"
                " the last, so it asks nothing; lower it or leave it out"
            )

    def __bool__(self) -> bool:
        return any(value is not None for value in (self.ttft_ms, self.tpot_ms, self.e2el_ms))

    def met_by(self, record: RequestRecord) -> bool:
        """Whether a completed request kept to every objective. One token has no TPOT to break."""
        times = record.metrics
        pairs = ((self.ttft_ms, times.ttft), (self.tpot_ms, times.tpot), (self.e2el_ms, times.e2e))
        return all(limit is None or seconds * 1e3 <= limit for limit, seconds in pairs)


def objectives(result: Mapping[str, Any]) -> str:
    """Returns the objectives that a result's goodput is of, such as "TTFT ≤ 200 ms, TPOT ≤ 20 ms"; empty
    where there are none."""
    slo = result.get("slo") or {}
    return ", ".join(f"{LATENCIES[key[:-3]]} ≤ {limit:g} ms" for key, limit in slo.items() if limit)


def latency_samples(records: Iterable[RequestRecord]) -> dict[str, list[float]]:
    """Milliseconds per latency name: one per completed request, and for `itl` one per instant at which tokens
    came after the first.

    `tpot` leaves out requests with a single output token, as vLLM does: they have no time per further token.
    """
    samples: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for record in records:
        if not record.completed:
            continue
        times = record.metrics
        samples["ttft"].append(times.ttft * 1e3)
        samples["e2el"].append(times.e2e * 1e3)
        samples["itl"].extend(step * 1e3 for step in times.itl)
        if record.output_len > 1:
            samples["tpot"].append(times.tpot * 1e3)
    return samples


def histograms(records: Iterable[RequestRecord], itl_known: bool = True) -> dict[str, dict[str, list[float]]]:
    """Returns of TTFT, ITL (if its instants are known) and E2E ten bins of equal width from the least to the
    most: `edges_ms` and `counts`; nothing of a latency without values."""
    bins = {}
    for name, values in latency_samples(records).items():
        if values and (name in ("ttft", "e2el") or (name == "itl" and itl_known)):
            counts, edges = np.histogram(values, 10)
            bins[name] = {"edges_ms": edges.tolist(), "counts": counts.tolist()}
    return bins


def summarize(samples: Sequence[float], name: str) -> Metrics:
    """`{"mean_<name>_ms": …, "median_…", "std_…", "p90_…", "p95_…", "p99_…", "min_…", "max_…"}` of
    milliseconds, and their number `<name>_samples`.

    The standard deviation is the population's and percentiles interpolate linearly, as in vLLM. A statistic
    that needs more samples (`least_samples`) is None.
    """
    array = np.asarray(samples, dtype=np.float64)
    metrics: Metrics = {}
    for statistic in STATISTICS:
        enough = array.size >= least_samples(statistic)
        metrics[f"{statistic}_{name}_ms"] = statistic_of(array, statistic) if enough else None
    return {**metrics, f"{name}_samples": array.size}


def statistic_of(values: NDArray[np.float64], statistic: str) -> float:
    """Returns one of `STATISTICS` of values, of which there is at least one."""
    rank = percentile_of(statistic)
    return float(getattr(values, statistic)() if rank is None else np.percentile(values, rank))


def compute_metrics(
    records: Iterable[RequestRecord],
    duration_s: float,
    slo: Slo | None = None,
    *,
    latencies: bool = True,
    window: tuple[float, float] = (-math.inf, math.inf),
) -> Metrics:
    """The metrics of measured requests.

    Args:
        records: the measured requests, warm-up excluded.
        duration_s: seconds in which they were served; of several repeats the sum of theirs.
        slo: objectives for `request_goodput`, which is None without any.
        latencies: False leaves them out, as of several cases: a percentile of pooled cases is none of any.
        window: first and last instant of what rates count: output tokens that came in it, prompts whose first
            token did, requests whose last token did. Totals are of all.

    Returns:
        `{mean,median,std,p90,p95,p99,min,max}_{ttft,tpot,itl,e2el}_ms`; `request_throughput` and
        `request_goodput` in requests/s; `output_throughput` and `total_token_throughput` in tokens/s;
        `completed`, `total_input_tokens`, `total_output_tokens`, `duration_s`; of drafts `tokens_per_step`
        after a request's first, and `draft_acceptance`. None where not defined.
    """
    done = [record for record in records if record.completed]
    begin, end = window
    ended = [record for record in done if begin <= record.metrics.token_times[-1] <= end]
    inputs = sum(r.prompt_len for r in done if begin <= r.metrics.token_times[0] <= end)
    times = [record.metrics.token_times for record in done]
    outputs = sum(bisect.bisect_right(each, end) - bisect.bisect_left(each, begin) for each in times)

    def rate(count: int) -> float | None:
        return count / duration_s if duration_s > 0 else None

    metrics: Metrics = {}
    for name, samples in latency_samples(done).items() if latencies else ():
        metrics.update(summarize(samples, name))
    metrics.update(
        request_throughput=rate(len(ended)),
        output_throughput=rate(outputs),
        total_token_throughput=rate(inputs + outputs),
        request_goodput=rate(sum(slo.met_by(record) for record in ended)) if slo else None,
        completed=len(done),
        total_input_tokens=sum(record.prompt_len for record in done),
        total_output_tokens=sum(record.output_len for record in done),
        duration_s=float(duration_s),
        tokens_per_step=_over(sum(r.output_len - 1 for r in done), sum(len(r.metrics.itl) for r in done)),
        draft_acceptance=_over(*(sum(by_place(done, name)) for name in ("accepted", "drafted"))),
    )
    return metrics


def by_place(records: Iterable[RequestRecord], name: Literal["drafted", "accepted"]) -> list[int]:
    """Returns the sums over requests of `RequestMetrics.drafted` or `accepted`."""
    return [sum(place) for place in zip_longest(*(getattr(r.metrics, name) for r in records), fillvalue=0)]


def _over(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def case_row(
    fields: Mapping[str, Any],
    records: Iterable[RequestRecord],
    duration_s: float,
    slo: Slo | None = None,
) -> dict[str, Any]:
    """One row of a result's `cases`: the workload's `batch_size`, `prompt_len`, `output_len` (and any other
    fields), then the metrics of that case's records.

    Raises:
        ConfigError: one of the three is missing or is not a positive integer.
    """
    for name in ("batch_size", "prompt_len", "output_len"):
        check(f"workload.{name}", fields.get(name), PositiveInt)
    return {**fields, **compute_metrics(records, duration_s, slo)}


def flat_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """The flat metrics of a run of one case: its row without what names the case, and without words."""
    named = ("case", *CASE_FIELDS, "first_error")
    return {key: v for key, v in row.items() if key not in named and (v is None or is_number(v))}


def record_row(record: RequestRecord, origin: float = 0.0) -> dict[str, Any]:
    """One row of `requests.jsonl`. `arrival_s` is in seconds after `origin`, an instant of
    the same clock."""
    times, done = record.metrics, record.completed
    return {
        "request_id": record.request_id,
        "case": record.case,
        "prompt_len": record.prompt_len,
        "output_len": record.output_len,
        "finish_reason": record.finish_reason,
        "arrival_s": times.arrival_time - origin,
        "ttft_ms": times.ttft * 1e3 if done else None,
        "tpot_ms": times.tpot * 1e3 if done and record.output_len > 1 else None,
        "e2el_ms": times.e2e * 1e3 if done else None,
        "itl_ms": [step * 1e3 for step in times.itl] if done else [],
        **({"drafted": times.drafted, "accepted": times.accepted} if times.drafted else {}),
        **(asdict(record.options) if record.options != RequestOptions() else {}),
    }


def is_number(value: Any) -> bool:
    """Whether a value of a result is a finite number; true and false are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def samples_by_case(rows: Iterable[Mapping[str, Any]], key: str) -> dict[int, NDArray[np.float64]]:
    """Collects from rows of requests.jsonl each case's values of `key`, a number or a list of them; a case
    without any is left out."""
    values: dict[int, list[Any]] = {}
    for row in rows:
        if row.get(key) is not None:
            values.setdefault(row["case"], []).append(np.atleast_1d(np.asarray(row[key], dtype=np.float64)))
    samples = {case: np.concatenate(parts) for case, parts in values.items()}
    return {case: array for case, array in samples.items() if array.size}


def relative_load(result: Mapping[str, Any]) -> NDArray[np.float64] | None:
    """Returns each expert's load over the even share [layers, experts] from `routing["counts"]`, NaN in dense
    layers; None where nothing was counted."""
    counts = np.asarray((result.get("routing") or {}).get("counts") or [], dtype=np.float64)
    if counts.ndim != 2 or not counts.sum():
        return None
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.full_like(counts, np.nan)
    return np.divide(counts * counts.shape[1], totals, out=shares, where=totals > 0)
