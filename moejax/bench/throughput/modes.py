"""The unit that a throughput experiment measures: a batching mode of a backend under planned traffic."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import MoejaxBackend, check_length
from moejax.bench.backends.registry import encoder
from moejax.bench.driver import ServedRequest, TrafficRun
from moejax.bench.traffic import PlannedRequest, ThroughputWorkload, plan_requests
from moejax.core.errors import ConfigError, unknown
from moejax.routing.capture import RoutingCapture


@dataclass
class Mode:
    """One row of the result.

    Attributes:
        backend: the engine, in its own batching mode.
        plan: its traffic, in order of arrival.
        workload: as it is of this row: with one number of users, at one rate.
        runs: what was measured, one for each iteration.
        failed_steps: of all iterations.
        trace: of the first iteration, where the engine captures routing.
        step_costs: FLOPs and bytes of its steps, from `moejax.bench.common.roofline.cost_breakdown`.
    """

    backend: Backend
    plan: Sequence[PlannedRequest]
    workload: ThroughputWorkload
    runs: list[TrafficRun] = field(default_factory=list)
    failed_steps: int = 0
    trace: RoutingCapture | None = None
    step_costs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def batching(self) -> str:
        return self.backend.batching

    @property
    def label(self) -> str:
        """For messages: the batching mode of our engine, a peer's name; and how many users."""
        name = self.batching if isinstance(self.backend, MoejaxBackend) else self.backend.name
        return name if self.workload.concurrency is None else f"{name}, {self.workload.concurrency} users"

    @property
    def served(self) -> list[ServedRequest]:
        return [item for run in self.runs for item in run.served]


def plan_modes(
    backends: Sequence[Backend], workload: ThroughputWorkload, plan: Sequence[PlannedRequest]
) -> list[Mode]:
    """For each number of users a mode for each backend; our own is followed by `workload.compare`'s other
    modes of it, which share its weights and have a cache and a scheduler of their own.

    Raises:
        ConfigError: `workload.compare` without our engine.
    """
    chosen: list[Backend] = []
    for backend in backends:
        chosen.append(backend)
        if isinstance(backend, MoejaxBackend):
            others = [mode for mode in dict.fromkeys(workload.compare) if mode != backend.batching]
            chosen += [backend.variant(mode) for mode in others]
    if workload.compare and not any(isinstance(backend, MoejaxBackend) for backend in backends):
        raise ConfigError(
            f"workload.compare is of moejax's batching modes; backend={backends[0].name} has one of its own"
        )
    cases = [replace(workload, concurrency=users) for users in workload.users]
    return [Mode(backend, plan, case) for case in cases for backend in chosen]


def plan_traffic(backends: Sequence[Backend], workload: ThroughputWorkload) -> list[PlannedRequest]:
    """Returns the requests in order of arrival, the same for all backends.

    Each fits the models, and alone also our cache: there is no use in waiting for more of it.

    Raises:
        ConfigError: the longest does not fit, or a file of the workload's is wrong.
        RequestError: a backend cannot sample as the workload asks.
    """
    vocab_size = min(backend.vocab_size for backend in backends)
    plan = plan_requests(workload, vocab_size, encode=encoder(backends))
    longest = max(plan, key=lambda asked: asked.total_len)
    for backend in backends:
        known = backend.scheduling.slo_classes
        for name, kind in workload.mix.items():
            if kind.slo_class is not None and kind.slo_class not in known:
                raise ConfigError(f"workload.mix.{name}: {unknown('slo_class', kind.slo_class, known)}")
        backend.check(workload.sampling(longest.output_len))
        check_length(backend, "the longest request", longest.prompt_len, longest.output_len)
    return plan
