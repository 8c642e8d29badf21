"""Policies of keeping experts resident: against naive twins, brute force and what must hold of any."""

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.core.errors import ConfigError
from moejax.core.tiers import A2crConfig
from moejax.routing.generate import generate
from moejax.routing.prefetch import predict, stall
from moejax.routing.residency import (
    POLICIES,
    ReplayOptions,
    Residency,
    Visits,
    recorded_visits,
    replay,
    single_visits,
)
from tests.routing.traces import trace_of


def visits_of(seed: int, traces: int = 2, steps: int = 12, layers: int = 3, experts: int = 6) -> Visits:
    """Up to two experts a group, at least one; skewed, so that policies differ."""
    rng = np.random.default_rng(seed)
    chance = rng.random((traces, steps, layers, experts)) ** np.linspace(0.3, 2, experts)
    needed = np.zeros(chance.shape, bool)
    order = np.argsort(-chance, axis=3)
    np.put_along_axis(needed, order[..., :1], True, axis=3)
    np.put_along_axis(needed, order[..., 1:2], rng.random((traces, steps, layers, 1)) < 0.6, axis=3)
    return Visits(needed, np.where(needed, rng.random(needed.shape), 0).astype(np.float32))


def misses(policy: str, visits: Visits, *capacities: int, options: ReplayOptions | None = None) -> np.ndarray:
    """`[T, C]`"""
    absent = replay(policy, visits, capacities, options)
    return (absent & visits.needed[:, None]).sum((2, 3, 4))


def groups_of(needed: np.ndarray) -> list[list[int]]:
    """Of `[S, L, E]`: experts, numbered over all layers, that are needed together, in order."""
    E = needed.shape[2]
    return [
        [layer * E + int(e) for e in np.flatnonzero(needed[step, layer])]
        for step in range(needed.shape[0])
        for layer in range(needed.shape[1])
    ]


# -- naive twins: misses of one trace ----------------------------------------------------------------------


def naive_scored(groups: list[list[int]], capacity: int, policy: str) -> int:
    resident: set[int] = set()
    last: dict[int, int] = {}
    count: dict[int, int] = {}
    missed = 0
    for now, group in enumerate(groups):
        missed += len(set(group) - resident)
        resident |= set(group)
        for key in group:
            last[key], count[key] = now, count.get(key, 0) + 1
        while len(resident) > capacity:
            free = resident - set(group)
            if policy == "lru":
                victim = min(free, key=lambda key: (last[key], key))
            else:
                victim = min(free, key=lambda key: (count[key], last[key], key))
            resident.remove(victim)
    return missed


def naive_arc(groups: list[list[int]], c: int) -> int:
    t1: list[int] = []
    t2: list[int] = []
    b1: list[int] = []
    b2: list[int] = []
    p, missed = 0.0, 0

    def replace(pinned: list[int], in_b2: bool) -> None:
        free1, free2 = ([key for key in t if key not in pinned] for t in (t1, t2))
        first = len(t1) > p or (in_b2 and len(t1) == p)
        if (first and free1) or not free2:
            t1.remove(free1[0])
            b1.append(free1[0])
        else:
            t2.remove(free2[0])
            b2.append(free2[0])

    for group in groups:
        missed += len([key for key in group if key not in t1 + t2])
        for x in group:
            if x in t1:
                t1.remove(x)
                t2.append(x)
            elif x in t2:
                t2.remove(x)
                t2.append(x)
            elif x in b1:
                p = min(c, p + max(1.0, len(b2) / len(b1)))
                replace(group, False)
                b1.remove(x)
                t2.append(x)
            elif x in b2:
                p = max(0.0, p - max(1.0, len(b1) / len(b2)))
                replace(group, True)
                b2.remove(x)
                t2.append(x)
            else:
                if len(t1) + len(b1) == c:
                    if len(t1) < c:
                        b1.pop(0)
                        replace(group, False)
                    else:
                        t1.remove(next(key for key in t1 if key not in group))
                elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                    if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                        b2.pop(0)
                    replace(group, False)
                t1.append(x)
            assert len(t1) + len(t2) <= c and len(t1) + len(b1) <= c
    return missed


