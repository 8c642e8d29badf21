"""Routing policies: text by steps says what the engine's decode steps do; the experiment."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from moejax import LLM, EngineConfig, MoeConfig, SamplingParams
from moejax.bench.common.held_out import Windows
from moejax.bench.quantization.evaluate import Evaluator, routing_changes
from moejax.bench.routing_policies.config import PolicyPreset, PolicySpeed, RoutingPoliciesSection
from moejax.bench.routing_policies.run import mark_pareto, run_policies
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.report.experiments import save_plots
from tests.bench.runs import run_into
from tests.examples import slow_but
from tests.model_shapes import DENSE, LATENT, SINKS, TWO_LAYERS
from tests.numerics import tolerance

WIDE = TWO_LAYERS.replace(num_experts_per_tok=4, initializer_range=0.2)
FAMILIES = {
    "gqa": WIDE,
    "latents": WIDE.replace(**LATENT | {"router": dataclasses.replace(LATENT["router"], top_groups=3)}),
    "windows_with_sinks": WIDE.replace(**SINKS, sliding_windows=(5, None)),
}
PRESETS = {
    "batch": PolicyPreset("batch", min_experts=1),
    "bias": PolicyPreset("bias", rate=0.1),
    "ratio": PolicyPreset("ratio", threshold=0.6),
    "six": PolicyPreset("top_p", threshold=0.9, max_experts=6),
    # One row an expert, in the steps of prompts as well, which are padded.
    "drop": PolicyPreset(capacity_factor=0.25),
    "reroute": PolicyPreset(capacity_factor=0.25, overflow="reroute"),
}
B, T = 4, 12


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(c) % 96 for c in text]


def engine(config: ModelConfig, preset: PolicyPreset | None) -> LLM:
    moe = MoeConfig() if preset is None else preset.of(MoeConfig())
    made = EngineConfig(
        compile_cache=False, seq_buckets=[B], token_buckets=[B], block_buckets=[16], max_model_len=40,
        max_num_seqs=B, block_size=4, autotune="rules", overlap=False, moe=moe,
    )  # fmt: skip
    llm = LLM(config, load_format="dummy", seed=0, engine=made)
    llm.tokenizer = Letters()  # type: ignore[assignment]
    return llm


@pytest.mark.parametrize(
    ("family", "name"),
    slow_but(
        [],
        [(family, name) for family in FAMILIES for name in PRESETS],
    ),
)
def test_text_by_steps_is_what_decode_steps_give(family: str, name: str) -> None:
    """B sequences of one token decode together; their outputs are windows, a position of which is a step."""
    with engine(FAMILIES[family], None) as full, engine(FAMILIES[family], PRESETS[name]) as llm:
        params = SamplingParams(max_tokens=T, temperature=1.0, seed=1, ignore_eos=True, logprobs=0)
        outputs = llm.generate([[5 + 7 * i] for i in range(B)], params)
        told = [sum(each.logprob for each in output.outputs[0].logprobs or []) for output in outputs]
        tokens = np.array([[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs], np.int32)
        windows = Windows(tokens, np.ones((B, T), bool), "", 1.0)
        sums = Evaluator(full.model, windows, B)(llm.model, by_step=True)
    np.testing.assert_allclose(-sums.nats[1], told, atol=40 * T * tolerance(32, 32))
    assert np.abs(sums.nats[0] - sums.nats[1]).max() > 0.01 and sums.flipped[0].min() > 0


def section(out: Path, **options: Any) -> RoutingPoliciesSection:
    text = out / "text.txt"
    text.write_text("".join(chr(c) for c in np.random.default_rng(0).integers(32, 120, 300)))
    speed = PolicySpeed(batch_size=B, prompt_len=3, output_len=5, iterations=1)
    fields = {"presets": PRESETS, "text": str(text), "seq_len": 20, "resamples": 200, "speed": speed}
    return RoutingPoliciesSection(**fields | options)


@pytest.mark.slow
def test_the_experiment(tmp_path: Path) -> None:
    made = section(tmp_path, policies=["ratio", "six", "batch", "drop"])
    config = {"routing_policies": dataclasses.asdict(made)}
    with run_into(tmp_path / "run", "routing_policies", config) as run:
        result = run_policies(lambda preset: engine(WIDE, preset), made, run)
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result
    rows = {row["name"]: row for row in result["cases"]}
    assert list(rows) == ["top_k", "ratio", "six", "batch", "drop"]
    assert rows["top_k"]["experts_per_token"] == 4 and rows["top_k"]["kl"] == 0
    assert 1 <= rows["ratio"]["experts_per_token"] < 4 < rows["six"]["experts_per_token"] < 6
    assert rows["batch"]["experts_per_token"] > 3
    assert rows["batch"]["mean_experts_hit"] < rows["top_k"]["mean_experts_hit"]
    assert rows["batch"]["decode_step_bytes"] < rows["top_k"]["decode_step_bytes"]
    assert rows["ratio"]["decode_step_flops"] < rows["top_k"]["decode_step_flops"]
    assert rows["drop"]["dropped_share"] > 0.1 and "dropped_share" not in rows["ratio"]
    assert all(rows[name]["kl"] > 0 and rows[name]["decode_ratio"] > 0 for name in made.policies)
    assert (tmp_path / "run" / "pareto.png").is_file()
    assert save_plots(result, tmp_path)


def test_changes_between_choices_of_different_width() -> None:
    base, other = jnp.array([[0, 1], [2, 8], [3, 4]]), jnp.array([[1, 0, 8], [2, 5, 8], [3, 8, 8]])
    assert [int(count) for count in routing_changes(base, other, 8)] == [2, 1]
    assert [int(count) for count in routing_changes(other, base, 8)] == [2, 1]


def test_the_points_that_nothing_beats() -> None:
    rows = [
        {"kl": 0.0, "decode_ratio": 1.0, "mean_experts_hit": 12.0},
        {"kl": 0.1, "decode_ratio": 1.2, "mean_experts_hit": 13.0},
        {"kl": 0.2, "decode_ratio": 1.1, "mean_experts_hit": 6.0},
    ]
    mark_pareto(rows)
    assert [row["pareto_time"] for row in rows] == [True, True, False]
    assert [row["pareto_experts"] for row in rows] == [True, False, True]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"policies": ["top"]}, r"routing_policies\.policies: unknown policy 'top'"),
        ({"policies": ["bias", "bias"]}, r"routing_policies\.policies: a name stands there twice"),
        ({"presets": {}}, r"routing_policies\.presets is empty"),
        ({"seq_len": 60}, r"routing_policies\.seq_len=60 and one token more exceed the limit of 40"),
    ],
)
def test_mistakes(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words), run_into(tmp_path / "run", "routing_policies", {}) as run:
        run_policies(lambda preset: engine(WIDE, preset), section(tmp_path, **fields), run)


def test_a_model_without_experts(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="has no experts to choose among"),
        run_into(tmp_path / "run", "routing_policies", {}) as run,
    ):
        run_policies(lambda preset: engine(TWO_LAYERS.replace(**DENSE), preset), section(tmp_path), run)
