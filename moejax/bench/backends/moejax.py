"""Our own engine as a backend: `LLM` and nothing in between."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from moejax.bench.backends.base import Backend
from moejax.bench.memory import peak_memory, weight_metrics
from moejax.core.config import Batching, EngineConfig
from moejax.core.errors import ConfigError
from moejax.core.scheduling import SchedulingConfig
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOptions, RequestOutput, SamplingParams
from moejax.engine.stats import StepRecord
from moejax.tracking.provenance import versions


class MoejaxBackend(Backend):
    """`LLM` under the names of `Backend`. `llm` is open to measurements that only ours allows: recorded
    routing, compile ledger, roofline.

    Args:
        adapters: names of those that requests have, in turns; none: they have none.
    """

    def __init__(self, llm: LLM, adapters: Sequence[str] = ()) -> None:
        self.llm, self.adapters = llm, adapters
        self._submitted = 0
        self.name = "moejax"
        self.vocab_size: int = llm.config.vocab_size
        self.max_model_len: int | None = llm.max_model_len
        self.encode = llm.tokenizer.encode if llm.tokenizer else None
        self.checkpoint = llm.model_dir
        self.seed: int | None = llm.seed

    def check(self, params: SamplingParams) -> None:
        """Accepts all: whatever is in `SamplingParams` the engine has."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        *,
        record_routing: bool = False,
        forget: bool = True,
    ) -> list[RequestOutput]:
        if forget:  # repetitions are not to find each other
            self.forget()
        options = [self._with_adapter(RequestOptions(), i) for i in range(len(prompts))]
        return self.llm.generate(prompts, params, record_routing=record_routing, options=options)

    def _with_adapter(self, options: RequestOptions, number: int) -> RequestOptions:
        if not self.adapters:
            return options
        return dataclasses.replace(options, adapter=self.adapters[number % len(self.adapters)])

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        options: RequestOptions | None = None,
    ) -> RequestOutput:
        options = self._with_adapter(options or RequestOptions(), self._submitted)
        self._submitted += 1
        return self.llm.submit(prompt, params, arrival_time=arrival_time, options=options)

    @property
    def scheduling(self) -> SchedulingConfig:
        return self.llm.engine_config.scheduling

    def step(self) -> bool:
        return self.llm.step()

    def abort(self, request_id: str) -> None:
        self.llm.abort(request_id)

    # Read from the engine, which has the truth; mypy would have attributes overridden by attributes only.
    @property
    def batching(self) -> str:  # type: ignore[override]
        return self.llm.engine_config.batching

    @property
    def max_num_seqs(self) -> int | None:  # type: ignore[override]
        return self.llm.engine_config.max_num_seqs

    @property
    def on_step(self) -> Callable[[StepRecord], None] | None:
        return self.llm.engine.on_step

    @on_step.setter
    def on_step(self, observer: Callable[[StepRecord], None] | None) -> None:
        self.llm.engine.on_step = observer

    def variant(self, batching: Batching) -> "MoejaxBackend":
        """The same weights behind an engine of another batching mode."""
        return self.beside(dataclasses.replace(self.llm.engine_config, batching=batching))

    def beside(self, engine: EngineConfig) -> "MoejaxBackend":
        """The same weights and adapters behind an engine of its own."""
        return MoejaxBackend(self.llm.variant(engine), self.adapters)

    def describe(self) -> dict[str, Any]:
        installed = versions()
        return {
            "name": self.name,
            "kind": "moejax",
            "versions": {name: installed.get(name) for name in ("moejax", "jax")},
            "dtype": getattr(self.llm.config, "dtype", None),
            "weights": str(self.llm.model_dir) if self.llm.model_dir else None,
            "batching": self.batching,
        }

    def prepare(self, *, max_num_seqs: int, max_total_len: int, params: Sequence[SamplingParams]) -> None:
        self.llm.warmup(max_total_len=max_total_len, sampling_params=params)

    def stats(self) -> dict[str, Any]:
        return self.llm.stats()

    def reset_stats(self) -> None:
        self.llm.reset_stats()
        self.forget()

    def forget(self) -> None:
        """Has the engine begin with nothing that it remembers of requests."""
        self._submitted = 0
        self.llm.clear_prefix_cache()
        self.llm.clear_drafts()

    def close(self) -> None:
        self.llm.close()

    def memory(self) -> dict[str, int | float | None]:
        stats = self.llm.stats()
        cache = {name: value for name, value in stats.items() if name.startswith("kv_cache_")}
        return {**peak_memory(), **weight_metrics(self.llm.stages), **cache}


def as_backend(engine: LLM | Backend) -> Backend:
    """An `LLM` as a backend; backends pass through."""
    return engine if isinstance(engine, Backend) else MoejaxBackend(engine)


def engine_of(backend: Backend) -> LLM | None:
    """The `LLM` within our own backend, None for a peer."""
    return backend.llm if isinstance(backend, MoejaxBackend) else None


def check_length(backend: Backend, text: str, prompt_len: int, output_len: int) -> None:
    """Raises `ConfigError` for a request that a backend's model, or alone our cache, is too short for; `text`
    names it."""
    text += f": {prompt_len} + {output_len} tokens"
    remedy = "shorten workload.prompt_len or workload.output_len"
    ours, limit = isinstance(backend, MoejaxBackend), backend.max_model_len
    if limit is not None and prompt_len + output_len > limit:
        whose = f" of {limit} (engine.max_model_len)" if ours else f" of {backend.name} of {limit}"
        raise ConfigError(f"{text} exceed the limit{whose}; {remedy}")
    if not ours:
        return
    stats = backend.stats()
    # The last token is never fed back, so its keys and values are not stored.
    blocks = math.ceil((prompt_len + output_len - 1) / stats["block_size"])
    if blocks > stats["num_blocks"]:
        raise ConfigError(
            f"{text} need {blocks} cache blocks of {stats['block_size']}, and the cache has"
            f" {stats['num_blocks']}; raise engine.num_blocks or {remedy}"
        )
