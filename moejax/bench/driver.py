"""Sends planned requests to an engine at their times and steps it until all are answered.

The loop is open: a request counts from the instant at which it was planned to arrive, however late the engine
was to notice it, so an overloaded engine cannot make its own load lighter (Schroeder, Wierman and
Harchol-Balter, NSDI 2006). No JAX here.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moejax.bench.backends.base import Backend
from moejax.bench.traffic import PlannedRequest
from moejax.core.errors import RequestError
from moejax.engine.requests.api import RequestMetrics, RequestOutput, SamplingParams
from moejax.engine.stats import StepRecord
from moejax.results.metrics import BROKEN_OFF, RequestRecord, Slo, record_row

# Seconds of the driver's clock between looks at what has finished, which are for the progress bar only.
_LOOK_EVERY = 0.2


@dataclass(frozen=True)
class ServedRequest:
    """The outcome of one planned request.

    Attributes:
        record: its lengths, instants and finish reason; "error" if the engine refused or lost it.
        queue_s: seconds from arrival to the first step that held it; None if none did.
        preemptions: how often it lost its blocks.
        error: one line if it failed.
        token_ids: what it generated, where the engine tells.
    """

    record: RequestRecord
    queue_s: float | None
    preemptions: int
    error: str | None = None
    token_ids: Sequence[int] = ()

    @property
    def failed(self) -> bool:
        return self.record.finish_reason == "error"

    @property
    def aborted(self) -> bool:
        return self.record.finish_reason in BROKEN_OFF and not self.failed

    def row(self, origin: float, slo: Slo) -> dict[str, Any]:
        """`record_row` with `queue_ms`, `preemptions`, `cached_tokens`, `slo_met` (None without objectives)
        and `error`."""
        met = self.record.completed and slo.met_by(self.record) if slo else None
        return {
            **record_row(self.record, origin),
            "queue_ms": None if self.queue_s is None else self.queue_s * 1e3,
            "preemptions": self.preemptions,
            "cached_tokens": self.record.metrics.cached_tokens,
            "slo_met": met,
            "error": self.error,
        }


@dataclass(frozen=True)
class TrafficRun:
    """One pass of the whole traffic. `start` is the first arrival's instant on the driver's clock."""

    start: float
    served: tuple[ServedRequest, ...]
    steps: tuple[StepRecord, ...]

    @property
    def records(self) -> list[RequestRecord]:
        return [item.record for item in self.served]

    def require_completed(self, label: str) -> None:
        """Raises `RequestError` where no request was completed; `label` names the engine."""
        if not any(record.completed for record in self.records):
            reason = next((item.error for item in self.served if item.error), "no reason given")
            raise RequestError(
                f"none of {len(self.served)} requests was completed ({label}); first: {reason}"
            )

    def rows(self, slo: Slo) -> list[dict[str, Any]]:
        """Returns the requests' rows of requests.jsonl; instants count from the start."""
        return [item.row(self.start, slo) for item in self.served]

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last token of a completed request; 0 if none completed."""
        ends = [record.metrics.token_times[-1] for record in self.records if record.completed]
        return max(ends) - self.start if ends else 0.0


def drive(
    backend: Backend,
    plan: Sequence[PlannedRequest],
    sampling: Callable[[int, int], SamplingParams],
    *,
    case: int = 0,
    on_progress: Callable[[int], None] = lambda finished: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    agree: Callable[[int], int] = lambda value: value,
) -> TrafficRun:
    """Serves `plan` from now on and returns when every request has ended.

    Args:
        plan: in order of arrival.
        sampling: (output length, place in the plan) → sampling parameters.
        case: index of the run's row in the result's `cases`.
        on_progress: told now and then how many requests have ended since it was last told.
        clock, sleep: seconds; the clock must be the engine's own.
        agree: gives process 0's value in every process (`moejax.sharding.distributed.agree`), so that all
            submit the same requests before the same step. Asked only while there are requests to come.

    A request that the engine refuses or breaks off is a `ServedRequest` like any other. If the body is left
    by an exception (Ctrl-C too), what still runs is aborted.
    """
    params = [sampling(planned.output_len, index) for index, planned in enumerate(plan)]
    steps: list[StepRecord] = []
    outputs: list[RequestOutput | str] = []  # of a refused request the engine's line
    running: list[RequestOutput] = []
    before, backend.on_step = backend.on_step, steps.append
    agree(0)  # so that all processes' clocks start together
    start = looked = clock()
    try:
        while True:
            now = clock()
            due = len(outputs)
            while due < len(plan) and start + plan[due].arrival_s <= now:
                due += 1
            if len(outputs) < len(plan):
                due = agree(due)
            while len(outputs) < due:
                planned, chosen = plan[len(outputs)], params[len(outputs)]
                arrival = start + planned.arrival_s
                try:
                    output = backend.submit(planned.prompt_token_ids, chosen, arrival_time=arrival)
                except RequestError as error:
                    outputs.append(str(error))
                    on_progress(1)
                else:
                    outputs.append(output)
                    running.append(output)
            busy = backend.step()
            if not busy or now - looked >= _LOOK_EVERY:
                looked, count = now, len(running)
                running = [output for output in running if not output.finished]
                on_progress(count - len(running))
            if not busy and len(outputs) == len(plan):
                break
            if not busy:
                sleep(max(0.0, start + plan[len(outputs)].arrival_s - clock()))
    finally:
        backend.on_step = before
        for output in running:
            if not output.finished:
                backend.abort(output.request_id)
    served = [
        _outcome(planned, output, start, f"{case}-{index}", case)
        for index, (planned, output) in enumerate(zip(plan, outputs, strict=True))
    ]
    return TrafficRun(start, tuple(served), tuple(steps))


def _outcome(
    asked: PlannedRequest, output: RequestOutput | str, start: float, name: str, case: int
) -> ServedRequest:
    """Returns what became of a request, by its output at the end of the run."""
    if isinstance(output, str):
        times = RequestMetrics(start + asked.arrival_s)
        record = RequestRecord(name, case, len(asked.prompt_token_ids), 0, times, "error")
        return ServedRequest(record, None, 0, output)
    record, error = RequestRecord.from_output(output, case=case), output.error
    if not output.finished:
        record = dataclasses.replace(record, finish_reason="error")
        error = error or "the engine had nothing left to do before this request was finished"
    scheduled = output.metrics.scheduled_time
    queue = None if scheduled is None else scheduled - output.metrics.arrival_time
    tokens = output.outputs[0].token_ids
    return ServedRequest(record, queue, output.metrics.preemptions, error, tokens)
