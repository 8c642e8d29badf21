"""The offload experiment: on the routing that it captures, and on the same from a file."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import LLM, EngineConfig, SamplingParams
from moejax.bench.offload.config import OffloadSection
from moejax.bench.offload.lookahead import next_router
from moejax.bench.offload.run import run_offload
from moejax.core.errors import ConfigError
from moejax.core.tiers import ExpertsConfig
from tests.bench.runs import run_into
from tests.model_shapes import DENSE, TWO_LAYERS


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(c) % 96 for c in text]


def engine(**experts: Any) -> LLM:
    made = EngineConfig(
        compile_cache=False, max_model_len=40, max_num_seqs=4, block_size=4, autotune="rules",
        capture_routing=True, seq_buckets=[4], token_buckets=[32], block_buckets=[16],
        experts=ExpertsConfig(**experts),
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
    *others, router = found["predictors"]
    assert router["predictor"] == "next_router" and router["layer_recall"][0] is None
    assert again["predictors"] == others
    added = {"stall_share_next_router", "moved_bytes_next_router"}
    assert again["cases"] == [{k: v for k, v in row.items() if k not in added} for row in found["cases"]]
    steps = OffloadSection(trace=str(tmp_path / "first"), batching="recorded", parts=2, shares=[1.0])
    assert run(tmp_path / "third", steps)["offload"]["traces"] == 2


def test_next_router_is_what_the_engine_foresees(tmp_path: Path) -> None:
    """The experts that an engine on disk fetches ahead are those that the replay is told of."""
    tokens = np.random.default_rng(1).integers(0, 96, (1, 12))
    with engine() as plain:
        guesses = next_router(plain.model, tokens)
    assert guesses.shape == (1, 12, 2, TWO_LAYERS.num_experts) and not guesses[:, :, 0].any()
    with engine(resident=1.0 - 1e-9, tier="disk", prefetch="next_router") as tiered:
        tiers, foreseen = tiered.engine.tiers, list[np.ndarray]()
        foresee = tiers.foresee
        tiers.foresee = lambda place, ids: (foreseen.append(ids), foresee(place, ids))
        tiered.generate([tokens[0].tolist()], SamplingParams(max_tokens=1, temperature=0))
    whole = np.zeros((12, TWO_LAYERS.num_experts + 1), bool)
    (ids,) = [each for each in foreseen if (each < TWO_LAYERS.num_experts).any()]
    rows = ids[(ids < TWO_LAYERS.num_experts).any(axis=1)]
    np.put_along_axis(whole, rows, True, axis=1)
    assert (whole[:, :-1] == guesses[0, :, 1]).all()


@pytest.mark.slow
def test_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(c) for c in np.random.default_rng(0).integers(32, 120, 130)))
    section = OffloadSection(
        mode="measured",
        text=str(text),
        seq_len=20,
        output_len=8,
        shares=[0.75],
        policies=["lru"],
        resamples=200,
        rounds=2,
    )
    opened: list[dict[str, Any]] = []

    def model(**experts: Any) -> LLM:
        opened.append(experts)
        return engine(**experts)

    with run_into(tmp_path / "out", "offload", {"offload": dataclasses.asdict(section)}) as this:
        found = run_offload(model, TWO_LAYERS, section, this, seed=0)
    assert [each["resident"] for each in opened] == [None, 0.75, 0.75, 0.75]
    assert [each.get("tier") for each in opened] == [None, "host", "disk", "disk"]
    everything, *tiered = found["cases"]
    assert everything["tpot_ratio"] == 1.0 and "hit_rate" not in everything
    assert all(case["tpot_ratio_low"] <= case["tpot_ratio"] <= case["tpot_ratio_high"] for case in tiered)
    for case, line in zip(tiered, found["timelines"][1:], strict=True):
        assert 0 < case["hit_rate"] <= case["best_hit_rate"] <= 1
        steps = len(line["misses"])
        assert sum(line["misses"]) == pytest.approx(case["step_misses"] * steps)
        assert sum(line["hits"]) / (sum(line["hits"]) + sum(line["misses"])) == pytest.approx(
            case["hit_rate"]
        )
        assert all(0 <= wait <= step for wait, step in zip(line["wait_ms"], line["step_ms"], strict=True))
    # All are the same requests with the same tokens and policy.
    assert len({case["hit_rate"] for case in tiered}) == 1 and tiered[2]["step_read_bytes"] > 0
    assert {p.name for p in (tmp_path / "out").glob("*.png")} == {"hits.png", "timeline.png"}
    assert "each engine from empty slots" in capsys.readouterr().err


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"offload\.shares must be numbers above 0 and at most 1"):
        OffloadSection(shares=[0.0])
    with pytest.raises(ConfigError, match=r"offload\.mode"):
        OffloadSection(mode="serve")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"offload\.policies: belady needs the future, .* choose among lru"):
        OffloadSection(mode="measured", policies=["static", "belady", "lru"])
    for nothing in ({"tiers": ["host"], "prefetch": ["next_router"]}, {"shares": [1.0]}, {"tiers": []}):
        options: dict[str, Any] = dict(nothing)
        with pytest.raises(ConfigError, match="no engine has experts in tiers; name a share below 1"):
            OffloadSection(mode="measured", **options)
    with pytest.raises(ConfigError, match=r"offload\.output_len must be"):
        OffloadSection(output_len=1)
    with pytest.raises(
        ConfigError, match=r"offload\.output_len=256 leaves no prompt of offload\.seq_len=256"
    ):
        OffloadSection(mode="measured", output_len=256)
    with pytest.raises(ConfigError, match=r"offload\.trace=none\.npz: there is no such file"):
        OffloadSection(trace="none.npz")
    with pytest.raises(ConfigError, match="has no experts to keep resident"):
        run(tmp_path, OffloadSection(), TWO_LAYERS.replace(**DENSE))
