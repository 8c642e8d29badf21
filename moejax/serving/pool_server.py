"""The endpoints over an `EnginePool`: each request goes to the `Server` of the model that it names."""

import contextlib
import json
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moejax.core.errors import unknown
from moejax.serving.app import Server, _Refused, refusal
from moejax.serving.async_llm import AsyncLLM
from moejax.serving.config import ServeSection
from moejax.serving.health import Health, worst
from moejax.serving.pool import EnginePool


class PoolServer(Server):
    """The endpoints over several models; a request that names none is for the first."""

    def __init__(self, pool: EnginePool, config: ServeSection) -> None:
        planned: Any = SimpleNamespace(llm=pool.plan(pool.names[0]), alive=True, num_requests=0)
        super().__init__(planned, config, pool.names[0])
        self.pool, self._servers = pool, dict[str, tuple[Server, ASGIApp]]()
        pool.on_close = self._closed

    def close(self) -> None:
        for name in list(self._servers):
            self._closed(name)
        super().close()

    def _closed(self, name: str) -> None:
        if name in self._servers:
            self._servers.pop(name)[0].close()

    def of(self, name: str, engine: AsyncLLM) -> ASGIApp:
        """Returns the endpoints of a model that is open."""
        if name not in self._servers:
            server = Server(engine, self.config, name)
            self._servers[name] = server, server.app()
        self._servers[name][0].ready = self.ready
        return self._servers[name][1]

    def health(self) -> Health:
        return worst([super().health(), *(server.health() for server, _ in self._servers.values())])

    async def _observed(self) -> dict[Any, Any]:
        return {name: engine.llm for name, engine in self.pool.open.items()}

    def _served(self) -> dict[str, Any]:
        opened = {name: engine.llm for name, engine in self.pool.open.items()}
        return {name: opened.get(name) or self.pool.plan(name) for name in self.pool.names}

    async def _through(self, request: Request) -> Response:
        """Hands a request on, whose model stays open until it is answered."""
        body = await self._body(request)
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            given = None  # which the model's own server tells
        name = given.get("model") if isinstance(given, dict) else None
        if name is None:
            name = self.name
        elif request.path_params:  # /admin/…: its actions have no argument of that name
            body = json.dumps({key: value for key, value in given.items() if key != "model"}).encode()
        if name not in self.pool.names:
            adapters = [own for own, llm in self._served().items() if name in llm.adapters]
            if not adapters:
                raise _Refused(404, unknown("model", str(name)[:100], self.pool.names))
            name = adapters[0]
        return _Leased(self, name, body)

    _completions = _chat = _tokenize = _detokenize = _administer = _through


class _Leased(Response):
    """The answer of a model's own server."""

    def __init__(self, server: PoolServer, name: str, body: bytes) -> None:
        super().__init__()
        self.server, self.name, self.request_body = server, name, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = False

        async def again() -> Message:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": self.request_body, "more_body": False}

        async with contextlib.AsyncExitStack() as stack:
            try:
                engine = await stack.enter_async_context(self.server.pool.lease(self.name))
            except Exception as error:
                return await refusal(error)(scope, receive, send)
            await self.server.of(self.name, engine)(scope, again, send)
