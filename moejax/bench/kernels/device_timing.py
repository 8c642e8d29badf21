"""Device time of short functions: chains of calls in one program, so that launching is not timed.

A chain of n calls and one of a single call are timed; the difference over n - 1 is a call's time, free of
dispatch and synchronisation. Calls of a chain wait for one another (`optimization_barrier`), as layers of a
model do, and use different inputs in turn, so that no call finds its weights in the cache.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

Function = Callable[[dict[str, Any]], Any]
MAX_CALLS = 64
# A chain keeps all of its outputs, and its inputs come several times: what they may hold together.
MEMORY_BUDGET = 8 << 30


@dataclass(frozen=True)
class Timed:
    """Microseconds a call, one sample per repeat.

    Attributes:
        calls: length of the chain.
        input_sets: different inputs that the calls take in turn.
    """

    samples: tuple[float, ...]
    calls: int
    input_sets: int

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the interquartile range over the median."""
        if len(self.samples) < 4:
            return math.nan
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / 2 / self.median_us


class Chain:
    """A function compiled as chains of one and of `calls` calls.

    Args:
        carries: argument name → index of the output that takes its place in the next call (arguments that
            the function updates in place).
    """

    def __init__(
        self,
        function: Function,
        inputs: Sequence[dict[str, Any]],
        calls: int,
        carries: Mapping[str, int] | None = None,
    ) -> None:
        self.calls, self.inputs = calls, list(inputs)
        self._carries = dict(carries or {})
        self._one = self._compile(function, 1)
        self._many = self._compile(function, calls)

    def _compile(self, function: Function, calls: int) -> Callable[[Any], Any]:
        carries = self._carries

        def chain(inputs: Sequence[dict[str, Any]]) -> list[Any]:
            outputs: list[Any] = []
            for i in range(calls):
                arguments = dict(inputs[i % len(inputs)])
                if outputs:
                    arguments |= {name: outputs[-1][index] for name, index in carries.items()}
                    arguments, outputs[-1] = jax.lax.optimization_barrier((arguments, outputs[-1]))
                outputs.append(function(arguments))
            # What is updated in place exists once.
            return [outputs[-1]] if carries else outputs

        return jax.jit(chain).lower(self.inputs).compile()

    def sample(self) -> float:
        """Microseconds a call, once."""
        times = []
        for program in (self._one, self._many):
            start = time.perf_counter()
            jax.block_until_ready(program(self.inputs))
            times.append(time.perf_counter() - start)
        return max(0.0, (times[1] - times[0]) / (self.calls - 1) * 1e6)

    def warm_up(self) -> None:
        for program in (self._one, self._many):
            jax.block_until_ready(program(self.inputs))


def measure(chains: Mapping[str, Chain], repeats: int) -> dict[str, Timed]:
    """Samples the chains in turn, every other round backwards, after a warm-up of each."""
    for chain in chains.values():
        chain.warm_up()
    samples: dict[str, list[float]] = {name: [] for name in chains}
    for i in range(repeats):
        for name in list(chains)[:: 1 if i % 2 == 0 else -1]:
            samples[name].append(chains[name].sample())
    return {
        name: Timed(tuple(samples[name]), chain.calls, len(chain.inputs)) for name, chain in chains.items()
    }


def chain_length(expected_us: float, output_bytes: int) -> int:
    """Calls per chain: some milliseconds of work, within the memory that the outputs may take."""
    by_time = math.ceil(4000 / max(expected_us, 1.0))
    by_memory = MEMORY_BUDGET // 2 // max(output_bytes, 1)
    return max(2, min(by_time, by_memory, MAX_CALLS))


def input_sets(input_bytes: int, cache_bytes: int) -> int:
    """How many different inputs it takes for none to be in the cache still when its turn comes again."""
    wanted = math.ceil(3 * cache_bytes / max(input_bytes, 1))
    return max(1, min(wanted, MEMORY_BUDGET // 2 // max(input_bytes, 1), MAX_CALLS))
