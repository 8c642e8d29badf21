"""Experts of simulated engines: copies, popularity that shifts, moves by the engine's rule, and capacity."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from moejax.bench.simulate.config import RoutingSection, SimulateSection, parse_layout
from moejax.bench.simulate.experts import SimulatedExperts
from moejax.bench.simulate.replicas import deploy
from moejax.bench.simulate.run import Asked, run_simulate
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.core.parallel import ParallelConfig
from moejax.core.scheduling import RebalanceConfig
from moejax.engine.scheduling.plan import StepPlan
from moejax.moe.placement import Placement, adjust_placement, balancedness
from moejax.simulate.kernels import WEIGHTS
from moejax.simulate.routing import RoutingLaw
from tests.bench.runs import run_into
from tests.bench.simulate.test_run import ENGINE, LARGE, WORKLOAD

MOVES = RebalanceConfig(every_steps=10, cooldown_steps=20)


def simulate(out: Path, engine: EngineConfig = ENGINE, **changes: Any) -> list[dict[str, Any]]:
    section = SimulateSection(**{"layouts": ["ep4_redundant4"], "laws": [], "interval": False, **changes})
    with run_into(out, "simulate", {"simulate": {"mode": "run"}}, hardware_kind="h100") as run:
        return run_simulate(Asked(LARGE, "dummy", section, engine, WORKLOAD), run)["cases"]


def engine(
    every: int = 10, shift_steps: int = 0, layout: str = "ep4_redundant4"
) -> tuple[SimulatedExperts, Any]:
    """Returns a simulated engine's experts, and the engine."""
    rule = dataclasses.replace(MOVES, every_steps=every)
    config = dataclasses.replace(ENGINE, rebalance=rule)
    section = SimulateSection(routing=RoutingSection(shift_steps=shift_steps))
    deployment = deploy("", LARGE, parse_layout(layout), config, section, "h100", RoutingLaw("zipf"))
    made = deployment.backend(section).layouts[0].make()
    experts = made[1].step_time.__self__
    assert isinstance(experts, SimulatedExperts)
    return experts, made[0]


def plan_of(tokens: int) -> StepPlan:
    """Returns a plan that decodes so many sequences, as far as a step's duration goes by it."""
    return StepPlan(decodes=cast(Any, [None] * tokens), positions=[100] * tokens)


def held(placement: Placement) -> np.ndarray:
    """Returns bool `[L, devices, E]`: whether a device has the expert."""
    slots = placement.physical_to_logical.reshape(placement.num_layers, placement.devices, -1)
    return (slots[..., None] == np.arange(placement.num_experts)).any(axis=2)


def test_a_copy_computes_its_part_of_an_experts_rows() -> None:
    counts = np.array([[8.0, 2.0, 1.0, 1.0]])
    law = RoutingLaw("zipf")
    loads = law.loads(4, 1, 2)
    loads.draws = lambda tokens: np.repeat(counts, law.layers, axis=0)
    assert loads.at(16) == (2, 10)  # experts 0 and 1 beside 2 and 3
    order = np.arange(4)
    assert loads.under(np.array([[0, 1, 3, 0, 2, 3]]), order).at(16) == (2.5, 6.5)
    # Expert 3 has what 0 had. One row of three copies: each is visited a third of the times.
    shifted = loads.under(np.array([[0, 1, 2, 3, 0, 0]]), order[::-1]).at(16)
    assert shifted == pytest.approx((2 + 1 / 3, 8 + 2 / 3))


@pytest.mark.parametrize("stages", [1, 2])
def test_experts_move_by_the_engines_rule_and_devices_wait_for_the_moves(stages: int) -> None:
    experts, made = engine(layout=f"pp{stages}_ep4_redundant4")
    runner, first = experts.runner, experts.loads
    old = Placement.contiguous(4, 64, 4, redundant=4)
    popularity = first.draws(4096).reshape(-1, 4, 64).sum(axis=0)
    reasons = {}
    for number in range(1, 51):
        experts.time(plan_of(32))
        spent, idle_at = sum(runner.parts.values()), runner._free
        if (event := made.rebalance()) is None:
            continue
        reasons[number] = event.reason
        assert runner._free - idle_at == pytest.approx(event.seconds)
        assert sum(runner.parts.values()) - spent == pytest.approx(event.seconds)
        if event.reason == "moved":
            new = adjust_placement(popularity, old, MOVES)
            assert np.array_equal(experts.loads.slots, new.physical_to_logical)
            assert event.after == pytest.approx(balancedness(popularity, new).mean())
            assert event.after < event.before == pytest.approx(balancedness(popularity, old).mean())
            # The law has four layers and the model two.
            each = 3 * LARGE.hidden_size * LARGE.moe_intermediate_size * WEIGHTS["bf16"] * 2 / 4
            received = (held(new) & ~held(old)).sum(axis=(0, 2))
            most = received.max() * each / stages  # a device has the layers of its stage
            time = experts.step.kernels.collective("collective-permute", most, 4, 1)
            assert (event.bytes_moved, event.seconds) == (received.sum() * each, time.seconds)
    none = "no layer gains enough"
    assert reasons == {10: "moved", 20: "cooldown", 30: none, 40: none, 50: none}
    assert experts.loads.at(256).rows < first.at(256).rows


