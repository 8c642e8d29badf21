"""Replicas of one engine, in other processes, behind `AsyncLLM`'s methods.

    front     checks a request and gives it a seed · chooses who gets it · keeps the tokens that have come
    replica   goes on from the tokens that are known, as `LLM.resume` does, and tells what each step adds

What a seed draws depends on the number of tokens alone: when a replica is lost, another one goes on where it
was. How messages travel is not known here (`moejax.serving.ray_serve`).
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from moejax.core.errors import DeviceError, MoejaxError, StepError
from moejax.engine.llm import LLM
from moejax.engine.requests.api import Checkpoint, RequestOptions, RequestOutput, SamplingParams
from moejax.engine.requests.inputs import Prompt
from moejax.engine.requests.output import StreamChunk
from moejax.engine.requests.state import RequestState
from moejax.serving.admin import administer
from moejax.serving.app import Server
from moejax.serving.async_llm import USUAL, AsyncLLM, Overloaded
from moejax.serving.config import ServeSection
from moejax.serving.health import HealthMonitor
from moejax.serving.metrics import CONTENT_TYPE, observe, render
from moejax.simulate.routers import Load, Router

logger = logging.getLogger(__name__)

_WHOLE = 32
"""Steps between two messages of an answer that nobody reads yet; so many are computed again at a loss."""


class Part(NamedTuple):
    """What a replica says of a request: first that it has it, then what its steps add, or why it fails."""

    replica: str
    chunks: Sequence[StreamChunk] = ()
    cached_tokens: int = 0
    error: MoejaxError | None = None


class Replica:
    """An engine and who answers for it, within an event loop; its methods go by Ray Serve's names."""

    def __init__(self, arguments: Mapping[str, Any], config: ServeSection, name: str) -> None:
        self.name, self.llm = name, LLM(**arguments)
        if config.warmup:
            self.llm.warmup(max_total_len=self.llm.max_model_len, sampling_params=USUAL)
        self.engine = AsyncLLM(self.llm, **config.limits)
        self.monitor = HealthMonitor(self.llm)

    async def stream(
        self, asked: Checkpoint, options: RequestOptions, interval: int, left_out: Collection[str] = ()
    ) -> AsyncGenerator[Part, None]:
        """Goes on with a request; see `AsyncLLM.resume`; `left_out` is for who has chosen this replica."""
        yield Part(self.name)
        outputs: list[RequestOutput] = []
        try:
            asked = replace(asked, model=self.llm.builder.model)  # a front may resolve dtypes in another way
            batches = self.engine.resume(asked, options=options, on_begin=outputs.append, interval=interval)
            async with contextlib.aclosing(batches):
                async for chunks in batches:
                    yield Part(self.name, chunks, outputs[0].metrics.cached_tokens)
        except MoejaxError as error:
            yield Part(self.name, error=type(error)(str(error)))

    async def check_health(self) -> None:
        """Raises `DeviceError` where it should be replaced."""
        health = self.monitor.health()
        if health.state == "unhealthy" or not self.engine.alive:
            raise DeviceError(", ".join(health.reasons) or "the engine's thread has ended")

    async def record_routing_stats(self) -> dict[str, float]:
        """Returns the fields of its `Load`."""
        scheduler = self.llm.engine.scheduler
        use = scheduler.allocator.num_used / scheduler.allocator.num_blocks
        return Load(len(scheduler.running), scheduler.num_waiting, use)._asdict()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns milliseconds from arrival to the first step, lately, and the share of its cache in use."""
        window = self.llm.engine.recent.window(10.0)
        return {"queue_ms": window["mean_queue_ms"] or 0.0, "use": window["cache_use_mean"] or 0.0}

    async def observe(self) -> tuple[str, Any]:
        """Returns its name and what `render` takes."""
        return self.name, observe(self.llm)

    async def administer(self, action: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """See `moejax.serving.admin.administer`."""
        return await asyncio.to_thread(administer, self.llm, action, given)


def choose(
    router: Router, loads: Mapping[str, Load], prompt: Sequence[int], left_out: Collection[str]
) -> str:
    """Returns the replica that a prompt goes to; those left out get none unless all are."""
    names = sorted(loads.keys() - set(left_out)) or sorted(loads)
    return names[router.choose([loads[name] for name in names], prompt)]


class Breaker:
    """Leaves out for `rest_s` seconds who has failed so often in a row; after that its next failure does."""

    def __init__(self, failures: int, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.failures, self.rest_s, self._clock = failures, rest_s, clock
        self._failed, self._until = Counter[str](), dict[str, float]()

    def told(self, name: str, worked: bool) -> None:
        """Takes note of how a request has ended."""
        self._failed[name] = 0 if worked else self._failed[name] + 1
        if self._failed[name] >= self.failures:
            self._until[name] = self._clock() + self.rest_s
            logger.warning("replica %s is left out for %g s", name, self.rest_s)

    def left_out(self) -> list[str]:
        """Returns who gets nothing now."""
        return [name for name, until in self._until.items() if until > self._clock()]


class Replicas:
    """The front of replicas, with as much of `AsyncLLM` as `Server` uses. A request goes on in another one
    when its own is lost or fails at it, up to `serve.retries` times without a further token.

    Args:
        llm: their model, without values.
        ask: gives a request to a replica that is not left out, with the interval of its messages (0: the
            replica's own), and yields what that says. What becomes of it meanwhile it raises as `StepError`.
        everywhere: calls a method of each replica by its name, and returns the results.
    """

    alive = True

    def __init__(
        self, llm: LLM,
        ask: Callable[[Checkpoint, RequestOptions, int, list[str]], AsyncGenerator[Part, None]],
        everywhere: Callable[..., Awaitable[list[Any]]], config: ServeSection,
    ) -> None:  # fmt: skip
        self.llm, self.everywhere, self._ask, self._config = llm, everywhere, ask, config
        self.num_requests, self.breaker = 0, Breaker(config.failures, config.rest_s)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *,
        on_begin: Callable[[RequestOutput], None] = lambda output: None, **more: Any,
    ) -> RequestOutput:  # fmt: skip
        """See `AsyncLLM.generate`."""
        outputs: list[RequestOutput] = []
        stream = self.stream(prompt, sampling_params, on_begin=outputs.append, streams=False, **more)
        on_begin(outputs[0])
        async with contextlib.aclosing(stream):
            async for _ in stream:
                pass
        return outputs[0]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, wait: bool = True,
        on_begin: Callable[[RequestOutput], None] = lambda output: None, **more: Any,
    ) -> AsyncGenerator[StreamChunk, None]:  # fmt: skip
        """See `AsyncLLM.stream`."""
        (request,) = self.llm.builder.to_generate([prompt], sampling_params, **{"streams": True, **more})
        on_begin(request.output)
        return self._chunks(request, wait, 0 if request.streams else _WHOLE)

    async def _chunks(
        self, request: RequestState, wait: bool, interval: int
    ) -> AsyncGenerator[StreamChunk, None]:
        if not wait and self.num_requests >= self._config.max_requests:
            raise Overloaded(f"{self.num_requests} requests are running, and no more are taken; try again")
        asked, request.asked = request.asked, None  # all samples go on; which are kept is decided at the end
        failed: list[str] = []  # at this request since its last token
        self.num_requests += 1
        try:
            while unfinished := [s for s in request.output.outputs if not s.finish_reason]:
                at, left_out = "", [*self.breaker.left_out(), *failed]
                options = request.sequences[0].options
                parts = self._ask(self._known(request), options, interval, left_out)
                try:
                    async with contextlib.aclosing(parts):
                        while (part := await self._next(parts, request)) is not None:
                            at = part.replica
                            for chunk in part.chunks:
                                failed = []
                                _take(request, chunk, part.cached_tokens)
                                yield chunk
                            if part.error is not None:
                                raise part.error
                    if not all(sample.finish_reason for sample in unfinished):
                        raise StepError("the replica has let go of the request")
                    self.breaker.told(at, worked=True)
                except StepError as error:
                    if at:
                        self.breaker.told(at, worked=False)
                    failed.append(at)
                    if len(failed) > self._config.retries:
                        raise
                    logger.warning("request %s goes on elsewhere: %s", request.output.request_id, error)
            request.asked = asked
            request.close()
        finally:
            self.num_requests -= 1

    async def _next(self, parts: AsyncGenerator[Part, None], request: RequestState) -> Part | None:
        try:
            async with asyncio.timeout(_left(request, 30.0)):  # more than the replica itself allows
                return await anext(parts, None)
        except TimeoutError:
            raise StepError("no replica has answered in the request's time") from None

    def _known(self, request: RequestState) -> Checkpoint:
        """Returns the request with what has come of it and the time that it still has."""
        kept = request.checkpoint(self.llm.builder.model)
        return replace(kept, sampling_params=replace(kept.sampling_params, max_time_s=_left(request)))


def _left(request: RequestState, more: float = 0.0) -> float | None:
    limit, began = request.sequences[0].params.max_time_s, request.output.metrics.arrival_time
    return None if limit is None else max(limit + more - (time.perf_counter() - began), 1e-3)


def _take(request: RequestState, chunk: StreamChunk, cached_tokens: int) -> None:
    """Adds a chunk to its request's output."""
    output = request.output
    sample, times = output.outputs[chunk.index], output.metrics.token_times
    if times:
        chunk.prompt_logprobs = None  # computed again, and told before
    elif chunk.index == 0:
        output.prompt_logprobs, output.metrics.cached_tokens = chunk.prompt_logprobs, cached_tokens
    if chunk.index == 0:
        times += [time.perf_counter()] * len(chunk.token_ids)
    sample.text += chunk.text
    sample.token_ids += chunk.token_ids
    if sample.logprobs is not None:
        sample.logprobs += chunk.logprobs or []
    sample.finish_reason, sample.stop_reason = chunk.finish_reason, chunk.stop_reason


class ReplicaServer(Server):
    """The endpoints over replicas; `running` tells how many there are."""

    def __init__(self, engine: Replicas, config: ServeSection, name: str, running: Callable[[], int]) -> None:
        front: Any = engine
        self.replicas = engine
        peers = {f"replica {i + 1}": lambda i=i: running() > i for i in range(config.replicas)}
        super().__init__(front, config, name, peers)

    async def _metrics(self, _: Request) -> Response:
        told = {(self.name, name): values for name, values in await self.replicas.everywhere("observe")}
        return Response(render(told, self.tenants), media_type=CONTENT_TYPE)

    async def _act(self, action: str, given: dict[str, Any]) -> dict[str, Any]:
        return {"done": action, "replicas": await self.replicas.everywhere("administer", action, given)}
