"""Bounded records of a running engine: its latest steps, requests and gaps between tokens, and histograms of
all of them. Only the engine's thread writes; any thread may read, without the engine's lock. No JAX here."""

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import psutil

from moejax.core.checked import PositiveNumber, check
from moejax.engine.requests.api import RequestMetrics, RequestOutput
from moejax.engine.stats import StepRecord

# vLLM's buckets (`vllm/v1/metrics/loggers.py`), with smaller ones below them.
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5,
    10, 20, 40, 80)  # fmt: skip
_REQUEST = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960,
    1920, 7680)  # fmt: skip
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
    160, 640, 2560)  # fmt: skip
EDGES = {"ttft": _FIRST, "itl": _TOKEN, "tpot": _TOKEN, "e2el": _REQUEST, "queue": _REQUEST}
"""Upper bounds in seconds of each latency's buckets; names as in the glossary of metrics."""
RECORDS, _FOLDED = 65536, 4096


class Ended(NamedTuple):
    """A request that has ended at `time`: counts of its tokens, and whether a step of it failed."""

    time: float
    prompt_tokens: int
    cached_tokens: int
    failed: bool


class Stepped(NamedTuple):
    """A step, the tokens that it gave, and experts that had slots, and that were used, up to then."""

    record: StepRecord
    tokens: int
    hits: int
    used: int

    @property
    def cache_use(self) -> float:
        return self.record.used_blocks / self.record.num_blocks


class Recent:
    """The latest `RECORDS` records of each kind, and sums that only grow.

    Attributes:
        ended: requests by finish reason of their first sample ("length" where nothing was to be generated).
        prompt_tokens, generation_tokens: of prompts that began to be computed, and of outputs.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self.ended = Counter[str]()
        self.prompt_tokens = self.generation_tokens = 0
        self._values = {name: deque[tuple[float, float]](maxlen=RECORDS) for name in EDGES}
        self._counts = {name: np.zeros(len(edges) + 1, np.int64) for name, edges in EDGES.items()}
        self._sums = dict.fromkeys(EDGES, 0.0)
        self._new: dict[str, list[tuple[float, float]]] = {name: [] for name in EDGES}
        self.clear()

    def clear(self) -> None:
        """Forgets what `window` tells of; sums and histograms go on."""
        self.histograms()
        for values in self._values.values():
            values.clear()
        self._began, self._told = self._clock(), self.generation_tokens
        self._steps = deque[Stepped](maxlen=RECORDS)
        self._requests = deque[Ended](maxlen=RECORDS)

    def scheduled(self, output: RequestOutput) -> None:
        """Takes in a request that is in a step for the first time."""
        self.prompt_tokens += len(output.prompt_token_ids)
        now = output.metrics.scheduled_time or 0.0
        self._new["queue"].append((now, now - output.metrics.arrival_time))

    def token(self, metrics: RequestMetrics, index: int) -> None:
        """Takes in a sample's new token; latencies are those of the first sample."""
        self.generation_tokens += 1
        times = metrics.token_times
        if index == 0 and len(times) == 1:
            self._new["ttft"].append((times[0], metrics.ttft))
        elif index == 0 and (gap := times[-1] - times[-2]) > 0:
            self._new["itl"].append((times[-1], gap))

    def request(self, output: RequestOutput) -> None:
        """Takes in a request that has ended, once."""
        metrics, now = output.metrics, self._clock()
        reason = (output.outputs[0].finish_reason if output.outputs else None) or "length"
        self.ended["error" if output.error else reason] += 1
        failed = output.error is not None
        self._requests.append(Ended(now, len(output.prompt_token_ids), metrics.cached_tokens, failed))
        if metrics.token_times:
            self._new["e2el"].append((now, metrics.e2e))
        if len(metrics.token_times) > 1:
            self._new["tpot"].append((now, metrics.tpot))

    def step(self, record: StepRecord, tiers: Any = None) -> None:
        """Takes in a step after its tokens; `tiers` count the experts that had slots."""
        hits, used = (tiers.hits, tiers.hits + tiers.misses) if tiers is not None else (0, 0)
        self._steps.append(Stepped(record, self.generation_tokens - self._told, hits, used))
        self._told = self.generation_tokens
        if len(self._new["itl"]) > _FOLDED:
            self.histograms()

    def histograms(self) -> dict[str, tuple[np.ndarray, float]]:
        """Returns by latency the counts of its buckets, int64 `[len(edges) + 1]`, and the sum in seconds."""
        with self._lock:
            for name, new in self._new.items():
                told = list(new)  # what comes meanwhile stands behind them
                del new[: len(told)]
                self._values[name].extend(told)
                values = [value for _, value in told]
                places = np.searchsorted(EDGES[name], values)
                self._counts[name] += np.bincount(places, minlength=len(EDGES[name]) + 1)
                self._sums[name] += sum(values)
            return {name: (counts.copy(), self._sums[name]) for name, counts in self._counts.items()}

    def samples(self, name: str) -> list[tuple[float, float]]:
        """Returns the latest values of a latency of `EDGES`: the clock's time, and seconds."""
        self.histograms()
        return list(self._values[name])

    def window(self, seconds: float) -> dict[str, Any]:
        """Returns what happened in the last `seconds`, or since the start or the oldest step that is kept;
        percentiles where there are values enough (20 for p95, 100 for p99), shares where anything was asked.
        Raises `ConfigError` for a window that is none."""
        check("window_s", seconds, PositiveNumber)
        self.histograms()
        now, steps = self._clock(), list(self._steps)
        since = max(now - seconds, steps[0].record.time if len(steps) == RECORDS else self._began)
        steps, span = [step for step in steps if step.record.time >= since], max(now - since, 1e-9)
        requests = [request for request in list(self._requests) if request.time >= since]
        prompts, uses = sum(r.prompt_tokens for r in requests), [step.cache_use for step in steps]
        hits, used = (steps[-1].hits - steps[0].hits, steps[-1].used - steps[0].used) if steps else (0, 0)
        told: dict[str, Any] = {"seconds": span, "steps": len(steps), "requests": len(requests)}
        told["prompt_throughput"] = sum(step.record.prefill_tokens for step in steps) / span
        told["output_throughput"] = sum(step.tokens for step in steps) / span
        for name, values in self._values.items():
            ms = np.array([1e3 * value for time, value in list(values) if time >= since])
            told[f"mean_{name}_ms"] = float(ms.mean()) if len(ms) else None
            for rank, least in ((95, 20), (99, 100)):
                told[f"p{rank}_{name}_ms"] = float(np.percentile(ms, rank)) if len(ms) >= least else None
        return told | {
            "error_rate": sum(r.failed for r in requests) / len(requests) if requests else None,
            "prefix_hit_rate": sum(r.cached_tokens for r in requests) / prompts if prompts else None,
            "expert_hit_rate": hits / used if used else None,
            "cache_use_mean": sum(uses) / len(uses) if uses else None,
            "cache_use_peak": max(uses, default=None),
            "process_rss_bytes": psutil.Process().memory_info().rss,
        }
