"""Decides, every so many steps of a running engine, whether experts move. No JAX here."""

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from moejax.core.scheduling import RebalanceConfig
from moejax.core.words import one_line
from moejax.engine.routing.expert_counts import LoadWindow
from moejax.engine.stats import RebalanceEvent
from moejax.moe.placement import Placement, adjust_placement, compare

logger = logging.getLogger(__name__)


class Rebalancer:
    """Decides by `adjust_placement` on the load of the latest steps.

    Args:
        window: loads of all layers.
        layers: those with experts.
        placement: returns that in use, of these layers.
        move: brings the weights from one placement to another, all or none.
        bytes_per_expert: of one layer.
    """

    def __init__(
        self,
        config: RebalanceConfig,
        window: LoadWindow,
        layers: np.ndarray,
        placement: Callable[[], Placement],
        move: Callable[[Placement, Placement], Any],
        bytes_per_expert: int,
    ) -> None:
        self.config, self.window, self.layers = config, window, layers
        self.placement, self.move, self.bytes_per_expert = placement, move, bytes_per_expert
        self.steps, self._rests_until = 0, 0

    def after_step(self) -> RebalanceEvent | None:
        """Counts a step. Returns what was decided after it, None where nothing was to decide.

        A move that fails leaves the placement as it was, and is logged: requests go on.
        """
        self.steps += 1
        if self.steps % self.config.every_steps:
            return None
        start = time.perf_counter()
        loads, old = self.window.sum()[self.layers], self.placement()
        new, why = self._decide(loads, old)
        change = compare(old, new, loads, bytes_per_expert=self.bytes_per_expert)
        if not why:
            # After a failure, too: the next step would most likely meet the same.
            self._rests_until = self.steps + self.config.cooldown_steps
            try:
                self.move(old, new)
            except Exception as error:
                why = f"failed: {one_line(error) or type(error).__name__}"
                logger.warning("experts stay where they were: %s", why)
        more = new.replicas - old.replicas
        return RebalanceEvent(
            step=self.steps,
            time=start,
            applied=not why,
            reason=why or "moved",
            before=float(change.before.mean()),
            after=float(change.before.mean() if why else change.after.mean()),
            replicated=0 if why else int(more[more > 0].sum()),
            removed=0 if why else int(-more[more < 0].sum()),
            moved=0 if why else int(change.moved.sum()),
            bytes_moved=0 if why else change.bytes_moved,
            seconds=time.perf_counter() - start,
        )

    def _decide(self, loads: np.ndarray, old: Placement) -> tuple[Placement, str]:
        """Returns the placement to be, and why it is the old one, if so."""
        config = self.config
        if self.steps < self._rests_until:
            return old, "cooldown"
        new = adjust_placement(
            loads,
            old,
            replicate_above=config.replicate_above,
            remove_below=config.remove_below,
            min_gain=config.min_gain,
        )
        return new, "no layer gains enough" if new == old else ""
