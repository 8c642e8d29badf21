"""Metrics of engines in Prometheus's text format, by vLLM's names and types under the prefix `moejax:`.

Reading takes no lock of an engine: a scrape answers while a step hangs. Counters that `LLM.reset_stats`
starts afresh do so here, which Prometheus takes for a restart.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.utils import floatToGoString

from moejax.core.errors import RequestError
from moejax.engine.recent import EDGES
from moejax.serving.health import device_probes
from moejax.serving.tenants import Tenants

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FAMILIES = {
    "gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily
}  # fmt: skip

METRICS: dict[str, tuple[str, str, str]] = {
    "num_requests_running": ("gauge", "", "samples of requests that run"),
    "num_requests_waiting": ("gauge", "", "samples of requests that wait"),
    "kv_cache_usage_perc": ("gauge", "", "blocks of the cache in use, a share from 0 to 1"),
    "prefix_cache_queries": ("counter", "", "prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("counter", "tier", "those of them that were found, by the memory they lay in"),
    "num_preemptions": ("counter", "", "samples that lost their blocks"),
    "prompt_tokens": ("counter", "", "tokens of prompts that began to be computed"),
    "generation_tokens": ("counter", "", "tokens generated, of all samples"),
    "request_success": ("counter", "finished_reason", "requests ended, by their first sample's reason"),
    "time_to_first_token_seconds": ("histogram", "", "arrival to the first token"),
    "inter_token_latency_seconds": ("histogram", "", "gaps between instants at which tokens came"),
    "request_time_per_output_token_seconds": ("histogram", "", "mean of a request's gaps, at its end"),
    "e2e_request_latency_seconds": ("histogram", "", "arrival to the last token, at the request's end"),
    "request_queue_time_seconds": ("histogram", "", "arrival to the first step"),
    "spec_decode_num_draft_tokens": ("counter", "", "drafts verified"),
    "spec_decode_num_accepted_tokens": ("counter", "", "drafts that were right"),
    "engine_steps": ("counter", "", "steps"),
    "failed_steps": ("counter", "", "steps that raised"),
    "nonfinite_tokens": ("counter", "", "tokens whose log-probability, where asked for, is NaN or infinite"),
    "expert_cache_queries": ("counter", "", "experts that steps needed, where they are in tiers"),
    "expert_cache_hits": ("counter", "", "those of them that had a slot on the device"),
    "expert_load": ("gauge", "layer,expert", "share of a layer's assignments in the window of `track_load`"),
    "routing_skew": ("gauge", "layer", "load of the busiest expert over the mean, in that window"),
    "energy_joules": ("counter", "device", "energy of a GPU or of the CPU's packages, where it is told"),
    "tenant_requests": ("counter", "tenant", "requests of a tenant that were let in"),
    "tenant_requests_refused": ("counter", "tenant,quota", "requests of a tenant that a quota refused"),
    "tenant_tokens": ("counter", "tenant,kind", "tokens of a tenant's requests that have ended"),
    "tenant_time_to_first_token_seconds": ("histogram", "tenant", "arrival to the first token, by tenant"),
}
"""Name → type, labels beside `model_name` (but of energy, a machine's, and tenants, a server's), meaning."""
LATENCIES = dict(zip([name for name, (kind, own, _) in METRICS.items() if kind == "histogram" and not own],
    ("ttft", "itl", "tpot", "e2el", "queue"), strict=True))  # fmt: skip


def observe(llm: Any) -> tuple[list[tuple[str, list[str], float]], dict[str, tuple[np.ndarray, float]]]:
    """Returns an engine's values and histograms. Raises `RequestError` if it is closed."""
    return list(_values(llm)), llm.engine.recent.histograms()


