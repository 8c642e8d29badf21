"""The engine's loop: schedule, launch, collect, postprocess.

    plain        schedule 1 · launch 1 · collect 1 | schedule 2 · launch 2 · collect 2 | …
    overlapped   schedule 1 · launch 1 | schedule 2 · launch 2 · collect 1 | schedule 3 · launch 3 · …

Both are made of the same parts and give the same tokens; the overlapped one lets the device work while the
host schedules, and finds out one step later that a sequence has met its end-of-sequence token.

There is no thread: whoever waits for a request turns the crank for all, under the lock, so that several
callers can stream at once, from one thread or from many.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, get_args

from moejax.cache.prefix import prefix_stats
from moejax.core.errors import RequestError, StepError, unknown
from moejax.core.words import one_line
from moejax.engine.recent import Recent
from moejax.engine.requests.api import FinishReason
from moejax.engine.requests.output import StreamChunk
from moejax.engine.requests.state import RequestState
from moejax.engine.scheduling.adaptive import AdaptiveBatching
from moejax.engine.scheduling.groups import GroupScheduler
from moejax.engine.scheduling.plan import Draft, Plan, StepPlan
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.sequence import State
from moejax.engine.scheduling.swap import swap_stats
from moejax.engine.scheduling.utility import StepTimes, Utility
from moejax.engine.stats import EngineStats, RebalanceEvent, StepRecord
from moejax.engine.step.runner import Runner, StepResult

logger = logging.getLogger(__name__)

Scheduling = Scheduler | GroupScheduler
"""A scheduler, or several as one."""

PauseMode = Literal["wait", "keep", "abort"]
CLOSED = "this LLM is closed; open another one"
PAUSED = "this LLM is paused, so that no step is taken; LLM.unpause() has it go on"


_LONGEST_WAIT_S = 0.01
"""Seconds that nobody else can enter the engine while all that wait are beyond their tenants' rates."""


@dataclass(slots=True)
class InFlight:
    """A launched step, and what was true when it was scheduled."""

    plan: Any  # of the scheduler that made it
    handle: Any
    launched: float
    running: int
    waiting: int
    left_waiting: int
    used_blocks: int
    stored_tokens: int
    limits: dict[str, int]  # of adaptive batching
    overlapped: bool = False  # launched before the last one's tokens were read
    compiled: bool = False  # something was, in its time
    ended: float | None = None  # when its tokens were first seen to be there