def naive_s3_fifo(groups: list[list[int]], capacity: int) -> int:
    least = max(1, round(capacity / 10))
    small: list[int] = []
    main: list[int] = []
    ghost: list[int] = []
    uses: dict[int, int] = {}
    missed = 0
    for group in groups:
        missed += len([key for key in group if key not in small + main])
        for x in group:
            if x in small + main:
                uses[x] = min(3, uses[x] + 1)
                continue
            while len(small) + len(main) >= capacity:
                from_small = [key for key in small if key not in group]
                from_main = [key for key in main if key not in group]
                if from_small and (len(small) >= least or not from_main):
                    old = from_small[0]
                    small.remove(old)
                    if uses[old] > 1:
                        uses[old] = 0
                        main.append(old)
                    else:
                        ghost.append(old)
                        if len(ghost) > capacity - least:
                            ghost.pop(0)
                else:
                    old = from_main[0]
                    main.remove(old)
                    if uses[old] > 0:
                        uses[old] -= 1
                        main.append(old)
            uses[x] = 0
            if x in ghost:
                ghost.remove(x)
                main.append(x)
            else:
                small.append(x)
    return missed


TWINS: dict[str, Any] = {
    "lru": functools.partial(naive_scored, policy="lru"),
    "lfu": functools.partial(naive_scored, policy="lfu"),
    "arc": naive_arc,
    "s3_fifo": naive_s3_fifo,
}


@pytest.mark.parametrize("policy", sorted(TWINS))
def test_a_policy_against_its_naive_twin(policy: str) -> None:
    for seed in range(6):
        visits = visits_of(seed, steps=40)
        found = misses(policy, visits, 3, 7, 12, 16)
        twin = [[TWINS[policy](groups_of(trace), c) for c in (3, 7, 12, 16)] for trace in visits.needed]
        assert found.tolist() == twin


def fewest_misses(groups: list[list[int]], capacity: int) -> int:
    """Brute force over all choices of what stays."""
    import itertools

    states = {frozenset[int](): 0}
    for group in groups:
        after: dict[frozenset[int], int] = {}
        for resident, cost in states.items():
            cost += len(set(group) - resident)
            rest = resident - set(group)
            keep = min(len(rest), capacity - len(set(group)))
            for kept in itertools.combinations(sorted(rest), keep):
                state = frozenset(kept) | frozenset(group)
                after[state] = min(after.get(state, cost), cost)
        states = after
    return min(states.values())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5))
def test_beladys_bound_is_what_brute_force_finds(seed: int, capacity: int) -> None:
    visits = visits_of(seed, traces=1, steps=6, layers=2, experts=4)
    assert misses("belady", visits, capacity)[0, 0] == fewest_misses(groups_of(visits.needed[0]), capacity)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 17))
def test_no_policy_beats_belady(seed: int, capacity: int) -> None:
    visits = visits_of(seed)
    bound = misses("belady", visits, capacity)
    for policy in POLICIES:
        assert (misses(policy, visits, capacity) >= bound).all(), policy


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_are_conserved(policy: str) -> None:
    """Of a single layer what is absent at each turn says all that is resident."""
    visits = visits_of(2, steps=60, layers=1, experts=12)
    absent = replay(policy, visits, [2, 5, 11])[:, :, :, 0]
    resident = (~absent).sum(3)
    assert (resident.max((0, 2)) == [2, 5, 11]).all()
    # What a turn needed is there at the next one, unless a cleanup came between.
    if "a2cr" not in policy:
        assert not (absent[:, :, 1:] & visits.needed[:, None, :-1, 0]).any()


@pytest.mark.parametrize("policy", POLICIES)
def test_room_for_all_leaves_compulsory_misses(policy: str) -> None:
    visits = visits_of(3)
    # Nothing is cleaned up.
    options = ReplayOptions(A2crConfig(cleanup_steps=1000))
    first = visits.needed.any(1).sum((1, 2))
    assert misses(policy, visits, 18, 30, options=options).tolist() == [[n, n] for n in first]


def test_lockstep_is_each_trace_and_capacity_by_itself() -> None:
    visits = visits_of(5, traces=3)
    for policy in set(POLICIES) - {"static"}:  # which looks at the other traces
        alone = [
            [misses(policy, Visits(n[None], m[None]), c)[0, 0] for c in (4, 9)]
            for n, m in zip(*visits, strict=True)
        ]
        assert misses(policy, visits, 4, 9).tolist() == alone


def test_popular_experts_stay() -> None:
    """By a given count, by the first steps', and by the trace's own."""
    needed = np.zeros((1, 40, 1, 8), bool)
    steps = np.arange(40)
    needed[0, :, 0, 0] = steps % 2 == 0
    needed[0, steps, 0, 1 + steps % 7] = True  # takes turns
    visits, counts = Visits(needed, needed.astype(np.float32)), np.eye(1, 8)
    for options in (ReplayOptions(popularity=counts), ReplayOptions(popularity_steps=9), ReplayOptions()):
        assert not replay("static", visits, [3], options)[0, 0, 9:, 0, 0].any()
    # A count that says otherwise, and steps that are too few to tell.
    other = ReplayOptions(popularity=np.arange(8)[None], popularity_steps=9)
    assert replay("static", visits, [3], other)[0, 0, 20::2, 0, 0].any()
    assert misses("static", visits, 3, options=ReplayOptions(popularity_steps=1)) == misses(
        "static", visits, 3, options=ReplayOptions(popularity=needed[0, 0])
    )


