"""The workload of a throughput experiment: requests that arrive over time, or that users send in turn.

Host code on plain values: no JAX, no Hydra. Arrivals, prompt lengths, output lengths and the prompts'
contents each have a random stream of their own: changing one leaves the others as they were, and fewer
requests are the first ones of more.
"""

import bisect
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal

import numpy as np

from moejax.bench.trace import MOONCAKE_BLOCK, TraceFormat, TraceRow, load_trace
from moejax.bench.workload import SampledWorkload, Sizes, load_prompts, prompt_ids
from moejax.cache.prefix import common_start
from moejax.core.checked import Checked, Must, NonNegativeInt, NonNegativeNumber, PositiveInt, PositiveNumber
from moejax.core.config import Batching
from moejax.core.errors import ConfigError
from moejax.core.files import content_hash
from moejax.engine.requests.api import RequestOptions

# Which of the seed's random streams draws what.
_ARRIVALS, _PROMPT_LENGTHS, _OUTPUT_LENGTHS, _PROMPTS, _PREFIXES, _BLOCKS, _KINDS = range(7)

# Of users who go on until the time is over, so many requests have lengths of their own, which then repeat.
_BLOCK = 1024
# Fields that are no part of a workload's hash while they have their defaults.
_NOT_HASHED = "iterations warmup compare slo trace_file prompts_file trace_format".split()
_HASHED_IF_SET = (
    "turns think_s branches concurrency duration_s warmup_s ramp_up_s timeout_s mix rate_steps rate_step_s"
).split()


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
class RequestKind(Checked, section="workload.mix"):
    """One of several kinds of requests in a workload.

    Attributes:
        share: how often it comes, relative to the others'.
        prompt_len, output_len: instead of the workload's; None: those.
        priority, deadline_ms, slo_class: see `moejax.RequestOptions`.
        tenant: see there; None: the kind's name.
    """

    share: PositiveNumber = 1.0
    prompt_len: LengthOrDistribution | None = None
    output_len: LengthOrDistribution | None = None
    priority: int = 0
    deadline_ms: PositiveNumber | None = None
    slo_class: str | None = None
    tenant: str | None = None

    def options(self, name: str) -> RequestOptions:
        """Returns what policies go by; `name` is the kind's."""
        tenant = name if self.tenant is None else self.tenant
        return RequestOptions(self.priority, self.deadline_ms, tenant, self.slo_class)


