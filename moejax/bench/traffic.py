"""The workload of a throughput experiment: requests that arrive over time.

Host code on plain values: no JAX, no Hydra. Arrivals, prompt lengths, output lengths and the prompts'
contents each have a random stream of their own: changing one leaves the others as they were, and fewer
requests are the first ones of more.
"""

import bisect
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import numpy as np

from moejax.bench.trace import TraceRow, load_trace
from moejax.bench.workload import SampledWorkload, load_prompts, prompt_ids
from moejax.core.checked import Checked, Must, NonNegativeInt, PositiveInt, PositiveNumber
from moejax.core.config import Batching
from moejax.core.errors import ConfigError
from moejax.core.files import content_hash

# Which of the seed's random streams draws what.
_ARRIVALS, _PROMPT_LENGTHS, _OUTPUT_LENGTHS, _PROMPTS, _PREFIXES = range(5)


@dataclass(frozen=True)
class Lengths(Checked, section="lengths"):
    """A distribution of lengths in tokens, whole numbers within [low, high].

    Attributes:
        low, high: the shortest and the longest; what a draw has beyond them is clipped.
        kind: `uniform` over [low, high]; `normal`; `lognormal`, which has the long tail of real outputs.
        mean, std: of the lengths themselves (a lognormal's too), before clipping; not for `uniform`.
    """

    low: PositiveInt
    high: PositiveInt
    kind: Literal["uniform", "normal", "lognormal"] = "uniform"
    mean: PositiveNumber | None = None
    std: PositiveNumber | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ConfigError(f"low {self.low} exceeds high {self.high}")
        given = {name: getattr(self, name) for name in ("mean", "std") if getattr(self, name) is not None}
        if self.kind == "uniform":
            if given:
                raise ConfigError(
                    f"kind=uniform has no {' and no '.join(given)}; set kind=normal or kind=lognormal"
                )
            return
        for name in ("mean", "std"):
            if name not in given:
                raise ConfigError(f"kind={self.kind} needs {name}, in tokens")
        if not self.low <= given["mean"] <= self.high:
            raise ConfigError(f"mean {given['mean']} is outside [low, high] = [{self.low}, {self.high}]")

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` lengths; the first k of them are the same for every count."""
        if self.kind == "uniform":
            return rng.integers(self.low, self.high, size=count, endpoint=True).tolist()
        assert self.mean is not None and self.std is not None
        if self.kind == "normal":
            values = rng.normal(self.mean, self.std, size=count)
        else:
            variance = math.log1p((self.std / self.mean) ** 2)
            values = rng.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), size=count)
        return np.clip(np.rint(values), self.low, self.high).astype(int).tolist()


LengthOrDistribution = Annotated[
    PositiveInt | Lengths,
    Must(lambda _: True, "an integer of at least 1 or a distribution ({key}.low, .high, .kind, .mean, .std)"),
]


@dataclass(frozen=True)
class ThroughputWorkload(SampledWorkload):
    """Requests that arrive whether or not the engine keeps up (an open loop).

    Attributes:
        num_requests: how many; of a trace at most that many rows, None takes all.
        request_rate: mean arrivals per second; inf lets all arrive at once.
        burstiness: shape of the gamma-distributed gaps between arrivals, as in vLLM's benchmark: 1 is a
            Poisson process, less comes in bursts, more is steadier (the gaps' variance is mean²/burstiness).
        trace_file: arrivals from a JSONL file instead (see `moejax.bench.trace.load_trace`).
        trace_speedup: the trace's clock runs this many times faster.
        prompt_len, output_len: tokens of each request, one number or a distribution. A trace's own lengths
            and prompts come first; those of `prompts_file` are taken in turn and at their own lengths.
        shared_prefix_len: tokens with which random prompts begin before their own `prompt_len`, one of
            `shared_prefixes` each in turn: a system prompt, or several with examples.
        iterations: measured repetitions of the whole traffic.
        warmup: short passes before, not measured, after all buckets are compiled; 0 measures a cold engine,
            compilation included.
        compare: batching modes measured beside `engine.batching`, in turns and with the same requests.
    """

    num_requests: PositiveInt | None = 64
    request_rate: Annotated[float, Must(lambda x: x > 0, "requests per second above 0, or inf")] = math.inf
    burstiness: PositiveNumber = 1.0
    trace_file: str | None = None
    trace_speedup: PositiveNumber = 1.0
    prompt_len: LengthOrDistribution = field(default_factory=lambda: Lengths(16, 64))
    output_len: LengthOrDistribution = field(default_factory=lambda: Lengths(8, 128))
    shared_prefix_len: NonNegativeInt = 0
    shared_prefixes: PositiveInt = 1
    iterations: PositiveInt = 1
    warmup: NonNegativeInt = 1
    compare: tuple[Batching, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_requests is None and self.trace_file is None:
            raise ConfigError(
                "workload.num_requests=null takes all rows of a trace: add workload.trace_file=FILE"
            )
        if self.trace_file is not None:
            if self.request_rate != math.inf:
                raise ConfigError(
                    f"workload.request_rate={self.request_rate:g} and workload.trace_file exclude each other:"
                    " a trace has its own arrival times (workload.trace_speedup makes them denser)"
                )
            load_trace(self.trace_file)
        elif self.trace_speedup != 1.0:
            raise ConfigError("workload.trace_speedup needs workload.trace_file")
        if self.shared_prefix_len and (self.trace_file or self.prompts_file):
            raise ConfigError(
                "workload.shared_prefix_len is for random prompts: those of workload.trace_file and "
                "workload.prompts_file begin as they do"
            )
        if self.burstiness != 1.0 and self.request_rate == math.inf:
            raise ConfigError("workload.burstiness needs a finite workload.request_rate")

    @property
    def hash(self) -> str:
        content = asdict(self)
        for name in ("iterations", "warmup", "compare", "slo", "trace_file", "prompts_file"):
            del content[name]
        # JSON has no infinity, and null must not stand for it here.
        content["request_rate"] = repr(float(self.request_rate))
        content["trace"] = load_trace(self.trace_file) if self.trace_file else None
        content["prompts"] = load_prompts(self.prompts_file) if self.prompts_file else None
        return content_hash(content)[:16]


@dataclass(frozen=True)
class PlannedRequest:
    """A request before it is sent: `arrival_s` seconds after the first one, and what it asks."""

    arrival_s: float
    prompt_token_ids: list[int]
    output_len: int

    @property
    def total_len(self) -> int:
        """Tokens of prompt and output together, which the engine's `max_model_len` must hold."""
        return len(self.prompt_token_ids) + self.output_len


def plan_requests(
    workload: ThroughputWorkload,
    vocab_size: int,
    *,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> list[PlannedRequest]:
    """The workload's requests in order of arrival.

    Args:
        vocab_size: random prompts are uniform in [0, vocab_size).
        encode: turns text into token ids; needed only for files that hold text.

    Raises:
        ConfigError: a file cannot be read, or a prompt of it has no token or one outside the vocabulary.
    """
    rows = load_trace(workload.trace_file)[: workload.num_requests] if workload.trace_file else []
    count = len(rows) or workload.num_requests
    assert count is not None
    rows = rows or [TraceRow(time) for time in _arrivals(workload, count)]
    origin = rows[0].time
    prompts = _prompts(workload, rows, vocab_size, encode)
    outputs = _draw(workload.output_len, workload.seed, _OUTPUT_LENGTHS, count)
    return [
        PlannedRequest((row.time - origin) / workload.trace_speedup, ids, row.output_len or output)
        for row, ids, output in zip(rows, prompts, outputs, strict=True)
    ]


def plan_fields(plan: Sequence[PlannedRequest], request_rate: float | None) -> dict[str, Any]:
    """Returns a row's fields: requests/s, the number of requests, and their mean lengths in tokens."""
    return {
        "request_rate": "inf" if request_rate == math.inf else request_rate,
        "num_requests": len(plan),
        "prompt_len": round(statistics.mean(len(request.prompt_token_ids) for request in plan)),
        "output_len": round(statistics.mean(request.output_len for request in plan)),
    }


def _arrivals(workload: ThroughputWorkload, count: int) -> list[float]:
    """Arrival times in seconds, the first at 0. Another rate stretches the same pattern."""
    if workload.request_rate == math.inf:
        return [0.0] * count
    rng = np.random.default_rng([workload.seed, _ARRIVALS])
    gaps = rng.standard_gamma(workload.burstiness, size=count - 1)
    gaps /= workload.request_rate * workload.burstiness
    return [0.0, *np.cumsum(gaps).tolist()]


def _prompts(
    workload: ThroughputWorkload,
    rows: Sequence[TraceRow],
    vocab_size: int,
    encode: Callable[[str], Sequence[int]] | None,
) -> list[list[int]]:
    """Token ids of each request: its trace row's, else the prompts file's next, else random ones.

    A random prompt depends on the seed, its place and its length, not on the other requests' lengths.
    """
    lengths = _draw(workload.prompt_len, workload.seed, _PROMPT_LENGTHS, len(rows))
    from_file = itertools.cycle(load_prompts(workload.prompts_file)) if workload.prompts_file else None
    prompts = []
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row.prompt is not None:
            where = f"workload.trace_file {workload.trace_file!r}"
            prompts.append(prompt_ids(row.prompt, vocab_size, encode, where))
        elif from_file is not None and row.prompt_len is None:
            where = f"workload.prompts_file {workload.prompts_file!r}"
            prompts.append(prompt_ids(next(from_file), vocab_size, encode, where))
        else:
            rng = np.random.default_rng([workload.seed, _PROMPTS, index])
            own = rng.integers(0, vocab_size, size=row.prompt_len or length).tolist()
            rng = np.random.default_rng([workload.seed, _PREFIXES, index % workload.shared_prefixes])
            prompts.append([*rng.integers(0, vocab_size, size=workload.shared_prefix_len).tolist(), *own])
    return prompts


def ideal_hit_rate(plan: Sequence[PlannedRequest]) -> float:
    """Returns the share of prompt tokens that an unlimited prefix cache finds: of each prompt the longest
    prefix that an earlier one has, all but its last token at most."""
    earlier: list[list[int]] = []
    found = 0
    for request in plan:
        prompt = request.prompt_token_ids
        place = bisect.bisect(earlier, prompt)
        beside = earlier[max(0, place - 1) : place + 1]  # the most alike of a sorted list
        found += max((_common(prompt[:-1], other) for other in beside), default=0)
        earlier.insert(place, prompt)
    return found / sum(len(request.prompt_token_ids) for request in plan)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Counts the first tokens that are equal."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _draw(lengths: int | Lengths, seed: int, stream: int, count: int) -> list[int]:
    if isinstance(lengths, int):
        return [lengths] * count
    return lengths.draw(np.random.default_rng([seed, stream]), count)
