"""When a running engine decides on its experts' places, and what it tells of it: over loads made up."""

from typing import Any

import numpy as np
import pytest

from moejax.bench.common.timeline import bin_steps
from moejax.core.scheduling import RebalanceConfig
from moejax.engine.routing.rebalance import Rebalanced, Rebalancer
from moejax.engine.stats import EngineStats, RebalanceEvent, StepRecord
from moejax.moe.placement import Placement, adjust_placement, compare


class Fake:
    """A rebalancer without weights: of 16 experts on eight devices one is hot."""

    def __init__(self, **fields: Any) -> None:
        self.config = RebalanceConfig(**{"every_steps": 4} | fields)
        self.placed = Placement.contiguous(1, 16, 8, redundant=8)
        self.rebalancer = Rebalancer(self.config, self._rebalance)
        self.hot, self.fails = 3, False

    def _rebalance(self) -> Rebalanced:
        loads = np.full((1, 16), 10)
        loads[0, self.hot] = 90
        old, new = self.placed, adjust_placement(loads, self.placed, self.config)
        if self.fails:
            raise MemoryError("out of\nmemory")
        self.placed = new
        return Rebalanced(compare(old, new, loads, bytes_per_expert=10), 0.5, new != old)

    def run(self, hot: int, steps: int) -> list[RebalanceEvent]:
        self.hot = hot
        return [event for _ in range(steps) if (event := self.rebalancer.after_step()) is not None]


def test_decisions_come_in_their_turn_and_say_what_they_did() -> None:
    fake = Fake()
    first, second, third = fake.run(3, 12)
    assert (first.step, second.step, third.step) == (4, 8, 12)
    assert first.reason == "moved" and first.replicated == first.removed == 2 and first.seconds == 0.5
    assert first.before is not None and first.after is not None and first.before > 1.8 > 1.1 > first.after
    assert first.bytes_moved >= 20
    for event in (second, third):
        assert event.reason == "no layer gains enough" and event.before == event.after == first.after
        assert not event.bytes_moved + event.replicated + event.removed
    (drifted,) = fake.run(9, 4)
    assert drifted.reason == "moved" and fake.placed.replicas[0, 9] == 4


def test_after_a_move_the_engine_rests() -> None:
    fake = Fake(cooldown_steps=8)
    assert [event.reason for event in fake.run(3, 4)] == ["moved"]
    rest, moved, again = fake.run(9, 12)
    assert rest.reason == again.reason == "cooldown" and rest.before is None and moved.reason == "moved"


def test_a_move_that_fails_is_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake(cooldown_steps=8)
    before, fake.fails = fake.placed, True
    (event,) = fake.run(3, 4)
    assert event.reason == "failed: out of memory" and event.bytes_moved == 0 and fake.placed is before
    assert "engine.rebalance: experts stay where they are: out of memory" in caplog.text
    fake.fails = False
    assert [event.reason for event in fake.run(3, 4)] == ["moved"]


def test_decisions_are_in_the_sums_and_on_the_timeline() -> None:
    stats, steps = EngineStats(), []
    moved = RebalanceEvent(4, 12.0, "moved", 1.8, 1.1, 2, 2, 640, 0.25)
    for n, event in enumerate([None, moved, RebalanceEvent(8, 13.0, "cooldown")]):
        steps.append(StepRecord(11.5 + n, 0.01, 0, 2, 4, 2, 2, 0, 5, 10, 60, 0, rebalance=event))
        stats.add(steps[-1])
    sums = stats.as_dict()
    assert (sums["rebalances"], sums["rebalance_bytes"], sums["rebalance_seconds"]) == (1, 640, 0.25)
    assert sums["last_rebalance"]["reason"] == "cooldown"
    for points in (2000, 1):
        first, second = bin_steps(steps, 10.0, points)["rebalance"]
        assert first["time"] == 2.0 and first["bytes_moved"] == 640 and second["reason"] == "cooldown"
    assert "rebalance" not in bin_steps(steps[:1], 10.0)
