"""Expert counts that steps were asked to record, summed by phase and over the latest steps. No JAX here."""

from collections import deque
from collections.abc import Callable

import numpy as np

from moejax.core.errors import ConfigError

PHASES = ("prefill", "decode")
_PARTS = 32


class LoadWindow:
    """Assignments a layer and expert, summed over the latest steps.

    The steps are held in at most 33 sums, so that memory is bounded however long the window is. It is exact
    up to 32 steps; a longer one covers at least its length and less than a 32nd more.

    Attributes:
        steps: steps that the window holds.
    """

    def __init__(self, num_layers: int, num_experts: int, window_steps: int) -> None:
        """Raises ConfigError: `window_steps` below 1."""
        if window_steps < 1:
            raise ConfigError(f"load window: window_steps={window_steps} must be at least 1")
        self.window_steps, self.steps = window_steps, 0
        self._steps_per_part = -(-window_steps // _PARTS)
        self._shape = (num_layers, num_experts)
        self._parts: deque[np.ndarray] = deque()  # the oldest first

    def add(self, counts: np.ndarray) -> None:
        """Adds one step's assignments, int32 `[L, E]`."""
        if self.steps % self._steps_per_part == 0:
            self._parts.append(np.zeros(self._shape, np.int64))
        self._parts[-1] += counts
        self.steps += 1
        if self.steps - self._steps_per_part >= self.window_steps:
            self._parts.popleft()
            self.steps -= self._steps_per_part

    def sum(self) -> np.ndarray:
        """Returns the assignments in the window, int64 `[L, E]`."""
        return sum(list(self._parts), start=np.zeros(self._shape, np.int64))


class RoutingRecord:
    """Sums over recorded steps. A step that computes any part of a prompt counts as "prefill".

    Attributes:
        counts: phase → int64 `[L, E]`, assignments.
        hits: phase → int64 `[L]`, experts visited, summed over steps: what the steps had to read.
        steps: phase → steps recorded.
        overflow: assignments "dropped" and "rerouted" (non-zero only under `capacity`, or where an exchange
            of tokens has been given limited room).
        window: loads of the latest steps, where they are tracked.
        listener: is given each recorded step's assignments, int32 `[L, E]`.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.counts = {phase: np.zeros((num_layers, num_experts), np.int64) for phase in PHASES}
        self.hits = {phase: np.zeros(num_layers, np.int64) for phase in PHASES}
        self.steps = dict.fromkeys(PHASES, 0)
        self.overflow = {"dropped": 0, "rerouted": 0}
        self.window: LoadWindow | None = None
        self.listener: Callable[[np.ndarray], None] = lambda counts: None

    def __repr__(self) -> str:
        L, E = self.counts[PHASES[0]].shape
        steps = [f"{count} {phase} steps" for phase, count in self.steps.items()]
        return f"<RoutingRecord: {L} layers, {E} experts; {', '.join(steps)}>"

    def add(self, phase: str, counts: np.ndarray, overflow: np.ndarray) -> None:
        """Adds one step's counts, int32 `[L, E]`, and overflow, int32 `[2]`."""
        self.counts[phase] += counts
        self.hits[phase] += np.count_nonzero(counts, axis=1)
        self.steps[phase] += 1
        for name, count in zip(self.overflow, overflow.tolist(), strict=True):
            self.overflow[name] += count
        if self.window is not None:
            self.window.add(counts)
        self.listener(counts)

    @property
    def mean_hits(self) -> dict[str, np.ndarray]:
        """Phase → float64 `[L]`, experts visited in a mean step; phases without a step are left out."""
        return {phase: self.hits[phase] / steps for phase, steps in self.steps.items() if steps}

    def reset(self) -> None:
        for phase in PHASES:
            self.counts[phase][...] = 0
            self.hits[phase][...] = 0
            self.steps[phase] = 0
        self.overflow = dict.fromkeys(self.overflow, 0)
