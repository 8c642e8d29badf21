"""Service by class and by tenant: who kept to what was asked, and how even tenants' shares were.

It knows nothing of engines, files or JAX.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from moejax.core.scheduling import SchedulingConfig, SloClass, Tenant
from moejax.results.metrics import Metrics, RequestRecord, latency_samples, summarize

Span = tuple[float, float]


def attained(record: RequestRecord, scheduling: SchedulingConfig) -> bool:
    """Tells whether a request was completed, before its deadline and within its class's objectives."""
    if not record.completed:
        return False
    asked, times = record.options, record.metrics
    slo = scheduling.slo_classes.get(asked.slo_class or "")
    pairs = [(asked.deadline_ms, times.e2e)]
    pairs += [] if slo is None else [(slo.ttft_ms, times.ttft), (slo.tpot_ms, times.tpot)]
    return all(limit is None or seconds * 1e3 <= limit for limit, seconds in pairs)


def attainment(records: Sequence[RequestRecord], scheduling: SchedulingConfig) -> float | None:
    """Returns the share of requests that kept to what was asked; None where nothing is."""
    asked = [record.options for record in records]
    named = [scheduling.slo_classes.get(options.slo_class or "", SloClass()) for options in asked]
    if all(slo == SloClass() for slo in named) and all(options.deadline_ms is None for options in asked):
        return None
    return sum(attained(record, scheduling) for record in records) / len(records)


def service_metrics(records: Sequence[RequestRecord], scheduling: SchedulingConfig) -> Metrics:
    """Returns what is known of requests of several classes or tenants; see the glossary."""
    metrics: Metrics = {"slo_attainment": attainment(records, scheduling)}
    spans = backlogs(records)
    if len(spans) < 2:
        return metrics
    pairs = list(itertools.combinations(spans, 2))
    gaps = [_gap(records, pair, overlap(*(spans[name] for name in pair)), scheduling) for pair in pairs]
    together = overlap(*spans.values())
    shares = [sum(service(records, name, together, scheduling)) for name in spans]
    squares = sum(share**2 for share in shares)
    return {
        **metrics,
        "service_gap": max(gaps),
        "jain_index": sum(shares) ** 2 / (len(shares) * squares) if squares else None,
    }


def group_rows(records: Sequence[RequestRecord], scheduling: SchedulingConfig) -> list[dict[str, Any]]:
    """Returns a row for each class, or priority, and for each tenant where there are several: requests, the
    share that kept to what was asked, latencies in milliseconds, output tokens."""
    keys = {
        "class": lambda record: record.options.slo_class or f"priority {record.options.priority}",
        "tenant": lambda record: record.options.tenant,
    }
    rows: list[dict[str, Any]] = []
    told: list[list[RequestRecord]] = []
    for kind, key in keys.items():
        groups: dict[str, list[RequestRecord]] = defaultdict(list)
        for record in records:
            groups[key(record)].append(record)
        for name, members in sorted(groups.items()) if len(groups) > 1 else ():
            if members in told:
                continue  # a tenant that is a class of its own
            told.append(members)
            samples = latency_samples(members)
            wanted = [
                f"{statistic}_{each}_ms" for each in ("ttft", "e2el") for statistic in ("median", "p99")
            ]
            latencies = {k: v for each in ("ttft", "e2el") for k, v in summarize(samples[each], each).items()}
            rows.append(
                {
                    "group": f"{kind} {name}",
                    "requests": len(members),
                    "slo_attainment": attainment(members, scheduling),
                    **{name: latencies[name] for name in wanted},
                    "total_output_tokens": sum(member.output_len for member in members),
                }
            )
    return rows


def backlogs(records: Sequence[RequestRecord]) -> dict[str, list[Span]]:
    """Returns for each tenant when it had something that waited: spans of instants that do not touch."""
    waits: dict[str, list[Span]] = defaultdict(list)
    for record in records:
        first = record.metrics.token_times[:1] or [record.metrics.arrival_time]
        begun = record.metrics.scheduled_time or first[0]
        waits[record.options.tenant].append((record.metrics.arrival_time, begun))
    joined: dict[str, list[Span]] = {}
    for tenant, spans in waits.items():
        merged: list[Span] = []
        for start, end in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        joined[tenant] = merged
    return joined


def overlap(*every: Sequence[Span]) -> list[Span]:
    """Returns the spans that all have in common."""
    common = list(every[0])
    for spans in every[1:]:
        both = [(max(a, c), min(b, d)) for a, b in common for c, d in spans]
        common = [(start, end) for start, end in both if start < end]
    return common


def service(
    records: Sequence[RequestRecord], tenant: str, spans: Sequence[Span], scheduling: SchedulingConfig
) -> list[float]:
    """Returns what a tenant was served in each span: weighted tokens, of prompts at the step that took them
    in, over its weight."""
    events = _events(records, tenant, scheduling)
    return [sum(size for at, size in events if start <= at <= end) for start, end in spans]


def _events(
    records: Sequence[RequestRecord], tenant: str, scheduling: SchedulingConfig
) -> list[tuple[float, float]]:
    weight = scheduling.tenants.get(tenant, Tenant()).weight
    events = []
    for record in records:
        if record.options.tenant == tenant:
            times = record.metrics
            computed = record.prompt_len - times.cached_tokens
            if times.scheduled_time is not None:
                events.append((times.scheduled_time, scheduling.prompt_weight * computed / weight))
            events += [(at, scheduling.output_weight / weight) for at in times.token_times]
    return sorted(events)


def _gap(
    records: Sequence[RequestRecord],
    pair: tuple[str, str],
    spans: Sequence[Span],
    scheduling: SchedulingConfig,
) -> float:
    """Returns the largest difference of two tenants' service over any time in which both had something that
    waited."""
    mine, theirs = (_events(records, name, scheduling) for name in pair)
    events = sorted([*mine, *((at, -size) for at, size in theirs)])
    largest = 0.0
    for start, end in spans:
        ahead = [0.0, *itertools.accumulate(size for at, size in events if start <= at <= end)]
        largest = max(largest, max(ahead) - min(ahead))
    return largest
