"""Limits that follow a target of inter-token latency. No JAX here, and no clock: equal steps, equal limits.

Two limits move over the buckets that steps are compiled for, since a padded bucket costs as a full one: how
many sequences run, and how many prompt tokens a step computes beside their decodes. Steps that only decode
say whether the first is too large, steps that also compute prompts whether the second is. They count where
they ran in the limit's own bucket: it stays while nothing fills it, or while more run than it allows.

buckets    one bucket down above the target's band, one up below it
aimd       additive increase, multiplicative decrease (Chiu and Jain, 1989), down to a bucket
fitted     a model of a step's time, by least squares; the largest buckets whose time is within the target

A bucket that was too slow is tried again only after a whole history of the one below, each time after twice
as many steps. Lowering a limit preempts nobody: nobody is admitted until enough have ended. The smallest
bucket is always allowed, so prompts go on and nothing starves.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from moejax.core.scheduling import AdaptiveBatchingConfig
from moejax.engine.step.buckets import Buckets

_MOST_PATIENT = 16
"""Histories after which a bucket is tried again at the latest."""


class Limit:
    """One of the two limits.

    Attributes:
        sizes: the buckets that it moves over, rising.
        level: what it is before it is rounded down to a bucket.
        times: of the newest steps in its bucket since it moved, over the target.
        steps: in its bucket since it moved.
        failed: the smallest bucket that was too slow, None for none.
        patience: steps before that one is tried again.
    """

    def __init__(self, level: float, history: int) -> None:
        self.level, self.steps, self.history = level, 0, history
        self.sizes: tuple[int, ...] = (1,)
        self.times: deque[float] = deque(maxlen=history)
        self.failed: int | None = None
        self.patience = history

    @property
    def size(self) -> int:
        """The limit: a bucket."""
        return self.sizes[max(0, bisect_right(self.sizes, self.level) - 1)]

    def beside(self, step: int) -> int:
        """Returns the next larger bucket (1) or the next smaller one (-1), its own at the end."""
        place = self.sizes.index(self.size) + step
        return self.sizes[min(max(place, 0), len(self.sizes) - 1)]

    def move(self, level: float) -> None:
        """Goes to a level, if no bucket is there or below that was too slow a while ago."""
        before, before_level = self.size, self.level
        self.level = min(max(level, self.sizes[0]), self.sizes[-1])
        if self.failed is not None and self.size >= self.failed:
            if self.steps < self.patience:
                self.level = before_level
                return
        if self.size < before:
            again = before == self.failed
            self.patience = min(2 * self.patience, _MOST_PATIENT * self.history) if again else self.history
            self.failed = before
        self.steps = 0
        self.times.clear()


class AdaptiveBatching:
    """The method "buckets", and the base of the others. All data-parallel groups share one: a step runs all
    of them, and lasts as long as the fullest.

    Args:
        config: the target and the constants.
        buckets: gives the buckets that steps are compiled for, which a warm-up changes.

    Attributes:
        running: sequences that run at a time.
        prefill: prompt tokens of a step that decodes.
        moves: how often either has changed.
    """

    def __init__(self, config: AdaptiveBatchingConfig, buckets: Callable[[], Buckets]) -> None:
        self.config, self.moves, self._buckets = config, 0, buckets
        self.target_s = config.target_itl_ms / 1e3
        self._running = Limit(config.start, config.history)
        self._prefill = Limit(config.start_tokens, config.history)
        self.refresh()

    @property
    def running(self) -> int:
        return self._running.size

    @property
    def prefill(self) -> int:
        return self._prefill.size

    def refresh(self) -> Buckets:
        """Takes up the buckets there are now, and returns them."""
        buckets = self._buckets()
        self._running.sizes, self._prefill.sizes = buckets.rows, buckets.tokens
        return buckets

    def observe(self, seconds: float, rows: int, tokens: int, decodes: int) -> None:
        """Takes in a step, compilation not among its time.

        Args:
            seconds: since the step before was done: what a running request waited for its token.
            rows, tokens: sequences and prompt tokens of the fullest data-parallel group.
            decodes: tokens that continue an output; where there are none nobody waited.
        """
        buckets, before = self.refresh(), (self.running, self.prefill)
        if not decodes:
            return
        rows, tokens = buckets.rows_for(rows, tokens), buckets.tokens_for(tokens)
        limit, used = (self._prefill, tokens) if tokens else (self._running, rows)
        time = min(seconds / self.target_s, self.config.longest)
        self._learn(time, rows, tokens)
        if used == limit.size:
            limit.times.append(time)
            limit.steps += 1
            if len(limit.times) >= self.config.least:
                self._move(limit, sum(limit.times) / len(limit.times))
        self.moves += before != (self.running, self.prefill)

    def stats(self) -> dict[str, Any]:
        """Returns the limits and how often they have moved, for `LLM.stats()`."""
        return {"most_running": self.running, "most_prefill": self.prefill, "limit_moves": self.moves}

    def _learn(self, time: float, rows: int, tokens: int) -> None:
        """Takes in any step: its time over the target, and its bucket."""

    def _move(self, limit: Limit, time: float) -> None:
        """Moves a limit if the mean time over the target of its bucket's steps asks for it."""
        if time > self.config.upper:
            limit.move(limit.beside(-1))
        elif time < self.config.lower:
            limit.move(limit.beside(1))


