"""The configuration dataclasses check each field and each pair that must fit together."""

import dataclasses
import math
from typing import Any

import pytest

from moejax.core.config import EngineConfig, ModelConfig, RopeConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.core.quant import QuantConfig

INF, NAN = math.inf, math.nan
COUNTS = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "intermediate_size", "max_position_embeddings",
)  # fmt: skip


def refusal(config: Any, /, **fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**fields)
    text = str(caught.value)
    assert text and "\n" not in text
    return text


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.0, "1", None, True])
def test_sizes_are_positive_integers(name: str, value: Any, tiny_config: ModelConfig) -> None:
    text = refusal(tiny_config.replace, **{name: value})
    assert text == f"{name} must be an integer of at least 1, got {value!r}"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_kv_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim must be even for rotary embedding, got 7"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds num_experts 8"),
        ({"moe_layers": (True,)}, "moe_layers has 1 entries for num_hidden_layers 2"),
        ({"sliding_windows": (None,) * 3}, "sliding_windows has 3 entries for num_hidden_layers 2"),
        ({"sliding_windows": (None, 0)}, "sliding_windows[1] must be an integer of at least 1, got 0"),
        ({"sliding_windows": (4.5, None)}, "sliding_windows[0] must be an integer of at least 1, got 4.5"),
        ({"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size must be an integer"),
        ({"clip_qkv": 0.0}, "clip_qkv must be a positive number, got 0.0"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps must be a positive number, got nan"),
        ({"qk_norm": "heads"}, "qk_norm: unknown value 'heads'; did you mean 'head'?"),
        ({"dtype": "flaot32"}, "dtype: unknown value 'flaot32'; did you mean 'float32'?"),
    ],
)
def test_model(changes: dict[str, Any], says: str, tiny_config: ModelConfig) -> None:
    assert refusal(tiny_config.replace, **changes).startswith(says)


def test_what_a_model_may_be(tiny_config: ModelConfig) -> None:
    assert tiny_config.replace(num_experts_per_tok=8, num_kv_heads=1, clip_qkv=8).num_experts_per_tok == 8
    assert tiny_config.attention_scale == 1 / math.sqrt(8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config.num_heads = 8  # type: ignore[misc]
    assert hash(tiny_config) == hash(tiny_config.replace())


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kind": "ntk"}, "rope_type: unknown value 'ntk'"),
        ({"kind": "lama3"}, "rope_type: unknown value 'lama3'; did you mean 'llama3'?"),
        *(
            ({"theta": v}, f"rope_theta must be a positive number, got {v!r}")
            for v in (0, -1.0, NAN, INF, "1")
        ),
        *(
            ({"kind": "linear", "factor": v}, f"rope factor must be a positive number, got {v!r}")
            for v in (0.0, NAN, None, True)
        ),
        ({"kind": "yarn", "factor": 2.0}, "rope_type 'yarn' needs original_max_position_embeddings"),
        ({"kind": "llama3", "factor": 2.0}, "rope_type 'llama3' needs original_max_position_embeddings"),
    ],
)
def test_rope(fields: dict[str, Any], says: str) -> None:
    assert refusal(RopeConfig, **fields).startswith(says)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"execution": "groupd"}, "engine.moe.execution: unknown value 'groupd'; did you mean 'grouped'?"),
        ({"execution": None}, "engine.moe.execution: unknown value 'None'"),
        ({"expert_layout": "fde"}, "engine.moe.expert_layout: unknown value 'fde'"),
        ({"overflow": "rerout"}, "engine.moe.overflow: unknown value 'rerout'; did you mean 'reroute'?"),
        (
            {"grouped_matmul": "block_mixed"},
            "engine.moe.grouped_matmul: unknown value 'block_mixed'; did you mean 'blocks_mixed'?",
        ),
        *(
            ({"capacity_factor": v}, f"engine.moe.capacity_factor must be a positive number, got {v!r}")
            for v in (0, -1.5, NAN, INF, "1", None, True)
        ),
        *(
            ({"block_rows": v}, f"engine.moe.block_rows must be an integer of at least 1, got {v!r}")
            for v in (0, 1.5, "4", False)
        ),
    ],
)
def test_moe(fields: dict[str, Any], says: str) -> None:
    assert refusal(MoeConfig, **fields).startswith(says)


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs"])
@pytest.mark.parametrize("value", [0, -4, 2.0, "8", True])
def test_engine_limits(name: str, value: Any) -> None:
    text = refusal(EngineConfig, **{name: value})
    assert text == f"engine.{name} must be an integer of at least 1, got {value!r}"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"platform": "cup"},
            "engine.platform: unknown value 'cup'; did you mean 'cpu'? (known: auto, cpu, gpu)",
        ),
        ({"platform": None}, "engine.platform: unknown value 'None'"),
        ({"compile_cache": 1}, "engine.compile_cache must be True or False, got 1"),
        ({"moe": {}}, "engine.moe must be a MoeConfig, got {}"),
        ({"moe": None}, "engine.moe must be a MoeConfig, got None"),
        ({"max_num_seqs": None}, "engine.max_num_seqs must be an integer of at least 1, got None"),
    ],
)
def test_engine(fields: dict[str, Any], says: str) -> None:
    assert refusal(EngineConfig, **fields).startswith(says)


def test_engine_defaults() -> None:
    config = EngineConfig()
    assert config.max_model_len is None and config.moe == MoeConfig() and config.platform == "auto"


@pytest.mark.parametrize("method", ["gptqq", "", None, 4])
def test_quant(method: Any) -> None:
    text = refusal(QuantConfig, method=method)
    assert (
        text.startswith("quant.method: unknown value")
        and "(known: awq, gptq, magnitude, none, rtn, smoothquant, wanda)" in text
    )
    assert QuantConfig(method="none") == QuantConfig() and QuantConfig().is_none
