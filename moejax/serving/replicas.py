"""Replicas of one engine, in other processes, behind `AsyncLLM`'s methods.

    front     checks a request and gives it a seed · chooses who gets it · keeps the tokens that have come
    replica   goes on from the tokens that are known, as `LLM.resume` does, and tells what each step adds

What a seed draws depends on the number of tokens alone: when a replica is lost, another one goes on where it
was, and who reads the stream sees a pause. How messages travel is not known here (`moejax.serving.ray_serve`).
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from moejax.core.errors import DeviceError, MoejaxError, RequestError, StepError
from moejax.core.words import one_line
from moejax.engine.llm import LLM
from moejax.engine.requests.api import Checkpoint, RequestOptions, RequestOutput, SamplingParams
from moejax.engine.requests.inputs import Prompt
from moejax.engine.requests.output import StreamChunk
from moejax.engine.requests.state import RequestState
from moejax.serving.admin import administer
from moejax.serving.app import Server
from moejax.serving.async_llm import AsyncLLM, Overloaded
from moejax.serving.config import ServeSection
from moejax.serving.health import HealthMonitor
from moejax.serving.metrics import observe
from moejax.simulate.routers import Load, Router

logger = logging.getLogger(__name__)

_WINDOW_S = 10.0
"""Seconds over which a replica's queueing time is told."""


@dataclasses.dataclass(frozen=True)
class Part:
    """What a replica says of a request: first that it has it, then what its steps add, or why it fails."""

    replica: str
    chunks: Sequence[StreamChunk] = ()
    cached_tokens: int = 0
    error: MoejaxError | None = None


class Replica:
    """An engine and who answers for it, within an event loop. Method names are Ray Serve's where it has any.

    Args:
        arguments: of `LLM`.
        name: by which its front knows it.
    """

    def __init__(self, arguments: Mapping[str, Any], config: ServeSection, name: str) -> None:
        self.name, self.llm = name, LLM(**arguments)
        if config.warmup:
            self.llm.warmup(max_total_len=self.llm.max_model_len)
        self.engine = AsyncLLM(self.llm, max_requests=config.max_requests, max_unread=config.max_unread)
        self.monitor = HealthMonitor(self.llm)

    async def stream(
        self, asked: Checkpoint, options: RequestOptions, left_out: Collection[str] = ()
    ) -> AsyncGenerator[Part, None]:
        """Goes on with a request. `left_out` is for whoever has chosen this replica."""
        yield Part(self.name)
        asked = dataclasses.replace(
            asked, model=self.llm.builder.model
        )  # a front may compute in other dtypes
        outputs: list[RequestOutput] = []
        try:
            batches = self.engine.resume(asked, options=options, on_begin=outputs.append)
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
        """Returns what `Load` is made of."""
        scheduler = self.llm.engine.scheduler
        use = scheduler.allocator.num_used / scheduler.allocator.num_blocks
        return Load(len(scheduler.running), scheduler.num_waiting, use)._asdict()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns milliseconds from arrival to the first step, and the share of places or cache in use."""
        load, most = Load(**await self.record_routing_stats()), self.llm.engine_config.max_num_seqs
        window = self.llm.engine.recent.window(_WINDOW_S)
        return {"queue_ms": window["mean_queue_ms"] or 0.0, "use": max(load.cache_use, load.running / most)}

    async def observe(self) -> tuple[str, Any]:
        """Returns its name and what `moejax.serving.metrics.render` takes."""
        return self.name, await asyncio.to_thread(observe, self.llm)

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
    """Leaves out for `rest_s` seconds who has failed `failures` times in a row; after that its next failure
    does."""

    def __init__(self, failures: int, rest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._rest_s, self._clock = failures, rest_s, clock
        self._failures, self._until = Counter[str](), dict[str, float]()

    def worked(self, name: str) -> None:
        """Takes note of a request that has ended well."""
        self._failures.pop(name, None)

    def failed(self, name: str) -> None:
        """Takes note of one that has not."""
        self._failures[name] += 1
        if self._failures[name] >= self._most:
            self._until[name] = self._clock() + self._rest_s
            logger.warning("replica %s is left out for %g s", name, self._rest_s)

    def left_out(self) -> list[str]:
        """Returns who gets nothing now."""
        return [name for name, until in self._until.items() if until > self._clock()]


Ask = Callable[[Checkpoint, RequestOptions, list[str]], AsyncGenerator[Part, None]]
Everywhere = Callable[..., Awaitable[list[Any]]]


class Replicas:
    """The front of replicas, with as much of `AsyncLLM` as `Server` uses. A request goes on in another replica
    when one is lost or fails at it, up to `serve.retries` times without a further token.

    Args:
        llm: their model, without values.
        ask: gives a request to a replica that is not left out, and yields what that says. What becomes of the
            replica meanwhile it raises as `StepError`.
        everywhere: calls a method of each replica by its name, and returns the results.
    """

    alive = True

    def __init__(self, llm: LLM, ask: Ask, everywhere: Everywhere, config: ServeSection) -> None:
        self.llm, self.everywhere = llm, everywhere
        self._ask, self._config, self.num_requests = ask, config, 0
        self.breaker = Breaker(config.failures, config.rest_s)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *,
        options: RequestOptions | None = None, wait: bool = True,
        on_begin: Callable[[RequestOutput], None] = lambda output: None,
    ) -> RequestOutput:  # fmt: skip
        """See `AsyncLLM.generate`."""
        request = self._build(prompt, sampling_params, options, streams=False)
        on_begin(request.output)
        async with contextlib.aclosing(self._chunks(request, wait)) as chunks:
            async for _ in chunks:
                pass
        return request.output

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *,
        options: RequestOptions | None = None, wait: bool = True,
        on_begin: Callable[[RequestOutput], None] = lambda output: None,
    ) -> AsyncGenerator[StreamChunk, None]:  # fmt: skip
        """See `AsyncLLM.stream`."""
        request = self._build(prompt, sampling_params, options, streams=True)
        on_begin(request.output)
        return self._chunks(request, wait)

    def _build(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None, *, streams: bool
    ) -> RequestState:
        (request,) = self.llm.builder.to_generate([prompt], params, streams=streams, options=options)
        return request

    async def _chunks(self, request: RequestState, wait: bool) -> AsyncGenerator[StreamChunk, None]:
        if not wait and self.num_requests >= self._config.max_requests:
            raise Overloaded(f"{self.num_requests} requests are running, of at most as many; try again")
        asked, request.asked = (
            request.asked,
            None,
        )  # each sample goes on; which are kept is decided at the end
        failed: list[str] = []  # at this request, since its last token
        self.num_requests += 1
        try:
            while not all(sample.finish_reason for sample in request.output.outputs):
                at = ""
                left_out = [*self.breaker.left_out(), *failed]
                parts = self._ask(self._known(request), request.sequences[0].options, left_out)
                try:
                    async with contextlib.aclosing(parts):
                        while (part := await self._next(parts, request)) is not None:
                            at = part.replica
                            if part.error is not None:
                                raise part.error
                            for chunk in part.chunks:
                                failed = []
                                _take(request, chunk, part.cached_tokens)
                                yield chunk
                    if not all(sample.finish_reason for sample in request.output.outputs):
                        raise StepError("the replica has let go of the request")
                    self.breaker.worked(at)
                except StepError as error:
                    if at:
                        self.breaker.failed(at)
                    if len(failed) >= self._config.retries:
                        raise
                    failed.append(at)
                    done = sum(len(sample.token_ids) for sample in request.output.outputs)
                    logger.warning(
                        "request %s goes on after %d tokens: replica %s: %s",
                        request.output.request_id, done, at or "(none yet)", one_line(error),
                    )  # fmt: skip
            request.asked = asked
            request.close()
        finally:
            self.num_requests -= 1

    async def _next(self, parts: AsyncGenerator[Part, None], request: RequestState) -> Part | None:
        """Returns what comes next, within the request's time and what a step may take longer."""
        try:
            async with asyncio.timeout(self._left(request, 30.0)):
                return await anext(parts, None)
        except TimeoutError:
            raise RequestError("no replica has gone on with the request in its time") from None

    def _left(self, request: RequestState, more: float = 0.0) -> float | None:
        limit = request.sequences[0].params.max_time_s
        since = time.perf_counter() - request.output.metrics.arrival_time
        return None if limit is None else max(limit - since + more, 1e-3)

    def _known(self, request: RequestState) -> Checkpoint:
        """Returns the request with what has come of it, and the time that it still has."""
        kept = request.checkpoint(self.llm.builder.model)
        return dataclasses.replace(
            kept, sampling_params=dataclasses.replace(kept.sampling_params, max_time_s=self._left(request))
        )


