"""Replicas of a simulated engine behind the members of `Backend`, on one virtual clock.

Each replica has the real loop and scheduler and a clock of its own; the replica that is furthest behind is
stepped first, so that events happen in order. `moejax.bench.driver.drive` with `clock` and `sleep` of this
backend serves a workload as it does in real time, in as much time as the host's work takes.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moejax.bench.backends.base import Backend
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import RequestError
from moejax.core.scheduling import SchedulingConfig
from moejax.engine.core import Engine
from moejax.engine.requests.api import RequestMetrics, RequestOptions, RequestOutput, SamplingParams
from moejax.engine.requests.output import OutputProcessor
from moejax.engine.requests.state import RequestState
from moejax.engine.scheduling.sequence import Sequence as Sample
from moejax.engine.stats import StepRecord
from moejax.simulate.routers import Load, RoundRobin, Router
from moejax.simulate.runner import CostModelRunner, VirtualClock


@dataclass
class Replica:
    """One engine with its runner and clock.

    Attributes:
        ready_at: instant from which it serves; it is being started until then.
        draining: it gets no more requests.
    """

    engine: Engine
    runner: CostModelRunner
    clock: VirtualClock
    ready_at: float = 0.0
    draining: bool = False

    @property
    def busy(self) -> bool:
        return not self.engine.scheduler.idle

    def load(self) -> Load:
        """Returns what routers go by."""
        scheduler = self.engine.scheduler
        blocks = scheduler.allocator
        return Load(len(scheduler.running), scheduler.num_waiting, blocks.num_used / blocks.num_blocks)


class SimulatedBackend(Backend):
    """Simulated replicas of one model.

    Args:
        make: returns a new replica's engine, runner and clock.
        replicas: how many there are at first.
        router: chooses a request's replica.
        request_s: seconds of each request that no replica is busy with: socket and tokenizer.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        make: Callable[[], tuple[Engine, CostModelRunner, VirtualClock]],
        *,
        replicas: int = 1,
        router: Router | None = None,
        request_s: float = 0.0,
    ) -> None:
        self.name, self.model, self.config, self.make = "simulated", model, config, make
        self.vocab_size, self.encode, self.checkpoint, self.seed = model.vocab_size, None, None, None
        self.max_model_len = config.max_model_len or model.max_position_embeddings
        self.max_num_seqs, self.batching = config.max_num_seqs, config.batching
        self.router, self.request_s = router or RoundRobin(), request_s
        self._on_step: Callable[[StepRecord], None] | None = None
        self.replicas: list[Replica] = []
        for _ in range(replicas):
            self.add_replica(0.0)
        self.now = 0.0
        self._ids = itertools.count()
        self._sent: dict[str, tuple[Replica, RequestState]] = {}

    def add_replica(self, ready_at: float) -> Replica:
        """Starts a replica that serves from an instant on."""
        replica = Replica(*self.make(), ready_at)
        replica.engine.on_step = self._on_step
        self.replicas.append(replica)
        return replica

    # -- time ----------------------------------------------------------------------------------------------

    def clock(self) -> float:
        """Returns the instant up to which all has happened."""
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def step(self) -> bool:
        """Steps the replica that is furthest behind; False if all are idle."""
        busy = [replica for replica in self.replicas if replica.busy]
        if not busy:
            return False
        first = min(busy, key=lambda replica: replica.clock.now)
        first.engine.step()
        if first.runner.error is not None:
            raise first.runner.error
        busy = [replica for replica in busy if replica is not first or first.busy]
        behind = min((replica.clock.now for replica in busy), default=first.clock.now)
        self.now = max(self.now, behind)
        return True

    # -- requests ------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        options: RequestOptions | None = None,
    ) -> RequestOutput:
        arrival = self.now if arrival_time is None else arrival_time
        if not prompt or len(prompt) + params.max_tokens > (self.max_model_len or 0):
            raise RequestError(
                f"a prompt of {len(prompt)} tokens and {params.max_tokens} to generate are over the limit of "
                f"{self.max_model_len} (engine.max_model_len)"
            )
        options = options or RequestOptions()
        number = next(self._ids)
        processor = OutputProcessor(0, params, None)
        output = RequestOutput(str(number), None, prompt, [processor.output], RequestMetrics(arrival))
        request = RequestState(output, [processor])
        sample = Sample(list(prompt), len(prompt), params, len(prompt) + params.max_tokens, number)
        sample.options, sample.arrival, sample.identity = options, arrival, ()
        request.attach([sample])
        serving = [r for r in self.replicas if not r.draining and r.ready_at <= arrival] or self.replicas
        replica = serving[self.router.choose([each.load() for each in serving], prompt)]
        if not replica.busy:
            replica.clock.now = max(replica.clock.now, arrival + self.request_s, replica.ready_at)
        replica.engine.add([request])
        self._sent[output.request_id] = replica, request
        request.on_close = lambda: self._sent.pop(output.request_id, None)
        return output

    def abort(self, request_id: str) -> None:
        if (sent := self._sent.get(request_id)) is not None:
            sent[0].engine.abort(sent[1])

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        outputs = [self.submit(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        while self.step():
            pass
        return outputs

    # -- facts ---------------------------------------------------------------------------------------------

    @property
    def scheduling(self) -> SchedulingConfig:
        return self.config.scheduling

    @property
    def on_step(self) -> Callable[[StepRecord], None] | None:
        return self._on_step

    @on_step.setter
    def on_step(self, observer: Callable[[StepRecord], None] | None) -> None:
        self._on_step = observer
        for replica in self.replicas:
            replica.engine.on_step = observer

    def check(self, params: SamplingParams) -> None:
        """Accepts all: no token depends on it."""

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "simulated",
            "replicas": len(self.replicas),
            "batching": self.batching,
        }

    def stats(self) -> dict[str, Any]:
        engines = [replica.engine for replica in self.replicas]
        failed = sum(engine.stats.failed_steps for engine in engines)
        return {
            "block_size": self.config.block_size,
            "failed_steps": failed,
            "steps": sum(e.stats.steps for e in engines),
        }

    def parts(self) -> dict[tuple[str, str], float]:
        """Returns simulated seconds by (kind of operation, source), over all replicas."""
        seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        for replica in self.replicas:
            for key, value in replica.runner.parts.items():
                seconds[key] += value
        return seconds
