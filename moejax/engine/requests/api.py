"""What a user asks of the engine and what comes back; names follow vLLM. No JAX here."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from moejax.core.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p (Holtzman et al., 1904.09751).
        min_p: drop tokens less likely than min_p times the likeliest (Nguyen et al., 2407.01082).
        repetition_penalty: > 1 makes tokens of the prompt and output less likely (Keskar et al., 1909.05858).
        seed: the request's own random stream. None derives one from the engine's seed and the request's
            place in the call.
        stop: strings that end the output; they are cut off unless include_stop_str_in_output.
        stop_token_ids: tokens that end the output, besides the model's end-of-sequence tokens.
        ignore_eos: go on past the end-of-sequence token (for benchmarks).
        logprobs: None for none; n ≥ 0 for the chosen token's log-probability and the n likeliest tokens'.
        n: independent samples of the same prompt; sample i uses seed + i.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | list[str] | str = ()
    stop_token_ids: tuple[int, ...] | list[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        _require_int("max_tokens", self.max_tokens, 1)
        _require_int("n", self.n, 1)
        if self.top_k == -1 and not isinstance(self.top_k, bool):
            object.__setattr__(self, "top_k", 0)  # vLLM's other word for "all"
        _require_int("top_k", self.top_k, 0)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0, 1024)
        if self.seed is not None:
            _require_int("seed", self.seed, 0, 2**32 - 1)
        _require_range("temperature", self.temperature, 0.0, math.inf)
        _require_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _require_range("min_p", self.min_p, 0.0, 1.0)
        _require_range("repetition_penalty", self.repetition_penalty, 0.0, math.inf, low_open=True)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else _items(value)
    if items is None or not all(isinstance(item, str) for item in items):
        raise RequestError(f"{name} must be a string or a list of strings, got {value!r}")
    if not all(items):
        raise RequestError(f"{name} must not hold an empty string")
    return items


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    items = _items(value)
    if items is None:
        raise RequestError(f"{name} must be a list of token ids, got {value!r}")
    for item in items:
        _require_int(f"{name}: each", item, 0)
    return tuple(int(item) for item in items)


def _items(value: object) -> tuple[Any, ...] | None:
    """The items of a list or the like; None for what is not one."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        return None
    return tuple(value)


def _require_int(name: str, value: object, low: int, high: int | None = None) -> None:
    span = f"of at least {low}" if high is None else f"between {low} and {high}"
    ok = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):  # type: ignore[operator]
        raise RequestError(f"{name} must be an integer {span}, got {value!r}")


def _require_range(name: str, value: float, low: float, high: float, low_open: bool = False) -> None:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    ok = number and math.isfinite(value)
    if not ok or value > high or value < low or (low_open and value == low):
        span = f"{'(' if low_open else '['}{low}, {high}{']' if math.isfinite(high) else ')'}"
        raise RequestError(f"{name} must be a number in {span}, got {value!r}")


@dataclass
class RequestMetrics:
    """Times of one request. Instants are `time.perf_counter()` seconds; token_times[i] is when token i was
    on the host, scheduled_time when the first step that held it was scheduled. `ttft`, `tpot` and `e2e` are
    durations in seconds. `preemptions` counts how often a sample of it lost its cache blocks."""

    arrival_time: float
    token_times: list[float] = field(default_factory=list)
    scheduled_time: float | None = None
    preemptions: int = 0

    @property
    def ttft(self) -> float:
        """Arrival to the first output token."""
        return self.token_times[0] - self.arrival_time

    @property
    def e2e(self) -> float:
        """Arrival to the last output token."""
        return self.token_times[-1] - self.arrival_time

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0 where there is only one."""
        steps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / steps if steps > 0 else 0.0

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies, one per output token after the first."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass
class Logprob:
    """A chosen token's log-probability under the model's own distribution (before temperature and
    filters), its rank (1 is the likeliest) and the likeliest tokens' log-probabilities."""

    logprob: float
    rank: int
    top: dict[int, float]


@dataclass
class CompletionOutput:
    """One sample of a request. `finish_reason` is None while it is still running."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """A request with its samples. `metrics` is the first sample's. `error` says what failed where a sample's
    finish reason is "error"."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    error: str | None = None

    def _repr_html_(self) -> str:
        from moejax.engine.requests.output_card import output_card

        return output_card(self)