def render(llms: Mapping[Any, Any], tenants: Tenants | None = None) -> bytes:
    """Returns all metrics of engines (`LLM`, what has one as `llm`, or what `observe` told) by their models'
    names, of replicas by (model, replica), which are labels then, and of a server's tenants. Engines that are
    closed are left out."""
    families: dict[str, Any] = {}
    whose = ["model_name", *["replica"] * any(isinstance(name, tuple) for name in llms)]
    for name, (kind, own, means) in METRICS.items():
        of_engines = "energy" not in name and "tenant" not in own
        labels = whose * of_engines + own.split(",") * bool(own)
        families[name] = _FAMILIES[kind](f"moejax:{name}", means, labels=labels)
    for key, given in llms.items():
        model = key if isinstance(key, tuple) else (key,)
        llm = getattr(given, "llm", given)
        try:
            values, observed = llm if isinstance(llm, tuple) else observe(llm)
        except RequestError:
            continue  # closed
        for name, others, value in values:
            families[name].add_metric([*model, *others], value)
        for name, latency in LATENCIES.items():
            families[name].add_metric([*model], *_buckets(latency, *observed[latency]))
    for tenant, stats in ({} if tenants is None else tenants.stats).items():
        if tenant:
            families["tenant_requests"].add_metric([tenant], stats.admitted)
            for quota, count in list(stats.refused.items()):
                families["tenant_requests_refused"].add_metric([tenant, quota], count)
            for kind, count in list(stats.tokens.items()):
                families["tenant_tokens"].add_metric([tenant, kind], count)
            family = families["tenant_time_to_first_token_seconds"]
            family.add_metric([tenant], *_buckets("ttft", stats.ttft, stats.ttft_s))
    for counter, joules in (item for probe in device_probes() for item in probe.read().counters.items()):
        if joules is not None and counter.endswith("energy_j"):
            families["energy_joules"].add_metric([counter.partition("_")[0]], joules)
    registry: Any = SimpleNamespace(collect=families.values)
    return generate_latest(registry)


def _buckets(latency: str, counts: np.ndarray, total: float) -> tuple[list[tuple[str, int]], float]:
    """Returns a histogram's cumulative buckets, and its sum in seconds."""
    ends = [*map(floatToGoString, map(float, EDGES[latency])), "+Inf"]
    return list(zip(ends, np.cumsum(counts).tolist(), strict=True)), total


def _values(llm: Any) -> Iterator[tuple[str, list[str], float]]:
    """Yields an engine's gauges and counters with their own labels' values."""
    engine, stats, recent = llm.engine, llm.engine.stats, llm.engine.recent
    blocks, tiers, window = engine.scheduler.allocator, engine.tiers, llm.runner.routing.window
    found = sum((Counter(dict(cache.counts)) for cache in engine.scheduler.prefix_caches), Counter[str]())
    plain: dict[str, float] = {
        "num_requests_running": len(engine.scheduler.running),
        "num_requests_waiting": engine.scheduler.num_waiting,
        "kv_cache_usage_perc": blocks.num_used / blocks.num_blocks,
        "prefix_cache_queries": found["prompt_tokens"],
        "num_preemptions": stats.preemptions,
        "prompt_tokens": recent.prompt_tokens,
        "generation_tokens": recent.generation_tokens,
        "spec_decode_num_draft_tokens": stats.drafted,
        "spec_decode_num_accepted_tokens": stats.accepted,
        "engine_steps": stats.steps,
        "failed_steps": stats.failed_steps,
        "nonfinite_tokens": stats.nonfinite_tokens,
    }
    if tiers is not None:
        plain |= {"expert_cache_queries": tiers.hits + tiers.misses, "expert_cache_hits": tiers.hits}
    yield from ((name, [], value) for name, value in plain.items())
    for name, count in found.items():
        if name.startswith("hit_tokens_"):
            yield "prefix_cache_hits", [name.removeprefix("hit_tokens_")], count
    yield from (("request_success", [reason], count) for reason, count in list(recent.ended.items()))
    for layer, loads in enumerate([] if window is None else window.sum()):
        if loads.any():
            yield "routing_skew", [str(layer)], loads.max() / loads.mean()
            for expert, share in enumerate(loads / loads.sum()):
                yield "expert_load", [str(layer), str(expert)], share
