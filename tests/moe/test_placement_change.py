"""Placements in use: sound tables, what a change gains and moves, and moving little."""

import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.moe.placement import Placement, compare, plan_placement
from tests.moe.placement_cases import SLACK, check_plan, counts_of_deepseek, zipf

CHANGES = [(32, 1, None, 32), (32, 4, 8, 32), (8, 1, None, 0), (8, 2, None, 8)]


@pytest.mark.parametrize("devices, nodes, groups, redundant", CHANGES)
@pytest.mark.parametrize("min_gain", [0.0, 0.02, 0.2])
def test_keeping_moves_less_and_stays_within_min_gain(devices, nodes, groups, redundant, min_gain):
    rng = np.random.default_rng(devices + redundant)
    loads = zipf(rng, 4, 256, 0.86)
    kwargs = {"devices": devices, "nodes": nodes, "groups": groups, "redundant": redundant}
    old = plan_placement(loads, **kwargs)
    drifted = loads * rng.lognormal(0, 0.2, loads.shape)
    fresh = plan_placement(drifted, **kwargs)
    kept = plan_placement(drifted, **kwargs, keep=old, min_gain=min_gain)
    check_plan(kept, drifted, devices, nodes, groups or (256 if nodes > 1 else 1), redundant)
    ours, best = compare(old, kept, drifted), compare(old, fresh, drifted)
    assert (ours.after <= best.after * (1.0 + min_gain) * (1.0 + SLACK)).all()
    assert ours.moved.sum() < 0.7 * best.moved.sum()
    # What stays on its device stays in its slot.
    same_slot = kept.physical_to_logical == old.physical_to_logical
    assert (same_slot | ours.moved).mean() > 0.99
    assert (ours.moved & same_slot).sum() == 0


def test_keeping_moves_about_a_seventeenth_of_the_logs_case():
    """58 × 288 slots after loads drift by 20 %: 956 of 16,704 moved when swaps were more elaborate."""
    loads = counts_of_deepseek(1)
    old = plan_placement(loads, devices=32, redundant=32)
    drifted = loads * np.random.default_rng(2).lognormal(0, 0.2, loads.shape)
    fresh = compare(old, plan_placement(drifted, devices=32, redundant=32), drifted)
    kept = plan_placement(drifted, devices=32, redundant=32, keep=old, min_gain=0.05)
    change = compare(old, kept, drifted)
    assert change.moved.sum() < 1000 and fresh.moved.sum() > 15_000
    assert (change.after <= 1.05 * fresh.after * (1.0 + SLACK)).all()


def test_keeping_what_is_balanced_enough_moves_nothing():
    rng = np.random.default_rng(7)
    loads = zipf(rng, 3, 64, 0.8)
    old = plan_placement(loads, devices=8, redundant=8)
    assert plan_placement(loads, devices=8, redundant=8, keep=old) == old
    drifted = loads * rng.lognormal(0, 0.1, loads.shape)
    assert plan_placement(drifted, devices=8, redundant=8, keep=old, min_gain=10.0) == old
    assert plan_placement(drifted, devices=8, redundant=8, keep=old) != old


def test_devices_are_renamed_to_keep_weights():
    """The same packing with devices and slots in another order: nothing has to move."""
    rng = np.random.default_rng(8)
    loads = zipf(rng, 3, 32, 1.0)
    for nodes in (1, 2):
        plan = plan_placement(loads, devices=8, nodes=nodes, redundant=8)
        table = plan.physical_to_logical.reshape(3, nodes, 8 // nodes, 5)
        table = rng.permuted(table[:, rng.permutation(nodes)][:, :, rng.permutation(8 // nodes)], axis=3)
        shuffled = Placement(table.reshape(3, 40), 32, 8)
        again = plan_placement(loads, devices=8, nodes=nodes, redundant=8, keep=shuffled)
        assert again == shuffled


def test_an_old_placement_of_other_nodes_or_slots_is_only_a_preference():
    loads = zipf(np.random.default_rng(9), 3, 32, 1.0)
    for old in (Placement.contiguous(3, 32, 8), plan_placement(loads, devices=8, redundant=16)):
        placement = plan_placement(loads, devices=8, nodes=2, redundant=8, keep=old, min_gain=9.0)
        check_plan(placement, loads, 8, 2, 32, 8)
    flat = plan_placement(loads, devices=8)
    assert flat.num_slots == 32
    kept = plan_placement(loads, devices=8, nodes=2, groups=8, keep=flat, min_gain=9.0)
    check_plan(kept, loads, 8, 2, 8, 0)


def test_compare_counts_what_must_move():
    old = Placement(np.array([[0, 1, 2, 3], [0, 1, 2, 3]]), 4, 2)
    new = Placement(np.array([[1, 0, 2, 3], [0, 2, 1, 3]]), 4, 2)
    loads = np.array([[1.0, 1.0, 1.0, 1.0], [3.0, 3.0, 1.0, 1.0]])
    result = compare(old, new, loads, bytes_per_expert=100)
    np.testing.assert_array_equal(result.moved, [[0, 0, 0, 0], [0, 1, 1, 0]])
    assert (result.moved.sum(), result.bytes_moved) == (2, 200)
    np.testing.assert_allclose(result.before, [1.0, 1.5])
    np.testing.assert_allclose(result.after, [1.0, 1.0])
    wider = Placement.contiguous(2, 4, 2, redundant=2)
    np.testing.assert_array_equal(compare(old, wider, loads).moved.sum(1), [3, 3])


def test_contiguous():
    placement = Placement.contiguous(2, 6, 4, redundant=2)
    np.testing.assert_array_equal(placement.physical_to_logical[0], [0, 1, 2, 3, 4, 5, 0, 1])
    np.testing.assert_array_equal(placement.logical_to_physical(2)[1, :3], [[0, 6], [1, 7], [2, -1]])
    with pytest.raises(ValueError):
        placement.physical_to_logical[0, 0] = 1


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Placement(np.array([[0, 1, 1]]), 3, 3), "expert 2 of layer 0 is on no device"),
        (lambda: Placement(np.array([[0, 1, 3]]), 3, 3), "slot 2 holds expert 3, valid are 0 to 2"),
        (lambda: Placement(np.array([[0, 1, 2**40]]), 3, 3), "holds expert 1099511627776"),
        (lambda: Placement(np.array([[0, 1, -1]]), 2, 3), "holds expert -1"),
        (lambda: Placement(np.array([[0, 1, 2]]), 3, 2), "3 slots are not a multiple of 2 devices"),
        (lambda: Placement(np.array([0, 1]), 2, 2), "shape"),
        (lambda: Placement(np.array([[0.0, 1.0]]), 2, 2), "float64"),
        (lambda: Placement.contiguous(1, 10, 4), "next redundant that fits is 2"),
        (lambda: Placement.contiguous(1, 4, 4).logical_to_physical(0), "too narrow"),
    ],
)
def test_unsound_placements_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
