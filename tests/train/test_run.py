"""The whole experiment from its command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.results.result import load_result

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "vocab_size=300 steps=6 batch_size=2 seq_len=32 warmup_steps=1 log_every=2 eval_every=4"
    " checkpoint_every=2 tracker=none model.hidden_size=16 model.num_hidden_layers=1"
    " model.num_attention_heads=2 model.num_key_value_heads=1 model.head_dim=8"
    " model.num_experts=4 model.num_experts_per_tok=2 model.moe_intermediate_size=8"
).split()


def _launch(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    places = [f"hydra.run.dir={folder}/run", f"checkpoint_dir={folder}/checkpoints"]
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "experiments.train", *SMALL, *places, *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_the_command_trains_exports_and_resumes(tmp_path: Path) -> None:
    done = _launch(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/run/model\nresults: {tmp_path}/run\n{{")
    result = load_result(tmp_path / "run")
    assert result["experiment"] == "train" and result["resumed_from"] == 0
    assert result["metrics"]["exported_held_out_perplexity"] > 1
    assert len(result["routing"]["counts"]) == 1 and len(result["provenance"]["checkpoint_hash"]) == 64
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [2, 4, 6]
    llm = LLM(tmp_path / "run" / "model")
    assert llm.generate("The", SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids

    again = _launch(tmp_path, "overwrite=true")
    assert again.returncode == 0 and load_result(tmp_path / "run")["resumed_from"] == 6
    other = _launch(tmp_path, "overwrite=true", "learning_rate=0.5")
    assert other.returncode == 2
    assert other.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "learning_rate (0.003 there, 0.5 here)" in other.stderr


@pytest.mark.slow
def test_a_wrong_place_ends_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("keep")
    done = _launch(tmp_path, f"export_dir={tmp_path}/precious")
    assert done.returncode == 2 and "is no model directory" in done.stderr
    assert not (tmp_path / "checkpoints").exists()
