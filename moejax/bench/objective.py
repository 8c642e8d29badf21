"""The one number of a run that a search over settings is after. Host code on plain values; no JAX."""

from collections.abc import Mapping
from typing import Any

from moejax.core.errors import ConfigError, did_you_mean
from moejax.results.metric_names import RATES, STATISTICS
from moejax.results.metrics import LATENCIES, Slo

_ANYWHERE = (
    "compile_seconds",
    "cost_per_million_output_tokens",
    "energy_per_output_token_j",
    "host_peak_bytes",
)
_OF: dict[str, tuple[str, ...]] = {
    "latency": ("median_tpot_ms", "weight_bytes", "kv_cache_bytes"),
    "throughput": (
        *(f"{statistic}_queue_ms" for statistic in STATISTICS),
        "mean_batch_size", "cache_use_mean", "cache_use_peak", "padding_waste", "preemptions",
        "speedup_over_static", "p99_ttft_ratio", "knee_rate", "max_goodput", "max_output_throughput",
        "weight_bytes", "kv_cache_bytes", "mfu_percent", "mbu_percent",
    ),
}  # fmt: skip


def known_objectives(experiment: str) -> list[str]:
    """Names of the flat metrics that an experiment has or may have."""
    latencies = [f"{statistic}_{name}_ms" for name in LATENCIES for statistic in STATISTICS]
    return list(dict.fromkeys([*RATES, *latencies, *_OF[experiment], *_ANYWHERE]))


def check_objective(objective: str | None, experiment: str, slo: Slo) -> None:
    """Raises `ConfigError` for a name that is no metric, or a goodput without objectives."""
    if objective is None:
        return
    if objective not in known_objectives(experiment):
        near = did_you_mean(str(objective), known_objectives(experiment))
        some = "request_goodput, output_throughput, p99_ttft_ms, median_tpot_ms, …"
        raise ConfigError(f"objective: unknown metric {str(objective)!r}{near} (known: {some})")
    if objective in ("request_goodput", "max_goodput") and not slo:
        raise ConfigError(
            f"objective={objective} counts requests within objectives, and none is set: add "
            "workload.slo.ttft_ms=MS, workload.slo.tpot_ms=MS or workload.slo.e2el_ms=MS"
        )


def objective_value(result: Mapping[str, Any], objective: str | None) -> float | None:
    """The metric's value; None where no objective was asked for.

    Raises:
        ConfigError: this run has no such value, for instance a cost without a price.
    """
    if objective is None:
        return None
    value = result["metrics"].get(objective)
    if value is None:
        raise ConfigError(f"objective={objective} has no value in this run; its metrics are in result.json")
    return float(value)
