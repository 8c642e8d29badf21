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
from dataclasses import dataclass
from typing import Any

from moejax.bench.backends.base import Backend, BackendError
from moejax.bench.traffic import OPEN, Pace, PlannedRequest
from moejax.core.errors import RequestError
from moejax.engine.requests.api import RequestMetrics, RequestOutput, SamplingParams
from moejax.engine.stats import StepRecord
from moejax.results.metrics import Metrics, RequestRecord, Slo, compute_metrics, record_row

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
        return self.record.finish_reason == "abort"

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
        pace: how it was sent: what of it counts.
    """

    start: float
    served: tuple[ServedRequest, ...]
    steps: tuple[StepRecord, ...]
    pace: Pace = OPEN

    @property
    def records(self) -> list[RequestRecord]:
        return [item.record for item in self.served]

    @property
    def window(self) -> tuple[float, float]:
        """The instants between which rates count: from the end of `warmup_s` to the last token of a completed
        request, or to the end of `duration_s` if that is earlier."""
        ends = [record.metrics.token_times[-1] for record in self.records if record.completed]
        begin, limit = self.start + self.pace.warmup_s, self.start + (self.pace.duration_s or math.inf)
        return begin, max(begin, min(max(ends, default=begin), limit))

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
        """The steps after the warm-up, and before the end of `duration_s` where there is one."""
        begin, end = self.window
        last = math.inf if self.pace.duration_s is None else end
        return [step for step in self.steps if begin <= step.time <= last]

    def metrics(self, slo: Slo) -> Metrics:
        """`compute_metrics` of this pass: latencies of the measured requests, counts and rates of what came
        in the window, whenever its request did."""
        begin, end = self.window
        measured = [item.record for item in self.measured]
        return {
            **compute_metrics(measured, self.duration_s, slo),
            **compute_metrics(self.records, self.duration_s, slo, latencies=False, window=(begin, end)),
        }

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

    def __init__(self, plan: Sequence[PlannedRequest], pace: Pace) -> None:
        self.plan, self.pace = list(plan), pace
        self.followers: dict[int, list[int]] = {}
        self._heap: list[tuple[int, int]] = []
        self._next = 0
        for user in range(len(plan) if pace.users is None else pace.users):
            begin = None if pace.users is None else pace.ramp_up_s * user / pace.users
            self._open(0, begin)

    def _open(self, now: int, after_s: float | None = None) -> None:
        """Takes the next conversation: its first request is due `after_s` after `now`, or when planned."""
        if self._at(self._next) is None:
            return
        first, self._next = self._next, self._next + 1
        while (later := self._at(self._next)) is not None and later.follows is not None:
            self.followers.setdefault(later.follows, []).append(self._next)
            self._next += 1
        self._push(first, now, after_s)

    def _at(self, place: int) -> PlannedRequest | None:
        if place == len(self.plan) and self.pace.more is not None:
            self.plan.append(self.pace.more(place))
        return self.plan[place] if place < len(self.plan) else None

    def _push(self, place: int, now: int, after_s: float | None = None) -> None:
        due = now + _ns(self.plan[place].arrival_s if after_s is None else after_s)
        if self.pace.duration_s is None or due < _ns(self.pace.duration_s):
            heapq.heappush(self._heap, (due, place))

    @property
    def first(self) -> int | None:
        """When the next one is due; None if none is."""
        return self._heap[0][0] if self._heap else None

    def take(self, now: int) -> list[tuple[int, int]]:
        """Returns what is due by `now`, with its instants; no longer the caller's to ask for."""
        taken = []
        while self._heap and self._heap[0][0] <= now:
            taken.append(heapq.heappop(self._heap))
        return taken

    def ended(self, place: int, now: int, why: str | None = None) -> list[int]:
        """Goes on after a request: with those that continue it, or else its user's next. Returns what will
        never be sent, if it ended without an answer for the reason `why`."""
        followers = self.followers.pop(place, [])
        if not followers and self.pace.users is not None:
            self._open(now)
        if why is None:
            for follower in followers:
                self._push(follower, now)
            return []
        return [lost for follower in followers for lost in (follower, *self.ended(follower, now, why))]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def drive(
    backend: Backend,
    plan: Sequence[PlannedRequest],
    sampling: Callable[[int, int], SamplingParams],
    *,
    pace: Pace = OPEN,
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
        pace: of users who wait for their answers, and what ends the sending and the requests.
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
    due = _Due(plan, pace)
    params = [sampling(planned.output_len, index) for index, planned in enumerate(plan)]
    steps: list[StepRecord] = []
    outputs: dict[int, RequestOutput | str] = {}  # of a request that was not taken the reason
    arrivals: dict[int, float] = {}
    late: dict[int, str] = {}
    running: list[RequestOutput] = []
    watched: dict[int, RequestOutput] = {}  # whose end decides what is sent, or that may run out of time
    before, backend.on_step = backend.on_step, steps.append
    agree(0)  # so that all processes' clocks start together
    start = looked = clock()
    now = 0

    def end(place: int, why: str | None = None) -> None:
        watched.pop(place, None)
        for lost in due.ended(place, now, why):
            outputs[lost] = f"request {place}, which it continues, {why}"
            arrivals[lost] = start + now / 1e9
            on_progress(1)

    try:
        while True:
            if watched or due.first is not None:
                now = agree(_ns(clock() - start))
            for place, output in list(watched.items()):
                if pace.timeout_s is not None and not output.finished:
                    if start + now / 1e9 >= arrivals[place] + pace.timeout_s:
                        late[place] = f"no end within {pace.timeout_s:g} s (workload.timeout_s)"
                        backend.abort(output.request_id)
                if output.finished or place in late:
                    end(place, late.get(place) or _broken_off(output))
            for instant, place in due.take(now):
                if place >= len(params):
                    params.append(sampling(due.plan[place].output_len, place))
                arrivals[place] = start + instant / 1e9
                prompt = _prompt(due.plan[place], outputs, backend)
                try:
                    output = backend.submit(prompt, params[place], arrival_time=arrivals[place])
                except RequestError as error:
                    outputs[place] = str(error)
                    on_progress(1)
                    end(place, f"was refused: {error}")
                else:
                    outputs[place] = output
                    running.append(output)
                    if pace.timeout_s or pace.users or place in due.followers:
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
            if due.first is None:
                break
            sleep(max(0.0, start + due.first / 1e9 - clock()))
    finally:
        backend.on_step = before
        for output in running:
            if not output.finished:
                backend.abort(output.request_id)
    served: dict[int, ServedRequest] = {}
    for place, output in sorted(outputs.items()):
        name, follows = f"{case}-{place}", due.plan[place].follows
        turn = 0 if follows is None else served[follows].turn + 1
        if isinstance(output, str):
            planned = 0 if follows is not None else len(due.plan[place].prompt_token_ids)
            record = RequestRecord(name, case, planned, 0, RequestMetrics(arrivals[place]), "error")
            served[place] = ServedRequest(record, None, 0, output, turn=turn)
        else:
            served[place] = _outcome(output, case, turn, late.get(place))
    return TrafficRun(start, tuple(served.values()), tuple(steps), pace)


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


def _outcome(output: RequestOutput, case: int, turn: int, late: str | None) -> ServedRequest:
    """Returns what became of a request that was sent, by its output at the end of the run; `late` says that
    it was given up."""
    record, error = RequestRecord.from_output(output, case=case), late or output.error
    if not output.finished:
        record = dataclasses.replace(record, finish_reason="error")
        error = error or "the engine had nothing left to do before this request was finished"
    times = output.metrics
    queue = None if times.scheduled_time is None else times.scheduled_time - times.arrival_time
    tokens, prompt = output.outputs[0].token_ids, output.prompt_token_ids
    return ServedRequest(record, queue, times.preemptions, error, tokens, prompt, turn)
