"""The one number of a run that a search over settings is after. Host code on plain values; no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moejax.bench.workload import LatencyCase
from moejax.core.checked import Checked, PositiveInt
from moejax.core.errors import ConfigError, did_you_mean
from moejax.results.metric_names import RATES, STATISTICS
from moejax.results.metrics import LATENCIES, Slo

_ANYWHERE = ("cost_per_million_output_tokens", "energy_per_output_token_j")
_OF_RUN = ("compile_seconds", "process_peak_bytes", "model_bytes", "kv_cache_allocated_bytes")
_OF_RAMP = ("knee_rate", "max_goodput", "max_output_throughput")
_OF_TRAFFIC = (
    *(f"{statistic}_queue_ms" for statistic in STATISTICS),
    "mean_batch_size", "cache_use_mean", "cache_use_peak", "padding_waste", "preemptions",
    "speedup_over_static", "p99_ttft_ratio", "mfu_percent", "mbu_percent",
)  # fmt: skip


@dataclass(frozen=True)
class ObjectiveCase(Checked, section="objective_case"):
    """The case of a latency run that `objective` is of: the fields that say which, None for any value."""

    batch_size: PositiveInt | None = None
    prompt_len: PositiveInt | None = None
    output_len: PositiveInt | None = None

    def fits(self, case: Mapping[str, Any]) -> bool:
        """Tells whether a case has the values asked for."""
        return all(value in (None, case[name]) for name, value in asdict(self).items())


ANY_CASE = ObjectiveCase()


def known_objectives(experiment: str, *, several: bool = False) -> list[str]:
    """Names of the flat metrics that a run (`latency`, `throughput`, `ramp`, or `users` with several numbers
    of them) has or may have; with `several` cases no latencies, which are each case's own."""
    latencies = [f"{statistic}_{name}_ms" for name in LATENCIES for statistic in STATISTICS]
    if experiment in ("ramp", "users"):
        return [*_OF_RAMP[experiment == "users" :], *_OF_RUN]
    of_case = () if several else (*latencies, *(_OF_TRAFFIC if experiment == "throughput" else ()))
    return [*RATES, *of_case, *_OF_RUN, *_ANYWHERE]


def check_objective(
    objective: str | None,
    experiment: str,
    slo: Slo,
    *,
    cases: Sequence[LatencyCase] = (),
    chosen: ObjectiveCase = ANY_CASE,
) -> None:
    """Raises `ConfigError` where a run would not have one value of `objective`: for a name that is no metric
    of it, a goodput without objectives, a case's metric of several cases.

    Args:
        experiment: see `known_objectives`.
        cases: what a latency run measures.
        chosen: the case that the objective is of.
    """
    known = known_objectives(experiment)
    if objective is None:
        if chosen != ANY_CASE:
            raise ConfigError("objective_case says which case objective=METRIC is of, and none is set")
        return
    if objective not in known:
        near = did_you_mean(str(objective), known)
        text = f"unknown metric {str(objective)!r} of a {experiment} run{near}"
        raise ConfigError(f"objective: {text} (known: {', '.join(known[:4])}, …)")
    if objective in ("request_goodput", "max_goodput") and not slo:
        raise ConfigError(
            f"objective={objective} counts requests within objectives, and none is set: add "
            "workload.slo.ttft_ms=MS, workload.slo.tpot_ms=MS or workload.slo.e2el_ms=MS"
        )
    rows = [asdict(case) for case in cases]
    fitting = sum(map(chosen.fits, rows))
    of_case = chosen != ANY_CASE or objective not in known_objectives(experiment, several=len(rows) > 1)
    if fitting != 1 and of_case:
        varied = [name for name in rows[0] if len({row[name] for row in rows}) > 1] or list(rows[0])
        choices = [" ".join(f"objective_case.{name}={row[name]}" for name in varied) for row in rows]
        raise ConfigError(
            f"objective={objective} is of one case, and objective_case fits {fitting} of {len(rows)}: add "
            + " or ".join(choices)
        )


def objective_value(
    result: Mapping[str, Any], objective: str | None, chosen: ObjectiveCase = ANY_CASE
) -> float | None:
    """The metric's value in the chosen case of the first backend, where cases have it, or in the whole run;
    None where no objective was asked for.

    Raises:
        ConfigError: this run has no such value, for instance a cost without a price.
    """
    if objective is None:
        return None
    value = result["metrics"].get(objective)
    if chosen != ANY_CASE:
        value = next(filter(chosen.fits, result["cases"])).get(objective, value)
    if value is None:
        raise ConfigError(f"objective={objective} has no value in this run; its metrics are in result.json")
    return float(value)
