"""An engine without a model: it schedules, counts and keeps time as the real one does, by plain rules.

A step takes every running sequence one token further; what is newly admitted is prefilled whole in its first
step, which also gives its first token. Time is the caller's: `VirtualClock` lets it pass only in steps and
sleeps, so that every instant is known beforehand.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flax import nnx

from moejax.core.config import EngineConfig
from moejax.core.errors import RequestError
from moejax.core.parallel import ParallelConfig
from moejax.core.resolve import Resolution
from moejax.core.scheduling import SchedulingConfig
from moejax.engine.requests.api import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from moejax.engine.stats import EngineStats, StepRecord
from moejax.engine.step.ledger import CompileLedger
from moejax.nn.param import ParamSpec, declare
from moejax.perf.certificate import Certificate
from moejax.perf.memory import StageMemory
from tests.perf.models import small_model


class VirtualClock:
    """Seconds that pass only where somebody says so; `sleeps` is what was slept."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@dataclass
class _Sequence:
    output: RequestOutput
    params: SamplingParams


@dataclass
class FakeLLM:
    """`LLM`'s interface as far as the throughput experiment uses it.

    Attributes:
        step_s, token_s: a step takes step_s plus token_s for each token that it computes.
        refuse, fail, abort_after: places of the submitted requests that `submit` refuses, that a step breaks
            off with an error after their first token, and that end as aborted.
        forget: places that are dropped without ever being finished.
    """

    engine_config: EngineConfig = field(default_factory=lambda: EngineConfig(max_num_seqs=4))
    clock: Callable[[], float] = time.perf_counter
    advance: Callable[[float], None] = lambda seconds: None
    step_s: float = 0.010
    token_s: float = 0.0
    block_size: int = 16
    num_blocks: int = 64
    max_model_len: int = 128
    refuse: Sequence[int] = ()
    fail: Sequence[int] = ()
    abort_after: Sequence[int] = ()
    forget: Sequence[int] = ()
    tokenizer: Any = None
    model_dir: Any = None
    seed: int = 0
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)

    def __post_init__(self) -> None:
        self.config = small_model(vocab_size=100)
        self.kv_cache_dtype = "float32"
        self.parallel_config = ParallelConfig()
        self.memory = Certificate(StageMemory((0,), 0, 0, 0), 0.0)  # nothing
        spec = ParamSpec((4, 8), ("embed", "mlp"), np.dtype(np.float32))
        self.stages = [nnx.Dict(kernel=declare(spec))]
        self.ledger = CompileLedger()
        self.resolutions = [Resolution("engine.platform", "cpu", "a fake")]
        self.on_step: Callable[[StepRecord], None] | None = None
        self.engine = self  # whose `on_step` a backend sets
        self.warmups: list[dict[str, Any]] = []
        self.submitted: list[tuple[list[int], SamplingParams, float | None]] = []
        self.outputs: list[RequestOutput] = []
        self.aborted: list[str] = []
        self.closed = 0
        self.variants: list[FakeLLM] = []
        self._stats = EngineStats()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []

    def variant(self, engine: EngineConfig) -> "FakeLLM":
        self.variants.append(dataclasses.replace(self, engine_config=engine))
        return self.variants[-1]

    def close(self) -> None:
        self.closed += 1

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def warmup(self, **limits: Any) -> None:
        self.warmups.append(limits)
        self.ledger.warmed_up = True

    def stats(self) -> dict[str, Any]:
        cache = {"kv_cache_allocated_bytes": 4096, "kv_cache_capacity_bytes": 8192}
        sizes = {"block_size": self.block_size, "num_blocks": self.num_blocks}
        return {**self._stats.as_dict(), **sizes, **cache}

    def clear_prefix_cache(self) -> None: ...

    def clear_drafts(self) -> None: ...

    def reset_stats(self) -> None:
        self._stats = EngineStats()

    def submit(
        self,
        prompt: list[int],
        sampling_params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        options: object = None,
    ) -> RequestOutput:
        assert sampling_params is not None
        self.submitted.append((prompt, sampling_params, arrival_time))
        place = len(self.submitted) - 1
        if place in self.refuse:
            raise RequestError("refused")
        times = RequestMetrics(self.clock() if arrival_time is None else arrival_time)
        output = RequestOutput(str(place), None, prompt, [CompletionOutput(0, "", [])], times)
        self.outputs.append(output)
        if place not in self.forget:
            self._waiting.append(_Sequence(output, sampling_params))
        return output

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        held = [s for s in (*self._waiting, *self._running) if s.output.request_id == request_id]
        for sequence in held:
            sequence.output.outputs[0].finish_reason, sequence.output.finished = "abort", True
        self._waiting = deque(s for s in self._waiting if s not in held)
        self._running = [s for s in self._running if s not in held]

    def step(self) -> bool:
        waiting, room = len(self._waiting), self.engine_config.max_num_seqs - len(self._running)
        if self.engine_config.batching == "static" and self._running:
            room = 0
        admitted = [self._waiting.popleft() for _ in range(min(room, waiting))]
        decoding = list(self._running)
        self._running += admitted
        if not self._running:
            return False
        scheduled = self.clock()
        prefill = sum(len(s.output.prompt_token_ids) for s in admitted)
        padded = 8 * -(-(prefill + len(decoding)) // 8)
        self.advance(self.step_s + self.token_s * padded)
        for sequence in admitted:
            sequence.output.metrics.scheduled_time = scheduled
        stored = sum(self._stored(s) for s in self._running)
        blocks = sum(-(-self._stored(s) // self.block_size) for s in self._running)
        now = self.clock()
        record = StepRecord(
            now, now - scheduled, prefill, len(decoding), padded, len(self._running), len(self._running),
            waiting, blocks, self.num_blocks, stored, 0, len(self._waiting),
        )  # fmt: skip
        for sequence in self._running:
            self._token(sequence, now)
        self._running = [s for s in self._running if not s.output.finished]
        self._stats.add(record)
        if self.on_step is not None:
            self.on_step(record)
        return True

    def _stored(self, sequence: _Sequence) -> int:
        return len(sequence.output.prompt_token_ids) + len(sequence.output.outputs[0].token_ids)

    def _token(self, sequence: _Sequence, now: float) -> None:
        output, sample = sequence.output, sequence.output.outputs[0]
        place = int(output.request_id)
        sample.token_ids.append(1)
        output.metrics.token_times.append(now)
        if place in self.fail:
            sample.finish_reason, output.error = "error", "a step failed: out of luck"
            self._stats.failed_steps += 1
        elif place in self.abort_after:
            sample.finish_reason = "abort"
        elif len(sample.token_ids) >= sequence.params.max_tokens:
            sample.finish_reason = "length"
        output.finished = sample.finish_reason is not None
