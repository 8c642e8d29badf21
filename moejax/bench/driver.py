"""Sends planned requests to an engine at their times and steps it until all are answered.

The loop is open, unless there are users who wait for their answers: a request counts from the instant at
which it was planned to arrive, however late the engine was to notice it, so an overloaded engine cannot make
its own load lighter (Schroeder, Wierman and Harchol-Balter, NSDI 2006). No JAX here.
"""

import dataclasses
import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moejax.bench.backends.base import Backend, BackendError
from moejax.bench.traffic import PlannedRequest, ThroughputWorkload, next_request
from moejax.core.errors import RequestError
from moejax.core.scheduling import SchedulingConfig
from moejax.engine.requests.api import RequestMetrics, RequestOptions, RequestOutput, SamplingParams
from moejax.engine.stats import StepRecord
from moejax.results.metrics import BROKEN_OFF, Metrics, RequestRecord, Slo, compute_metrics, record_row
from moejax.results.service import service_metrics

# Seconds of the driver's clock between looks at what has finished, which are for the progress bar only.
_LOOK_EVERY = 0.2

OPEN = ThroughputWorkload()


@dataclass(frozen=True)
class ServedRequest:
    """The outcome of one planned request.

    Attributes:
        record: its lengths, instants and finish reason; "error" if the engine refused or lost it.
        queue_s: seconds from arrival to the first step that held it; None if none did.
        preemptions: how often it lost its blocks.
        error: one line if it failed.
        token_ids: what it generated, where the engine tells.
        prompt_token_ids: its whole prompt; none if it was never sent.
        turn: how many came before it in its conversation.
    """

    record: RequestRecord
    queue_s: float | None
    preemptions: int
    error: str | None = None
    token_ids: Sequence[int] = ()
    prompt_token_ids: Sequence[int] = ()
    turn: int = 0

    @property
    def failed(self) -> bool:
        return self.record.finish_reason == "error"

    @property
    def aborted(self) -> bool:
        return self.record.finish_reason in BROKEN_OFF and not self.failed

    def row(self, origin: float, slo: Slo) -> dict[str, Any]:
        """`record_row` with `turn`, `queue_ms`, `preemptions`, `cached_tokens`, `slo_met` (None without
        objectives) and `error`."""
        met = self.record.completed and slo.met_by(self.record) if slo else None
        return {
            **record_row(self.record, origin),
            "turn": self.turn,
            "queue_ms": None if self.queue_s is None else self.queue_s * 1e3,
            "preemptions": self.preemptions,
            "cached_tokens": self.record.metrics.cached_tokens,
            "slo_met": met,
            "error": self.error,
        }


@dataclass(frozen=True)
class TrafficRun:
    """One pass of the whole traffic.

    Attributes:
        start: the first arrival's instant on the driver's clock.
        served: what was sent, and what could not be since what it continues failed, in the plan's order.
        workload: how long its warm-up was, and when the sending ended.
        scheduling: what classes ask and tenants weigh.
    """

    start: float
    served: tuple[ServedRequest, ...]
    steps: tuple[StepRecord, ...]
    workload: ThroughputWorkload = OPEN
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)

    @property
    def records(self) -> list[RequestRecord]:
        return [item.record for item in self.served]

    @property
    def window(self) -> tuple[float, float]:
        """The instants between which rates count: from the end of `warmup_s` to the last token of a completed
        request, or to the end of `duration_s` if that is earlier."""
        begin, limit = self.start + self.workload.warmup_s, self.workload.duration_s or math.inf
        ends = [record.metrics.token_times[-1] for record in self.records if record.completed]
        return begin, min(max([begin, *ends]), self.start + limit)

    @property
    def duration_s(self) -> float:
        """Seconds of the window; 0 if no request was completed."""
        begin, end = self.window
        return end - begin

    @property
    def measured(self) -> list[ServedRequest]:
        """The requests that arrived after the warm-up."""
        begin, _ = self.window
        return [item for item in self.served if item.record.metrics.arrival_time >= begin]

    @property
    def measured_steps(self) -> list[StepRecord]:
        """The steps after the warm-up, up to the end of `duration_s` where there is one."""
        begin, end = self.workload.warmup_s, self.workload.duration_s or math.inf
        return [step for step in self.steps if begin <= step.time - self.start <= end]

    def metrics(self, slo: Slo) -> Metrics:
        """`compute_metrics` of this pass: latencies of the measured requests, rates of what came in the
        window, whenever its request did, totals of all."""
        counted = compute_metrics(self.records, self.duration_s, slo, latencies=False, window=self.window)
        mixed = [item.record for item in self.measured] if self.workload.mix else []
        service = service_metrics(mixed, self.scheduling) if mixed else {}
        return compute_metrics([item.record for item in self.measured], self.duration_s) | counted | service

    def require_completed(self, label: str) -> None:
        """Raises `RequestError` where no request was completed; `label` names the engine."""
        if not any(record.completed for record in self.records):
            reason = next((item.error for item in self.served if item.error), "no reason given")
            raise RequestError(
                f"none of {len(self.served)} requests was completed ({label}); first: {reason}"
            )

    def rows(self, slo: Slo) -> list[dict[str, Any]]:
        """Returns the measured requests' rows of requests.jsonl; instants count from the start."""
        return [item.row(self.start, slo) for item in self.measured]


