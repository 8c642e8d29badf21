"""Shapes of published models without weights, whole and with their first layers alone."""

import pytest

from experiments.launch.compose import build_job, composer
from experiments.launch.schema import LatencyConfig, ModelSection
from moejax.core.errors import ConfigError
from moejax.models.decoder import Decoder
from moejax.models.registry import config_from_hf
from moejax.nn.param import num_params


def compose(*overrides: str) -> ModelSection:
    """Returns the section `model` of a latency run."""
    with composer("latency", LatencyConfig) as composed:
        job: LatencyConfig = build_job(LatencyConfig, composed.config(list(overrides)))
    return job.model


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral_8x7b", 46.7), ("qwen3_30b_a3b", 30.5), ("qwen3_235b_a22b", 235.1), ("olmoe_1b_7b", 6.9),
     ("qwen15_moe_a2_7b", 14.3), ("deepseek_v2_lite", 15.7), ("deepseek_v3", 671.0), ("kimi_k2", 1026.4),
     ("dense_175b", 174.6), ("gemma3_27b", 27.0), ("llama31_8b", 8.0), ("qwen3_0_6b", 0.6),
     ("granite30_1b_a400m", 1.3), ("gpt_oss_20b", 20.9), ("gpt_oss_120b", 116.8),
     ("glm_4_5_air", 106.9), ("minimax_m2", 228.7), ("minimax_text_01", 456.1), ("phi_mini_moe", 7.6)],
)  # fmt: skip
def test_dummy_shape_has_the_published_number_of_parameters(name: str, billions: float) -> None:
    model = Decoder(config_from_hf(compose(f"model={name}").hf_config))
    assert round(num_params(model) / 1e9, 1) == billions


def test_first_layers_of_a_dummy_model() -> None:
    model = compose("model=deepseek_v2_lite", "model.num_hidden_layers=2")
    config = config_from_hf(model.source)
    assert config.num_layers == 2 and config.moe_layers == (False, True)
    assert model.name == "DeepSeek-V2-Lite-2layers"
    for layers, what in (("28", "the model has 27"), ("0", "must be an integer of at least 1")):
        with pytest.raises(ConfigError, match=rf"model\.num_hidden_layers.*{what}"):
            _ = compose("model=deepseek_v2_lite", f"model.num_hidden_layers={layers}").source
    with pytest.raises(ConfigError, match=r"model\.num_hidden_layers.*needs model\.load_format=dummy"):
        compose("model.num_hidden_layers=2")
