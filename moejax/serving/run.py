"""Runs a server until it is told to end."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager

import uvicorn

from moejax.core.errors import ConfigError
from moejax.engine.llm import LLM
from moejax.serving.app import Server
from moejax.serving.async_llm import USUAL, AsyncLLM
from moejax.serving.config import ServeSection

# Longer than clients keep idle connections, lest one sends a request as this end closes its own.
_KEEP_ALIVE_S = 65


def serve(
    answering: AbstractAsyncContextManager[Server], config: ServeSection, on_ready: Callable[[str, str], None]
) -> None:
    """Answers requests until SIGINT or SIGTERM, then ends what runs, or after `serve.drain_s` all.

    Args:
        answering: opens the endpoints within an event loop, see `serving_engine`.
        on_ready: told the model's name and the address once it takes requests.

    Raises:
        ConfigError: a file of keys, or an address that cannot be listened at.
    """
    with listen(config.host, config.port) as listening:
        with asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
            runner.run(_serve(answering, config, listening, on_ready))


@contextlib.asynccontextmanager
async def serving_engine(llm: LLM, config: ServeSection, name: str) -> AsyncIterator[Server]:
    """Opens the endpoints over one engine, whose model requests call by a name."""
    if config.warmup:
        llm.warmup(max_total_len=llm.max_model_len, sampling_params=USUAL)
    engine = AsyncLLM(llm, **config.limits)
    try:
        with contextlib.closing(Server(engine, config, name)) as server:
            yield server
    finally:
        await engine.close(drain=False)


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
    answering: AbstractAsyncContextManager[Server], config: ServeSection, listening: socket.socket,
    on_ready: Callable[[str, str], None],
) -> None:  # fmt: skip
    async with answering as server:
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
            on_ready(server.name, f"http://{host}:{port}")
            await serving
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


class _Listener(uvicorn.Server):
    """uvicorn's server, which leaves signals to who runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
