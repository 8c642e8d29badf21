"""The routing experiment from traces to files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax.bench.routing.config import (
    GenerateSection,
    PlacementSection,
    ReplayedRebalance,
    RoutingSelection,
)
from moejax.bench.routing.over_time import over_time_rows
from moejax.bench.routing.placement import placement_row
from moejax.bench.routing.rows import layer_rows, trace_row
from moejax.bench.routing.run import run_routing
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.moe.placement import Placement, balancedness
from moejax.routing import analysis, locality
from moejax.routing.capture import RoutingCapture, load_capture
from moejax.routing.generate import generate
from moejax.routing.source import trace_names
from tests.bench.runs import run_into

SHAPE: dict[str, Any] = {
    "num_experts": 8, "top_k": 2, "layers": 2, "requests": 4, "prompt_len": 12, "output_len": 20,
}  # fmt: skip


def run(selection: RoutingSelection, out: Path, model: ModelConfig | None = None) -> dict[str, Any]:
    config = dataclasses.asdict(selection)
    with run_into(out, "routing", config) as this:
        return run_routing(selection, model, this)


@pytest.fixture
def captured(tmp_path: Path) -> RoutingCapture:
    trace = generate("correlated", **SHAPE, exponent=0.5)
    (tmp_path / "first").mkdir()
    trace.save(tmp_path / "first" / "routing.npz")
    return trace


def test_a_trace_beside_a_generated_one(
    captured: RoutingCapture, tiny_config: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = GenerateSection(kind="zipf", requests=4, prompt_len=12, output_len=20, exponent=1.5)
    selection = RoutingSelection(trace=str(tmp_path / "first"), generate=wanted, seed=7)
    result = run(selection, tmp_path / "out", tiny_config)
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result
    for name in ("load", "co_activation", "working_set", "temporal_locality", "load_over_time"):
        assert (tmp_path / "out" / f"{name}.png").is_file()
    made = load_capture(tmp_path / "out")
    np.testing.assert_array_equal(made.ids, generate("zipf", **SHAPE, exponent=1.5, seed=7).ids)
    assert made.meta["model"] == "small" and made.meta["generator"]["exponent"] == 1.5

    first, second = result["cases"]
    assert (first["trace"], second["trace"]) == ("first", "generated")
    skew = analysis.skew(captured.counts())
    assert first["max_over_mean"] == pytest.approx(skew.max_over_mean.mean())
    assert first["max_over_mean_worst"] == skew.max_over_mean.max()
    rows = [row for row in result["layers"] if row["trace"] == "first"]
    assert [row["entropy"] for row in rows] == skew.entropy.tolist()
    assert rows[0]["next_layer_bits"] > 0.1 and rows[1]["next_layer_bits"] is None
    assert first["reuse"] > second["reuse"] - 0.2 and second["max_over_mean"] > first["max_over_mean"]
    hits = locality.hits_per_step(captured.phase("decode")).mean()
    size = 3 * 32 * 16 * 4
    assert first["decode_hits"] == pytest.approx(hits)
    assert first["decode_bytes_per_step"] == pytest.approx(hits * 2 * size)
    sets = result["working_sets"]["first"]["tokens"]
    np.testing.assert_allclose(sets["bytes"], np.sum(sets["experts"], axis=0) * size)
    metrics = result["metrics"]
    assert metrics["gini"] == first["gini"] and metrics["gini_generated"] == second["gini"]
    (difference,) = result["differences"]
    assert difference["matched_rows"] == 4 * 31  # both generated, so in order
    shown = capsys.readouterr().err
    assert "generated, by layer" in shown and "visit other" in shown
    assert " redundant experts; planned on the first half of the steps, on the second: " in shown


def test_traces_of_other_shapes_stand_beside_each_other(captured: RoutingCapture, tmp_path: Path) -> None:
    other = generate("uniform", **{**SHAPE, "num_experts": 9})
    path = other.save(tmp_path / "nine.npz")
    result = run(RoutingSelection(trace=[str(tmp_path / "first"), str(path)]), tmp_path / "out")
    assert [case["trace"] for case in result["cases"]] == ["first", "nine"]
    assert result["differences"][0]["reason"] == "of another shape"
    assert "contiguous_imbalance" in result["cases"][0] and "contiguous_imbalance" not in result["cases"][1]
    assert "expert_bytes" not in result["cases"][0] and not (tmp_path / "out" / "routing.npz").exists()


def test_placement_by_the_traces_load(captured: RoutingCapture) -> None:
    trace = generate("zipf", **SHAPE, exponent=2.0)
    row = placement_row(trace, PlacementSection(devices=4, redundant=4))
    loads = trace.counts()
    start = balancedness(loads, Placement.contiguous(2, 8, 4))
    assert row["contiguous_imbalance"] == pytest.approx(start.mean())
    assert row["contiguous_imbalance_max"] == start.max()
    assert row["contiguous_imbalance"] > row["planned_imbalance"] > row["replicated_imbalance"] >= 1
    assert row["replicated_holdout_imbalance"] >= row["replicated_imbalance"] - 0.05
    assert placement_row(trace, PlacementSection())["devices"] == 4
    assert placement_row(trace, PlacementSection(devices=1)) == {}
    assert placement_row(generate("uniform", **{**SHAPE, "num_experts": 9}), PlacementSection()) == {}
    with pytest.raises(ConfigError, match=r"placement\.devices=3 does not divide the trace's 8 experts"):
        placement_row(trace, PlacementSection(devices=3))
    with pytest.raises(ConfigError, match="the next redundant that fits"):
        placement_row(trace, PlacementSection(devices=4, redundant=3))


def test_placements_over_time_are_judged_on_what_they_have_not_seen(
    tiny_config: ModelConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = GenerateSection(
        kind="bursty", requests=32, prompt_len=1, output_len=256, period=64, intensity=16.0, hot=2
    )
    rule = ReplayedRebalance(every_steps=16, min_gain=0.05)
    section = PlacementSection(devices=4, redundant=4, rebalance=rule)
    selection = RoutingSelection(generate=wanted, placement=section)
    result = run(selection, tmp_path / "out", tiny_config)
    kept, once, anew, adjusted = rows = result["placement_over_time"]
    assert [row["placement"] for row in rows] == ["kept", "once", "anew", "adjusted"]
    trace = load_capture(tmp_path / "out")
    start = Placement.contiguous(2, 8, 4, redundant=4)
    loads = analysis.load_over_time(trace, 16)[0]
    assert kept["imbalances"] == [pytest.approx(balancedness(load, start).mean()) for load in loads]
    assert kept["imbalance"] == pytest.approx(np.mean(kept["imbalances"][1:])) and kept["moved"] == 0
    assert once["moved_at"] == [0] and all(row["imbalances"][0] == kept["imbalances"][0] for row in rows)
    # After each burst both planners need one window to see it.
    assert {0, 4, 8, 12} <= set(adjusted["moved_at"]) and {0, 4, 8, 12} <= set(anew["moved_at"])
    assert adjusted["imbalance"] < once["imbalance"] < kept["imbalance"]
    size = 3 * 32 * 16 * 2
    assert adjusted["moved_bytes"] == adjusted["moved"] * size and anew["imbalance_max"] > anew["imbalance"]
    assert (
        adjusted["prefill_ratio"] == kept["prefill_ms"] / adjusted["prefill_ms"] >= 1 == kept["prefill_ratio"]
    )
    metrics = result["metrics"]
    assert metrics["adjusted_imbalance"] == adjusted["imbalance"] and metrics["kept_moved"] == 0
    assert (tmp_path / "out" / "placement.png").is_file()
    assert "generated: placements over time" in capsys.readouterr().err
    resting = ReplayedRebalance(every_steps=16, min_gain=0.05, cooldown_steps=100)
    rows = over_time_rows(trace, resting, result["cases"][0], None)
    assert min(np.diff(rows[-1]["moved_at"])) >= 7 and "prefill_ms" not in rows[0]


@pytest.mark.parametrize("fields", [{"nodes": 2}, {"redundant": 0}, {"devices": 1}])
def test_what_the_engine_would_not_adjust_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"placement\.rebalance needs placement\.nodes=1"):
        PlacementSection(**fields, rebalance=ReplayedRebalance(every_steps=8))
    with pytest.raises(ConfigError, match=r"placement\.rebalance\.remove_below=1 is more than half"):
        ReplayedRebalance(remove_below=1.0)


def test_a_run_that_cannot_be_writes_nothing(
    captured: RoutingCapture, tiny_config: ModelConfig, tmp_path: Path
) -> None:
    out, first = tmp_path / "out", str(tmp_path / "first")
    (tmp_path / "text.npz").write_text("no trace")
    empty = captured.select(np.zeros(captured.num_rows, bool)).save(tmp_path / "empty.npz")
    zipf = GenerateSection(kind="zipf")
    small, dense = tiny_config.replace(num_experts=4), tiny_config.replace(moe_layers=(False, False))
    for selection, model, message in (
        (RoutingSelection(trace=first), small, "trace=.*it has 8 experts and the model"),
        (
            RoutingSelection(trace=str(tmp_path / "text.npz")),
            None,
            r"is no routing trace of moejax \(no \.npz file\)",
        ),
        (RoutingSelection(trace=str(empty)), None, "the trace has no rows"),
        (RoutingSelection(generate=zipf), None, "makes a trace of a model's shape: say which"),
        (RoutingSelection(generate=zipf), dense, "no layers with experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(selection, out, model)
        assert not list(out.iterdir())
    with pytest.raises(ConfigError, match=r"placement\.devices=3 does not divide"):
        run(RoutingSelection(trace=first, placement=PlacementSection(devices=3)), out)
    assert not list(out.iterdir())


def test_wrong_sections_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing to look at: give trace=PATH"):
        RoutingSelection()
    with pytest.raises(
        ConfigError, match=rf"trace={tmp_path}: the folder holds no routing\.npz; run it with"
    ):
        RoutingSelection(trace=str(tmp_path))
    with pytest.raises(ConfigError, match=r"trace=gone: there is no such file"):
        RoutingSelection(trace=["gone"])
    with pytest.raises(ConfigError, match=r"trace must be a string or a list"):
        RoutingSelection(trace=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"generate\.kind"):
        GenerateSection(kind="zip")
    with pytest.raises(ConfigError, match=r"generate\.exponent is set and generate\.kind is not"):
        GenerateSection(exponent=1.0)
    with pytest.raises(ConfigError, match=r"generate\.hot is no parameter of kind 'uniform'"):
        GenerateSection(kind="uniform", hot=3)
    with pytest.raises(ConfigError, match=r"generate\.requests"):
        GenerateSection(kind="zipf", requests=0)
    with pytest.raises(ConfigError, match=r"placement\.redundant must be an integer of at least 0"):
        PlacementSection(redundant=-1)


def test_a_trace_in_which_no_expert_ran(captured: RoutingCapture) -> None:
    nothing = dataclasses.replace(captured, ids=np.full_like(captured.ids, captured.num_experts))
    row = trace_row(nothing, layer_rows(nothing), None)
    assert row["max_over_mean_worst"] is None and row["max_over_mean"] is None and row["decode_hits"] == 0


def test_names_tell_traces_apart() -> None:
    paths = ["outputs/a/routing.npz", "outputs/a", "x/my trace.npz", "y/my trace.npz"]
    assert trace_names(paths) == ["a", "a_2", "my_trace", "my_trace_2"]
