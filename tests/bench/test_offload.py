"""The offload experiment: on the routing that it captures, and on the same from a file."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import LLM, EngineConfig
from moejax.bench.offload.config import OffloadSection
from moejax.bench.offload.run import run_offload
from moejax.core.errors import ConfigError
from tests.bench.runs import run_into
from tests.model_shapes import DENSE, TWO_LAYERS


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(c) % 96 for c in text]


def engine() -> LLM:
    made = EngineConfig(
        compile_cache=False, max_model_len=40, max_num_seqs=4, block_size=4, autotune="rules",
        capture_routing=True, seq_buckets=[4], token_buckets=[32], block_buckets=[16],
    )  # fmt: skip
    llm = LLM(TWO_LAYERS, load_format="dummy", seed=0, engine=made)
    llm.tokenizer = Letters()  # type: ignore[assignment]
    return llm


def run(out: Path, section: OffloadSection, shape: Any = TWO_LAYERS) -> dict[str, Any]:
    with run_into(out, "offload", {"offload": dataclasses.asdict(section)}) as this:
        return run_offload(engine, shape, section, this, seed=0)


def test_captured_and_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(c) for c in np.random.default_rng(0).integers(32, 120, 130)))
    options: dict[str, Any] = {"shares": [0.75, 1.0], "resamples": 200}
    found = run(tmp_path / "first", OffloadSection(text=str(text), seq_len=20, **options))
    assert json.loads((tmp_path / "first" / "result.json").read_text()) == found
    accesses = 6 * 20 * 2 * TWO_LAYERS.num_experts_per_tok  # the text's last window is too short
    assert found["offload"]["traces"] == 6 and found["offload"]["accesses"] == accesses
    assert (tmp_path / "first" / "hits.png").is_file() and "predictor" in capsys.readouterr().err
    for case in found["cases"]:
        assert case["belady_gap"] >= 0 and case["hit_rate_low"] <= case["hit_rate"] <= case["hit_rate_high"]
        misses = round((1 - case["hit_rate"]) * accesses)
        assert case["missed_bytes"] == misses * found["offload"]["expert_bytes"] == case["moved_bytes"]
        assert case["stall_share_transition"] <= case["stall_share"]
    again = run(tmp_path / "second", OffloadSection(trace=str(tmp_path / "first"), **options))
    assert again["cases"] == found["cases"] and again["predictors"] == found["predictors"]
    steps = OffloadSection(trace=str(tmp_path / "first"), batching="recorded", parts=2, shares=[1.0])
    assert run(tmp_path / "third", steps)["offload"]["traces"] == 2


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"offload\.shares must be numbers above 0 and at most 1"):
        OffloadSection(shares=[0.0])
    with pytest.raises(ConfigError, match=r"offload\.mode"):
        OffloadSection(mode="serve")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"offload\.trace=none\.npz: there is no such file"):
        OffloadSection(trace="none.npz")
    with pytest.raises(ConfigError, match="has no experts to keep resident"):
        run(tmp_path, OffloadSection(), TWO_LAYERS.replace(**DENSE))