class _Due:
    """Which request is sent when, in nanoseconds since the start: whole numbers, so that processes that agree
    on the time agree on the order too."""

    def __init__(self, plan: Sequence[PlannedRequest], workload: ThroughputWorkload) -> None:
        self.plan, self.heap, self._next = list(plan), list[tuple[int, int]](), 0
        self._first, self._workload, users = plan, workload, workload.users[0]
        for user in range(users or len(plan)):
            self.open(_ns(workload.ramp_up_s * user / users - workload.think_s) if users else 0)

    def _at(self, place: int) -> PlannedRequest | None:
        if place == len(self.plan) and self._workload.endless:
            self.plan.append(next_request(self._workload, self._first, place))
        return self.plan[place] if place < len(self.plan) else None

    def open(self, now: int) -> None:
        """Takes up the next conversation, if there is one."""
        while (asked := self._at(self._next)) is not None and asked.follows is not None:
            self._next += 1
        if asked is not None:
            self.push(self._next, now)
            self._next += 1

    def push(self, place: int, now: int) -> None:
        """Notes that a request is due its `arrival_s` after `now`, unless sending has ended by then."""
        due = now + _ns(self.plan[place].arrival_s)
        if self._workload.duration_s is None or due < _ns(self._workload.duration_s):
            heapq.heappush(self.heap, (due, place))

    def after(self, place: int) -> int | None:
        """Returns the place of the request that continues this one, if there is one."""
        later = self._at(place + 1)
        return place + 1 if later is not None and later.follows == place else None


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def drive(
    backend: Backend,
    plan: Sequence[PlannedRequest],
    sampling: Callable[[int, int], SamplingParams],
    *,
    workload: ThroughputWorkload = OPEN,
    case: int = 0,
    on_progress: Callable[[int], None] = lambda finished: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    agree: Callable[[int], int] = lambda value: value,
) -> TrafficRun:
    """Serves `plan` from now on and returns when every request has ended.

    Args:
        plan: in order of arrival, each conversation's requests one after the other.
        sampling: (output length, place in the plan) → sampling parameters.
        workload: says how many users wait for their answers (`concurrency`, one number), and when to end the
            sending and the requests.
        case: index of the run's row in the result's `cases`.
        on_progress: told now and then how many requests have ended since it was last told.
        clock, sleep: seconds; the clock must be the engine's own.
        agree: gives process 0's value in every process (`moejax.sharding.distributed.agree`): its time, by
            which all submit the same requests before the same step. Asked only while there are requests to
            come or to be given up.

    A request that the engine refuses or breaks off is a `ServedRequest` like any other; what continues it
    fails too. If the body is left by an exception (Ctrl-C too), what still runs is aborted.

    Raises:
        BackendError: a request continues an output of which the backend does not tell the tokens.
    """
    due, users, limit = _Due(plan, workload), workload.users[0], workload.timeout_s
    params = [sampling(planned.output_len, index) for index, planned in enumerate(plan)]
    steps: list[StepRecord] = []
    outputs: dict[int, RequestOutput | str] = {}  # of a request that was not taken the reason
    sent: dict[int, int] = {}  # nanoseconds after the start
    late: dict[int, str] = {}
    running: list[RequestOutput] = []
    watched: dict[int, RequestOutput] = {}  # whose end decides what is sent, or that may run out of time
    before, backend.on_step = backend.on_step, steps.append
    agree(0)  # so that all processes' clocks start together
    start = looked = clock()
    now = 0

    def end(place: int, why: str | None = None) -> None:
        """Goes on after a request: with what continues it, of which nothing can be sent if it has no answer,
        for the reason `why`, or with its user's next."""
        watched.pop(place, None)
        while (later := due.after(place)) is not None and why is not None:
            outputs[later] = f"request {place}, which it continues, {why}"
            sent[later], place = now, later
            on_progress(1)
        if later is not None:
            due.push(later, now)
        elif users is not None:
            due.open(now)

    try:
        while True:
            if watched or due.heap:
                now = agree(_ns(clock() - start))
            for place, output in list(watched.items()):
                if limit and not output.finished and now >= sent[place] + _ns(limit):
                    late[place] = f"no end within {limit:g} s (workload.timeout_s)"
                    backend.abort(output.request_id)
                if output.finished or place in late:
                    end(place, late.get(place) or _broken_off(output))
            ready = []
            while due.heap and due.heap[0][0] <= now:
                ready.append(heapq.heappop(due.heap))
            for instant, place in ready:
                asked, sent[place] = due.plan[place], instant
                chosen = params[place] if place < len(params) else sampling(asked.output_len, place)
                prompt = _prompt(asked, outputs, backend)
                try:
                    output = backend.submit(
                        prompt, chosen, arrival_time=start + instant / 1e9, options=asked.options
                    )
                except RequestError as error:
                    outputs[place] = str(error)
                    on_progress(1)
                    end(place, f"was refused: {error}")
                else:
                    outputs[place] = output
                    running.append(output)
                    if limit or users or due.after(place) is not None:
                        watched[place] = output
            busy = backend.step()
            passed = clock()
            if not busy or passed - looked >= _LOOK_EVERY:
                looked, count = passed, len(running)
                running = [output for output in running if not output.finished]
                on_progress(count - len(running))
            if busy:
                continue
            for place, output in list(watched.items()):
                if not output.finished:  # and never will be
                    end(place, "was lost")
            if watched:
                continue
            if not due.heap:
                break
            sleep(max(0.0, start + due.heap[0][0] / 1e9 - clock()))
    finally:
        backend.on_step = before
        for output in running:
            if not output.finished:
                backend.abort(output.request_id)
    served: dict[int, ServedRequest] = {}
    for place, answer in sorted(outputs.items()):
        name, follows = f"{case}-{place}", due.plan[place].follows
        turn = 0 if follows is None else served[follows].turn + 1
        if isinstance(answer, str):
            planned = 0 if follows is not None else len(due.plan[place].prompt_token_ids)
            times, options = RequestMetrics(start + sent[place] / 1e9), due.plan[place].options
            record = RequestRecord(name, case, planned, 0, times, "error", options)
            served[place] = ServedRequest(record, None, 0, answer, turn=turn)
        else:
            served[place] = _outcome(answer, case, turn, late.get(place), due.plan[place].options)
    return TrafficRun(start, tuple(served.values()), tuple(steps), workload, backend.scheduling)


