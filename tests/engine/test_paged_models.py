"""Models whose attention is more than full and causal: windows, dense layers, and rotary bases that grow with
the sequence. Chunked, preempted and forked they give what the plain loop gives."""

import dataclasses

import numpy as np
import pytest

from moejax.core.config import ModelConfig, RopeConfig
from moejax.engine.llm import LLM
from tests.engine.paged import SCARCE, TIGHT, OneByOne, assert_clean, greedy, prompt
from tests.engine.tiny import FullForward, main_config, small_config, windowed_config
from tests.model_shapes import GEMMA, LATENT, LINEAR, LLAMA, SINKS
from tests.numerics import relative_error

CONFIGS: dict[str, ModelConfig] = {
    # Multi-query attention, a window longer than a block, a dense layer before the routed one.
    "windowed": windowed_config(),
    # A window within a block, and a layer without one.
    "half_windowed": windowed_config().replace(sliding_windows=(3, None), num_kv_heads=4),
    "dense": main_config(**LLAMA),
    "local_rope": main_config(**GEMMA),
    # Keys and values come of latents; the whole sequence at once makes each head's own.
    "latent": main_config(**LATENT, moe_layers=(False, True)),
    # Half of each head is rotated before it is normalised, or in pairs of neighbours.
    "rotated": main_config(qk_norm="rotated", rope=RopeConfig(partial_rotary_factor=0.5)),
    "interleaved": main_config(rope=RopeConfig(partial_rotary_factor=0.5, interleaved=True)),
    # A state a sequence, which begins with zeros wherever its sequence is computed anew.
    "linear": main_config(**LINEAR),
    "all_linear": main_config(**LINEAR | {"linear_layers": (True, True)}),
    "sinks": windowed_config().replace(**SINKS, sliding_windows=(3, None)),
}
DYNAMIC = small_config(
    max_position_embeddings=12, rope=RopeConfig("dynamic", theta=100.0, factor=4.0), initializer_range=0.4
)
WHOLE = dataclasses.replace(SCARCE, max_num_batched_tokens=64, token_buckets=[64])
LENGTHS = (3, 11, 16, 1, 22, 8)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("latent", "local_rope", "linear") else pytest.param(name, marks=pytest.mark.slow)
        for name in CONFIGS
    ],
)
def test_windows_latents_and_dense_layers(name: str) -> None:
    llm = LLM(CONFIGS[name], load_format="dummy", engine=SCARCE)
    whole = FullForward(llm.model)
    prompts = [prompt(n) for n in LENGTHS]
    outs = llm.generate(prompts, greedy(9))
    for ids, out in zip(prompts, outs, strict=True):
        assert out.outputs[0].token_ids == whole.greedy(ids, 9)
    assert llm.stats()["preemptions"] > 0
    assert_clean(llm)


@pytest.fixture(scope="module")
def dynamic() -> LLM:
    return LLM(DYNAMIC, load_format="dummy", engine=SCARCE)


@pytest.fixture(scope="module")
def dynamic_alone(dynamic: LLM) -> OneByOne:
    return OneByOne(dynamic.model)


@pytest.mark.slow
def test_the_growing_base_matters(dynamic: LLM, dynamic_alone: OneByOne) -> None:
    """Past the trained length tokens differ from those of a base that stays; before it they do not."""
    plain = LLM(DYNAMIC.replace(rope=RopeConfig(theta=100.0)), load_format="dummy", engine=TIGHT_SHORT)
    fixed = OneByOne(plain.model)
    prompts = [prompt(n, 1) for n in (18, 20, 22)]
    assert any(fixed.steps(ids, greedy(8))[0] != dynamic_alone.steps(ids, greedy(8))[0] for ids in prompts)
    assert fixed.steps(prompt(3, 1), greedy(8))[0] == dynamic_alone.steps(prompt(3, 1), greedy(8))[0]


TIGHT_SHORT = dataclasses.replace(TIGHT, max_model_len=12)


@pytest.mark.parametrize("chunked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_dynamic_base(chunked: bool, dynamic: LLM, dynamic_alone: OneByOne) -> None:
    """A prompt's keys are rotated for its whole length, though a chunk knows only a part of it; an output's
    for the length at which it came. Prompts below, across and past the trained length of 12."""
    assert dynamic.max_model_len == 32 > DYNAMIC.max_position_embeddings
    prompts = [prompt(n, 1) for n in (5, 9, 12, 13, 15, 16, 11)]
    params = [greedy(n) for n in (12, 8, 3, 9, 8, 7, 16)]
    engine = dynamic if chunked else dynamic.variant(WHOLE)
    for ids, p, out in zip(prompts, params, engine.generate(prompts, params), strict=True):
        assert out.outputs[0].token_ids == dynamic_alone.steps(ids, p)[0]
    assert_clean(engine)


def test_dynamic_base_after_preemption(dynamic: LLM, dynamic_alone: OneByOne) -> None:
    """What is computed anew takes the base that it was first computed with."""
    dynamic.reset_stats()
    prompts = [prompt(n, 2) for n in (14, 9, 16, 6, 11)]
    outs = dynamic.generate(prompts, greedy(16))
    for ids, out in zip(prompts, outs, strict=True):
        assert out.outputs[0].token_ids == dynamic_alone.steps(ids, greedy(16))[0]
    assert sum(out.metrics.preemptions > 0 for out in outs) >= 2
    assert_clean(dynamic)


@pytest.mark.slow
def test_scores_past_the_trained_length(dynamic: LLM) -> None:
    """In chunks of 8 as in one of 64."""
    sequences = [prompt(n, 3) for n in (6, 20, 31)]
    whole = dynamic.variant(WHOLE)
    for ours, theirs in zip(dynamic.score(sequences), whole.score(sequences), strict=True):
        assert np.isfinite(ours).all() and relative_error(ours, theirs) < 1e-5
