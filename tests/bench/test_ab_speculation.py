"""The table of drafts, on a small model's engines: what it says is what the requests and steps were."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from moejax import LLM, EngineConfig, SpeculationConfig
from moejax.bench.ab.config import AbSection
from moejax.bench.ab.run import run_ab
from moejax.bench.ab.variants import Arm
from moejax.bench.backends.moejax import MoejaxBackend
from moejax.bench.latency.cases import answer_prompts, plan_batches
from moejax.bench.workload import COPIES, WorkloadConfig
from moejax.core.errors import ConfigError
from moejax.report.speculation import speculation_table
from tests.bench.runs import run_into
from tests.engine.tiny import main_config, write_model
from tests.examples import slow_but

ENGINE = EngineConfig(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32, compile_cache=False)
WORKLOAD = WorkloadConfig(batch_size=2, prompt_len=16, output_len=20)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_model(tmp_path_factory.mktemp("model"), main_config(), tokenizer=False)
    return LLM(folder, dtype="float32", engine=ENGINE)


def arms(llm: LLM, method: Any = "suffix") -> list[Arm]:
    engines = {
        "overlapped": ENGINE,
        "plain": dataclasses.replace(ENGINE, overlap=False),
        "drafts": dataclasses.replace(ENGINE, speculation=SpeculationConfig(method=method, k=3)),
    }
    return [Arm(name, [], MoejaxBackend(llm.variant(engine))) for name, engine in engines.items()]


@pytest.mark.parametrize("text", slow_but([], ["random", "copy", "own", "seen"]))
def test_the_table_of_drafts(llm: LLM, text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for plot in ("ratios_plot", "rounds_plot"):
        monkeypatch.setattr(f"moejax.report.ab.{plot}", lambda result: None)
    workload, section = (
        dataclasses.replace(WORKLOAD, text=text),
        AbSection(rounds=8, metrics=["median_tpot_ms"]),
    )
    with run_into(tmp_path, "latency_ab") as run:
        result = run_ab(arms(llm), workload, section, run)
    overlapped, plain, drafts = result["speculation"]
    assert [row["variant"] for row in result["speculation"]] == ["overlapped", "plain", "drafts"]
    for row in (overlapped, plain):
        assert (row["tokens_per_step"], row["rows_per_step"], row["acceptance_by_place"]) == (1.0, 2.0, [])
        assert row["mean_experts_hit"] == plain["mean_experts_hit"] and "speed_over_plain" not in row
    # Another way to the same: the requests' own counts, over the steps that the passes took.
    rows = [row for row in result["iterations"] if row["variant"] == "drafts"]
    assert {row["tokens_per_step"] for row in rows} == {drafts["tokens_per_step"]}  # nothing is remembered
    assert (drafts["draft_acceptance"] == 1.0) == (text == "seen")
    assert all(case["equal_requests"] == 1.0 for case in result["cases"])
    for loop in ("plain", "overlapped"):
        step = drafts["tokens_per_step"] / drafts[f"speed_over_{loop}"]
        assert drafts[f"step_time_over_{loop}"] == pytest.approx(step)
        even = drafts[f"break_even_over_{loop}"]
        assert 1 + even * (drafts["rows_per_step"] / 2 - 1) == pytest.approx(max(1.0, step))
        assert result["metrics"][f"speed_over_{loop}_drafts"] == drafts[f"speed_over_{loop}"]
    if text == "seen":
        assert drafts["acceptance_by_place"] == [1.0] * 3 and drafts["tokens_per_step"] > 3
        assert drafts["experts_over_plain"] > 1 < drafts["bytes_over_plain"]
    console = Console(width=160, record=True)
    console.print(speculation_table(result["speculation"]))
    assert f"{drafts['tokens_per_step']:.2f}" in console.export_text()


@pytest.mark.slow
def test_single_tokens_have_no_table(llm: LLM, tmp_path: Path) -> None:
    workload = dataclasses.replace(WORKLOAD, output_len=1)
    with run_into(tmp_path, "latency_ab") as run:
        result = run_ab(arms(llm), workload, AbSection(rounds=8, metrics=["median_ttft_ms"]), run)
    assert result["speculation"] == [] and result["verdicts"]


def test_prompts_that_the_model_has_answered_itself(llm: LLM) -> None:
    workload = dataclasses.replace(WORKLOAD, text="own")
    backend = MoejaxBackend(llm)
    plan = plan_batches([backend], workload)
    answer_prompts(plan, [backend], workload)
    ((case, prompts),) = plan
    ((_, drawn),) = plan_batches([backend], WORKLOAD)
    for prompt, random in zip(prompts, drawn, strict=True):
        start = case.prompt_len // COPIES
        assert len(prompt) == case.prompt_len and prompt[:start] == random[:start]
        (out,) = llm.generate([prompt[:start]], WORKLOAD.sampling(case.prompt_len - start))
        assert prompt[start:] == out.outputs[0].token_ids


def test_no_engine_of_ours_cannot_answer() -> None:
    peer: Any = SimpleNamespace(vocab_size=64, encode=None)
    with pytest.raises(ConfigError, match=r"workload\.text=own needs an engine of moejax"):
        plan_batches([peer], dataclasses.replace(WORKLOAD, text="own"))
