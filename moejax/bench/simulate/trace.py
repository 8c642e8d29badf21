"""The simulator beside a published run, request by request: vLLM 0.19 serving 300 requests with Qwen3-30B-A3B
on two RTX PRO 6000, data-parallel attention and experts on both (`e2e_rtxpro6000_requests`, README of
`moejax/assets/gpu_tables`).

No number is fitted: kernels come from the device's tables; limits, links (16 GB/s, 20 us) and blocks from
that run's configuration (LLMServingSim, bench/examples/RTXPRO6000); the host's work is behind the device's,
since vLLM schedules the next step meanwhile.
"""

from collections.abc import Sequence
from typing import Any

from moejax.bench.backends.replica import Layout
from moejax.bench.backends.simulated import SimulatedBackend
from moejax.bench.driver import OPEN, drive
from moejax.bench.traffic import PlannedRequest
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.parallel import ParallelConfig
from moejax.engine.requests.api import RequestMetrics
from moejax.results.metrics import RequestRecord, compute_metrics
from moejax.simulate.profiled import ProfiledKernels
from moejax.simulate.routing import RoutingLaw
from moejax.simulate.runner import simulated_engine
from moejax.simulate.step import HostCosts, StepDurations
from moejax.simulate.tables import FOLDER, rows_of

LAWS = (RoutingLaw("zipf"), RoutingLaw("uniform"), RoutingLaw("even"))
"""The simulator's own law first; "even" is what LLMServingSim assumes."""

_LAYERS, _BLOCKS = 48, 37819
_MODEL = ModelConfig(
    "qwen3_moe", 151936, 2048, _LAYERS, 32, 4, 128, 128, 8, 768, 6144, (True,) * _LAYERS, (None,) * _LAYERS,
    40960, dtype="bfloat16",
)  # fmt: skip
_ENGINE = EngineConfig(max_num_seqs=128, max_num_batched_tokens=2048, block_size=16, max_model_len=8192)


class _FromTheQueue(SimulatedBackend):
    """Counts a request from the instant at which the loop takes it up, as the published instants do: half of
    them are, to the millisecond, another request's tokens'."""

    def submit(self, *args: Any, arrival_time: float | None = None, **kwargs: Any) -> Any:
        return super().submit(*args, arrival_time=self.now, **kwargs)


def published() -> list[RequestRecord]:
    """Returns the run's requests in order of arrival, instants in seconds. Between their first and their last
    token instants are a straight line, which no metric but the inter-token latency depends on."""
    records = []
    for row in rows_of(FOLDER / "e2e_rtxpro6000_requests.csv.gz"):
        prompt, count = int(row["input_tokens"]), int(row["output_tokens"])
        arrival, first, last = (float(row[f"{name}_s"]) for name in ("arrival", "first_token", "last_token"))
        times = [first + (last - first) * place / max(1, count - 1) for place in range(count)]
        metrics = RequestMetrics(arrival, token_times=times)
        records.append(RequestRecord(row["request"], 0, prompt, count, metrics, "length"))
    return sorted(records, key=lambda record: record.metrics.arrival_time)


def simulate(records: Sequence[RequestRecord], law: RoutingLaw) -> list[RequestRecord]:
    """Returns the same requests as the simulator serves them."""
    parallel = ParallelConfig(ep=2, attention="data")
    step = StepDurations(_MODEL, parallel, ProfiledKernels(), law, HostCosts(step_s=0.0, row_s=0.0))
    make = lambda: simulated_engine(_ENGINE, step.time, _BLOCKS, groups=parallel.data_groups)  # noqa: E731
    backend = _FromTheQueue(_MODEL, _ENGINE, [Layout(make)])
    asked = [(one.metrics.arrival_time, [0] * one.prompt_len, one.output_len) for one in records]
    plan = [PlannedRequest(*one) for one in asked]
    return drive(backend, plan, OPEN.sampling, clock=backend.clock, sleep=backend.sleep).records


def rows() -> list[dict[str, Any]]:
    """Returns a row for each routing law and metric: published and simulated value in milliseconds or
    tokens/s, and the relative error of the latter."""
    truth, found = published(), []
    for law in LAWS:
        both = []
        for records in (truth, simulate(truth, law)):
            span = max(one.metrics.token_times[-1] for one in records) - records[0].metrics.arrival_time
            both.append(compute_metrics(records, span))
        for name in [f"{s}_{of}_ms" for of in ("ttft", "tpot", "e2el") for s in ("mean", "median", "p99")]:
            found.append(_row(name, law, *(float(metrics[name] or 0) for metrics in both)))
        found.append(_row("output_throughput", law, *(float(m["output_throughput"] or 0) for m in both)))
    return found


def _row(name: str, law: RoutingLaw, truth: float, simulated: float) -> dict[str, Any]:
    error = simulated / truth - 1
    return {"routing": str(law), "metric": name, "published": truth, "simulated": simulated, "error": error}
