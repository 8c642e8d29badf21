"""Our own engine as its users meet it: `moejax.serving` in a process of its own, and a client of it."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moejax.bench.backends.base import BackendError
from moejax.bench.backends.config import BackendOptions
from moejax.bench.backends.openai_endpoint import OpenAIEndpoint
from moejax.core.errors import MoejaxError
from moejax.core.files import ensure_writable
from moejax.core.words import one_line
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.tracking.provenance import versions

_CLOSE_S = 10.0


class MoejaxServer(OpenAIEndpoint):
    """A client of a server that it starts, at a free port of this machine.

    What a measurement does to an engine between its requests (compiling, forgetting, counting) goes through a
    pipe, at whose end the process ends, too. It is spawned: JAX's threads do not survive a fork.

    Args:
        open_llm: opens the engine; it must be picklable, for the process calls it.
        log: where the process writes what it says.

    Raises:
        BackendError: the server has not come up.
    """

    def __init__(
        self, name: str, options: BackendOptions, open_llm: Callable[[], LLM], log: Path, **endpoint: Any
    ) -> None:
        ensure_writable(log.parent)
        self.name, self.timeout_s, self.log = name, options.timeout_s, log
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, open_llm, log, options.stream_interval), name=f"backend-{name}"
        )
        self._process.start()
        theirs.close()
        try:
            url = f"{self._receive()}/v1"
            super().__init__(name, replace(options, kind="openai_endpoint", url=url), **endpoint)
        except BaseException:
            self._end()
            raise

    def prepare(self, *, max_num_seqs: int, max_total_len: int, params: Sequence[SamplingParams]) -> None:
        self._call("warmup", max_total_len=max_total_len, sampling_params=params)

    def stats(self) -> dict[str, Any]:
        return super().stats() | {"failed_steps": self._call("stats")["failed_steps"]}

    def reset_stats(self) -> None:
        for name in (
            "reset_stats",
            "clear_prefix_cache",
            "clear_drafts",
        ):  # repetitions do not find each other
            self._call(name)

    def describe(self) -> dict[str, Any]:
        installed = versions()
        known = {name: installed.get(name) for name in ("moejax", "jax")}
        told = super().describe()
        return {**told, "kind": "moejax_server", "versions": known | told["versions"], "url": None}

    def close(self) -> None:
        super().close()
        self._end()

    def _call(self, method: str, **arguments: Any) -> Any:
        """Returns what a method of the process's `LLM` does."""
        with contextlib.suppress(OSError):  # `_receive` says why it is gone
            self._pipe.send((method, arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            if not self._pipe.poll(self.timeout_s):
                raise BackendError(
                    f"backend {self.name} said nothing for {self.timeout_s:g} s (backend.timeout_s);"
                    f" see {self.log}"
                )
            error, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_CLOSE_S)
            raise BackendError(
                f"backend {self.name}: its process ended with code {self._process.exitcode}; see {self.log}"
            ) from None
        if error is not None:
            raise BackendError(f"backend {self.name}: {error}")
        return value

    def _end(self) -> None:
        self._pipe.close()
        self._process.join(_CLOSE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, open_llm: Callable[[], LLM], log: Path, stream_interval: int) -> None:
    """The process: opens the engine, serves it, and calls it as the pipe says until that ends."""
    from moejax.serving.config import ServeSection
    from moejax.serving.run import serve, serving_engine

    with open(log, "wb") as said:
        for descriptor in (1, 2):
            os.dup2(said.fileno(), descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is whoever started it's, and ends the pipe

    def answer(llm: LLM) -> None:
        try:
            while True:
                method, arguments = pipe.recv()
                try:
                    pipe.send((None, getattr(llm, method)(**arguments)))
                except MoejaxError as error:
                    pipe.send((one_line(error), None))
        except (EOFError, OSError):
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with open_llm() as llm:
            thread = threading.Thread(target=answer, args=(llm,), daemon=True)

            def ready(name: str, address: str) -> None:
                pipe.send((None, address))
                thread.start()

            section = ServeSection(port=0, max_requests=1 << 16, drain_s=1.0, stream_interval=stream_interval)
            serve(serving_engine(llm, section, "moejax"), section, ready)
    except MoejaxError as error:
        pipe.send((one_line(error), None))