def test_a_budget_below_one_turns_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 slots for experts do not hold the 2 that one step needs"):
        replay("lru", visits_of(0), [1])


def test_experts_of_a_turn_cannot_evict_each_other() -> None:
    needed = np.ones((1, 3, 2, 2), bool)
    visits = Visits(needed, needed.astype(np.float32))
    for policy in POLICIES:  # two slots for two layers of two: every turn loads both, and has both
        assert misses(policy, visits, 2)[0, 0] == 12


def test_layer_lru_keeps_its_quotas() -> None:
    """Layer 0 goes round three experts, layer 1 stays with one, which global LRU throws out."""
    needed = np.zeros((1, 30, 2, 6), bool)
    steps = np.arange(30)
    needed[0, steps, 0, steps % 6] = True
    needed[0, steps, 1, steps // 2 % 2] = True
    visits = Visits(needed, needed.astype(np.float32))
    assert misses("layer_lru", visits, 4)[0, 0] == 30 + 2
    assert misses("lru", visits, 4)[0, 0] > 32


def test_a2cr_levels_follow_the_pressure_with_hysteresis_and_cleanup_evicts_below_the_threshold() -> None:
    from moejax.routing.residency import _AdaptiveA2cr

    visits = visits_of(1, traces=1)
    options = ReplayOptions(A2crConfig(cleanup_steps=1000))
    state = _AdaptiveA2cr(visits, np.array([0]), np.array([18]), options)
    seen = []
    for taken in (5, 13, 17, 16, 12, 11, 18):  # of 18; 16 and 13 hold their level, by 0.05
        resident = np.arange(18)[None] < taken
        state.step(1, resident)
        seen.append(int(state.level[0]))
    assert seen == [2, 1, 0, 0, 1, 2, 0]
    # A threshold above any score empties the memory at every cleanup.
    eager = ReplayOptions(A2crConfig(threshold=2.0, cleanup_steps=1))
    assert misses("a2cr", visits, 18, options=eager)[0, 0] == visits.accesses[0]
    # A second's worth of compute between cleanups: each step.
    by_time = ReplayOptions(A2crConfig(threshold=2.0, cleanup_seconds=1.0), compute_s=1.0)
    assert misses("a2cr", visits, 18, options=by_time)[0, 0] == visits.accesses[0]


def test_a2cr_score() -> None:
    from moejax.routing.residency import _A2cr

    needed = np.zeros((1, 3, 1, 3), bool)
    needed[0, 0, 0, :2] = needed[0, 1, 0, 1] = True
    visits = Visits(needed, np.where(needed, 0.5, 0).astype(np.float32))
    state = _A2cr(visits, np.array([0]), np.array([3]), ReplayOptions())
    for step in range(2):
        state.use(step, 0, slice(0, 3), visits.needed[:, step, 0], visits.mass[:, step, 0])
    score = state.keys(np.array([0]), 4, 0, np.ones((1, 3), bool))[0]
    ratio = np.log(2) / np.log(3)
    assert score[0] == pytest.approx(0.4 * 0.5 + 0.3 * ratio + 0.3 * np.exp(-0.05 * 4))
    assert score[1] == pytest.approx(0.4 + 0.3 + 0.3 * np.exp(-0.05 * 3))
    fading = _A2cr(visits, np.array([0]), np.array([3]), ReplayOptions(A2crConfig(mass_decay=0.5)))
    for step in range(2):
        fading.step(step, np.ones((1, 3), bool))
        fading.use(step, 0, slice(0, 3), visits.needed[:, step, 0], visits.mass[:, step, 0])
    assert fading.mass[0].tolist() == [0.25, 0.75, 0]


@pytest.mark.parametrize("wrong", [{"pressures": [0.5]}, {"pressures": [0.7, 0.9, 0.0]}])
def test_levels_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"offload\.a2cr\.pressures must fall"):
        A2crConfig(**wrong)


