"""Device time of short functions: chains of calls in one program, so that launching is not timed.

A chain of n calls and one of a single call are timed; the difference over n - 1 is a call's time, free of
dispatch and synchronisation. Each call has inputs of its own: XLA would merge equal calls on equal inputs
(an `optimization_barrier` between them does not stop it), and weights used twice could be in the cache still.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax

Function = Callable[[dict[str, Any]], Any]
Clock = Callable[[], float]
MAX_CALLS = 64
# What the inputs and outputs of all of a chain's calls may hold together.
MEMORY_BUDGET = 24 << 30


@dataclass(frozen=True)
class Timed:
    """Microseconds a call, one sample per repeat.

    Attributes:
        calls: length of the chain.
    """

    samples: tuple[float, ...]
    calls: int

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half the interquartile range over the median."""
        if len(self.samples) < 4:
            return math.nan
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / 2 / self.median_us if self.median_us else math.nan


class Sampled(Protocol):
    """What `measure` times; `sample` gives microseconds a call and `calls` how many one is the mean of."""

    calls: int

    def warm_up(self) -> None: ...

    def sample(self, clock: Clock) -> float: ...


class Chain:
    """A function compiled as chains of a single call and of a call per input.

    Args:
        inputs: of each call; at least two.
        carries: argument name → index of the output that takes its place in the next call (arguments that
            the function updates in place). Those that the calls do not have are left out.
    """

    def __init__(
        self, function: Function, inputs: Sequence[dict[str, Any]], carries: Mapping[str, int] | None = None
    ) -> None:
        if len(inputs) < 2:
            raise ValueError("a chain takes at least two calls")
        self.calls, self.inputs = len(inputs), list(inputs)
        carries = {name: index for name, index in (carries or {}).items() if inputs[0].get(name) is not None}
        self._one = self._compile(function, 1, carries)
        self._many = self._compile(function, self.calls, carries)

    def _compile(self, function: Function, calls: int, carries: Mapping[str, int]) -> Callable[[Any], Any]:
        def chain(inputs: Sequence[dict[str, Any]]) -> list[Any]:
            outputs: list[Any] = []
            for arguments in inputs[:calls]:
                if outputs:
                    arguments = arguments | {name: outputs[-1][index] for name, index in carries.items()}
                outputs.append(function(arguments))
            if not carries:
                return outputs
            # What is updated in place exists once. The other outputs are all kept, or making them would be
            # dead code in every call but the last.
            carried = set(carries.values())
            early = [tuple(x for i, x in enumerate(out) if i not in carried) for out in outputs[:-1]]
            return [*early, outputs[-1]]

        return jax.jit(chain).lower(self.inputs).compile()

    def sample(self, clock: Clock = time.perf_counter) -> float:
        """Microseconds a call, once; `clock` gives seconds."""
        times = []
        for program in (self._one, self._many):
            start = clock()
            jax.block_until_ready(program(self.inputs))
            times.append(clock() - start)
        return max(0.0, (times[1] - times[0]) / (self.calls - 1) * 1e6)

    def warm_up(self) -> None:
        for program in (self._one, self._many):
            jax.block_until_ready(program(self.inputs))


def measure(
    chains: Mapping[str, Sampled], repeats: int, clock: Clock = time.perf_counter
) -> tuple[dict[str, Timed], dict[str, str]]:
    """Samples the chains in turn, every other round backwards, after a warm-up of each. Returns times by
    name, and what those that failed at run time said.

    A chain that raises while it runs (out of memory, for one) is left out from then on and has no time. Nor
    has one whose calls, in the median, take no longer together than one alone: noise is no time of 0.
    """
    samples: dict[str, list[float]] = {name: [] for name in chains}
    failed: dict[str, str] = {}
    for name, chain in chains.items():
        with _noted(name, failed):
            chain.warm_up()
    for i in range(repeats):
        for name in list(chains)[:: 1 if i % 2 == 0 else -1]:
            if name not in failed:
                with _noted(name, failed):
                    samples[name].append(chains[name].sample(clock))
    timed = {n: Timed(tuple(samples[n]), chain.calls) for n, chain in chains.items() if n not in failed}
    for name in [name for name, figures in timed.items() if not figures.median_us]:
        calls = timed.pop(name).calls
        failed[name] = f"lost in noise: {calls} calls took no longer than one; raise bench.repeats"
    return timed, failed


@contextmanager
def _noted(name: str, failed: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever one implementation raises, the others are still to be timed
        failed[name] = one_line(error)


def one_line(error: BaseException) -> str:
    """An exception for a cell or a log line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def chain_length(expected_us: float, call_bytes: int) -> int:
    """Calls per chain: some milliseconds of work, within the memory that inputs and outputs may take."""
    by_time = math.ceil(4000 / max(expected_us, 1.0))
    return max(2, min(by_time, MEMORY_BUDGET // max(call_bytes, 1), MAX_CALLS))


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays, or shapes, in a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
