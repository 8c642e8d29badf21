"""The simulation experiment: rows, intervals, plans and refusals, on shapes that were never measured too."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moejax.bench.simulate.config import PlanSection, RoutingSection, SimulateSection, parse_layout
from moejax.bench.simulate.plan import choose_layout, layouts, plan_rows, run_plan, steady_state
from moejax.bench.simulate.replicas import Deployment, deploy
from moejax.bench.simulate.run import WITH_INTERVAL, Asked, run_simulate
from moejax.bench.traffic import ThroughputWorkload
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.hardware import KNOWN
from moejax.core.parallel import PRESETS, ParallelConfig
from moejax.report.experiments import print_result, save_plots
from moejax.report.simulate import verdict_lines
from moejax.results.compare import compare
from moejax.results.metrics import Slo
from moejax.simulate.fleet import Autoscale, Fleet
from moejax.simulate.step import GroupWork
from moejax.simulate.tables import SOURCES
from tests.bench.runs import run_into
from tests.model_shapes import LATENT, TWO_LAYERS

LARGE = TWO_LAYERS.replace(
    vocab_size=32_000, hidden_size=2048, num_heads=32, num_kv_heads=8, head_dim=128, num_experts=64,
    num_experts_per_tok=4, moe_intermediate_size=1024, max_position_embeddings=4096, dtype="bfloat16",
)  # fmt: skip
ENGINE = EngineConfig(max_num_seqs=32, max_num_batched_tokens=1024, block_size=16, max_model_len=1024)
WORKLOAD = ThroughputWorkload(
    num_requests=24, prompt_len=100, output_len=20, request_rate=50.0, slo=Slo(ttft_ms=500, tpot_ms=20)
)
SECTION = SimulateSection(layouts=["tp2", "data_ep2"], rates=[20.0, 200.0], laws=["uniform"])


def simulate(out: Path, model: ModelConfig = LARGE, **changes: Any) -> dict[str, Any]:
    section = dataclasses.replace(SECTION, **changes)
    config = {"simulate": dataclasses.asdict(section)}
    with run_into(out, "simulate", config, hardware_kind="h100") as run:
        return run_simulate(Asked(model, "dummy", section, ENGINE, WORKLOAD), run)


def test_every_case_has_an_interval_a_law_and_its_sources(tmp_path: Path) -> None:
    result = simulate(tmp_path)
    assert result["hardware"]["simulated"] and result["provenance"]["device"]["platform"] == "simulated"
    assert [(row["layout"], row["request_rate"]) for row in result["cases"]] == [
        ("tp2", 20.0), ("tp2", 200.0), ("data_ep2", 20.0), ("data_ep2", 200.0),
    ]  # fmt: skip
    for row in result["cases"]:
        assert row["completed"] == 24 and row["num_devices"] == 2 and row["routing_law"]
        assert sum(row[f"from_{source}"] for source in SOURCES) == pytest.approx(1)
        for name in WITH_INTERVAL:
            if row.get(name) is not None:
                assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"], name
        assert row["median_tpot_ms_low"] < row["median_tpot_ms"] < row["median_tpot_ms_high"]
    assert {row["law"] for row in result["routing_laws"]} == {"uniform"}
    console = Console(record=True, width=160)
    print_result(result, console)
    text = console.export_text()
    assert "SIMULATED" in text and "routing law zipf" in text and "cache blocks" in text
    assert [path.name for path in save_plots(result, tmp_path)] == ["simulate.png"]


def test_the_same_run_twice_is_the_same_to_the_digit(tmp_path: Path) -> None:
    one, two = (simulate(tmp_path / name, interval=False, laws=[]) for name in "ab")
    assert one["cases"] == two["cases"]


def test_latent_attention_and_two_replicas(tmp_path: Path) -> None:
    model = LARGE.replace(**LATENT | {"shared_expert_intermediate_size": 512}, num_experts=64)
    (row,) = simulate(tmp_path, model, layouts=["ep2"], rates=[20.0], laws=[], replicas=2)["cases"]
    assert row["num_devices"] == 4 and row["completed"] == 24


def test_a_layout_that_does_not_suit_is_a_row_with_the_reason(tmp_path: Path) -> None:
    rows = simulate(tmp_path, layouts=["ep7", "tp2"], rates=[20.0], laws=[], interval=False)["cases"]
    assert [row["error"] is None for row in rows] == [True, False]
    assert "num_experts 64 % ep=7" in rows[1]["error"]


def test_what_does_not_fit_says_what_would(tmp_path: Path) -> None:
    huge = LARGE.replace(num_layers=96, moe_layers=(True,) * 96, sliding_windows=(None,) * 96)
    with pytest.raises(ConfigError, match=r"h100.* of 77.3 GB: weights 81.6 GB .* do not fit; ") as refused:
        simulate(tmp_path, huge, layouts=["single"])
    _, _, ways = str(refused.value).partition("what makes it fit: ")
    assert ways == "simulate.weights=w8a16_int8 with simulate.dense=w8a16_int8, or simulate.layouts=[ep2]"
    (row,) = simulate(tmp_path / "2", huge, layouts=["tp2"], rates=[20.0], laws=[], interval=False)["cases"]
    assert (
        row["device_weight_bytes"] + row["device_cache_bytes"] + row["device_step_bytes"]
        == (row["device_memory_bytes"])
    )
    assert not (tmp_path / "result.json").exists()


def test_a_simulated_and_a_measured_run_have_no_winner(tmp_path: Path) -> None:
    import json

    simulate(tmp_path / "a", interval=False, laws=[])
    measured = json.loads((tmp_path / "a" / "result.json").read_text())
    measured["hardware"]["simulated"] = False
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "result.json").write_text(json.dumps(measured))
    found = compare([tmp_path / "a", tmp_path / "b"], across=["device"])
    assert found.blocked["B"]["simulation"] == "one of them is simulated, the other measured"
    assert not any(verdict.decided for verdict in found.verdicts)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("tp4", {"tp": 4}),
        ("pp2_ep4", {"pp": 2, "ep": 4}),
        ("data_ep8_nodes2", {"ep": 8, "nodes": 2, "attention": "data"}),
    ],
)
def test_layouts_by_degrees(name: str, degrees: dict[str, Any]) -> None:
    assert parse_layout(name) == ParallelConfig(**degrees)


@pytest.mark.parametrize("name", ["tp", "tp0", "ep2_ep4", "rows4", ""])
def test_no_layout(name: str) -> None:
    with pytest.raises(ConfigError, match="neither a preset"):
        SimulateSection(layouts=[name])


def test_presets_are_layouts() -> None:
    assert {name: parse_layout(name) for name in PRESETS} == PRESETS


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layouts": []}, "layouts is empty"),
        ({"stack": "vlm"}, "stack"),
        ({"weights": "int3"}, "weights"),
        ({"router": "random"}, "router"),
        ({"routing": {"kind": "zip"}}, "kind"),
    ],
)
def test_wrong_settings_are_one_line(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        given = {key: RoutingSection(**v) if key == "routing" else v for key, v in changes.items()}
        SimulateSection(**given)
    assert "\n" not in str(caught.value)


def test_an_exponent_without_a_law_that_has_one() -> None:
    with pytest.raises(ConfigError, match="has no meaning"):
        RoutingSection(kind="uniform", exponent=1.0)


STEPS = Autoscale(layouts=["tp2", "tp4"], queue_ms=1e-3, interval_s=0.1, cooldown_s=0.2, cold_start_s=0.1)


@pytest.mark.slow
def test_a_fleet_changes_its_layout_and_its_case_tells_when(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "layouts": ["tp2"], "rates": [200.0], "fleets": {"still": Fleet(), "resized": Fleet(autoscale=STEPS)},
    }  # fmt: skip
    result, again = (simulate(tmp_path / name, interval=False, **changes) for name in "ab")
    still, resized = result["cases"]
    assert result["cases"] == again["cases"], "deterministic"
    assert "scale_events" not in still and still["num_devices"] == 2
    assert resized["scale_events"][0] == {"at_s": 0.1, "from": "tp2", "to": "tp4"}
    assert resized["completed"] == 24 and resized["num_devices"] == 4 and resized["replicas"] == 1
    assert resized["tokens_per_s_per_device"] == pytest.approx(resized["output_throughput"] / 4)
    console = Console(record=True, width=160)
    print_result(result, console)
    assert "tp2 resized (200 req/s): scaled at 0.1 s tp2 → tp4" in console.export_text()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"steps": ["tp2", "rows4"]}, "simulate.autoscale.layouts: 'rows4' is neither a preset"),
        ({"steps": ["tp2"]}, r"simulate.autoscale.layouts=\[tp2\]: name two or more"),
        ({"steps": ["tp4", "tp2"]}, "each of more devices than the one before"),
        ({"steps": ["tp2", "ep2"]}, "each of more devices than the one before"),
        ({"layouts": ["tp8"]}, r"simulate.layouts: tp8 is none of simulate.autoscale.layouts=\[tp2, tp4\]"),
        ({"mode": "plan"}, "simulate.mode=plan chooses one layout"),
    ],
)
def test_layouts_that_no_replica_can_change_between_are_one_line(changes: dict[str, Any], text: str) -> None:
    steps = dataclasses.replace(STEPS, layouts=changes.pop("steps", STEPS.layouts))
    with pytest.raises(ConfigError, match=text) as caught:
        SimulateSection(**{"layouts": ["tp2"], "fleets": {"x": Fleet(autoscale=steps)}, **changes})
    assert "\n" not in str(caught.value)


# -- planning --------------------------------------------------------------------------------------------


def deployment(name: str = "tp2", kind: str = "a100_80gb", **changes: Any) -> Deployment:
    section = dataclasses.replace(SECTION, **changes)
    return deploy(name, LARGE, parse_layout(name), ENGINE, section, kind, section.routing.law)


def test_a_looser_objective_allows_a_larger_batch_and_more_tokens() -> None:
    one = deployment()
    found = [steady_state(one, 100, 20, tpot) for tpot in (1e-6, 2e-3, 5e-3, 1.0)]
    batches = [each["batch_size"] for each in found]
    assert batches[0] == 0 and batches[-1] == ENGINE.max_num_seqs
    assert batches == sorted(batches) and len(set(batches)) > 2
    rates = [each["steady_tokens_per_s"] for each in found]
    assert rates == sorted(rates)
    assert all(
        each["steady_tpot_ms"] <= 1e3 * tpot for each, tpot in zip(found[1:], (2e-3, 5e-3, 1.0), strict=True)
    )


def test_all_layouts_suit_and_each_is_there_once() -> None:
    found = list(layouts(LARGE, 8))
    assert len({parallel for _, parallel in found}) == len(found) == len({name for name, _ in found})
    assert all(parallel.num_devices <= 8 for _, parallel in found)
    assert {1, 2, 4, 8} == {parallel.num_devices for _, parallel in found}
    assert all(parse_layout(name) == parallel for name, parallel in found)


def test_the_plan_s_best_keeps_the_objectives(tmp_path: Path) -> None:
    plan = PlanSection(tokens_per_s=5000, devices={"a100_80gb": 2.0, "l4": 0.5}, most_devices=2, simulated=2)
    section = dataclasses.replace(SECTION, mode="plan", plan=plan, interval=False)
    config = {"simulate": dataclasses.asdict(section)}
    with run_into(tmp_path, "simulate", config) as run:
        result = run_plan(Asked(LARGE, "dummy", section, ENGINE, WORKLOAD), run)
    rows = result["cases"]
    best = rows[0]
    assert best["request_goodput"] >= 0.9 * best["request_throughput"]
    for row in rows:
        rate = row["tokens_per_s_per_device"]
        assert (
            row["num_devices"] * rate >= 5000
            and (row["replicas"] - 1) * row["num_devices"] / row["replicas"] * rate < 5000
        )
        price = plan.devices[row["device_kind"]]
        assert row["cost_per_million_output_tokens"] == pytest.approx(price / 3600 / rate * 1e6)
    console = Console(record=True, width=160)
    print_result(result, console)
    assert "plan for 5,000 output tokens/s" in console.export_text()


def test_a_plan_needs_an_objective() -> None:
    with pytest.raises(ConfigError, match=r"needs workload\.slo\.tpot_ms"):
        plan_rows(LARGE, ENGINE, SECTION, ThroughputWorkload(), {"h100": None})


def test_a_refused_plan_writes_nothing(tmp_path: Path) -> None:
    section, slow = dataclasses.replace(SECTION, mode="plan"), Slo(tpot_ms=1e-3)
    workload = dataclasses.replace(WORKLOAD, slo=slow)
    with (
        pytest.raises(ConfigError, match="no layout serves this"),
        run_into(tmp_path, "simulate", {}) as run,
    ):
        run_plan(Asked(LARGE, "dummy", section, ENGINE, workload), run)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_plan_for_an_unknown_device() -> None:
    with pytest.raises(ConfigError, match=r"simulate\.plan\.devices.*h1000"):
        PlanSection(devices={"h1000": None})


def test_devices_without_tables_give_a_bound(tmp_path: Path) -> None:
    for kind in ("l4", "mi300x", "tpu_v5e", "t10"):
        step = deployment(kind=kind).step
        parts = step.of([GroupWork(8, 800, (), 8)]).parts
        assert {part.source for part in parts} == {"roofline"}
        assert KNOWN[kind].bandwidth is not None


def test_a_winner_needs_intervals_that_are_apart() -> None:
    base = {"request_rate": 1.0, "request_goodput": None, "layout": "a", "median_tpot_ms": 10.0}
    near = base | {"layout": "b", "median_tpot_ms": 11.0}
    ends = {"median_tpot_ms_low": 0.8, "median_tpot_ms_high": 1.2}
    rows = [row | {key: row["median_tpot_ms"] * x for key, x in ends.items()} for row in (base, near)]
    assert verdict_lines(rows) == ["1 req/s: no layout is ahead by more than the intervals"]
    far = [
        rows[0],
        base
        | {"layout": "c", "median_tpot_ms": 20.0, "median_tpot_ms_low": 16.0, "median_tpot_ms_high": 24.0},
    ]
    assert "a has the best TPOT p50" in verdict_lines(far)[0]
    assert not verdict_lines(rows[:1]) and not verdict_lines([base, near])


def test_windows_of_some_layers_do_not_shorten_the_others() -> None:
    def seconds(*windows: int | None) -> float:
        model = LARGE.replace(sliding_windows=windows)
        step = deploy("single", model, ParallelConfig(), ENGINE, SECTION, "h100", SECTION.routing.law).step
        return step.of([GroupWork(16, 16 * 900, (), 16)]).seconds

    assert seconds(64, 64) < seconds(64, None) < seconds(None, None)
    assert seconds(64, None) == pytest.approx(seconds(None, 64))


def test_uneven_pipeline_stages_have_all_layers() -> None:
    model = LARGE.replace(num_layers=9, moe_layers=(True,) * 9, sliding_windows=(None,) * 9)
    law = SECTION.routing.law
    for name in ("pp8", "pp2"):
        step = deploy(name, model, parse_layout(name), ENGINE, SECTION, "h100", law).step
        assert [layer for stage in step.parts for layer in stage] == list(range(9)) and all(step.parts)
        assert step.of([GroupWork(8, 800, ((64, 64),), 9)]).seconds > 0


@pytest.mark.slow
def test_a_layout_is_chosen_by_what_a_steady_state_serves() -> None:
    section = dataclasses.replace(SECTION, memory_share=0.9)
    chosen = choose_layout(LARGE, ENGINE, section, "a100_80gb", 4, (100.0, 20.0))
    assert chosen.num_devices == 4 and not chosen.auto
    rates = {
        name: steady_state(
            deploy(name, LARGE, parallel, ENGINE, section, "a100_80gb", section.routing.law), 100.0, 20.0, 1e9
        )["steady_tokens_per_s"]
        for name, parallel in layouts(LARGE, 4)
        if parallel.num_devices == 4
    }
    best = max(rates, key=lambda name: rates[name])
    assert dict(layouts(LARGE, 4))[best] == chosen and len(rates) > 3
    with pytest.raises(ConfigError, match=r"^parallel.auto=4 on a100_80gb: none keeps 0.001 ms a token"):
        choose_layout(LARGE, ENGINE, section, "a100_80gb", 4, (100.0, 20.0), 0.001)
    with pytest.raises(ConfigError, match="no layout suits 3 devices; powers of two do"):
        choose_layout(LARGE, ENGINE, section, "a100_80gb", 3, (100.0, 20.0))
    tight = dataclasses.replace(section, memory_share=0.001)
    with pytest.raises(ConfigError, match="do not fit"):
        choose_layout(LARGE, ENGINE, tight, "a100_80gb", 4, (100.0, 20.0))
