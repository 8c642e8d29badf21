"""`AsyncLLM`: an engine whose steps a thread of its own takes, for one event loop.

    event loop      checks and tokenizes · awaits · takes chunks ┐ inbox: begin, abort
    engine thread   inbox · one step · wakes who has something new ┘

The loop never waits for the engine's lock, which a step holds. A request is the thread's from `begin` to its
end; whoever awaits it only reads what the engine has appended.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from moejax.core.errors import ConfigError, RequestError, StepError
from moejax.core.words import one_line
from moejax.engine.llm import LLM
from moejax.engine.requests.api import Checkpoint, RequestOptions, RequestOutput, SamplingParams
from moejax.engine.requests.inputs import Prompt
from moejax.engine.requests.output import StreamChunk
from moejax.engine.requests.state import RequestState

logger = logging.getLogger(__name__)

USUAL = (SamplingParams(temperature=0.0), SamplingParams())
"""What a warm-up compiles for: greedy requests, and those that say nothing of it, which are sampled."""

_LOOK_S = 0.02
"""Seconds after which the thread looks again while the engine is paused, or others run what it has."""


class Overloaded(RequestError):
    """As many requests as are allowed are there; a later one may find room."""


@dataclass(eq=False, slots=True)
class _Entry:
    """A request that somebody awaits."""

    request: RequestState
    interval: int  # chunks that its reader is woken for, but for the first
    told: bool = False  # of its first chunk
    event: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None

    @property
    def ended(self) -> bool:
        return self.request.finished or self.error is not None

    def raise_failure(self) -> None:
        if self.error is not None:
            raise self.error
        if self.request.output.error:
            raise StepError(self.request.output.error, [self.request.output])


class AsyncLLM:
    """An `LLM` behind coroutines of one event loop. `async with AsyncLLM(llm) as engine:` drains and
    closes it.

    The `LLM` stays the caller's: it may be paused, reconfigured or given new weights from other threads
    meanwhile, and is not closed here.

    Args:
        llm: the engine.
        max_requests: requests that may be there at a time; `generate` and `stream` wait for their turn.
        max_unread: chunks that a stream's reader may lag behind before its request is ended.
        stream_interval: chunks of a request that come as one for each of its samples, at most `max_unread`;
            the first one comes at once, and with the last one all.

    Raises:
        ConfigError: an interval that is over `max_unread`.
    """

    def __init__(
        self, llm: LLM, *, max_requests: int = 1024, max_unread: int = 4096, stream_interval: int = 1
    ) -> None:
        if not 1 <= stream_interval <= max_unread:
            raise ConfigError(f"stream_interval must be 1 to max_unread={max_unread}, got {stream_interval}")
        self.llm, self.max_unread, self.stream_interval = llm, max_unread, stream_interval
        self.max_requests = max_requests
        self._room = asyncio.Semaphore(max_requests)
        self._loop = asyncio.get_running_loop()
        self._work = threading.Condition()
        self._inbox: deque[tuple[_Entry, bool]] = deque()  # to begin, else to abort
        self._live: dict[_Entry, None] = {}  # the thread's own
        self._present: set[_Entry] = set()  # the loop's own
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._closing: str | None = None
        self._stop = False
        self._over: Exception | None = None  # once the thread takes no more orders
        self._thread = threading.Thread(target=self._run, name="moejax-engine", daemon=True)
        self._thread.start()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close(drain=error[0] is None)

    @property
    def alive(self) -> bool:
        """Whether its thread is there, which takes the steps."""
        return self._thread.is_alive()

    @property
    def num_requests(self) -> int:
        """Requests that have begun and not ended."""
        return len(self._present)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        wait: bool = True,
        on_begin: Callable[[RequestOutput], None] = lambda output: None,
    ) -> RequestOutput:
        """Completes one prompt. Cancelling the task ends the request.

        Args:
            wait: False raises `Overloaded` where it would have to wait for its turn.
            on_begin: told at once the output that is to grow.

        Raises:
            RequestError: as `LLM.generate`, or this is closing.
            StepError: a step failed.
        """
        request = self._build(prompt, sampling_params, options, streams=False)
        on_begin(request.output)
        return (await self._whole([request], wait))[0]

    async def score(
        self, sequences: Sequence[Prompt], *, adapter: str | None = None, wait: bool = True
    ) -> list[np.ndarray]:
        """Returns what `LLM.score` does, and raises what it and `generate` do."""
        outputs = await self._whole(self.llm.builder.to_score(list(sequences), adapter), wait)
        every = [output.prompt_logprobs or [] for output in outputs]
        return [np.array([entry.logprob for entry in entries if entry], np.float32) for entries in every]

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        wait: bool = True,
        on_begin: Callable[[RequestOutput], None] = lambda output: None,
    ) -> AsyncGenerator[StreamChunk, None]:
        """Yields what each step adds, or each `stream_interval` steps; with n > 1 the samples' chunks
        alternate. Leaving it, or cancelling its task, ends the request. The prompt is checked at the call,
        not at the first chunk.

        Args:
            wait: as for `generate`.
            on_begin: told at once the output that is to grow.

        Raises:
            RequestError: as `generate`; or its reader has fallen `max_unread` chunks behind.
            StepError: a step failed.
        """
        request = self._build(prompt, sampling_params, options, streams=True)
        on_begin(request.output)
        return self._chunks(request, wait)

    def resume(
        self, checkpoint: Checkpoint, *, options: RequestOptions | None = None,
        on_begin: Callable[[RequestOutput], None] = lambda output: None, interval: int = 0,
    ) -> AsyncGenerator[list[StreamChunk], None]:  # fmt: skip
        """Goes on with a request that another engine of this model has had, and yields what has been added
        since, at `interval` in place of `stream_interval` where that is over 0. A request that has no token
        yet begins, and may be of any kind; else see `LLM.resume`."""
        if any(checkpoint.samples):
            request = self.llm.builder.resume(checkpoint, options)
            request.streams = True
        else:
            text, ids = checkpoint.prompt, list(checkpoint.prompt_token_ids)
            prompt: Prompt = {"prompt": text, "prompt_token_ids": ids}
            request = self._build(prompt, checkpoint.sampling_params, options, streams=True)
        on_begin(request.output)
        return self._batches(request, wait=True, interval=min(interval, self.max_unread))

    async def _chunks(self, request: RequestState, wait: bool) -> AsyncGenerator[StreamChunk, None]:
        async with contextlib.aclosing(self._batches(request, wait)) as batches:
            async for batch in batches:
                for chunk in batch:
                    yield chunk

    async def _batches(
        self, request: RequestState, wait: bool, interval: int = 0
    ) -> AsyncGenerator[list[StreamChunk], None]:
        (entry,) = await self._begin([request], wait, interval)
        try:
            ended = False
            while not ended:
                entry.event.clear()
                ended = entry.ended  # read first: what comes last is there then
                if batch := [request.chunks.popleft() for _ in range(len(request.chunks))]:
                    yield batch if entry.interval == 1 else _joined(batch)
                if not ended:
                    await entry.event.wait()
            entry.raise_failure()
        finally:
            self._leave([entry])

    async def drain(self) -> None:
        """Takes no request from now on, and waits for the end of those that are there."""
        self._closing = (
            self._closing or "the engine is closing: it ends what it has and takes no more requests"
        )
        await self._quiet.wait()

    async def close(self, *, drain: bool = True) -> None:
        """Ends the thread, with `drain` after the requests' own end; else they end with what they have.
        Closing again does nothing."""
        self._closing = self._closing or "the engine is closed"
        if drain:
            await self.drain()
        with self._work:
            self._stop = True
            self._work.notify()
        await asyncio.to_thread(self._thread.join)

    # -- the loop's side ---------------------------------------------------------------------------------

    def _build(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None, *, streams: bool
    ) -> RequestState:
        (request,) = self.llm.builder.to_generate([prompt], params, streams=streams, options=options)
        return request

    async def _whole(self, requests: Sequence[RequestState], wait: bool) -> list[RequestOutput]:
        entries = await self._begin(requests, wait)
        try:
            for entry in entries:
                while not entry.ended:
                    entry.event.clear()
                    if not entry.ended:
                        await entry.event.wait()
                entry.raise_failure()
        finally:
            self._leave(entries)
        return [request.output for request in requests]

    async def _begin(self, requests: Sequence[RequestState], wait: bool, interval: int = 0) -> list[_Entry]:
        """Waits for the requests' turn and hands them to the thread."""
        if self._closing is not None:
            raise RequestError(self._closing)
        if len(requests) > self.max_requests or (
            not wait and self.num_requests + len(requests) > self.max_requests
        ):
            raise Overloaded(
                f"{self.num_requests} requests are running, of at most {self.max_requests}; try again"
            )
        held = 0
        try:
            for _ in requests:
                await self._room.acquire()
                held += 1
            if self._closing is not None:
                raise RequestError(self._closing)
        except BaseException:
            for _ in range(held):
                self._room.release()
            raise
        entries = [_Entry(request, interval or self.stream_interval) for request in requests]
        self._present.update(entries)
        self._quiet.clear()
        self._post([(entry, True) for entry in entries])
        return entries

    def _leave(self, entries: Sequence[_Entry]) -> None:
        """Lets go of requests, which end if they have not."""
        self._post([(entry, False) for entry in entries if not entry.ended])
        for entry in entries:
            self._present.discard(entry)
            self._room.release()
        if not self._present:
            self._quiet.set()

    def _post(self, orders: list[tuple[_Entry, bool]]) -> None:
        with self._work:
            if self._over is None:
                self._inbox.extend(orders)
                self._work.notify()
                return
        for entry, _ in orders:
            entry.error = self._over
            entry.event.set()

    # -- the thread's side -------------------------------------------------------------------------------

    def _run(self) -> None:
        over: Exception = RequestError("the engine is closed")
        try:
            while self._take_orders():
                if not self._live:
                    continue
                engine = self.llm.engine
                if not engine.step_unless_paused(_LOOK_S) and not any(e.ended for e in self._live):
                    time.sleep(_LOOK_S)  # others have taken what there was to do
                self._deliver()
            for entry in self._live:
                self.llm.engine.abort(entry.request)
        except RequestError as closed:  # the `LLM` is
            over = closed
        except Exception as defect:
            logger.exception("the engine's thread has ended")
            over = StepError(
                f"the engine's thread has ended: {type(defect).__name__}: {one_line(defect)}", []
            )
        with self._work:
            orders, self._over = self._inbox, over
        self._closing = self._closing or str(over)
        entries = [*self._live, *(entry for entry, begins in orders if begins)]
        for entry in entries:
            if not entry.ended:
                entry.error = over
        self._wake(entries)

    def _take_orders(self) -> bool:
        """Waits for something to do, takes what has come; False once the thread is to end."""
        with self._work:
            while not (self._inbox or self._live or self._stop):
                self._work.wait()
            orders, self._inbox = self._inbox, deque()
        if self._stop:
            with self._work:
                self._inbox.extendleft(reversed(orders))
            return False
        for entry, begins in orders:
            if not begins:
                self._live.pop(entry, None)
                self.llm.engine.abort(entry.request)
                continue
            try:
                self.llm.engine.add([entry.request])
                self._live[entry] = None
            except RequestError as error:
                entry.error = error
                self._wake([entry])
        return True

    def _deliver(self) -> None:
        """Wakes who has something new to read, and ends who does not read."""
        woken = []
        for entry in list(self._live):
            unread = len(entry.request.chunks)
            if unread > self.max_unread:
                entry.error = RequestError(
                    f"the stream's reader is {unread} chunks behind, of at most {self.max_unread}"
                )
                entry.request.chunks.clear()
                self.llm.engine.abort(entry.request)
            if entry.ended:
                del self._live[entry]
            if entry.ended or unread >= (entry.interval if entry.told else 1):
                entry.told = True
                woken.append(entry)
        if woken:
            self._wake(woken)

    def _wake(self, entries: list[_Entry]) -> None:
        def wake() -> None:
            for entry in entries:
                entry.event.set()

        try:
            self._loop.call_soon_threadsafe(wake)
        except RuntimeError:  # the loop has ended, and nobody waits
            logger.debug("nobody waits for %d requests any more", len(entries))


def _joined(batch: list[StreamChunk]) -> list[StreamChunk]:
    """Returns one chunk for each sample, of all that there are of it."""
    joined: dict[int, StreamChunk] = {}
    for chunk in batch:
        if chunk.index in joined:
            joined[chunk.index].add(chunk)
        else:
            joined[chunk.index] = chunk
    return list(joined.values())
