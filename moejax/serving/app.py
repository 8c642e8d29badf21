"""The HTTP side of an `AsyncLLM`: OpenAI's endpoints, by Starlette.

    POST /v1/completions, /v1/chat/completions     GET /v1/models     POST /tokenize, /detokenize
    GET /health (`HealthMonitor`)  /ready (it takes requests)  /metrics (Prometheus)
    POST /admin/{load_adapter,unload_adapter,reload,rebalance,pause,unpause,profile_start,profile_stop}

Whatever a body says, nothing of it is run or opened; admin bodies name files, and ask for a key of their own.
"""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, cast

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from moejax.core.errors import MoejaxError, RequestError, StepError, unknown
from moejax.core.words import one_line
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOptions, RequestOutput, SamplingParams
from moejax.engine.requests.inputs import Prompt
from moejax.engine.requests.output import StreamChunk
from moejax.serving.admin import ACTIONS, administer
from moejax.serving.async_llm import AsyncLLM, Overloaded
from moejax.serving.config import ServeSection
from moejax.serving.health import Health, HealthMonitor
from moejax.serving.metrics import CONTENT_TYPE, render
from moejax.serving.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Speller,
    TokenizeBody,
    completion_choice,
    event,
    parse,
    usage,
)
from moejax.serving.tenants import QuotaExceeded, Tenants, read_keys

logger = logging.getLogger(__name__)


