"""Experts of a simulated engine: popularity that shifts, placements that follow it, and what finds no room.

The engine's own rule (`engine.rebalance`) decides on the loads that the routing law gives the steps' tokens;
only the moves are simulated. One object for each engine, since each has a placement of its own.
"""

import numpy as np

from moejax.core.errors import ConfigError
from moejax.core.scheduling import RebalanceConfig
from moejax.engine.core import Engine
from moejax.engine.routing.expert_counts import LoadWindow
from moejax.engine.routing.rebalance import Rebalanced, Rebalancer
from moejax.engine.scheduling.plan import Plan
from moejax.moe.placement import Placement, adjust_placement, compare
from moejax.simulate.kernels import WEIGHTS
from moejax.simulate.routing import RoutingLaw
from moejax.simulate.runner import CostModelRunner, VirtualClock
from moejax.simulate.step import GroupWork, StepDurations, StepTime

_SAMPLE = 4096
"""Tokens whose draws say how popular experts are."""


def check_law(law: RoutingLaw, rebalance: RebalanceConfig, shift_steps: int) -> None:
    """Raises `ConfigError` where experts are to shift or to move under a law without popular experts."""
    if not law.layers and (rebalance.every_steps or shift_steps):
        key = "engine.rebalance.every_steps" if rebalance.every_steps else "simulate.routing.shift_steps"
        raise ConfigError(
            f"{key} does not go with the routing law {law.kind!r} (simulate.routing.kind, simulate.laws), by "
            "which no expert is popular for longer than a step; take zipf, or a trace"
        )


class SimulatedExperts:
    """What the experts of one engine do from step to step.

    Args:
        made: the engine, and what it runs on; its durations are told here from now on.
        shift_steps: steps after which other experts are as popular as those were; 0: never.

    Attributes:
        loads: of the experts where they are.
    """

    def __init__(
        self,
        made: tuple[Engine, CostModelRunner, VirtualClock],
        step: StepDurations,
        rebalance: RebalanceConfig,
        shift_steps: int,
    ) -> None:
        engine, self.runner, clock = made
        self.step, self.rule, self.shift_steps, self.loads = step, rebalance, shift_steps, step.loads
        self.runner.step_time = self.time
        self._steps, self._window = 0, None
        if rebalance.every_steps:
            model, parallel, layers = step.model, step.parallel, step.routing.layers
            self._popularity = self.loads.draws(_SAMPLE).reshape(-1, layers, model.num_experts).sum(axis=0)
            self._window = LoadWindow(layers, model.num_experts, rebalance.every_steps)
            self._placement = Placement.contiguous(
                layers, model.num_experts, parallel.ep, redundant=parallel.redundant_experts
            )
            engine.rebalance = Rebalancer(rebalance, self._rebalance, clock).after_step

    def time(self, plan: Plan) -> StepTime:
        """Returns the duration of the next step."""
        if self.shift_steps and self._steps and self._steps % self.shift_steps == 0:
            rng = np.random.default_rng((self.step.seed, self._steps // self.shift_steps))
            self.loads = self.loads.under(self.loads.slots, rng.permutation(self.step.model.num_experts))
        self._steps += 1
        groups = [GroupWork.of(part) for part in plan.groups]
        pieces = self.step.pieces(groups)
        tokens = self.step.together(groups, pieces)
        if self._window is not None:
            counts = pieces * tokens * self._popularity[:, self.loads.order]
            self._window.add(counts.astype(np.int64))
        self._count(tokens, pieces)
        return self.step.of(groups, self.loads)

    def _count(self, tokens: int, pieces: int) -> None:
        """Counts the assignments of so many microbatches of so many tokens."""
        moe, counts = self.step.moe, self.runner.assignments
        E, k, ranks = self.loads.shape
        counts["chosen"] += pieces * (chosen := tokens * k)
        if moe.execution == "grouped":
            counts["heaviest"] += pieces * self.loads.at(tokens).rows * ranks
        elif moe.execution == "capacity" and tokens:
            room = moe.capacity(tokens, k, E)
            late = chosen * self.loads.overflow(tokens, room)
            # Another expert takes what finds no room as long as any has some: tokens may ask them all.
            free = E * room - (chosen - late) if moe.overflow == "reroute" else 0.0
            counts["rerouted"] += pieces * (rerouted := min(late, free))
            counts["dropped"] += pieces * (late - rerouted)

    def _rebalance(self) -> Rebalanced:
        """Places the experts for the latest steps' loads, and has the devices wait for the moves."""
        assert self._window is not None
        model, parallel, kernels = self.step.model, self.step.parallel, self.step.kernels
        old, layers = self._placement, self._placement.num_layers
        loads, shape = self._window.sum(), self.step.experts
        new = adjust_placement(loads, old, self.rule)
        # The law's layers stand for all with experts.
        times = sum(model.moe_layers) / layers
        each = 3 * shape.hidden * shape.inter * WEIGHTS[kernels.weights] * times
        change = compare(old, new, loads, bytes_per_expert=round(each * parallel.tp))
        if new == old:
            return Rebalanced(change, 0.0, False)
        received = change.moved.reshape(layers, parallel.ep, -1).sum(axis=(0, 2)).max() / parallel.pp
        moving = kernels.collective("collective-permute", float(received * each), parallel.ep, 1)
        self.runner.occupy("collective", moving.source, moving.seconds)
        self._placement = new
        self.loads = self.loads.under(new.physical_to_logical, self.loads.order)
        return Rebalanced(change, moving.seconds, True)
