"""Bounded records of a running engine: its latest steps, requests and gaps between tokens, and histograms of
all of them. Only the engine's thread writes; any thread may read, without the engine's lock. No JAX here."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

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


class _Ring:
    """The latest `RECORDS` rows of numbers. Their memory is taken at once: a server's does not grow with what
    it has answered."""

    def __init__(self, columns: int) -> None:
        self._rows, self._count = np.full((RECORDS, columns), np.nan), 0

    def extend(self, rows: list[tuple[float, ...]]) -> None:
        """Adds rows, each in place of the oldest where the ring is full."""
        size, columns = self._rows.shape
        kept = rows[-size:]
        places = np.arange(self._count + len(rows) - len(kept), self._count + len(rows)) % size
        self._rows[places] = np.array(kept).reshape(len(kept), columns)
        self._count += len(rows)

    def rows(self) -> np.ndarray:
        """Returns float64 `[kept, columns]`, the oldest first."""
        at = self._count % len(self._rows) if self._count > len(self._rows) else 0
        return np.concatenate([self._rows[at : self._count], self._rows[:at]])


# The columns of each ring begin with the clock's time: of a latency its value; of a request its prompt's and
# cached tokens and whether a step of it failed; of a step its prompts' and outputs' tokens, the used share of
# the cache, and experts that had slots, and that were used, up to then.
_COLUMNS = dict.fromkeys(EDGES, 2) | {"request": 4, "step": 6}


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
        self._counts = {name: np.zeros(len(edges) + 1, np.int64) for name, edges in EDGES.items()}
        self._sums = dict.fromkeys(EDGES, 0.0)
        self._new: dict[str, list[tuple[float, ...]]] = {name: [] for name in _COLUMNS}
        self._forget()

    def clear(self) -> None:
        """Forgets what `window` tells of; sums and histograms go on."""
        self.histograms()
        self._forget()

    def _forget(self) -> None:
        with self._lock:
            self._rings = {name: _Ring(columns) for name, columns in _COLUMNS.items()}
        self._began, self._told = self._clock(), self.generation_tokens

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
        self._new["request"].append((now, len(output.prompt_token_ids), metrics.cached_tokens, failed))
        if metrics.token_times:
            self._new["e2el"].append((now, metrics.e2e))
        if len(metrics.token_times) > 1:
            self._new["tpot"].append((now, metrics.tpot))

    def step(self, record: StepRecord, tiers: Any = None) -> None:
        """Takes in a step after its tokens; `tiers` count the experts that had slots."""
        hits, used = (tiers.hits, tiers.hits + tiers.misses) if tiers is not None else (0, 0)
        tokens, use = self.generation_tokens - self._told, record.used_blocks / record.num_blocks
        self._new["step"].append((record.time, record.prefill_tokens, tokens, use, hits, used))
        self._told = self.generation_tokens
        if any(len(new) > _FOLDED for new in self._new.values()):
            self.histograms()

    def histograms(self) -> dict[str, tuple[np.ndarray, float]]:
        """Returns by latency the counts of its buckets, int64 `[len(edges) + 1]`, and the sum in seconds."""
        with self._lock:
            for name, new in self._new.items():
                told = list(new)  # what comes meanwhile stands behind them
                del new[: len(told)]
                self._rings[name].extend(told)
                if name in EDGES:
                    values = [row[1] for row in told]
                    places = np.searchsorted(EDGES[name], values)
                    self._counts[name] += np.bincount(places, minlength=len(EDGES[name]) + 1)
                    self._sums[name] += sum(values)
            return {name: (counts.copy(), self._sums[name]) for name, counts in self._counts.items()}

    def samples(self, name: str) -> np.ndarray:
        """Returns the latest values of a latency of `EDGES`, `[values, 2]`: the clock's time, and seconds."""
        self.histograms()
        with self._lock:
            return self._rings[name].rows()

    def window(self, seconds: float) -> dict[str, Any]:
        """Returns what happened in the last `seconds`, or since the start or the oldest step that is kept;
        percentiles where there are values enough (20 for p95, 100 for p99), shares where anything was asked.
        Raises `ConfigError` for a window that is none."""
        check("window_s", seconds, PositiveNumber)
        self.histograms()
        with self._lock:
            kept = {name: ring.rows() for name, ring in self._rings.items()}
        now, full = self._clock(), len(kept["step"]) == RECORDS
        since = max(now - seconds, kept["step"][0, 0] if full else self._began)
        span = max(now - since, 1e-9)
        kept = {name: rows[rows[:, 0] >= since] for name, rows in kept.items()}
        steps, requests = kept["step"], kept["request"]
        hits, used = steps[-1, 4:] - steps[0, 4:] if len(steps) else (0, 0)
        told: dict[str, Any] = {"seconds": span, "steps": len(steps), "requests": len(requests)}
        told["prompt_throughput"], told["output_throughput"] = (steps[:, 1:3].sum(0) / span).tolist()
        for name in EDGES:
            ms = 1e3 * kept[name][:, 1]
            told[f"mean_{name}_ms"] = float(ms.mean()) if len(ms) else None
            for rank, least in ((95, 20), (99, 100)):
                told[f"p{rank}_{name}_ms"] = float(np.percentile(ms, rank)) if len(ms) >= least else None
        prompts = requests[:, 1].sum()
        return told | {
            "error_rate": float(requests[:, 3].mean()) if len(requests) else None,
            "prefix_hit_rate": float(requests[:, 2].sum() / prompts) if prompts else None,
            "expert_hit_rate": float(hits / used) if used else None,
            "cache_use_mean": float(steps[:, 3].mean()) if len(steps) else None,
            "cache_use_peak": float(steps[:, 3].max()) if len(steps) else None,
            "process_rss_bytes": psutil.Process().memory_info().rss,
        }