@dataclass(frozen=True)
class ThroughputWorkload(SampledWorkload):
    """Requests that arrive whether or not the engine keeps up (an open loop), or of so many users who each
    wait for their answer (a closed one).

    Attributes:
        num_requests: how many; of a trace at most that many rows, None takes all. Also None where
            `duration_s` ends it.
        request_rate: mean arrivals per second, of conversations their first turns; inf lets all arrive at
            once.
        burstiness: shape of the gamma-distributed gaps between arrivals, as in vLLM's benchmark: 1 is a
            Poisson process, less comes in bursts, more is steadier (the gaps' variance is mean²/burstiness).
        rate_steps, rate_step_s: factors of `request_rate`, each for so many seconds, and then from the first
            one again; none: a steady rate.
        trace_file, trace_format: arrivals, lengths and prompts from a file (see
            `moejax.bench.trace.load_trace`). Conversations, which have no times, come at `request_rate` or
            from users, and their later turns continue what was answered here.
        trace_speedup: the trace's clock runs this many times faster.
        prompt_len, output_len: tokens of each request, one number or a distribution. A trace's own lengths
            and prompts come first; those of `prompts_file` are taken in turn and at their own lengths.
        shared_prefix_len: tokens with which random prompts begin before their own `prompt_len`, one of
            `shared_prefixes` each in turn: a system prompt, or several with examples.
        turns: requests of a conversation. Each further one's prompt is the one before it, the tokens that
            were answered, and `prompt_len` new ones; it is sent `think_s` seconds after that answer.
        branches: prompts are the nodes of a tree, filled level by level: each is its parent's and
            `prompt_len` new tokens, and has so many children. None: no tree.
        concurrency: so many users, each of whom sends the next request `think_s` seconds after the answer to
            the last; a list measures each as a case. None: an open loop.
        ramp_up_s: over so many seconds users begin, one after the other.
        warmup_s: requests that arrive in the first so many seconds, and tokens that come in them, are in no
            statistic.
        duration_s: after so many seconds no request is sent, and tokens that come later are in no rate.
        timeout_s: a request that has not ended so many seconds after its arrival is aborted.
        mix: kinds of requests by name, drawn at random, a conversation's turns alike; see `RequestKind`.
            Empty: all are alike.
        iterations: measured repetitions of the whole traffic.
        warmup: short passes before, not measured, after all buckets are compiled; 0 measures a cold engine,
            compilation included.
        compare: batching modes measured beside `engine.batching`, in turns and with the same requests.
    """

    num_requests: PositiveInt | None = 64
    request_rate: Annotated[float, Must(lambda x: x > 0, "requests per second above 0, or inf")] = math.inf
    burstiness: PositiveNumber = 1.0
    rate_steps: tuple[PositiveNumber, ...] = ()
    rate_step_s: PositiveNumber = 1.0
    trace_file: str | None = None
    trace_format: TraceFormat = "auto"
    trace_speedup: PositiveNumber = 1.0
    prompt_len: LengthOrDistribution = field(default_factory=lambda: Lengths(16, 64))
    output_len: LengthOrDistribution = field(default_factory=lambda: Lengths(8, 128))
    shared_prefix_len: NonNegativeInt = 0
    shared_prefixes: PositiveInt = 1
    turns: PositiveInt = 1
    branches: PositiveInt | None = None
    concurrency: Sizes | None = None
    think_s: NonNegativeNumber = 0.0
    ramp_up_s: NonNegativeNumber = 0.0
    warmup_s: NonNegativeNumber = 0.0
    duration_s: PositiveNumber | None = None
    timeout_s: PositiveNumber | None = None
    mix: dict[str, RequestKind] = field(default_factory=dict)
    iterations: PositiveInt = 1
    warmup: NonNegativeInt = 1
    compare: tuple[Batching, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        closed, at_once = self.concurrency is not None, self.request_rate == math.inf
        uncounted = self.num_requests is None and self.trace_file is None
        shapes = (self.turns > 1, self.branches is not None, self.trace_file is not None)
        waiting = closed or self.turns > 1 or (self.trace_file is not None and not self.timed)
        for wrong, text in (
            (uncounted and self.duration_s is None,
             "num_requests=null takes all rows of a trace: add workload.trace_file=FILE, or duration_s"),
            (uncounted and (self.branches is not None or (at_once and not closed)),
             "num_requests=null needs workload.concurrency or a finite workload.request_rate, and no tree"),
            (self.timed and not at_once,
             f"request_rate={self.request_rate:g} and workload.trace_file exclude each other:"
             " a trace has its own arrival times (workload.trace_speedup makes them denser)"),
            (closed and (self.timed or not at_once),
             "concurrency excludes workload.request_rate and a trace's times: its users send when answered"),
            (self.trace_format != "auto" and self.trace_file is None,
             "trace_format needs workload.trace_file"),
            (self.trace_speedup != 1.0 and not self.timed,
             "trace_speedup needs workload.trace_file, with times"),
            (self.shared_prefix_len and (self.trace_file or self.prompts_file),
             "shared_prefix_len is for random prompts: those of workload.trace_file and "
             "workload.prompts_file begin as they do"),
            (self.burstiness != 1.0 and at_once, "burstiness needs a finite workload.request_rate"),
            (self.rate_steps and at_once, "rate_steps need a finite workload.request_rate"),
            (sum(shapes) > 1, "turns, workload.branches and workload.trace_file exclude each other"),
            ((self.num_requests or 0) % self.turns,
             f"num_requests={self.num_requests} is no multiple of workload.turns={self.turns}"),
            (self.think_s and not waiting,
             "think_s needs workload.turns above 1, workload.concurrency or a trace of conversations"),
            (self.ramp_up_s and not closed, "ramp_up_s needs workload.concurrency"),
            (self.duration_s is not None and self.warmup_s >= self.duration_s,
             f"warmup_s={self.warmup_s:g} leaves nothing of workload.duration_s={self.duration_s}"),
        ):  # fmt: skip
            if wrong:
                raise ConfigError(f"workload.{text}")

    @property
    def timed(self) -> bool:
        """Whether a trace says when its requests came."""
        return bool(self.trace) and self.trace[0].time is not None

    @property
    def trace(self) -> list[TraceRow]:
        """All rows of the trace; none without one."""
        return [] if self.trace_file is None else load_trace(self.trace_file, self.trace_format)

    @property
    def users(self) -> list[int | None]:
        """Each case's users; of an open loop's one case None."""
        return [self.concurrency] if isinstance(self.concurrency, int | None) else list(self.concurrency)

    @property
    def endless(self) -> bool:
        """Whether users go on until the time is over."""
        return self.num_requests is None and self.trace_file is None and self.concurrency is not None

    @property
    def offered_rate(self) -> float | None:
        """Mean arrivals per second, inf for all at once; None where a trace or its users say when."""
        return None if self.timed or self.concurrency is not None else self.request_rate

    @property
    def hash(self) -> str:
        content = asdict(self)
        unset = [
            f.name for f in fields(self) if f.name in _HASHED_IF_SET and content[f.name] in (f.default, {})
        ]
        for name in (*_NOT_HASHED, *unset):
            del content[name]
        # JSON has no infinity, and null must not stand for it here.
        content["request_rate"] = repr(float(self.request_rate))
        new = ("continues", "answer", "hash_ids")
        rows = [{k: v for k, v in vars(row).items() if k not in new or v} for row in self.trace]
        content["trace"] = rows or None
        content["prompts"] = load_prompts(self.prompts_file) if self.prompts_file else None
        return content_hash(content)[:16]


@dataclass(frozen=True)
class PlannedRequest:
    """A request before it is sent.

    Attributes:
        arrival_s: seconds after the first one's; of one that follows another after the end of that one, and
            of one that a user sends after the end of the user's last.
        prompt_token_ids: its prompt; of one that follows another what comes after that one's prompt and
            actual output.
        output_len: tokens asked for.
        follows: place in the plan of the request whose output it continues, an earlier one.
        history_len: tokens before `prompt_token_ids` if all outputs are as long as asked for.
        options: what policies go by.
    """

    arrival_s: float
    prompt_token_ids: list[int]
    output_len: int
    follows: int | None = None
    history_len: int = 0
    options: RequestOptions = field(default_factory=RequestOptions)

    @property
    def prompt_len(self) -> int:
        """Tokens of the whole prompt, at most."""
        return self.history_len + len(self.prompt_token_ids)

    @property
    def total_len(self) -> int:
        """Tokens of prompt and output together at most, which the engine's `max_model_len` must hold."""
        return self.prompt_len + self.output_len


def next_request(workload: ThroughputWorkload, plan: Sequence[PlannedRequest], place: int) -> PlannedRequest:
    """Returns the request at a place beyond a plan that only the clock ends: one of the plan's once more, its
    own tokens, if they are random, in another order."""
    asked, back = plan[place % len(plan)], place - place % len(plan)
    shared = workload.shared_prefix_len if asked.follows is None else 0
    if workload.prompts_file is not None:
        shared = len(asked.prompt_token_ids)
    rng = np.random.default_rng([workload.seed, _PROMPTS, place])
    own = rng.permutation(asked.prompt_token_ids[shared:]).tolist()
    follows = None if asked.follows is None else asked.follows + back
    return replace(asked, prompt_token_ids=[*asked.prompt_token_ids[:shared], *own], follows=follows)


def plan_requests(
    workload: ThroughputWorkload,
    vocab_size: int,
    *,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> list[PlannedRequest]:
    """The workload's requests: conversations in order of arrival, each with its turns in theirs.

    Args:
        vocab_size: random prompts are uniform in [0, vocab_size).
        encode: turns text into token ids; needed only for files that hold text.

    Raises:
        ConfigError: a file cannot be read, or a prompt of it has no token or one outside the vocabulary.
    """
    rows = workload.trace[: workload.num_requests] or _conversations(workload)
    if rows[0].time is None:
        starts = iter(_arrivals(workload, sum(not row.continues for row in rows)))
        rows = [replace(row, time=None if row.continues else next(starts)) for row in rows]
    origin = rows[0].time or 0.0
    kinds = _kinds(workload, rows)
    prompts = _prompts(workload, rows, kinds, vocab_size, encode)
    outputs = _lengths(workload, kinds, "output_len", _OUTPUT_LENGTHS)
    plan: list[PlannedRequest] = []
    for place, (row, ids, output) in enumerate(zip(rows, prompts, outputs, strict=True)):
        follows = place - 1 if row.continues or place % workload.turns else None
        waits = follows is not None or workload.concurrency is not None
        arrival = workload.think_s if waits else ((row.time or 0.0) - origin) / workload.trace_speedup
        history = 0 if follows is None else plan[follows].total_len
        if row.answer is not None and encode is not None:
            output = max(1, len(encode(row.answer)))
        name = kinds[place]
        options = workload.mix[name].options(name) if name else RequestOptions()
        plan.append(PlannedRequest(arrival, ids, row.output_len or output, follows, history, options))
    return plan


def _kinds(workload: ThroughputWorkload, rows: Sequence[TraceRow]) -> list[str]:
    """Returns the name of each request's kind, of a conversation's the same; empty where there are none."""
    if not workload.mix:
        return [""] * len(rows)
    names, shares = list(workload.mix), np.array([kind.share for kind in workload.mix.values()])
    rng = np.random.default_rng([workload.seed, _KINDS])
    drawn = rng.choice(len(shares), size=len(rows), p=shares / shares.sum())
    kinds: list[str] = []
    for place, row in enumerate(rows):
        follows = row.continues or place % workload.turns
        kinds.append(kinds[-1] if follows else names[drawn[place]])
    return kinds


def _lengths(workload: ThroughputWorkload, kinds: Sequence[str], key: str, stream: int) -> list[int]:
    """Draws each request's length, as its kind has it or else the workload."""
    own = {name: getattr(workload.mix[name], key) if name else None for name in set(kinds)}
    drawn = {
        name: _draw(lengths or getattr(workload, key), workload.seed, stream, len(kinds))
        for name, lengths in own.items()
    }
    return [drawn[name][place] for place, name in enumerate(kinds)]


def _conversations(workload: ThroughputWorkload) -> list[TraceRow]:
    """Rows without prompts and lengths, a conversation's one after the other."""
    count, turns = workload.num_requests or _BLOCK, workload.turns
    starts = _arrivals(workload, max(1, count // turns))
    if workload.num_requests is None and not workload.endless:
        assert workload.duration_s is not None
        while starts[-1] < workload.duration_s:
            starts = _arrivals(workload, 2 * len(starts))
        starts = starts[: bisect.bisect_left(starts, workload.duration_s)]
    return [TraceRow(start) for start in starts for _ in range(turns)]


def plan_fields(plan: Sequence[PlannedRequest], workload: ThroughputWorkload) -> dict[str, Any]:
    """Returns a row's fields: requests/s, the users of a closed loop, the number of requests, and their mean
    lengths in tokens."""
    rate, users = workload.offered_rate, workload.users[0]
    return {
        "request_rate": "inf" if rate == math.inf else rate,
        **({} if users is None else {"concurrency": users}),
        "num_requests": len(plan),
        "prompt_len": round(statistics.mean(request.prompt_len for request in plan)),
        "output_len": round(statistics.mean(request.output_len for request in plan)),
    }


def _arrivals(workload: ThroughputWorkload, count: int) -> list[float]:
    """Arrival times in seconds, the first at 0. Another rate stretches the same pattern, or parts of it."""
    if workload.request_rate == math.inf:
        return [0.0] * count
    rng = np.random.default_rng([workload.seed, _ARRIVALS])
    gaps = rng.standard_gamma(workload.burstiness, size=count - 1)
    gaps /= workload.request_rate * workload.burstiness
    times = np.append(0.0, np.cumsum(gaps))
    if workload.rate_steps:
        passed = np.cumsum(workload.rate_steps) * workload.rate_step_s  # of a steady rate's time
        rounds = math.ceil(times[-1] / passed[-1]) + 1
        ends = [0.0, *(passed + passed[-1] * np.arange(rounds)[:, None]).ravel().tolist()]
        times = np.interp(times, ends, workload.rate_step_s * np.arange(len(ends)))
    return times.tolist()


def _prompts(
    workload: ThroughputWorkload,
    rows: Sequence[TraceRow],
    kinds: Sequence[str],
    vocab_size: int,
    encode: Callable[[str], Sequence[int]] | None,
) -> list[list[int]]:
    """Token ids of each request: its trace row's, else the prompts file's next, else random ones.

    A random prompt depends on the seed, its place and its length, not on the other requests' lengths.
    """
    lengths = _lengths(workload, kinds, "prompt_len", _PROMPT_LENGTHS)
    from_file = itertools.cycle(load_prompts(workload.prompts_file)) if workload.prompts_file else None
    prompts: list[list[int]] = []
    block = functools.cache(lambda which: _random(workload, _BLOCKS, which, MOONCAKE_BLOCK, vocab_size))
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        before: list[int] = []
        if workload.branches is not None and index:
            before = prompts[(index - 1) // workload.branches]
        elif workload.shared_prefix_len and index % workload.turns == 0:
            which = index // workload.turns % workload.shared_prefixes
            before = _random(workload, _PREFIXES, which, workload.shared_prefix_len, vocab_size)
        if row.prompt is not None:
            where = f"workload.trace_file {workload.trace_file!r}"
            own = prompt_ids(row.prompt, vocab_size, encode, where)
        elif from_file is not None and row.prompt_len is None:
            where = f"workload.prompts_file {workload.prompts_file!r}"
            own = prompt_ids(next(from_file), vocab_size, encode, where)
        else:
            before = [*before, *itertools.chain(*map(block, row.hash_ids))][: row.prompt_len]
            own_len = (row.prompt_len or length) - (len(before) if row.hash_ids else 0)
            own = _random(workload, _PROMPTS, index, own_len, vocab_size)
        prompts.append([*before, *own])
    return prompts


def _random(workload: ThroughputWorkload, stream: int, place: int, length: int, vocab_size: int) -> list[int]:
    """Token ids, uniform in [0, vocab_size); fewer are the first of more."""
    rng = np.random.default_rng([workload.seed, stream, place])
    return rng.integers(0, vocab_size, size=length).tolist()


def ideal_hit_rate(passes: Iterable[Iterable[tuple[Sequence[int], Sequence[int]]]]) -> float | None:
    """Returns the share of prompt tokens that an unlimited prefix cache finds, which each pass begins empty:
    of each prompt the longest prefix that an earlier one with its output has, all but the last token at most,
    of the prompt and of that output, whose last token no step computes.

    Args:
        passes: of each pass the requests' prompts and outputs in order of arrival.
    """
    found = total = 0
    for requests in passes:
        earlier: list[list[int]] = []
        for prompt, output in requests:
            asked = list(prompt)
            place = bisect.bisect(earlier, asked)
            beside = earlier[max(0, place - 1) : place + 1]  # the most alike of a sorted list
            found += max((common_start(asked[:-1], other) for other in beside), default=0)
            total += len(asked)
            bisect.insort(earlier, [*asked, *output[:-1]])
    return found / total if total else None


def _draw(lengths: int | Lengths, seed: int, stream: int, count: int) -> list[int]:
    if isinstance(lengths, int):
        return [lengths] * count
    return lengths.draw(np.random.default_rng([seed, stream]), count)