class Aimd(AdaptiveBatching):
    def _move(self, limit: Limit, time: float) -> None:
        if time > self.config.upper:
            limit.move(limit.size * self.config.decrease)
        elif time < self.config.lower:
            limit.move(limit.level + self.config.increase * limit.sizes[-1])


class Fitted(AdaptiveBatching):
    """Time = a + b · tokens + c · rows, of buckets, by recursive least squares with forgetting: in the form
    that sums up observations, and is pulled a little to the last estimate, so that what was not seen for long
    is remembered and does not blow up. No coefficient is below 0."""

    _PULL = 0.01

    def __init__(self, config: AdaptiveBatchingConfig, buckets: Callable[[], Buckets]) -> None:
        super().__init__(config, buckets)
        self._seen, self._sum = np.zeros((3, 3)), np.zeros(3)
        self._scaled = np.zeros(3)  # a, b and c for sizes as shares of the largest, over the target
        self._rows = self._steps = 0

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds: of any step, of a prompt token, of a row."""
        a, b, c = (self._scaled * self.target_s).tolist()
        return a, b / self._prefill.sizes[-1], c / self._running.sizes[-1]

    def _features(self, rows: int, tokens: int) -> np.ndarray:
        return np.array([1.0, tokens / self._prefill.sizes[-1], rows / self._running.sizes[-1]])

    def _time(self, limit: Limit, size: int) -> float:
        """Predicts a step's time, over the target, in a bucket of a limit."""
        rows, tokens = (size, 0) if limit is self._running else (min(self._rows, self.running), size)
        rows = self._buckets().rows_for(rows, tokens)
        return float(self._features(rows, tokens) @ self._scaled)

    def _learn(self, time: float, rows: int, tokens: int) -> None:
        x, keep = self._features(rows, tokens), self.config.forgetting
        if self._steps >= self.config.least:
            time = min(time, self.config.longest * float(x @ self._scaled))
        self._seen = keep * self._seen + np.outer(x, x)
        self._sum = keep * self._sum + time * x
        pulled = self._seen + self._PULL * np.eye(3), self._sum + self._PULL * self._scaled
        self._scaled = np.maximum(np.linalg.solve(*pulled), 0.0)
        self._rows, self._steps = rows, self._steps + 1
        for limit in (self._running, self._prefill) if self._steps >= self.config.least else ():
            if self._time(limit, limit.size) > self.config.upper:
                within = [size for size in limit.sizes if self._time(limit, size) <= 1.0]
                limit.move(max(within, default=limit.sizes[0]))

    def _move(self, limit: Limit, time: float) -> None:
        # A model that is wrong about what it has not seen for long finds out by trying.
        tries = time < self.config.lower and limit.steps >= limit.patience
        if limit.size < limit.sizes[-1] and (tries or self._time(limit, limit.beside(1)) <= 1.0):
            limit.move(limit.beside(1))


METHODS: dict[str, type[AdaptiveBatching]] = {"buckets": AdaptiveBatching, "aimd": Aimd, "fitted": Fitted}


def make_adaptive(config: AdaptiveBatchingConfig, buckets: Callable[[], Buckets]) -> AdaptiveBatching | None:
    """Returns the controller that a configuration asks for, if it does."""
    return METHODS[config.method](config, buckets) if config.enabled else None