def _take(request: RequestState, chunk: StreamChunk, cached_tokens: int) -> None:
    """Adds a chunk to its request's output."""
    output = request.output
    sample, metrics = output.outputs[chunk.index], output.metrics
    if chunk.prompt_logprobs is not None and metrics.token_times:
        chunk.prompt_logprobs = None  # computed again, and told before
    elif chunk.prompt_logprobs is not None:
        output.prompt_logprobs = chunk.prompt_logprobs
    if chunk.index == 0 and chunk.token_ids:
        metrics.cached_tokens = metrics.cached_tokens if metrics.token_times else cached_tokens
        metrics.token_times.append(time.perf_counter())
    sample.text += chunk.text
    sample.token_ids += chunk.token_ids
    if sample.logprobs is not None:
        sample.logprobs += chunk.logprobs or []
    sample.finish_reason, sample.stop_reason = chunk.finish_reason, chunk.stop_reason


class ReplicaServer(Server):
    """The endpoints over replicas. `running` tells how many there are."""

    def __init__(self, engine: Replicas, config: ServeSection, name: str, running: Callable[[], int]) -> None:
        front: Any = engine
        self.replicas = engine
        peers = {f"replica {i + 1}": lambda i=i: running() > i for i in range(config.replicas)}
        super().__init__(front, config, name, peers)

    async def _observed(self) -> dict[Any, Any]:
        return {(self.name, replica): told for replica, told in await self.replicas.everywhere("observe")}

    async def _administer(self, request: Request) -> Response:
        action, given = await self._action(request)
        if action in ("load_adapter", "unload_adapter"):
            raise RequestError(f"{action}: replicas have no adapters; serve one engine (serve.replicas=1)")
        return JSONResponse(
            {"done": action, "replicas": await self.replicas.everywhere("administer", action, given)}
        )
