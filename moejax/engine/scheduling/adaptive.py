"""Limits that follow a target of inter-token latency. No JAX here, and no clock: equal steps, equal limits.

Two limits move over the buckets that steps are compiled for, since a padded bucket costs as a full one: how
many sequences run, and how many prompt tokens a step computes beside their decodes. The mean of all steps is
to keep to the target, and by the first limit; a step that computes prompts may take `slack` times as long, by
the second. Steps count where they ran in the limit's own bucket: it stays while nothing fills it, or while
more run than it allows.

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

import numpy as np

from moejax.core.scheduling import AdaptiveBatchingConfig
from moejax.engine.step.buckets import Buckets

_MOST_PATIENT = 16  # histories after which a bucket is tried again at the latest


class Limit:
    """One of the two limits.

    Attributes:
        sizes: the buckets that it moves over, rising.
        level: what it is before it is rounded down to a bucket.
        target_s: seconds that its steps should take.
        times: of the newest steps in its bucket since it moved, over the target.
        alone: of those that only decode.
        steps: in its bucket since it moved.
        failed: the smallest bucket that was too slow, None for none.
        patience: steps before that one is tried again.
    """

    def __init__(self, level: float, target_s: float, history: int) -> None:
        self.level, self.target_s, self.steps, self.history = level, target_s, 0, history
        self.sizes: tuple[int, ...] = (1,)
        self.times: deque[float] = deque(maxlen=history)
        self.alone: deque[float] = deque(maxlen=history)
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
        self.restart()

    @property
    def mean(self) -> float:
        """The steps' mean time over the target; 0 without any."""
        return sum(self.times) / max(1, len(self.times))

    def restart(self) -> None:
        """Forgets the steps before."""
        self.steps = 0
        self.times.clear()
        self.alone.clear()


class AdaptiveBatching:
    """The method "buckets", and the base of the others. All data-parallel groups share one: a step runs all
    of them, and lasts as long as the fullest.

    Args:
        config: the target and the constants.
        buckets: gives the buckets that steps are compiled for, which a warm-up changes.

    Attributes:
        running: sequences that run at a time.
        prefill: prompt tokens of a step that decodes.
    """

    def __init__(self, config: AdaptiveBatchingConfig, buckets: Callable[[], Buckets]) -> None:
        self.config, self._buckets = config, buckets
        target = config.target_itl_ms / 1e3
        self._running = Limit(config.start, target, config.history)
        self._prefill = Limit(config.start_tokens, config.slack * target, config.history)
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
        buckets = self.refresh()
        if not decodes:
            return
        padded, tokens = buckets.rows_for(rows, tokens), buckets.tokens_for(tokens)
        self._learn(seconds, padded, tokens)
        for limit, used in ((self._running, buckets.rows_for(rows)), (self._prefill, tokens)):
            if used == limit.size:
                limit.times.append(min(seconds / limit.target_s, self.config.longest))
                limit.steps += 1
                if not tokens:
                    limit.alone.append(limit.times[-1])
                if len(limit.times) >= self.config.least:
                    self._move(limit)
                if limit is self._prefill and not limit.times:
                    self._running.restart()  # the mean of all steps is another one now

    def stats(self) -> dict[str, int]:
        """Returns the limits, for `LLM.stats()` and `StepRecord`."""
        return {"most_running": self.running, "most_prefill": self.prefill}

    def _learn(self, seconds: float, rows: int, tokens: int) -> None:
        """Takes in any step: its time and its bucket."""

    def _move(self, limit: Limit) -> None:
        """Moves a limit if its steps' mean time asks for it. Where the mean of all steps is too long, and
        those that only decode keep to the target, prompts give way."""
        if limit.mean > self.config.upper:
            prefill = self._prefill
            prompts = prefill.size > prefill.sizes[0] and sum(limit.alone) <= len(limit.alone)
            blamed = prefill if prompts else limit
            blamed.move(self._lower(blamed))
            limit.restart()
        elif limit.mean < self.config.lower and self._running.mean < 1.0:
            limit.move(self._higher(limit))

    def _lower(self, limit: Limit) -> float:
        return limit.beside(-1)

    def _higher(self, limit: Limit) -> float:
        return limit.beside(1)


class Aimd(AdaptiveBatching):
    def _lower(self, limit: Limit) -> float:
        return limit.size * self.config.decrease

    def _higher(self, limit: Limit) -> float:
        return limit.level + self.config.increase * limit.sizes[-1]


class Fitted(AdaptiveBatching):
    """Time = a + b · tokens + c · rows, of buckets, by recursive least squares with forgetting: in the form
    that sums up observations, and is pulled a little to the last estimate, so that what was not seen for long
    is remembered and does not blow up. No coefficient is below 0."""

    _PULL = 0.01

    def __init__(self, config: AdaptiveBatchingConfig, buckets: Callable[[], Buckets]) -> None:
        super().__init__(config, buckets)
        self._seen, self._sum = np.zeros((3, 3)), np.zeros(3)
        self._scaled = np.zeros(3)  # a, b and c in targets, of sizes as shares of the largest
        self._rows, self._tokens, self._steps = 0, 0.0, 0

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """Seconds: of any step, of a prompt token, of a row."""
        a, b, c = (self._scaled * self._running.target_s).tolist()
        return a, b / self._prefill.sizes[-1], c / self._running.sizes[-1]

    def _features(self, rows: int, tokens: float) -> np.ndarray:
        return np.array([1.0, tokens / self._prefill.sizes[-1], rows / self._running.sizes[-1]])

    def _time(self, limit: Limit, size: int, tokens: float = 0.0) -> float:
        """Predicts the time, over the target, of a limit's steps in a bucket; rows with so many tokens."""
        if limit is self._running:
            x = self._features(size, tokens)
        else:
            x = self._features(self._buckets().rows_for(min(self._rows, self.running), size), size)
        return float(x @ self._scaled) * self._running.target_s / limit.target_s

    def _learn(self, seconds: float, rows: int, tokens: int) -> None:
        x, keep = self._features(rows, tokens), self.config.forgetting
        time = min(seconds / self._running.target_s, self.config.longest * self.config.slack)
        if self._steps >= self.config.least:
            time = min(time, self.config.longest * float(x @ self._scaled))
        self._seen = keep * self._seen + np.outer(x, x)
        self._sum = keep * self._sum + time * x
        pulled = self._seen + self._PULL * np.eye(3), self._sum + self._PULL * self._scaled
        self._scaled = np.maximum(np.linalg.solve(*pulled), 0.0)
        self._tokens += (1 - keep) * (tokens - self._tokens)
        self._rows, self._steps = rows, self._steps + 1
        for limit in (self._running, self._prefill) if self._steps >= self.config.least else ():
            if self._time(limit, limit.size) > self.config.upper:
                within = [size for size in limit.sizes if self._time(limit, size) <= 1.0]
                limit.move(max(within, default=limit.sizes[0]))

    def _move(self, limit: Limit) -> None:
        if limit.mean > self.config.upper:
            super()._move(limit)
        if self._running.mean < 1.0 and limit.size < limit.sizes[-1]:
            if self._time(limit, limit.beside(1), self._tokens) <= 1.0:
                limit.failed = None
                limit.move(limit.beside(1))
            elif limit.mean < self.config.lower and limit.steps >= limit.patience:
                # A model that is wrong about what it has not seen for long finds out by trying.
                limit.move(limit.beside(1))


METHODS: dict[str, type[AdaptiveBatching]] = {"buckets": AdaptiveBatching, "aimd": Aimd, "fitted": Fitted}
