"""Several models by name under one budget of memory: opened on demand, the least recently used closed."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError, RequestError, unknown
from moejax.core.words import byte_words
from moejax.engine.llm import LLM
from moejax.serving.async_llm import USUAL, AsyncLLM, Overloaded


@dataclasses.dataclass(eq=False)
class _Model:
    """A model of a pool; `plan` has no values, and its weights are those of the model `weights_of`."""

    name: str
    arguments: Mapping[str, Any]
    plan: LLM
    weights_of: str
    engine: AsyncLLM | None = None
    opening: asyncio.Task[None] | None = None
    leases: int = 0
    used: float = 0.0


class EnginePool:
    """Hands out an `AsyncLLM` by name. Names that differ in engine settings alone share their weights where
    `LLM.variant` allows that.

    Args:
        models: name → arguments of `LLM`.
        memory_bytes: of a device for all engines that are open, as `LLM.memory` counts; None: all may be.
        wait_s: the longest wait for room.
        limits: of each engine, see `AsyncLLM`.
        warmup: whether an engine compiles its steps before its first request.

    Raises:
        ConfigError: a model that cannot be opened, or is over the budget by itself.
    """

    def __init__(
        self, models: Mapping[str, Mapping[str, Any]], memory_bytes: float | None = None, *,
        wait_s: float = 30.0, warmup: bool = False, **limits: int,
    ) -> None:  # fmt: skip
        self.memory_bytes, self._wait_s, self._warmup, self._limits = memory_bytes, wait_s, warmup, limits
        self._changing, self._freed = asyncio.Lock(), asyncio.Event()
        self.on_close: Callable[[str], None] = lambda name: None
        self._models: dict[str, _Model] = {}
        for name, arguments in models.items():
            self._models[name] = model = self._planned(name, arguments)
            if (needs := self._bytes([model])) > (memory_bytes or needs):
                raise ConfigError(
                    f"model {name} alone needs {byte_words(needs)} of a device, over the pool's"
                    f" {byte_words(memory_bytes or 0)}: {model.plan.memory.parts()}"
                )

    @property
    def llms(self) -> dict[str, LLM]:
        """Every model's `LLM`: one without values where it is not open."""
        return {
            name: model.engine.llm if model.engine else model.plan for name, model in self._models.items()
        }

    @contextlib.asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[AsyncLLM]:
        """Opens a model unless it is, and keeps it open within the block.

        Raises:
            RequestError: there is no such name.
            Overloaded: no room has come in time.
            MoejaxError: what opening it raises.
        """
        if name not in self._models:
            raise RequestError(unknown("model", str(name)[:100], self._models))
        model = self._models[name]
        model.leases += 1
        try:
            if model.engine is None:  # a task of its own goes on when who has asked for it leaves
                model.opening = model.opening or asyncio.create_task(self._open(model))
                await asyncio.shield(model.opening)
            if model.engine is None:
                raise RequestError("the pool is closed")
            yield model.engine
        finally:
            model.leases, model.used = model.leases - 1, time.monotonic()
            self._freed.set()

    async def close(self) -> None:
        """Closes all engines; what runs ends with what it has."""
        async with self._changing:
            for model in self._models.values():
                await self._close(model)

    def _planned(self, name: str, arguments: Mapping[str, Any]) -> _Model:
        for other in self._models.values():
            with contextlib.suppress(ConfigError):  # other engine settings that change the weights
                if {**other.arguments, "engine": None} == {**arguments, "engine": None}:
                    return _Model(name, arguments, other.plan.variant(_engine(arguments)), other.weights_of)
        return _Model(name, arguments, LLM(**arguments, fill=False), name)

    def _bytes(self, models: list[_Model]) -> float:
        """Returns what these take of a device together; weights that they share count once."""
        weights = {model.weights_of: model.plan.memory.held.weights for model in models}
        return sum(weights.values()) + sum(m.plan.memory.total - m.plan.memory.held.weights for m in models)

    async def _open(self, model: _Model) -> None:
        try:
            async with self._changing:
                async with asyncio.timeout(self._wait_s):
                    here = await self._make_room(model)
                alike = [m.engine.llm for m in here if m.engine and m.weights_of == model.weights_of]
                model.engine = AsyncLLM(await asyncio.to_thread(self._llm, model, alike), **self._limits)
        except TimeoutError:
            others = ", ".join(other.name for other in self._opened())
            raise Overloaded(
                f"model {model.name} has found no room within {self._wait_s:g} s beside {others}; try again"
            ) from None
        finally:
            model.opening = None

    async def _make_room(self, model: _Model) -> list[_Model]:
        """Returns who is open beside it, once there is room."""
        while (here := self._opened()) and self._bytes([*here, model]) > (self.memory_bytes or 1e30):
            self._freed.clear()
            if idle := [other for other in here if not other.leases]:
                await self._close(min(idle, key=lambda other: other.used))
            else:
                await self._freed.wait()
        return here

    def _opened(self) -> list[_Model]:
        return [model for model in self._models.values() if model.engine is not None]

    def _llm(self, model: _Model, alike: list[LLM]) -> LLM:
        llm = alike[0].variant(_engine(model.arguments)) if alike else LLM(**model.arguments)
        if self._warmup:
            llm.warmup(max_total_len=llm.max_model_len, sampling_params=USUAL)
        return llm

    async def _close(self, model: _Model) -> None:
        engine, model.engine = model.engine, None
        if engine is not None:
            self.on_close(model.name)
            await engine.close(drain=False)
            await asyncio.to_thread(engine.llm.close)


def _engine(arguments: Mapping[str, Any]) -> EngineConfig:
    return arguments.get("engine") or EngineConfig()
