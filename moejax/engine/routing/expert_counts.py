"""Expert counts that steps were asked to record, summed by phase. No JAX here."""

import numpy as np

from moejax.moe.load_window import LoadWindow

PHASES = ("prefill", "decode")


class RoutingRecord:
    """Sums over recorded steps. A step that computes any part of a prompt counts as "prefill".

    Attributes:
        counts: phase → int64 `[L, E]`, assignments.
        hits: phase → int64 `[L]`, experts visited, summed over steps: what the steps had to read.
        steps: phase → steps recorded.
        overflow: assignments "dropped" and "rerouted" (non-zero only under `capacity`, or where an exchange
            of tokens has been given limited room).
        window: loads of the latest steps, where they are tracked.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.counts = {phase: np.zeros((num_layers, num_experts), np.int64) for phase in PHASES}
        self.hits = {phase: np.zeros(num_layers, np.int64) for phase in PHASES}
        self.steps = dict.fromkeys(PHASES, 0)
        self.overflow = {"dropped": 0, "rerouted": 0}
        self.window: LoadWindow | None = None

    def add(self, phase: str, counts: np.ndarray, overflow: np.ndarray) -> None:
        """One step's int32 `[L, E]` and `[2]`."""
        self.counts[phase] += counts
        self.hits[phase] += np.count_nonzero(counts, axis=1)
        self.steps[phase] += 1
        for name, count in zip(self.overflow, overflow.tolist(), strict=True):
            self.overflow[name] += count
        if self.window is not None:
            self.window.add(counts)

    def reset(self) -> None:
        for phase in PHASES:
            self.counts[phase][...] = 0
            self.hits[phase][...] = 0
            self.steps[phase] = 0
        self.overflow = dict.fromkeys(self.overflow, 0)