def test_a_shift_gives_other_experts_the_rows_and_leaves_them_where_they_are() -> None:
    experts, made = engine(every=0, shift_steps=25)
    orders, times = [], []
    for _ in range(60):
        times.append(experts.time(plan_of(32)).seconds)
        orders.append(tuple(experts.loads.order))
        assert made.rebalance() is None
    assert [len(set(part)) for part in (orders[:25], orders[25:50], orders[50:])] == [1, 1, 1]
    assert len(set(orders)) == 3 and all(sorted(order) == list(range(64)) for order in orders)
    assert np.array_equal(experts.loads.slots, experts.step.loads.slots)
    assert orders[0] == tuple(range(64)) and times[24] != times[25]


@pytest.mark.parametrize(("layout", "microbatches"), [("ep4", 1), ("pp2_ep4", 2)])
def test_the_fullest_rank_s_rows_are_those_of_a_step_s_microbatches(layout: str, microbatches: int) -> None:
    experts, _ = engine(every=0, layout=layout)
    experts.time(plan_of(32))
    counts, rows = experts.runner.assignments, experts.loads.at(32 // microbatches).rows
    assert counts == {"chosen": 32 * LARGE.num_experts_per_tok, "heaviest": microbatches * rows * 4}


@pytest.mark.slow
def test_rebalancing_lightens_the_fullest_rank_and_tokens_are_the_same_number(tmp_path: Path) -> None:
    moving = dataclasses.replace(ENGINE, rebalance=MOVES)
    (still,) = simulate(tmp_path / "a")
    (moved,) = simulate(tmp_path / "b", moving)
    (again,) = simulate(tmp_path / "c", moving)
    assert moved == again
    assert "rebalances" not in still and moved["rebalances"] >= 1 and moved["rebalance_bytes"] > 0
    assert 1 < moved["expert_imbalance"] < still["expert_imbalance"]
    assert moved["completed"] == still["completed"] == WORKLOAD.num_requests
    (shifting,) = simulate(tmp_path / "d", moving, routing=RoutingSection(shift_steps=15))
    assert shifting["expert_imbalance"] > moved["expert_imbalance"]


def test_what_finds_no_room_is_dropped_or_taken_by_others(tmp_path: Path) -> None:
    rows = {}
    for factor, overflow in ((0.5, "drop"), (0.5, "reroute"), (1.0, "drop"), (1.0, "reroute"), (2.0, "drop")):
        moe = MoeConfig("capacity", capacity_factor=factor, overflow=overflow)
        out = tmp_path / f"{factor}{overflow}"
        (rows[factor, overflow],) = simulate(out, dataclasses.replace(ENGINE, moe=moe), layouts=["ep4"])
    lost = {key: row["dropped_share"] for key, row in rows.items()}
    assert 1 > lost[0.5, "drop"] > lost[1.0, "drop"] > lost[2.0, "drop"] > 0
    # Half the places are for at least half of the assignments; all have room at a factor of 1.
    assert lost[1.0, "reroute"] == 0 and 0 < lost[0.5, "reroute"] <= 0.5
    for factor in (0.5, 1.0):
        other = rows[factor, "reroute"]
        assert lost[factor, "drop"] == pytest.approx(lost[factor, "reroute"] + other["rerouted_share"])
    (every,) = simulate(
        tmp_path / "dense", dataclasses.replace(ENGINE, moe=MoeConfig("dense")), layouts=["ep4"]
    )
    assert "expert_imbalance" not in every
    assert rows[0.5, "drop"]["median_ttft_ms"] < rows[2.0, "drop"]["median_ttft_ms"] < every["median_ttft_ms"]


def test_overflow_is_counted_expert_by_expert() -> None:
    law = RoutingLaw("zipf")
    loads = law.loads(4, 1, 2)
    loads.draws = lambda tokens: tokens * np.array([[0.5, 0.25, 0.125, 0.125]])
    assert loads.overflow(16, 4) == pytest.approx(4 / 16)
    assert loads.overflow(16, 8) == 0
    assert loads.overflow(24, 6) == pytest.approx(6 / 24)
    assert RoutingLaw("even").loads(4, 2, 2).overflow(16, 4) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("layout", "fields", "changes", "message"),
    [
        ("ep4", {"rebalance": MOVES}, {}, "redundant_experts=0"),
        ("tp2", {"rebalance": MOVES}, {}, "parallel.ep=1"),
        ("ep4_redundant4", {"rebalance": MOVES}, {"routing": RoutingSection("power")}, "law 'power'"),
        ("ep4_redundant4", {"rebalance": MOVES}, {"laws": ["even"]}, "law 'even'"),
        ("ep4", {}, {"routing": RoutingSection("even", shift_steps=5)}, "simulate.routing.shift_steps"),
        ("ep4_redundant4", {"moe": MoeConfig("capacity")}, {}, "does not go with parallel.redundant_experts"),
        ("ep4_redundant3", {}, {}, "67"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(
    tmp_path: Path, layout: str, fields: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(tmp_path, dataclasses.replace(ENGINE, **fields), layouts=[layout], **changes)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_layouts_words_name_copies_once() -> None:
    assert parse_layout("data_ep8_redundant8") == ParallelConfig(ep=8, attention="data", redundant_experts=8)
    with pytest.raises(
        ConfigError, match=r"^simulate\.layouts: 'ep8_redundant8_redundant4' is neither a preset"
    ):
        parse_layout("ep8_redundant8_redundant4")