class _Refused(Exception):
    """A request that is answered with an error of this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Events(StreamingResponse):
    """Server-sent events whose reader must keep up. `ends` is left after them, or in their place."""

    def __init__(self, content: AsyncGenerator[bytes, None], timeout_s: float) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.content, self.timeout_s = content, timeout_s
        self.ends = contextlib.ExitStack()

    async def __call__(self, *asgi: Any) -> None:
        with self.ends:
            await super().__call__(*asgi)

    async def stream_response(self, send: Send) -> None:
        async def within(message: Any) -> None:
            async with asyncio.timeout(self.timeout_s):
                await send(message)

        try:
            await super().stream_response(within)
        except TimeoutError:
            logger.warning("a stream's reader took nothing for %g s; its request has ended", self.timeout_s)
        finally:
            await self.content.aclose()


class Server:
    """The endpoints over one engine.

    Args:
        engine: answers.
        config: limits and keys.
        name: of the model.
        peers: what the engine needs, see `HealthMonitor`.
        tenants: who may ask, where other servers count for them, too; None: those of `config`.

    Raises:
        ConfigError: a file of keys.
    """

    def __init__(
        self, engine: AsyncLLM, config: ServeSection, name: str, peers: Any = None,
        tenants: Tenants | None = None,
    ) -> None:  # fmt: skip
        self.engine, self.config, self.name = engine, config, name
        self.began, self.ready = int(time.time()), True
        self.spell = Speller(engine.llm.tokenizer)
        self.tenants = tenants or Tenants(config.api_keys_file)
        self._admin_keys = read_keys("admin_keys_file", config.admin_keys_file)
        self.monitor = HealthMonitor(engine.llm, peers=peers)

    def close(self) -> None:
        """Ends what watches the engine."""
        self.monitor.close()

    def app(self) -> Starlette:
        """Returns the ASGI application."""

        def route(path: str, method: str, handler: Any, *, keys: dict[bytes, str] | None = None) -> Route:
            async def guarded(request: Request) -> Response:
                return await self._answer(request, handler, keys)

            return Route(path, guarded, methods=[method])

        keys = self.tenants.keys
        routes = [
            route("/health", "GET", self._health),
            route("/ready", "GET", self._ready),
            route("/metrics", "GET", self._metrics),
            route("/v1/models", "GET", self._models, keys=keys),
            route("/v1/completions", "POST", self._completions, keys=keys),
            route("/v1/chat/completions", "POST", self._chat, keys=keys),
            route("/tokenize", "POST", self._tokenize, keys=keys),
            route("/detokenize", "POST", self._detokenize, keys=keys),
        ]
        if self._admin_keys is not None:
            routes.append(route("/admin/{action}", "POST", self._administer, keys=self._admin_keys))

        async def failed(_: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            return _error(error.status_code, str(error.detail))

        return Starlette(routes=routes, exception_handlers={HTTPException: failed})

    async def _answer(self, request: Request, handler: Any, keys: dict[bytes, str] | None) -> Response:
        """Runs a handler for whoever may ask it; each mistake is a line, each defect is logged."""
        try:
            with contextlib.ExitStack() as ends:  # left at the answer's end
                request.state.tenant = "" if keys is None else keys[_known_key(request, keys)]
                request.state.ends = ends
                response: Response = await handler(request)
                if isinstance(response, _Events):
                    response.ends = ends.pop_all()
                return response
        except _Refused as refused:
            return _error(refused.status, str(refused))
        except QuotaExceeded as over:
            return _error(429, str(over), over.retry_s)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            return refusal(error)

    # -- what a request has ------------------------------------------------------------------------------

    async def _body(self, request: Request) -> bytes:
        """Returns a body within its limits of size and time."""
        most = self.config.max_body_bytes
        told = request.headers.get("content-length", "0")
        body = bytearray()
        try:
            async with asyncio.timeout(self.config.read_timeout_s):
                if not told.isdecimal() or len(told) > 18 or int(told) > most:
                    raise _Refused(413, f"the body is over {most} bytes (serve.max_body_bytes)")
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise _Refused(413, f"the body is over {most} bytes (serve.max_body_bytes)")
        except TimeoutError:
            seconds = self.config.read_timeout_s
            raise _Refused(
                408, f"the body did not come within {seconds:g} s (serve.read_timeout_s)"
            ) from None
        return bytes(body)

    def _named(self, model: str | None, options: RequestOptions) -> RequestOptions:
        """Returns the options with the adapter that goes by the model's name."""
        adapters = self.engine.llm.adapters
        if model in (None, self.name):
            return options
        if model not in adapters:
            raise _Refused(404, unknown("model", str(model)[:100], [self.name, *adapters]))
        return dataclasses.replace(options, adapter=model)

    def _limited(self, params: SamplingParams) -> SamplingParams:
        most = self.config.max_samples
        if max(params.n, params.best_of or 1) > most:
            raise RequestError(f"n and best_of are at most {most} (serve.max_samples)")
        return dataclasses.replace(params, max_time_s=self.config.max_time_s)

    def _charge(self, request: Request, prompts: list[Prompt], params: SamplingParams) -> list[RequestOutput]:
        """Charges the key's tenant for prompts, until the answer's end; returns the list of their outputs."""

        def most() -> int:
            encode = self.engine.llm.get_tokenizer().encode
            sizes = [len(encode(prompt) if isinstance(prompt, str) else prompt) for prompt in prompts]
            rooms = [max(0, self.engine.llm.max_model_len - size) for size in sizes]
            samples = params.best_of or params.n
            return sum(sizes) + samples * sum(min(params.max_tokens, room) for room in rooms)

        drawn = (params.best_of or params.n) / params.n
        charged = self.tenants.charged(request.state.tenant, len(prompts), most, drawn)
        return cast(list[RequestOutput], request.state.ends.enter_context(charged))

    def _check_room(self, requests: int) -> None:
        if not self.ready:
            raise _Refused(503, "the server is ending and takes no more requests")
        here, most = self.engine.num_requests, self.config.max_requests
        if here + requests > most:
            raise Overloaded(
                f"{here} requests are running, of at most {most} (serve.max_requests); try again"
            )

    # -- endpoints ---------------------------------------------------------------------------------------

    def health(self) -> Health:
        """Returns how what answers is."""
        dead = Health("unhealthy", ("the engine's thread has ended",))
        return self.monitor.health() if self.engine.alive else dead

    def served(self) -> dict[str, LLM]:
        """Returns the models by their names; some may have no values yet."""
        return {self.name: self.engine.llm}

    async def _health(self, _: Request) -> Response:
        health = self.health()
        return JSONResponse(dataclasses.asdict(health), 503 if health.state == "unhealthy" else 200)

    async def _ready(self, _: Request) -> Response:
        ready = self.ready and self.engine.alive
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def _metrics(self, _: Request) -> Response:
        text = await asyncio.to_thread(render, self.served(), self.tenants)
        return Response(text, media_type=CONTENT_TYPE)

    async def _models(self, _: Request) -> Response:
        models = [
            {"id": name, "object": "model", "created": self.began, "owned_by": "moejax", "parent": parent,
             "max_model_len": llm.max_model_len}
            for own, llm in self.served().items()
            for name, parent in [(own, None), *((name, own) for name in llm.adapters)]
        ]  # fmt: skip
        return JSONResponse({"object": "list", "data": models})

    async def _tokenize(self, request: Request) -> Response:
        body = parse(TokenizeBody, await self._body(request))
        tokenizer = self.engine.llm.get_tokenizer()
        tokens = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        length = self.engine.llm.max_model_len
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": length})

    async def _detokenize(self, request: Request) -> Response:
        body, size = parse(DetokenizeBody, await self._body(request)), self.engine.llm.config.vocab_size
        if strange := [token for token in body.tokens if not 0 <= token < size]:
            raise RequestError(f"tokens has {strange[0]}, out of range; the vocabulary is 0..{size - 1}")
        return JSONResponse({"prompt": self.engine.llm.get_tokenizer().decode(body.tokens)})

    async def _administer(self, request: Request) -> Response:
        action = request.path_params["action"]
        if action not in ACTIONS:
            raise _Refused(404, unknown("action", action[:100], ACTIONS))
        try:
            given = json.loads(await self._body(request) or b"{}")
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            raise RequestError("body: a JSON object is wanted")
        return JSONResponse(await self._act(action, given))

    async def _act(self, action: str, given: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(administer, self.engine.llm, action, given)

    async def _completions(self, request: Request) -> Response:
        body = parse(CompletionBody, await self._body(request))
        params, options = body.to_sampling()
        params, options = self._limited(params), self._named(body.model, options)
        prompts, head = body.prompts, self._head("text_completion", "cmpl", body.model)
        self._check_room(len(prompts))
        options = self.tenants.options(request.state.tenant, options)
        outputs = self._charge(request, prompts, params)
        if not body.stream:
            await self._while_connected(request, self._all(prompts, params, options, outputs))
            decode, n = self.engine.llm.get_tokenizer().decode if body.echo else str, params.n
            choices = [
                completion_choice(body, output, sample, i * n + sample.index, self.spell, decode)
                for i, output in enumerate(outputs)
                for sample in output.outputs
            ]
            counts = usage(outputs)
            if body.scores_only:
                counts |= {"completion_tokens": 0, "total_tokens": counts["prompt_tokens"]}
            return JSONResponse(head | {"choices": choices, "usage": counts})

        def choice(index: int, chunk: StreamChunk) -> dict[str, Any]:
            told = None
            if body.logprobs is not None and chunk.logprobs:
                told = self.spell.completion(chunk.token_ids, chunk.logprobs)
            return body.choice(index, chunk) | {"text": chunk.text, "logprobs": told}

        return self._events(body, head, prompts, params, options, choice, outputs)

    async def _chat(self, request: Request) -> Response:
        body, llm = parse(ChatBody, await self._body(request)), self.engine.llm
        prompt = llm.chat_prompt([message.plain() for message in body.messages])
        params, options = body.to_sampling(llm.max_model_len - len(prompt))
        params, options = self._limited(params), self._named(body.model, options)
        self._check_room(1)
        options = self.tenants.options(request.state.tenant, options)
        outputs = self._charge(request, [prompt], params)
        if not body.stream:
            head = self._head("chat.completion", "chatcmpl", body.model)
            await self._while_connected(request, self._all([prompt], params, options, outputs))
            (output,) = outputs
            choices = []
            for sample in output.outputs:
                told = self.spell.chat(sample.token_ids, sample.logprobs or []) if body.logprobs else None
                message = {"role": "assistant", "content": sample.text}
                choices.append(body.choice(sample.index, sample) | {"message": message, "logprobs": told})
            return JSONResponse(head | {"choices": choices, "usage": usage([output])})
        spoken = set[int]()

        def choice(index: int, chunk: StreamChunk) -> dict[str, Any]:
            delta: dict[str, Any] = {} if index in spoken else {"role": "assistant"}
            spoken.add(index)
            told = None
            if body.logprobs and chunk.logprobs:
                told = self.spell.chat(chunk.token_ids, chunk.logprobs)
            return body.choice(index, chunk) | {"delta": {**delta, "content": chunk.text}, "logprobs": told}

        head = self._head("chat.completion.chunk", "chatcmpl", body.model)
        return self._events(body, head, [prompt], params, options, choice, outputs)

    # -- their parts -------------------------------------------------------------------------------------

    def _head(self, kind: str, prefix: str, model: str | None) -> dict[str, Any]:
        name, now = f"{prefix}-{uuid.uuid4().hex}", int(time.time())
        return {"id": name, "object": kind, "created": now, "model": model or self.name}

    async def _all(
        self, prompts: list[Prompt], params: SamplingParams, options: RequestOptions,
        outputs: list[RequestOutput],
    ) -> None:  # fmt: skip
        """Completes all prompts, into `outputs` in their order; where one fails the others end, too."""
        async with asyncio.TaskGroup() as group:
            more: dict[str, Any] = {"options": options, "wait": False, "on_begin": outputs.append}
            for prompt in prompts:
                group.create_task(self.engine.generate(prompt, _of(params), **more))

    async def _while_connected(self, request: Request, answer: Awaitable[Any]) -> Any:
        """Awaits an answer, and gives it up once nobody waits for it any more."""

        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        task, left = asyncio.ensure_future(answer), asyncio.ensure_future(gone())
        try:
            await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnect
            return task.result()
        except ExceptionGroup as group:
            raise _first(group) from None
        finally:
            for one in (task, left):
                one.cancel()
            await asyncio.gather(task, left, return_exceptions=True)

    def _events(
        self, body: CompletionBody | ChatBody, head: dict[str, Any], prompts: list[Prompt],
        params: SamplingParams, options: RequestOptions, choice: Callable[[int, StreamChunk], dict[str, Any]],
        outputs: list[RequestOutput],
    ) -> Response:  # fmt: skip
        """Returns a stream with a chunk for what each step adds, and the counts where they are asked for."""
        streams = [
            self.engine.stream(p, _of(params), options=options, wait=False, on_begin=outputs.append)
            for p in prompts
        ]
        told = body.stream_options
        at_end, always = (told.include_usage, told.continuous_usage_stats) if told else (False, False)

        async def events() -> AsyncGenerator[bytes, None]:
            try:
                async with contextlib.aclosing(_merged(streams, params.n)) as chunks:
                    async for index, chunk in chunks:
                        data = head | {"choices": [choice(index, chunk)]}
                        yield event(data | ({"usage": usage(outputs)} if always else {}))
                if at_end:
                    yield event(head | {"choices": [], "usage": usage(outputs)})
            except Exception as caught:
                yield event(_described(*_told(_first(caught))))
            yield event("[DONE]")

        return _Events(events(), self.config.write_timeout_s)


async def _merged(
    streams: list[AsyncGenerator[StreamChunk, None]], n: int
) -> AsyncGenerator[tuple[int, StreamChunk], None]:
    """Yields the chunks of several prompts as they come, each with its choice's number."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as chunks:
            async for chunk in chunks:
                yield chunk.index, chunk
        return
    ready: asyncio.Queue[tuple[int, StreamChunk] | None] = asyncio.Queue(len(streams))

    async def read(number: int, stream: AsyncGenerator[StreamChunk, None]) -> None:
        async with contextlib.aclosing(stream) as chunks:
            async for chunk in chunks:
                await ready.put((number * n + chunk.index, chunk))
        await ready.put(None)

    async with asyncio.TaskGroup() as group:
        for number, stream in enumerate(streams):
            group.create_task(read(number, stream))
        left = len(streams)
        while left:
            if (item := await ready.get()) is None:
                left -= 1
            else:
                yield item


def _of(params: SamplingParams) -> SamplingParams:
    """Returns the parameters of a prompt: without a seed a new one; `LLM` would draw the same again."""
    return params if params.seed is not None else dataclasses.replace(params, seed=secrets.randbits(31))


def refusal(error: Exception) -> Response:
    """Returns the answer that tells of an error."""
    return _error(*_told(error))


def _first(error: Exception) -> Exception:
    """Returns the first of a group of errors, of which all others follow."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _told(error: Exception) -> tuple[int, str]:
    """Returns the status and the line for an error; a defect's words and traceback are the log's alone."""
    if isinstance(error, Overloaded):
        return 429, str(error)
    if isinstance(error, MoejaxError):
        return 500 if isinstance(error, StepError) else 400, one_line(error)
    logger.error("a request has met a defect", exc_info=error)
    return 500, "the server has a defect here; its log has the traceback"


def _known_key(request: Request, keys: dict[bytes, str]) -> bytes:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    key = given.strip().encode("utf-8", "replace") if scheme.lower() == "bearer" else b""
    if not any([hmac.compare_digest(key, known) for known in keys]):  # all of them: equal time
        raise _Refused(401, "no valid key; send it as Authorization: Bearer KEY")
    return key


def _described(status: int, message: str) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _error(status: int, message: str, retry_s: int = 1) -> Response:
    headers = {"Retry-After": str(retry_s)} if status in (429, 503) else {}
    return JSONResponse(_described(status, message), status, headers)