def test_visits_of_a_trace() -> None:
    """Two requests in two steps; request 1's position 1 is computed twice, one expert did not run."""
    ids = [[[0, 1]], [[2, 0]], [[1, 3]], [[2, 1]], [[3, 0]]]
    trace = trace_of(ids, [0, 0, 1, 1, 2], [0, 1, 0, 1, 1], [0, 0, 1, 1, 1], experts=3)
    single = single_visits(trace)
    assert single.needed[:, :, 0].astype(int).tolist() == [[[1, 1, 0], [0, 1, 0]], [[1, 0, 1], [0, 1, 1]]]
    assert single.mass[0, 1, 0].tolist() == [0, 0.5, 0]
    whole = recorded_visits(trace)
    assert whole.needed[0, :, 0].astype(int).tolist() == [[1, 1, 1], [0, 1, 1], [1, 0, 0]]
    assert whole.mass[0, 0, 0].tolist() == [1, 0.5, 0.5] and whole.largest_group == 3
    assert recorded_visits(trace, 3).needed[:, 0, 0].tolist() == whole.needed[0, :, 0].tolist()
    with pytest.raises(ConfigError, match=r"offload\.parts=4: the trace has 3 steps"):
        recorded_visits(trace, 4)


def test_predictors() -> None:
    made = generate("zipf", num_experts=8, top_k=2, layers=3, requests=4, prompt_len=8, output_len=9)
    visits = single_visits(made)
    before = predict("previous", visits)
    assert not before[:, 0].any() and (before[:, 1:] == visits.needed[:, :-1]).all()
    assert not predict("none", visits).any()
    foreseen = predict("transition", visits)
    assert not foreseen[:, 0, 0].any() and (foreseen.sum(3) <= 2).all()
    # By hand: the table of the other traces, for one turn.
    trace, step, layer = 2, 3, 1
    scores = np.zeros(8)
    for e in np.flatnonzero(visits.needed[trace, step, layer - 1]):
        others = [t for t in range(4) if t != trace]
        came = visits.needed[others, :, layer - 1, e]
        scores += visits.needed[others, :, layer][came].sum(0) / max(came.sum(), 1)
    best = np.argsort(-scores, kind="stable")[:2]
    assert sorted(best) == np.flatnonzero(foreseen[trace, step, layer]).tolist()


def test_experts_that_follow_each_other_are_foreseen() -> None:
    needed = np.zeros((2, 20, 2, 4), bool)
    at = np.arange(20) * 7 // 3 % 4
    needed[:, np.arange(20), 0, at] = needed[:, np.arange(20), 1, (at + 1) % 4] = True
    foreseen = predict("transition", Visits(needed, needed.astype(np.float32)))
    assert (foreseen[:, :, 1] == needed[:, :, 1]).all()


def test_stall_by_hand() -> None:
    needed = np.zeros((1, 2, 1, 4), bool)
    needed[0, :, 0, :2] = True
    visits, absent = Visits(needed, needed.astype(np.float32)), np.ones((1, 1, 2, 1, 4), bool)
    plain = stall(visits, absent, 2.0, 3.0)
    assert plain.seconds.item() == 4 * 2.0 and plain.moved.item() == 4
    predicted = np.zeros_like(needed)
    predicted[0, 1, 0, 1:] = True  # one right, two wrong; 1.5 of the three come in 3 s
    ahead = stall(visits, absent, 2.0, 3.0, predicted)
    assert ahead.seconds.item() == (4 - 0.5) * 2.0 and ahead.moved.item() == 4 + 1


@pytest.mark.parametrize("policy", [*(p for p in POLICIES if p != "belady"), "static of first steps"])
@pytest.mark.parametrize("slots", [3, 7])
def test_deciding_turn_by_turn_is_the_replay(policy: str, slots: int) -> None:
    """Decisions that know nothing of what comes miss what the replay of the whole trace misses."""
    visits = visits_of(7, traces=1, steps=40)
    counts = visits_of(8).needed.sum((0, 1))
    if policy == "static of first steps":
        policy, counts = "static", None
    options = ReplayOptions(A2crConfig(cleanup_steps=5), popularity=counts, popularity_steps=10)
    whole = replay(policy, visits, [slots], options)[0, 0]
    _, S, L, E = visits.needed.shape
    online = Residency(policy, L, E, slots, options)
    held = set[int]()
    for step in range(S):
        held -= set(online.step().tolist())
        for layer in range(L):
            needed = visits.needed[0, step, layer]
            absent = online.absent(layer, needed)
            assert (absent - layer * E).tolist() == np.flatnonzero(needed & whole[step, layer]).tolist()
            evicted = online.turn(layer, needed, visits.mass[0, step, layer])
            assert set(evicted.tolist()) <= held and not set(evicted.tolist()) & set(absent.tolist())
            held = held - set(evicted.tolist()) | set(absent.tolist())
            assert held == set(np.flatnonzero(online.resident).tolist()) and len(held) <= slots