def _prompt(
    planned: PlannedRequest, outputs: Mapping[int, RequestOutput | str], backend: Backend
) -> list[int]:
    """Returns the whole prompt of a request that is sent: what it continues has ended."""
    if planned.follows is None:
        return planned.prompt_token_ids
    before = outputs[planned.follows]
    assert isinstance(before, RequestOutput)
    answer = before.outputs[0].token_ids
    if len(answer) != len(before.metrics.token_times):
        raise BackendError(
            f"backend {backend.name} does not tell its outputs' token ids, which a conversation's next turn"
            " begins with: leave out workload.turns and traces of conversations"
        )
    return [*before.prompt_token_ids, *answer, *planned.prompt_token_ids]


def _broken_off(output: RequestOutput) -> str | None:
    """Returns why there is no answer to a request that has ended; None where there is one."""
    if output.outputs[0].finish_reason in ("stop", "length"):
        return None
    return f"failed: {output.error}" if output.error else "was aborted"


def _outcome(
    output: RequestOutput, case: int, turn: int, late: str | None, options: RequestOptions
) -> ServedRequest:
    """Returns what became of a request that was sent, by its output at the end of the run; `late` says that
    it was given up."""
    record, error = RequestRecord.from_output(output, case, options), late or output.error
    if not output.finished:
        record = dataclasses.replace(record, finish_reason="error")
        error = error or "the engine had nothing left to do before this request was finished"
    times = output.metrics
    queue = None if times.scheduled_time is None else times.scheduled_time - times.arrival_time
    tokens, prompt = output.outputs[0].token_ids, output.prompt_token_ids
    return ServedRequest(record, queue, times.preemptions, error, tokens, prompt, turn)
