"""Runs a server until it is told to end."""

import asyncio
import contextlib
import dataclasses
import functools
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import jax
import uvicorn

from moejax.core.errors import ConfigError, refuse
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.serving.app import Server
from moejax.serving.async_llm import AsyncLLM
from moejax.serving.config import ServeSection
from moejax.serving.pool import EnginePool
from moejax.serving.pool_server import PoolServer

# Longer than clients keep idle connections, lest one sends a request as this end closes its own.
_KEEP_ALIVE_S = 65


Answering = Callable[[], AbstractAsyncContextManager[Server]]
"""Opens what answers, within an event loop."""


def serve(llm: LLM, config: ServeSection, name: str, on_ready: Callable[[str], None]) -> None:
    """Answers requests by an engine, see `run`; `name` is what requests call the model."""

    @contextlib.asynccontextmanager
    async def answering() -> AsyncIterator[Server]:
        engine = AsyncLLM(llm, max_requests=config.max_requests, max_unread=config.max_unread)
        try:
            with contextlib.closing(Server(engine, config, name)) as server:
                yield server
        finally:
            await engine.close(drain=False)

    run(config, answering, on_ready, before=lambda: prepare(llm, config))


def serve_models(
    models: Mapping[str, Mapping[str, Any]], config: ServeSection, on_ready: Callable[[str], None]
) -> None:
    """Answers requests by several models, name → arguments of `LLM`, see `run`."""

    @contextlib.asynccontextmanager
    async def answering() -> AsyncIterator[Server]:
        pool = EnginePool(
            models, config.memory_gb and 1e9 * config.memory_gb, wait_s=config.wait_s,
            max_requests=config.max_requests, max_unread=config.max_unread,
            prepare=lambda llm: prepare(llm, config),
        )  # fmt: skip
        try:
            with contextlib.closing(PoolServer(pool, config)) as server:
                yield server
        finally:
            await pool.close()

    run(config, answering, on_ready)


def serve_replicas(
    arguments: Mapping[str, Any], config: ServeSection, on_ready: Callable[[str, str], None]
) -> None:
    """Answers requests by replicas of `LLM(**arguments)` in processes of their own, see `run`; `on_ready` is
    told the model's name, too.

    Raises:
        ConfigError: Ray is not installed, or the engine's settings do not go with replicas.
        DeviceError: they do not start.
    """
    try:
        from moejax.serving.ray_serve import replicas
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve.replicas: {error.name} is not installed; pip install 'moejax[ray]'"
        ) from None
    engine = arguments["engine"]
    refuse("serve.replicas", True, {"engine.adapters.slots": engine.adapters.slots})
    jax.config.update("jax_platforms", "cpu")  # the devices are the replicas'
    planned = {**arguments, "parallel": None, "engine": dataclasses.replace(engine, platform="auto")}
    with LLM(**planned, fill=False) as llm:
        name = config.name or (llm.model_dir.name if llm.model_dir else llm.config.family)
        answering = functools.partial(replicas, llm, arguments, config, name)
        run(config, answering, functools.partial(on_ready, name))


def prepare(llm: LLM, config: ServeSection) -> None:
    """Compiles ahead of the first request where `serve.warmup` asks for that."""
    if config.warmup:
        llm.warmup(max_total_len=llm.max_model_len, sampling_params=[SamplingParams(temperature=0.0)])


def run(
    config: ServeSection,
    answering: Answering,
    on_ready: Callable[[str], None],
    *,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Answers requests until SIGINT or SIGTERM, then ends what runs, or after `serve.drain_s` all.

    Args:
        on_ready: told the address once it takes requests.
        before: done before, once the address is had.

    Raises:
        ConfigError: a file of keys, or an address that cannot be listened at.
    """
    with listen(config.host, config.port) as listening:
        before()
        with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
            runner.run(_serve(config, answering, listening, on_ready))


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens, or raises `ConfigError`.

    Its connections send at once: asyncio sees to that only where a socket names its protocol, and else a body
    in another packet than its head would wait 40 ms for the client's acknowledgement.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"serve.host={host}, serve.port={port}: cannot listen there"
            f" ({error.strerror or error}); is another server at this address? port=0 takes one that is free"
        ) from None
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


async def _serve(
    config: ServeSection, answering: Answering, listening: socket.socket, on_ready: Callable[[str], None]
) -> None:
    async with answering() as server:
        options = uvicorn.Config(
            server.app(), log_config=None, http="h11", access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(config.drain_s)), server_header=False, lifespan="off",
        )  # fmt: skip
        listener = _Listener(options)
        host, port = listening.getsockname()[:2]
        serving = asyncio.create_task(listener.serve(sockets=[listening]))
        loop = asyncio.get_running_loop()

        def end() -> None:
            server.ready, listener.should_exit = False, True

        signals = (signal.SIGINT, signal.SIGTERM) if sys.platform != "win32" else ()
        for number in signals:
            loop.add_signal_handler(number, end)
        try:
            while not (listener.started or serving.done()):
                await asyncio.sleep(0.01)
            on_ready(f"http://{host}:{port}")
            await serving
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


class _Listener(uvicorn.Server):
    """uvicorn's server, which leaves signals to who runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