class Engine:
    """Drives a scheduler and a runner.

    Args:
        overlap: launch the next step before the last one's tokens are read.
        clock: returns the seconds that all instants are of; a simulated runner has one of its own.
        sleep: waits for so many of them.

    `on_step` is called after every step with its `StepRecord`; `agree` gives process 0's value in all
    processes; `retries` is how often a request of a failed step is computed again before it ends as failed;
    `rebalance` is called after every step and may move experts; `compilations` counts those so far; `adapt`
    has limits follow the steps' time.
    """

    def __init__(
        self,
        scheduler: Scheduling,
        runner: Runner,
        *,
        overlap: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.clock, self.sleep = clock, sleep
        self.overlap, self.retries = overlap, 0
        self.agree: Callable[[int], int] = lambda value: value
        self.shrink: Callable[[int], None] | None = None  # the device's blocks to so many
        self.compilations: Callable[[], int] = lambda: 0
        self.adaptive: AdaptiveBatching | None = None
        self.tiers: Any = None  # experts in tiers, which count what they move
        self.store: Any = None  # of blocks below the device, which counts them
        self.times: StepTimes | None = None
        self.stats, self.recent = EngineStats(), Recent(clock)
        self.on_step: Callable[[StepRecord], None] | None = None
        self.rebalance: Callable[[], RebalanceEvent | None] = lambda: None
        self.lock = threading.RLock()
        self._in_flight: InFlight | None = None
        self.stopped: str | None = None  # why no step is taken
        self._stopped_by = 0  # thread
        self._unpaused = threading.Condition(self.lock)
        self._held = False  # nothing new is scheduled: a pause begins
        self._timed: list[tuple[int, RequestState]] = []  # when `max_time_s` ends, µs of process 0's clock
        self._turning = False
        self._aborted: list[tuple[RequestState, FinishReason]] = []  # during a turn
        self._last_time = self.clock()
        self._delivered: float | None = None  # the last step, if nobody waited in between

    def add(self, requests: Iterable[RequestState], group: int | None = None) -> None:
        """Queues requests, all or none; in a data-parallel group if that is said.

        Raises:
            RequestError: one of them could never run, or the engine is closed.
        """
        requests = list(requests)
        with self.lock:
            if self.stopped == CLOSED:
                raise RequestError(CLOSED)
            for request in requests:
                for root in request.roots:
                    self.scheduler.check_fits(root)
                    self.scheduler.check_on_time(root)
            for request in requests:
                request.on_end = self.recent.request
                for root in request.roots:
                    self.scheduler.add(root, group)
                if (limit := request.sequences[0].params.max_time_s) is not None:
                    arrival = self.agree(round(1e6 * request.output.metrics.arrival_time))
                    self._timed.append((arrival + round(1e6 * limit), request))

    def abort(self, request: RequestState, reason: FinishReason = "abort") -> None:
        """Ends a request with what it has; nothing happens to one that has ended."""
        with self.lock:
            if self._turning:
                # The lock is re-entrant: this is a finalizer or an observer in the middle of a turn.
                self._aborted.append((request, reason))
                return
            self._end(request, reason)
            if self._in_flight is not None and self.scheduler.idle:
                # Nobody else would come to collect the last step, and its time would run on meanwhile.
                self.step()

    def pause(self, mode: PauseMode, why: str = PAUSED) -> None:
        """Takes no step from now on, see `LLM.pause`; `why` is told to those who ask for one."""
        if mode not in get_args(PauseMode):
            raise RequestError(f"pause: {unknown('mode', str(mode), get_args(PauseMode))}")
        with self.lock:
            if self._turning:
                raise RequestError("pause and close: not from within a step; call them between two")
            self.unpause()
            parts = self._parts
            try:
                for part in parts:
                    part.admits = False
                    for sequence in [*part.running, *part.waiting()] if mode == "abort" else ():
                        self.abort(sequence.owner[0])
                self._held = mode == "keep"
                while self.step():
                    pass
            finally:
                self._held = False
                for part in parts:
                    part.admits = True
            self.stopped, self._stopped_by = why, threading.get_ident()

    def unpause(self) -> None:
        with self.lock:
            self.stopped = None
            self._unpaused.notify_all()

    def run(self, requests: Items[RequestState], group: int | None = None) -> None:
        """Queues requests, as `add` does, and steps until all have ended.

        Raises:
            RequestError: one of them could never run, or the engine is paused; then none is queued.
            StepError: one of them failed.
        """
        if self.stopped is not None:
            raise RequestError(self.stopped)
        self.add(requests, group)
        try:
            self.run_until(lambda: all(request.finished for request in requests))
        finally:
            for request in requests:
                if not request.finished:
                    self.abort(request)
        failed = [request.output.error for request in requests if request.output.error]
        if failed:
            more = f" (and {len(failed) - 1} more requests)" if len(failed) > 1 else ""
            raise StepError(f"{failed[0]}{more}", [request.output for request in requests])

    def stream(self, request: RequestState) -> Iterator[StreamChunk]:
        """Yields a queued request's chunks; before them an empty one, to be read at once.

        Raises:
            StepError: the request failed.
        """
        try:
            yield StreamChunk(0, "", [], None, None, None)
            finished = False
            while not finished:
                # Read first: another thread may add the last chunk and finish once there is none.
                finished = request.finished
                while request.chunks:
                    yield request.chunks.popleft()
                if finished:
                    break
                self.run_until(lambda: bool(request.chunks) or request.finished)
        finally:
            self.abort(request)
        if request.output.error:
            raise StepError(request.output.error, [request.output])

    def state(self) -> dict[str, Any]:
        """Returns counts of running and waiting sequences and of cache blocks, for `LLM.stats()`."""
        scheduler, blocks = self.scheduler, self.scheduler.allocator
        return {
            "running": len(scheduler.running),
            "waiting": scheduler.num_waiting,
            "paused": self.stopped is not None,
            "used_blocks": blocks.num_used,
            "num_blocks": blocks.num_blocks,
            "pool_blocks": sum(part.allocator.made for part in self._parts),
            "block_size": blocks.block_size,
            "cache_use": blocks.num_used / blocks.num_blocks,
            **prefix_stats(scheduler.prefix_caches),
            **swap_stats(scheduler.swaps),
            **({"tenant_service": scheduler.policy.service()} if scheduler.policy.charges else {}),
            **(self.adaptive.stats() if self.adaptive else {}),
            **(self.tiers.stats() if self.tiers else {}),
            **(self.store.stats() if self.store else {}),
        }

    def adapt(self, adaptive: AdaptiveBatching) -> None:
        """Has the limits of all data-parallel groups follow a controller's from now on."""
        self.adaptive = adaptive
        for part in self._parts:
            part.most_running, part.most_prefill = adaptive.running, adaptive.prefill

    def time_steps(self, times: StepTimes) -> None:
        """Has all data-parallel groups choose by the steps' durations, from now on, what is drafted."""
        self.times = times
        for part in self._parts:
            if part.speculation is not None:
                config = part.speculation.config
                part.speculation.utility = Utility(config.k, times, blind=config.on_device)

    def reset_stats(self) -> None:
        """See `LLM.reset_stats`."""
        self.stats = EngineStats()
        self.recent.clear()
        for prefixes in self.scheduler.prefix_caches:
            prefixes.counts.clear()
        for swap in self.scheduler.swaps:
            swap.counts.clear()
        if self.tiers is not None:
            self.tiers.reset_stats()
        if self.store is not None and self.store.file is not None:
            self.store.file.counts.clear()

    def clear_drafts(self) -> None:
        """Has all data-parallel groups forget the sequences that have ended."""
        for part in self._parts:
            if part.speculation is not None:
                part.speculation.proposer.forget()

    @property
    def _parts(self) -> list[Scheduler]:
        """The scheduler, or those of the data-parallel groups."""
        return getattr(self.scheduler, "groups", [self.scheduler])

    def run_until(self, done: Callable[[], bool]) -> None:
        """Steps until `done()`, together with whoever else does.

        Raises:
            RequestError: it was this thread that paused the engine; others wait.
        """
        while not done():
            with self.lock:
                if self.stopped is not None and self._stopped_by != threading.get_ident():
                    self._unpaused.wait()
                elif self.stopped is not None:
                    raise RequestError(self.stopped)
                elif not done() and not self.step():
                    raise AssertionError("the engine is idle and a request has not ended")

    def step(self) -> bool:
        """Runs one turn of the loop. False if there was nothing to do, or the engine is paused.

        A step that fails ends the requests in it with finish reason "error", unless they may be retried; all
        others are computed anew.
        """
        with self.lock:
            if self.stopped is not None:
                logger.warning(self.stopped)
                return False
            self._turning = True
            try:
                return self._turn()
            except BaseException:
                # An interrupt, or a defect of ours: what is in flight cannot be accounted for any more.
                self._forget()
                raise
            finally:
                self._turning = False
                while self._aborted:
                    self.abort(*self._aborted.pop())

    def step_unless_paused(self, seconds: float) -> bool:
        """Runs `step`; while the engine is paused waits for `unpause`, so long at the most, and is False."""
        with self.lock:
            if self.stopped not in (None, CLOSED):
                self._unpaused.wait(seconds)
                return False
            return self.step()

    def _turn(self) -> bool:
        ended = self._end_late()
        previous, self._in_flight = self._in_flight, None
        self._look(previous)
        alone = any(part.speculation is not None and not part.speculation.overlaps for part in self._parts)
        drafts = previous is not None and any(part.drafts for part in previous.plan.groups)
        if previous is not None and alone and (drafts or self.scheduler.drafts):
            # Drafts continue what the host has read, and are verified before their sequence goes on.
            if not self._collect(previous):
                return True
            previous, ended = None, True
        waiting = self.scheduler.num_waiting
        plan = None if self._held else self.scheduler.schedule()
        if plan is None and previous is None:
            self._delivered = None
            if not self._held and (wait := self.scheduler.wait_s()):
                self.sleep(min(wait, _LONGEST_WAIT_S))
                return True
            return ended
        if previous is None:
            self._last_time = self.clock()
        launched = error = None
        if plan is not None:
            try:
                launched = self._launch(plan, waiting, overlapped=previous is not None)
            except Exception as caught:
                error = caught
        if launched is not None and launched.compiled and previous is not None and previous.ended is None:
            previous.compiled = True  # its tokens are read after that
        if not self.overlap and launched is not None:
            previous, launched = launched, None
        if previous is not None and not self._collect(previous):
            return True  # the step launched after it has read its results, and is forgotten with it
        if plan is not None and error is not None:
            self._fail(plan, error)
            return True
        if launched is not None and self.scheduler.idle:
            # All of its sequences turned out to have ended: nobody would come to collect it.
            self._collect(launched)
            return True
        self._in_flight = launched
        return True

    def _end_late(self) -> bool:
        """Ends requests whose time is over, and tells whether there were any. By process 0's clock."""
        self._timed = [timed for timed in self._timed if not timed[1].finished]
        now = self.agree(round(1e6 * self.clock())) if self._timed else 0
        late = [request for end, request in self._timed if end <= now]
        for request in late:
            self._end(request, "time")
        return bool(late)

    def _look(self, step: InFlight | None) -> None:
        """Notes when a step is seen to have ended. The next one is launched before its tokens are read, and
        would else be in the time of every token but the last, which none follows."""
        if step is not None and step.ended is None and self.runner.ready(step.handle):
            step.ended = self.clock()

    def _collect(self, step: InFlight) -> bool:
        """Waits for a step and delivers it; False if it failed."""
        self._look(step)
        try:
            result = self.runner.collect(step.handle)
        except Exception as error:
            self._fail(step.plan, error)
            return False
        self._deliver(step, result)
        return True

    def _launch(self, plan: Plan, waiting: int, overlapped: bool) -> InFlight:
        scheduler, now, compiled = self.scheduler, self.clock(), self.compilations()
        for chunk in plan.chunks:
            if chunk.first and chunk.sequence.owner is not None:
                output = chunk.sequence.owner[0].output
                if output.metrics.scheduled_time is None:
                    output.metrics.scheduled_time, output.metrics.cached_tokens = now, chunk.sequence.cached
                    self.recent.scheduled(output)
        return InFlight(
            plan,
            self.runner.launch(plan),
            now,
            len(scheduler.running),
            waiting,
            scheduler.num_waiting,
            scheduler.allocator.num_used,
            scheduler.stored_tokens() if self.on_step else 0,
            self.adaptive.stats() if self.adaptive else {},
            overlapped,
            self.compilations() > compiled,
        )

    def _deliver(self, step: InFlight, result: StepResult) -> None:
        """Brings a step's tokens to their requests."""
        now = self.clock() if step.ended is None else step.ended
        plan, scheduler = step.plan, self.scheduler
        prompts = iter(result.prompt_logprobs or ())
        for chunk in plan.chunks if result.prompt_logprobs else ():
            part = list(islice(prompts, chunk.count))
            if chunk.sequence.state is not State.FINISHED:
                chunk.sequence.owner[0].take_prompt(chunk.start, part)
        if result.mass is not None:
            self._parts[0].eviction.take(plan.groups[0], result.mass)
        taken = scheduler.postprocess(plan, result.tokens)
        last = {sequence: row for row, sequence in taken}
        for row, sequence in taken:
            request, index = sequence.owner
            if request.finished or request.builders[index].finished:
                continue  # failed with another of its samples, or ended by a stop string, just now
            logprob = result.logprobs[row] if result.logprobs else None
            reason = sequence.finish_reason if row == last[sequence] else None
            self.stats.nonfinite_tokens += logprob is not None and not math.isfinite(logprob.logprob)
            ended = request.take(index, result.tokens[row], logprob, reason, now)
            self.recent.token(request.output.metrics, index)
            if ended:
                scheduler.finish(sequence)  # it may be a stop string, which only the text shows
                request.close()
            elif reason == "error":
                self._end(
                    request,
                    "error",
                    f"the replayed routing trace ends with token {len(sequence.tokens) - 1} of its sample "
                    f"{index}, and it would go on; record a longer run, or lower max_tokens",
                )
        for request in [chunk.sequence.owner[0] for chunk in plan.chunks if chunk.sequence.score]:
            if not request.finished and request.sequences[0].state is State.FINISHED:
                request.close()
        self._record(step, result, now)
        if scheduler.idle and (saves := scheduler.save_only()) is not None:
            self.runner.save(saves)  # now, not when the next request waits for it
        if scheduler.idle and self.shrink is not None:
            self.shrink(max(part.allocator.retract() for part in self._parts))

    def _record(self, step: InFlight, result: StepResult, now: float) -> None:
        plan, scheduler = step.plan, self.scheduler
        decodes = len(plan.decodes) - plan.idle
        drafts = [draft for group in plan.groups for draft in self._verified(group)]
        record = StepRecord(
            time=now,
            seconds=now - max(self._last_time, step.launched),
            prefill_tokens=plan.chunk_tokens,
            decode_tokens=decodes,
            padded_tokens=result.padded_tokens,
            sequences=decodes - len(drafts) + len(plan.chunks),
            running=step.running,
            waiting=step.waiting,
            used_blocks=step.used_blocks,
            num_blocks=scheduler.allocator.num_blocks,
            stored_tokens=step.stored_tokens,
            preempted=plan.preempted,
            left_waiting=step.left_waiting,
            rebalance=self.rebalance(),
            compiled=step.compiled,
            drafted=len(drafts),
            accepted=sum(draft.accepted for draft in drafts),
            **step.limits,
        )
        self._last_time = now
        self.stats.add(record)
        self.recent.step(record, self.tiers)
        scheduler.policy.observe(record.seconds, max(1, record.tokens))
        if self.adaptive is not None and not self.agree(record.compiled):
            rows, tokens = zip(*((len(p.sequences), p.chunk_tokens) for p in plan.groups), strict=True)
            seconds = self.agree(round(1e9 * record.seconds)) / 1e9
            self.adaptive.observe(seconds, max(rows), max(tokens), decodes)
            self.adapt(self.adaptive)
        if self.times is not None:
            self._time(step, now, self.times)
        for swap in scheduler.swaps:
            swap.observe(record.seconds, record.prefill_tokens)
        if self.on_step is not None:
            self.on_step(record)

    def _verified(self, plan: StepPlan) -> Iterable[Draft]:
        """Returns a plan's drafts, each of which it tells the request whose first sample it is of."""
        for row, draft in plan.drafts.items():
            owner = plan.decodes[row].owner
            if owner is not None and owner[1] == 0 and not draft.tentative:
                owner[0].output.metrics.verified(len(draft.tokens) - 1, draft.accepted)
        return [draft for draft in plan.drafts.values() if not draft.tentative]

    def _time(self, step: InFlight, now: float, times: StepTimes) -> None:
        """Takes in the duration of a step that only decoded, by process 0's clock."""
        seconds = 0.0 if self._delivered is None or step.compiled else now - self._delivered
        self._delivered = None if self.scheduler.idle else now
        seconds = self.agree(round(1e9 * seconds)) / 1e9
        if seconds and not step.plan.chunks:
            rows = max(len(group.decodes) for group in step.plan.groups)
            drafts = any(group.drafts for group in step.plan.groups)
            times.observe(rows, drafts or (self.overlap and not step.overlapped), seconds)

    def _fail(self, plan: Plan, error: Exception) -> None:
        """Ends the requests of a failed step that may not be retried, and has all others computed anew."""
        text = one_line(error) or type(error).__name__
        kind = "" if text.startswith(type(error).__name__) else f"{type(error).__name__}: "
        self.stats.failed_steps += 1
        requests: dict[int, RequestState] = {}
        for sequence in plan.sequences:
            if sequence.state is not State.FINISHED:
                requests[id(sequence.owner[0])] = sequence.owner[0]
        for request in requests.values():
            if request.retries < self.retries:
                request.retries += 1
                self.stats.retried_requests += 1
                logger.warning("request %s is computed again: %s%s", request.output.request_id, kind, text)
            else:
                self._end(request, "error", f"a step failed: {kind}{text}")
        self._forget()

    def _end(self, request: RequestState, reason: FinishReason, error: str | None = None) -> None:
        """Ends a request with what it has."""
        for sequence in request.sequences:
            self.scheduler.finish(sequence)
        if error is not None:
            request.output.error = f"request {request.output.request_id}: {error}"
        request.abort(reason)
        self._unpaused.notify_all()  # a thread may wait for it through a pause

    def _forget(self) -> None:
        self._in_flight = None
        self.scheduler.forget_device_state()
        self.runner.reset()
