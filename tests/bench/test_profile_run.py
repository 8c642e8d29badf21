"""The profile experiment from beginning to end, on a model that compiles in seconds."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from moejax.bench.profile.capture import check, name_compiled_programs
from moejax.bench.profile.config import ProfileSection, ProfileWorkload
from moejax.bench.profile.run import PROFILE_FILE, run_profile
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError
from moejax.engine.llm import LLM
from moejax.perf.operation_costs import OPERATIONS
from moejax.results.result import load_result
from tests.bench.runs import run_into

WORKLOAD = ProfileWorkload(batch_size=2, prompt_len=12, output_len=6, iterations=3, warmup=1)


@pytest.fixture
def llm(tiny_config: ModelConfig) -> LLM:
    """Its programs are compiled anew: cached ones may be older than a scope."""
    engine = EngineConfig(max_num_seqs=2, max_model_len=32, compile_cache=False, max_num_batched_tokens=16)
    return LLM(tiny_config, engine=engine, load_format="dummy")


def run(llm: LLM, out: Path, kind: str = "auto") -> dict[str, Any]:
    with run_into(out, "profile", hardware_kind=kind) as this:
        return run_profile(llm, WORKLOAD, ProfileSection(compare=("h100",)), this)


@pytest.mark.optimized
@pytest.mark.slow
def test_a_profile(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parts add up to the step, nearly all is attributed, and the cost breakdown agrees with what ran."""
    run(llm, tmp_path)
    result = load_result(tmp_path)
    assert [row["phase"] for row in result["cases"]] == ["prefill", "decode"]
    assert result["metrics"]["recompiles_after_warmup"] == 0 and result["metrics"]["mfu_percent"] > 0
    for phase in result["roofline"]:
        parts = sum(row["measured_ms"] for row in phase["operations"])
        rest = phase["launch_overhead_ms"] + phase["host_gap_ms"] + phase["unattributed_ms"]
        assert parts + rest == pytest.approx(phase["measured_ms"])
        assert phase["unattributed_ms"] < 0.05 * phase["measured_ms"]
        assert {row["operation"] for row in phase["operations"]} <= OPERATIONS.keys()
        took = {row["operation"] for row in phase["operations"] if row["measured_ms"] > 0}
        assert {"qkv_projection", "attention", "experts_gate_up", "experts_down", "lm_head"} <= took
        assert set(phase["devices"]) == {"h100"}
    prefill, decode = result["roofline"]
    # 24 tokens of two prompts, 16 a step; five decode steps of three generations.
    assert prefill["steps_per_unit"] == 2 and decode["steps_per_unit"] == 1
    assert prefill["measured_units"] == 3 and 12 <= decode["measured_units"] <= 15
    detail = json.loads((tmp_path / PROFILE_FILE).read_text())
    assert (tmp_path / detail["trace"]).is_file()
    longest = detail["phases"][1]["instructions"]
    assert longest == sorted(longest, key=lambda row: -row["ms"]) and longest[0]["operation"] in OPERATIONS
    assert {"roofline.png", "residuals.png"} <= {path.name for path in tmp_path.iterdir()}
    assert "decode step:" in capsys.readouterr().err
    assert llm.engine.on_step is None


def test_refused_before_anything_runs(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'cpu' has no known peak for float16"):
        run(LLM(llm.config, dtype="float16", engine=llm.engine_config, load_format="dummy"), tmp_path)
    with pytest.raises(ConfigError, match="unknown device 'b2000'"):
        run(llm, tmp_path, kind="b2000")
    with pytest.raises(ConfigError, match=r"exceeds engine\.max_num_seqs 2"):
        check(llm, ProfileWorkload(batch_size=3, prompt_len=4, output_len=6))
    with pytest.raises(ConfigError, match=r"30 \+ 6 tokens exceed the limit of 32"):
        check(llm, ProfileWorkload(prompt_len=30, output_len=6))
    assert not llm.ledger.entries and not list(tmp_path.iterdir())


def test_programs_are_cached_by_their_scopes() -> None:
    key = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, key)
    try:
        name_compiled_programs()
        assert getattr(jax.config, key) is True
    finally:
        jax.config.update(key, before)
