"""`python -m experiments.ablation`: its stages as configurations, and mistakes in one line."""

import json
from pathlib import Path

import pytest

from experiments.ablation import main
from experiments.launch.app import launch
from experiments.launch.command_line import translate
from experiments.launch.notebook import compose
from experiments.launch.variants import compose_variants

TWO = ["ablation.stages.a=[engine.overlap=false]", "ablation.stages.b=[quant=int8]"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_stage_is_the_one_before_and_its_own() -> None:
    argv = ["experiment=ladder", "workload.num_requests=4", "ablation.stages.kv=[quant.kv_cache=int8]"]
    config = compose(argv, "ablation")
    stages = compose_variants(config, "ablation", translate(argv))
    assert list(stages) == ["plain", "grouped", "fitted", "overlap", "int8", "continuous", "kv"]
    assert [stage.engine.moe.execution for stage in stages.values()] == ["dense"] + ["grouped"] * 6
    assert [stage.engine.batching for stage in stages.values()] == ["static"] * 5 + ["continuous"] * 2
    assert stages["overlap"].quant.method == "none" and stages["kv"].quant.method == "rtn"
    assert stages["kv"].quant.kv_cache == "int8" and stages["kv"].workload.num_requests == 4
    assert config.ab.metrics == config.ablation.metrics and len(config.ablation.reference) == 5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "ablation.stages needs at least two: add 'ablation.stages.NAME=[KEY=VALUE]'"),
        (
            [*TWO, "ablation.stages.c=[engine.overlp=true]"],
            "ablation.stages.c: unknown key 'engine.overlp'; did",
        ),
        ([*TWO, "ablation.stages.c=[]"], "ablation.stages.c is the same configuration as b"),
        (
            [*TWO, "ablation.stages.c=[batches.iterations=9]"],
            "ablation.stages.c changes 'batches', which all",
        ),
        ([*TWO, "ablation.reference=[{stage:x}]"], "'ablation.reference[0].latency_ms' has no value yet"),
        (
            [*TWO, "ab.variants.x=[quant=int8]"],
            "ab.variants: the variants of an ablation are ablation.stages",
        ),
        ([*TWO, "ablation.stagez.a=[]"], "unknown key 'ablation.stagez.a'; did you mean 'ablation.stages"),
        ([*TWO, "workload=poison"], "workload=poison: unknown option 'poison'; did you mean 'poisson'?"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(argv: list[str], message: str, capsys) -> None:
    assert launch(main, "ablation", argv, ahead=True) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.err.count("\n") == 1, captured.err
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.slow
def test_stages_of_fixed_batches_run_on_the_shipped_model(capsys) -> None:
    argv = [
        "ablation.of=latency", "batches.batch_size=[1,2]", "batches.prompt_len=4", "batches.output_len=4",
        "engine.autotune=rules", "ablation.stages.dense=[engine.moe.execution=dense]",
        "ablation.stages.grouped=[engine.moe.execution=grouped]",
        "ablation.stages.measured=[engine.autotune=cached]",
        "ablation.stages.int8=[quant=int8]", "tracker=none", "ab.rounds=9", "ab.metrics=[mean_e2el_ms]",
    ]  # fmt: skip
    assert launch(main, "ablation", argv, ahead=True) == 0, capsys.readouterr().err
    folder = capsys.readouterr().out.splitlines()[0].removeprefix("results: ")
    result = json.loads(Path(folder, "result.json").read_text())
    assert len(result["cases"]) == 10 and [row["stage"] for row in result["stages"]][-1] == "int8"
    # What autotuning chooses is laid out with the weights, which are then no other stage's.
    assert {variant["name"]: variant["weights"] for variant in result["variants"]}["measured"] == "its own"
    assert result["stages"][3]["memory_gb"] < result["stages"][2]["memory_gb"]
    assert result["metrics"]["recompiles_after_warmup"] == 0
