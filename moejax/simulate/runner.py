"""A runner that computes nothing: it takes a plan's simulated duration and moves a virtual clock.

    launch    the step begins when the device is free, and ends a duration later
    collect   the clock goes on to that end

With the engine's overlapped loop the next step is launched before the last is collected, and follows it
without a gap. No JAX here.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable

from moejax.core.config import EngineConfig
from moejax.core.errors import refuse
from moejax.engine.core import Engine
from moejax.engine.scheduling.groups import scheduler_of
from moejax.engine.scheduling.plan import Plan
from moejax.engine.scheduling.policies import make_policy
from moejax.engine.step.runner import StepResult
from moejax.simulate.step import StepTime


class VirtualClock:
    """Seconds that pass only when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class CostModelRunner:
    """Implements `moejax.engine.step.runner.Runner` on a virtual clock. Every token is 0.

    Args:
        step_time: duration of a plan.
        clock: the engine's.
        block_s: seconds that copying a block to the host's store or back takes.

    Attributes:
        parts: (kind of operation, source) → seconds so far.
        assignments: of a layer, over all steps: tokens' choices of an expert "chosen", how many they were if
            all ranks had the "heaviest" one's, and those without room, "dropped" or "rerouted".
        phase_s: seconds of steps that only decode, and of those with prompts.
        error: why a duration could not be told; the engine takes that for a failed step.
    """

    def __init__(
        self, step_time: Callable[[Plan], StepTime], clock: VirtualClock, block_s: float = 0.0
    ) -> None:
        self.step_time, self.clock, self.block_s = step_time, clock, block_s
        self.parts: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.assignments: defaultdict[str, float] = defaultdict(float)
        self.phase_s: defaultdict[str, float] = defaultdict(float)
        self.error: Exception | None = None
        self._free = 0.0

    def launch(self, plan: Plan) -> tuple[float, StepResult]:
        try:
            time = self.step_time(plan)
        except Exception as error:
            self.error = error
            raise
        for op, source, seconds in time.parts:
            self.parts[op, source] += seconds
        self.phase_s["prefill" if plan.chunks else "decode"] += time.seconds
        self.save(plan)
        self._free = max(self.clock.now, self._free) + time.seconds
        return self._free, StepResult([0] * len(plan.sequences), padded_tokens=plan.num_tokens)

    def ready(self, handle: tuple[float, StepResult]) -> bool:
        return self.clock.now >= handle[0]

    def collect(self, handle: tuple[float, StepResult]) -> StepResult:
        self.clock.now = max(self.clock.now, handle[0])
        return handle[1]

    def save(self, plan: Plan) -> None:
        if self.block_s and (moved := max(len(group.saves) + len(group.loads) for group in plan.groups)):
            self.occupy("host", "roofline", moved * self.block_s)

    def occupy(self, op: str, source: str, seconds: float) -> None:
        """Has the devices do something for so long, besides steps."""
        self._free = max(self.clock.now, self._free) + seconds
        self.parts[op, source] += seconds

    def reset(self) -> None:
        """Forgets nothing: there is no state."""


def simulated_engine(
    config: EngineConfig,
    step_time: Callable[[Plan], StepTime],
    num_blocks: int,
    *,
    groups: int = 1,
    block_bytes: float = 0.0,
    host_bandwidth: float = 25e9,
) -> tuple[Engine, CostModelRunner, VirtualClock]:
    """Returns an idle engine, with the scheduler of a real one, that runs on a virtual clock.

    Args:
        num_blocks: of each data-parallel group.
        block_bytes: of a block of the cache on a device.
        host_bandwidth: bytes/s between a device and the host's memory.

    Raises:
        ConfigError: the policy does not go with the rest.
    """
    clock, prefixes = VirtualClock(), config.prefix_cache
    below = prefixes.disk_gb + config.swap_disk_gb
    refuse("a simulated engine", True, {"engine.prefix_cache.disk_gb and swap_disk_gb; leave them 0": below})
    place = "device" if prefixes.place == "auto" else prefixes.place
    policy = make_policy(config, clock=clock)
    slots = [
        int(used * memory * 1e9 // (block_bytes * groups)) if block_bytes else 0
        for used, memory in (
            (prefixes.enabled and place == "host", prefixes.host_memory_gb),
            (config.preemption != "recompute", config.swap_memory_gb),
        )
    ]
    scheduler = scheduler_of(
        config,
        num_blocks,
        groups=groups,
        policy=policy,
        prefixes=dataclasses.replace(prefixes, place=place),
        slots=slots[0],
        swapped=slots[1],
    )
    runner = CostModelRunner(step_time, clock, block_bytes / host_bandwidth)
    engine = Engine(scheduler, runner, overlap=config.overlap, clock=clock, sleep=clock.sleep)
    engine.retries = config.retries
    return engine, runner, clock
