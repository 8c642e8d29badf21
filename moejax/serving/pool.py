"""Several models by name under one budget of memory: opened on demand, the least recently used closed."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError, RequestError, unknown
from moejax.core.words import byte_words
from moejax.engine.llm import LLM
from moejax.serving.async_llm import AsyncLLM, Overloaded

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Model:
    """A model of a pool; `plan` is its `LLM` without values, whose weights are those of `weights_of`."""

    name: str
    arguments: dict[str, Any]
    plan: LLM
    weights_of: str
    engine: AsyncLLM | None = None
    opening: asyncio.Task[None] | None = None
    leases: int = 0
    used: float = 0.0


class EnginePool:
    """Hands out an `AsyncLLM` for each name, of engines that are open only while there is room for them.

    Names whose arguments differ in engine settings alone share their weights while both are open
    (`LLM.variant`), as far as these settings leave the weights as they are.

    Args:
        models: name → arguments of `LLM`.
        memory_bytes: of a device, for all engines that are open: weights, cache and the largest step of each,
            as `LLM.memory` counts them. None: all may be open at a time.
        wait_s: the longest wait for room, while requests run on what would have to be closed or another model
            is being opened.
        max_requests, max_unread: of each engine, see `AsyncLLM`.
        prepare: called with an engine that has been opened, before its first request.

    Raises:
        ConfigError: a model that cannot be opened, or needs more than the budget by itself.
    """

    def __init__(
        self,
        models: Mapping[str, Mapping[str, Any]],
        memory_bytes: float | None = None,
        *,
        wait_s: float = 30.0,
        max_requests: int = 1024,
        max_unread: int = 4096,
        prepare: Callable[[LLM], None] = lambda llm: None,
    ) -> None:
        self.memory_bytes, self.wait_s, self._prepare = memory_bytes, wait_s, prepare
        self._limits: dict[str, Any] = {"max_requests": max_requests, "max_unread": max_unread}
        self.on_close: Callable[[str], None] = lambda name: None
        self._models: dict[str, _Model] = {}
        self._changing, self._freed = asyncio.Lock(), asyncio.Event()
        for name, arguments in models.items():
            self._models[name] = model = self._plan(name, dict(arguments))
            if (needs := self._bytes([model])) > (memory_bytes or needs):
                raise ConfigError(
                    f"model {name} alone needs {byte_words(needs)} of a device, over the pool's"
                    f" {byte_words(memory_bytes or 0)}; {model.plan.memory.parts()}"
                )

    @property
    def names(self) -> list[str]:
        """The models' names, in their order."""
        return list(self._models)

    @property
    def open(self) -> dict[str, AsyncLLM]:
        """The engines that are open, by their names."""
        return {model.name: model.engine for model in self._models.values() if model.engine is not None}

    def plan(self, name: str) -> LLM:
        """Returns a model's `LLM` without values: its sizes and choices. Raises `RequestError` for another
        name."""
        return self._of(name).plan

    @contextlib.asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[AsyncLLM]:
        """Opens a model unless it is, and keeps it open within the block.

        Raises:
            RequestError: there is no such name.
            Overloaded: no room has come within `wait_s`.
            MoejaxError: what opening it raises.
        """
        model = self._of(name)
        model.leases += 1
        try:
            if model.engine is None:
                if model.opening is None:  # a task of its own: it goes on when who asked for it has left
                    model.opening = asyncio.create_task(self._open(model))
                await asyncio.shield(model.opening)
            if model.engine is None:
                raise RequestError("the pool is closed")
            yield model.engine
        finally:
            model.leases -= 1
            model.used = time.monotonic()
            self._freed.set()

    async def close(self) -> None:
        """Closes all engines; what runs ends with what it has."""
        async with self._changing:
            for model in self._models.values():
                await self._close(model)

    def _of(self, name: str) -> _Model:
        if name not in self._models:
            raise RequestError(unknown("model", str(name)[:100], self._models))
        return self._models[name]

    def _plan(self, name: str, arguments: dict[str, Any]) -> _Model:
        engine = arguments.get("engine") or EngineConfig()
        for other in self._models.values():
            alike = {**other.arguments, "engine": None} == {**arguments, "engine": None}
            if alike and other.weights_of == other.name:
                try:
                    return _Model(name, arguments, other.plan.variant(engine), other.name)
                except ConfigError as error:  # its settings lay out the weights in another way
                    logger.info("model %s has weights of its own beside %s: %s", name, other.name, error)
        return _Model(name, arguments, LLM(**arguments, fill=False), name)

    def _bytes(self, models: list[_Model]) -> float:
        """Returns what these take of a device together; weights that they share count once."""
        weights = {model.weights_of: model.plan.memory.held.weights for model in models}
        return sum(weights.values()) + sum(m.plan.memory.total - m.plan.memory.held.weights for m in models)

    async def _open(self, model: _Model) -> None:
        try:
            began = time.monotonic()
            async with asyncio.timeout(self.wait_s) as waiting, self._changing:
                await self._make_room(model)
                waiting.reschedule(None)
                here = [m for m in self._models.values() if m.engine and m.weights_of == model.weights_of]
                llm = await asyncio.to_thread(self._llm, model, here)
                model.engine = AsyncLLM(llm, **self._limits)
                logger.info("model %s is open after %.1f s", model.name, time.monotonic() - began)
        except TimeoutError:
            raise Overloaded(
                f"model {model.name} has found no room within {self.wait_s:g} s beside the models that run"
                f" ({', '.join(self.open)}); try again"
            ) from None
        finally:
            model.opening = None

    def _llm(self, model: _Model, here: list[_Model]) -> LLM:
        if here and here[0].engine is not None:
            llm = here[0].engine.llm.variant(model.arguments.get("engine") or EngineConfig())
        else:
            llm = LLM(**model.arguments)
        self._prepare(llm)
        return llm

    async def _make_room(self, model: _Model) -> None:
        """Closes models that nobody leases, those first whose last request ended first."""
        while True:
            self._freed.clear()
            here = [other for other in self._models.values() if other.engine is not None]
            if self.memory_bytes is None or self._bytes([*here, model]) <= self.memory_bytes:
                return
            if idle := [other for other in here if not other.leases]:
                await self._close(min(idle, key=lambda other: other.used))
            else:
                await self._freed.wait()

    async def _close(self, model: _Model) -> None:
        engine, model.engine = model.engine, None
        if engine is not None:
            self.on_close(model.name)
            await engine.close(drain=False)
            await asyncio.to_thread(engine.llm.close)
