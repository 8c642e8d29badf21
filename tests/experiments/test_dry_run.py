"""`--dry-run` says what a run would do and refuses what it would refuse; it leaves nothing."""

import importlib
from pathlib import Path

import jax
import pytest

from experiments.launch.app import launch
from moejax.core.config import EngineConfig
from moejax.core.parallel import ParallelConfig
from moejax.engine.llm import LLM
from moejax.engine.opening.start import cache_blocks

SMALL = ["workload.batch_size=[1,4]", "engine.max_num_seqs=4", "engine.max_model_len=128"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dry(experiment: str, *argv: str) -> int:
    return launch(importlib.import_module(f"experiments.{experiment}").main, experiment, [*argv, "--dry-run"])


def test_says_cases_memory_choices_and_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    unread = "quant.awq_grid=7"
    formula = "engine.memory_check=formula"
    assert dry("latency", *SMALL, "quant=int4_rtn_g64", unread, formula, "hydra.run.dir=here") == 0
    out, err = capsys.readouterr()
    assert "measures b1_p64_n32, b4_p64_n32; iterations 3; warmup 1\n" in out, err
    assert "writes here, about 0.5 MB\n" in out
    assert "GB: weights 3.3 MB (experts 2.1 MB, attention 132 kB, embeddings 1.0 MB, other " in out
    assert "), cache 1.3 MB, largest step 9.1 MB (formula)" in out
    assert f"  {unread} is ignored: for awq\n" in out
    assert "engine.num_blocks = 16 (4 sequences of 128 tokens; 1.3 MB a device)\n" in out
    assert list(tmp_path.iterdir()) == []


def test_plans_every_model_of_a_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    given = ["engine.memory_check=formula", "engine.max_model_len=128"]
    models = [f"serve.models.{name}=[engine.max_num_seqs={n}]" for name, n in (("a", 4), ("b", 8))]
    assert dry("serve", *given, *models) == 0
    out = capsys.readouterr().out
    for name, blocks in (("a", 16), ("b", 32)):
        assert f"  {name}: engine.num_blocks = {blocks} (" in out, out
        assert f"  {name}: memory of a device: " in out
    assert dry("serve", *given, "engine.max_num_seqs=4") == 0
    assert "  engine.num_blocks = 16 (" in capsys.readouterr().out
    assert dry("serve", *given, "serve.api_keys_file=none.txt") == 2
    assert "none.txt" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_lists_a_sweeps_jobs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert dry("latency", *SMALL, "engine.memory_check=formula", "-m", "engine.block_size=16,32") == 0
    out = capsys.readouterr().out
    assert out.startswith("a sweep of 2 jobs, in multirun/latency/")
    assert "job 0: workload.batch_size=[1,4] " in out and "engine.num_blocks = 32 (" in out
    assert "engine.block_size=32\n  writes multirun/latency/" in out  # what is as in job 0 is not said again
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("experiment", "argv", "said"),
    [
        ("latency", ["workload.prompt_len=4000"], "4000 + 32 tokens exceed the limit of 2048"),
        ("latency", ["model=qwen3_30b_a3b", "model.dtype=float32", "hardware=a100_80gb"], "of 85.9 GB: "),
        ("latency", ["hydra.run.dir=used"], "'used' holds a run already (result.json)"),
        ("stress", ["engine.max_model_len=16"], "stress.probe_tokens 24 leave no room"),
        ("generate", ["prompts=''"], "prompt"),
    ],
)
def test_refuses_what_a_run_refuses(
    experiment: str, argv: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Path("used").mkdir()
    Path("used/result.json").write_text("{}")
    assert dry(experiment, *argv) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
    assert list(tmp_path.rglob("*")) == [tmp_path / "used", tmp_path / "used/result.json"]


def test_a_planned_engine_has_the_sizes_of_one_that_is_opened() -> None:
    engine = EngineConfig(max_num_seqs=2, max_model_len=64)
    planned, opened = LLM("tiny", engine=engine, fill=False), LLM("tiny", engine=engine)
    assert repr(planned) == repr(opened)
    assert planned.resolutions == opened.resolutions


def test_a_planned_engines_cache_leaves_room_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LLM("tiny", fill=False).config

    class Device:
        platform = "gpu"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 50_000_000, "bytes_in_use": 10_000_000}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    blocks = [
        int(cache_blocks(EngineConfig(), config, 2048, ParallelConfig(), absent=absent).value)
        for absent in (0, 20_000_000)
    ]
    assert blocks[1] == blocks[0] // 2
