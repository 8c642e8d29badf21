"""The endpoints over an `EnginePool`: each request goes to the `Server` of the model that it names."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moejax.core.errors import unknown
from moejax.engine.llm import LLM
from moejax.serving.app import Server, _Refused, refusal
from moejax.serving.config import ServeSection
from moejax.serving.health import STATES, Health
from moejax.serving.pool import EnginePool
from moejax.serving.split import Split


class PoolServer(Server):
    """The endpoints over several models; a request that names none is for the first."""

    def __init__(self, pool: EnginePool, config: ServeSection) -> None:
        name, plan = next(iter(pool.llms.items()))
        planned: Any = SimpleNamespace(llm=plan, alive=True, num_requests=0)
        super().__init__(planned, config, name)
        self.pool, self._servers = pool, dict[str, tuple[Server, ASGIApp]]()
        self.split = Split(config.split) if config.split else None
        if config.split and config.name:  # a request that names none is for all of them
            self.name = config.name
        pool.on_close = self._closed

    def _closed(self, name: str) -> None:
        if name in self._servers:
            self._servers.pop(name)[0].close()

    def served(self) -> dict[str, LLM]:
        return self.pool.llms

    def health(self) -> Health:
        healths = [super().health(), *(server.health() for server, _ in self._servers.values())]
        return max(healths, key=lambda health: STATES.index(health.state))

    async def _models(self, request: Request) -> Response:
        listed: Any = json.loads(bytes((await super()._models(request)).body))
        if self.split is not None:  # the versions' own entry: the longest that any request for it may be
            length = min(self.served()[name].max_model_len for name in self.split.weights)
            entry = {"id": self.name, "parent": None, "max_model_len": length}
            listed["data"].append(listed["data"][0] | entry)
        return JSONResponse(listed)

    async def _through(self, request: Request) -> Response:
        """Hands a request on to its model's own endpoints; that stays open until it is answered."""
        body = await self._body(request)
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            given = None  # which those endpoints tell
        llms = self.served()
        if not isinstance(given, dict):
            return _Leased(self, next(iter(llms)), body)
        name = given.get("model")
        if self.split is not None and name in (None, self.name):
            if request.path_params.get("action") == "split":
                changes = {key: value for key, value in given.items() if key != "model"}
                return JSONResponse(await asyncio.to_thread(self.split.act, changes, llms))
            if not request.path_params:  # texts are cut into tokens by the first version
                asks = request.url.path.startswith("/v1/")
                name = self.split.next() if asks else next(iter(self.split.weights))
                body = json.dumps(given | {"model": name}).encode()
        if name is not None and request.path_params:  # /admin/…: actions have no argument of that name
            body = json.dumps({key: value for key, value in given.items() if key != "model"}).encode()
        name = self.name if name is None else name
        for own in [own for own, llm in llms.items() if name == own or name in llm.adapters]:
            return _Leased(self, own, body)
        raise _Refused(404, unknown("model", str(name)[:100], llms))

    _completions = _chat = _tokenize = _detokenize = _administer = _through


class _Leased(Response):
    """The answer of a model's own endpoints."""

    def __init__(self, server: PoolServer, name: str, given: bytes) -> None:
        super().__init__()
        self.server, self.name, self.given = server, name, [given]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def again() -> Message:
            return {"type": "http.request", "body": self.given.pop()} if self.given else await receive()

        pool, servers = self.server.pool, self.server._servers
        async with contextlib.AsyncExitStack() as stack:
            try:
                engine = await stack.enter_async_context(pool.lease(self.name))
            except Exception as error:
                return await refusal(error)(scope, receive, send)
            if self.name not in servers:
                server = Server(engine, self.server.config, self.name, tenants=self.server.tenants)
                servers[self.name] = server, server.app()
            await servers[self.name][1](scope, again, send)


@contextlib.asynccontextmanager
async def serving_models(
    models: Mapping[str, Mapping[str, Any]], config: ServeSection
) -> AsyncIterator[PoolServer]:
    """Opens the endpoints over several models, name → arguments of `LLM`."""
    memory = config.memory_gb and 1e9 * config.memory_gb
    pool = EnginePool(models, memory, wait_s=config.wait_s, warmup=config.warmup, **config.limits)
    try:
        with contextlib.closing(PoolServer(pool, config)) as server:
            yield server
    finally:
        await pool.close()
