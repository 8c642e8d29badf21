"""GLM-4.5 (arXiv 2508.06471) and dots.llm1 (arXiv 2506.05767): grouped queries, and DeepSeek-V3's experts."""

from typing import Any

from moejax.core.config import ModelConfig
from moejax.models.deepseek import read_experts, read_v3_router, write_experts
from moejax.models.family import Family, common_fields
from moejax.models.hf_config import HfFields, layer_types, layer_windows


def _read_glm4(fields: HfFields) -> ModelConfig:
    common = common_fields(fields, default_theta=1e4, default_eps=1e-5, partial_rotary_factor=0.5)
    return ModelConfig(
        family="glm4_moe",
        router=read_v3_router(fields),
        norm_topk_prob=bool(fields.take("norm_topk_prob", default=True)),
        mtp_layers=int(fields.take("num_nextn_predict_layers", "num_mtp_layers", default=1)),
        sliding_windows=(None,) * common["num_layers"],
        qk_norm="head" if fields.take("use_qk_norm", default=False) else "none",
        qkv_bias=bool(fields.take("attention_bias", default=False)),
        **read_experts(fields, common, dense=1, shared=1),
    )


def _write_glm4(config: ModelConfig) -> dict[str, Any]:
    return write_experts(config) | {
        "head_dim": config.head_dim,
        "partial_rotary_factor": config.rope.partial_rotary_factor,
        "use_qk_norm": config.qk_norm == "head",
        "num_nextn_predict_layers": config.mtp_layers,
    }


def _read_dots1(fields: HfFields) -> ModelConfig:
    common = common_fields(fields, default_theta=1e4, default_eps=1e-6)
    layers, bias = common["num_layers"], bool(fields.take("attention_bias", default=False))
    fields.take("sliding_window", "use_sliding_window")  # transformers does not read the second
    window = fields.raw.get("sliding_window", 4096)  # null is none, and not the default
    first = int(fields.take("max_window_layers", default=62))
    sliding = [window is not None and layer >= first for layer in range(layers)]
    return ModelConfig(
        family="dots1",
        router=read_v3_router(fields),
        norm_topk_prob=bool(fields.take("norm_topk_prob", default=False)),
        sliding_windows=layer_windows(fields, layers, window, sliding),
        qk_norm="head",
        qkv_bias=bias,
        attention_out_bias=bias,
        **read_experts(fields, common),
    )


def _write_dots1(config: ModelConfig) -> dict[str, Any]:
    return write_experts(config) | {
        "head_dim": config.head_dim,
        "sliding_window": next((w for w in config.sliding_windows if w is not None), None),
        "layer_types": layer_types(config.sliding_windows),
    }


GLM4_MOE = Family("glm4_moe", "Glm4MoeForCausalLM", _read_glm4, _write_glm4)
DOTS1 = Family("dots1", "Dots1ForCausalLM", _read_dots1, _write_dots1)
