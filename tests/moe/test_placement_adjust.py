"""Placements changed a little at a time: sound, at rest under constant load, after new hot experts when it
drifts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.core.errors import ConfigError
from moejax.core.scheduling import RebalanceConfig
from moejax.moe.placement import Placement, adjust_placement, balancedness, compare
from tests.examples import examples
from tests.moe.placement_cases import SLACK

RULE = RebalanceConfig()


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(8, 4, 4), (16, 8, 8), (6, 3, 3), (8, 4, 0), (64, 8, 16), (4, 4, 12), (16, 1, 1)]),
    exponent=st.floats(0, 2),
    min_gain=st.floats(0, 1),
    above=st.floats(1, 4),
)
def test_a_change_is_sound_gains_what_is_asked_and_comes_to_rest(
    seed: int, shape: tuple[int, int, int], exponent: float, min_gain: float, above: float
) -> None:
    E, devices, redundant = shape
    rng = np.random.default_rng(seed)
    loads = rng.permuted(np.tile(1000 * np.arange(1, E + 1.0) ** -exponent, (3, 1)), axis=1).round()
    loads[2] *= rng.random() < 0.5  # a layer that nobody visited
    rule = RebalanceConfig(replicate_above=above, remove_below=above / 2, min_gain=min_gain)
    placed = Placement.contiguous(3, E, devices, redundant=redundant)
    for _ in range(10):
        new = adjust_placement(loads, placed, rule)
        assert new.num_slots == placed.num_slots and (new.replicas >= 1).all()  # what it must always have
        done = compare(placed, new, loads)
        changed = (new.physical_to_logical != placed.physical_to_logical).any(1)
        assert (done.after[changed] <= done.before[changed] * (1 - min_gain) * (1 + SLACK)).all()
        assert (done.after[changed] < done.before[changed]).all()
        if not changed.any():
            break
        placed = new
    else:
        pytest.fail("the same load still moves experts after ten decisions")


def test_replicas_follow_a_drift_and_pay() -> None:
    """Loads of one expert after another, then of none: each gets replicas, and gives them up again."""
    placed = Placement.contiguous(1, 16, 8, redundant=8)
    for hot in (3, 9, 14):
        loads = np.full((1, 16), 100.0)
        loads[0, hot] = 900.0
        placed = adjust_placement(loads, placed, RULE)
        assert placed.replicas[0, hot] >= 4 and balancedness(loads, placed)[0] < 1.15
        assert adjust_placement(loads, placed, RULE) == placed
    assert placed.replicas[0, 3] < 4 and placed.replicas[0, 9] < 4
    # The replica's device did not have the expert.
    for device in placed.physical_to_logical[0].reshape(8, -1):
        assert len(set(device.tolist())) == len(device)


def test_no_replica_between_the_thresholds_and_nothing_below_the_least_gain() -> None:
    placed = Placement.contiguous(1, 8, 4, redundant=4)
    loads = np.array([[160.0, 160, 160, 160, 100, 140, 60, 80]])  # a replica of the first four has 80 of 116
    new = adjust_placement(loads, placed, RebalanceConfig(min_gain=0.0))
    assert balancedness(loads, placed)[0] == pytest.approx(320 / 255)
    assert (new.replicas == placed.replicas).all() and balancedness(loads, new)[0] < 1.1  # by swaps
    assert adjust_placement(loads, placed, RebalanceConfig(min_gain=0.3)) == placed
    with pytest.raises(ConfigError, match="keep has 1 layers, 8 experts"):
        adjust_placement(np.ones((2, 8)), placed, RULE)


def test_thresholds_that_would_thrash_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.rebalance\.remove_below=0\.8 is more than half of repl"):
        RebalanceConfig(remove_below=0.8)
    with pytest.raises(ConfigError, match=r"engine\.rebalance\.every_steps must be an integer of at least 0"):
        RebalanceConfig(every_steps=-1)
