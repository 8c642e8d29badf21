"""Ablations: what the stages add up to, the rows of a run in turns, and rows from elsewhere shown alike."""

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moejax.bench.ab.config import AblationSection, AbSection, PublishedStage
from moejax.bench.ab.run import run_ab
from moejax.bench.ab.variants import Arm
from moejax.core.errors import ConfigError
from moejax.report.ablation import waterfall_plot, with_gains
from moejax.report.experiments import print_result, report_of
from tests.bench.runs import run_into
from tests.bench.test_ab import WORKLOAD, Clocked

LADDER = [
    PublishedStage("baseline", 5200.0, "OOM"),
    PublishedStage("tensor parallel", 2300.0, 45.0),
    PublishedStage("FlashAttention", 1800.0, 42.0),
    PublishedStage("int8", 950.0, 24.0),
    PublishedStage("continuous batching", 620.0, 26.0),
]


def test_a_stage_has_all_overrides_before_it_and_of_a_key_the_last() -> None:
    stages = {"a": ["x=1", "+y=2"], "b": [], "c": ["y=3", "z=[1,2]"]}
    assert AblationSection(stages=stages).variants == {
        "a": ["x=1", "+y=2"], "b": ["x=1", "+y=2"], "c": ["x=1", "y=3", "z=[1,2]"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": {"a b": []}}, "ablation.stages: 'a b' is no name: letters, digits, - and _"),
        ({"stages": {"a": "x=1"}}, "ablation.stages.a must be a list of overrides"),
        ({"metrics": ["speed"]}, "ablation.metrics: unknown metric 'speed'"),
        ({"of": "both"}, "ablation.of: unknown value 'both' (known: latency, throughput)"),
    ],
)
def test_a_section_that_is_wrong_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AblationSection(**fields)
    assert str(caught.value).startswith(message)
    with pytest.raises(ConfigError, match=r"memory_gb must be a positive number or OOM, got 'lots'"):
        PublishedStage("a", 1.0, "lots")  # type: ignore[arg-type]


def test_gains_are_speeds_and_multiply() -> None:
    rows = with_gains([dataclasses.asdict(stage) for stage in LADDER])
    gains = [row["gain"] for row in rows]
    assert gains[0] == 1.0 and gains[1] == pytest.approx(5200 / 2300)
    assert np.prod(gains) == pytest.approx(rows[-1]["cumulative_gain"]) == pytest.approx(8.387, abs=1e-3)
    own = with_gains([{"stage": "a", "latency_ms": 2.0}, {"stage": "b", "latency_ms": 1.0, "gain": 1.9}])
    assert own[1]["gain"] == 1.9 and own[1]["cumulative_gain"] == 2.0


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run of three stages: the second half as slow again, the third twice as fast as the first."""
    out = tmp_path_factory.mktemp("ablation")
    stages = {"plain": ["x=1"], "worse": ["y=1"], "better": ["z=1"]}
    ablation = AblationSection(of="latency", stages=stages, reference=LADDER)
    factors = {"plain": 1.0, "worse": 1.5, "better": 0.5}
    drift = SimpleNamespace(value=1.0)
    engines = {name: Clocked(factor, 0.002, 1, drift=drift) for name, factor in factors.items()}
    arms = [Arm(name, ablation.variants[name], engine) for name, engine in engines.items()]
    section = AbSection(variants=ablation.variants, rounds=10, metrics=ablation.metrics)
    goal = {"metric": "cumulative_gain_better", "op": ">=", "value": 4, "source": "hope"}
    with run_into(out, "ablation", {"goals": [goal]}) as run:
        return run_ab(arms, WORKLOAD, section, run, ablation), out


def test_stages_in_turns_have_their_gains_whatever_the_machine_does(measured) -> None:
    result, out = measured
    rows = {row["stage"]: row for row in result["stages"]}
    assert list(rows) == ["plain", "worse", "better"] and rows["better"]["overrides"] == ["z=1"]
    assert rows["plain"]["gain"] == rows["plain"]["cumulative_gain"] == 1.0
    assert rows["worse"]["gain"] == pytest.approx(1 / 1.5, rel=0.02)
    assert rows["better"]["gain"] == pytest.approx(3, rel=0.02)
    assert rows["better"]["cumulative_gain_low"] < 2.02 and rows["better"]["cumulative_gain_high"] > 1.98
    assert rows["better"]["latency_ms"] == pytest.approx(rows["plain"]["latency_ms"] / 2, rel=0.02)
    assert (
        rows["worse"]["mean_tpot_ms"] > rows["better"]["mean_tpot_ms"]
        and "output_throughput" in rows["worse"]
    )
    assert rows["plain"]["memory_gb"] is None and rows["plain"]["equal_requests"] == 1.0
    assert result["metrics"]["gain_better"] == rows["better"]["gain"]
    assert [row["verdict"] for row in result["goals"]] == ["missed"]
    assert (out / "waterfall.png").is_file()
    assert json.loads((out / "result.json").read_text())["reference"][0]["memory_gb"] == "OOM"


def test_rows_are_shown_however_they_came_about(measured) -> None:
    def shown(result: dict[str, Any]) -> str:
        console = Console(width=140, record=True, file=io.StringIO())
        assert report_of(result) is not None and print_result(result, console)
        return console.export_text()

    text = shown(measured[0])
    assert "ablation, measured on" in text and "published" in text and "OOM" in text
    assert "better: z=1" in text and "E2E mean (ms): better is faster than plain by 2.0" in text
    stages = [{**dataclasses.asdict(stage), "overrides": ["a=1"]} for stage in LADDER[1:]]
    simulated = {
        "experiment": "whatever", "stages": stages, "cases": [], "metrics": {}, "config": {},
        "provenance": {}, "hardware": {"kind": "a100_80gb", "simulated": True},
    }  # fmt: skip
    text = shown(simulated)
    assert "simulated on a100_80gb" in text and "1.28x" in text and "3.71x" in text
    (axis,) = waterfall_plot(simulated).axes
    assert axis.get_title() == "simulated on a100_80gb"
    assert [bar.get_height() for bar in axis.patches] == [2300.0, 500.0, 850.0, 330.0, 620.0]
