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
_OF_RUN = ("compile_seconds", "host_peak_bytes", "weight_bytes", "kv_cache_bytes")
_OF_RAMP = ("knee_rate", "max_goodput", "max_output_throughput")
_OF_TRAFFIC = (
    *(f"{statistic}_queue_ms" for statistic in STATISTICS),
    "mean_batch_size", "cache_use_mean", "cache_use_peak", "padding_waste", "preemptions",
    "speedup_over_static", "p99_ttft_ratio", "mfu_percent", "mbu_percent",
)  # fmt: skip


@dataclass(frozen=True)
class ObjectiveCase(Checked, section="objective_case"):
    """Names the case that `objective` is of, where the workload has several; each field that is given must be
    the case's."""

    batch_size: PositiveInt | None = None
    prompt_len: PositiveInt | None = None
    output_len: PositiveInt | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in asdict(self).values())

    def fits(self, case: Mapping[str, Any]) -> bool:
        """Whether a case has all that is given."""
        return all(value in (None, case[name]) for name, value in asdict(self).items())


def known_objectives(experiment: str, *, several: bool = False) -> list[str]:
    """Names of the flat metrics that a run of an experiment (`latency`, `throughput` or `ramp`) has or may
    have; with `several` cases no latencies, which are each case's own."""
    latencies = [f"{statistic}_{name}_ms" for name in LATENCIES for statistic in STATISTICS]
    if experiment == "ramp":
        return [*_OF_RAMP, *_OF_RUN]
    of_case = () if several else (*latencies, *(_OF_TRAFFIC if experiment == "throughput" else ()))
    return [*RATES, *of_case, *_OF_RUN, *_ANYWHERE]


def check_objective(
    objective: str | None,
    experiment: str,
    slo: Slo,
    *,
    cases: Sequence[LatencyCase] = (),
    chosen: ObjectiveCase | None = None,
) -> None:
    """Checks before anything is measured that a run will have one value of `objective`.

    Args:
        experiment: see `known_objectives`.
        cases: what a latency run measures.
        chosen: which of them the objective is of.

    Raises:
        ConfigError: a name that is no metric of such a run, a goodput without objectives, a case's metric of
            several cases, or a choice that fits none or several of them.
    """
    if objective is None:
        if chosen:
            raise ConfigError(
                "objective_case says which case objective=METRIC is of, and objective is not set"
            )
        return
    known = known_objectives(experiment)
    if objective not in known:
        near = did_you_mean(str(objective), known)
        some = [name for name in (*_OF_RAMP, "request_goodput", "p99_ttft_ms", *RATES[:1]) if name in known]
        raise ConfigError(
            f"objective: unknown metric {str(objective)!r} of a {experiment} run{near} "
            f"(known: {', '.join(some)}, …)"
        )
    if objective in ("request_goodput", "max_goodput") and not slo:
        raise ConfigError(
            f"objective={objective} counts requests within objectives, and none is set: add "
            "workload.slo.ttft_ms=MS, workload.slo.tpot_ms=MS or workload.slo.e2el_ms=MS"
        )
    if chosen and objective in _OF_RUN:
        raise ConfigError(f"objective={objective} is of the whole run: leave objective_case out")
    fitting = [asdict(case) for case in cases if chosen is None or chosen.fits(asdict(case))]
    if len(fitting) != 1 and (
        chosen or objective not in known_objectives(experiment, several=len(cases) > 1)
    ):
        raise ConfigError(
            f"objective={objective} is of one case, and objective_case fits {len(fitting)} of {len(cases)}:"
            f" add {_choices([asdict(case) for case in cases])}"
        )


def _choices(cases: Sequence[Mapping[str, int]]) -> str:
    """Returns each case as the arguments that choose it, by the lengths in which the cases differ."""
    varied = [name for name in cases[0] if len({case[name] for case in cases}) > 1] or list(cases[0])
    return " or ".join(" ".join(f"objective_case.{name}={case[name]}" for name in varied) for case in cases)


def objective_value(
    result: Mapping[str, Any], objective: str | None, chosen: ObjectiveCase | None = None
) -> float | None:
    """The metric's value in the run or in the chosen case of its first backend; None where no objective was
    asked for.

    Raises:
        ConfigError: this run has no such value, for instance a cost without a price.
    """
    if objective is None:
        return None
    rows = [row for row in result["cases"] if chosen.fits(row)] if chosen else [result["metrics"]]
    value = rows[0].get(objective)
    if value is None:
        raise ConfigError(f"objective={objective} has no value in this run; its metrics are in result.json")
    return float(value)
