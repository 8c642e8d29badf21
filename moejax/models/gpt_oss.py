"""gpt-oss (arXiv 2508.10925): attention sinks, windows in turn with full attention, biases everywhere, and
experts with a clamped SwiGLU."""

import dataclasses
from typing import Any

from moejax.core.config import ClampedSwiglu, ModelConfig, RouterConfig
from moejax.models.family import Family, all_routed, common_fields
from moejax.models.hf_config import HfFields, layer_types, layer_windows

_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_WINDOW = 128


def _read(fields: HfFields) -> ModelConfig:
    if fields.raw.get("rope_parameters") is None and fields.raw.get("rope_scaling") is None:
        fields = dataclasses.replace(fields, raw=fields.raw | {"rope_parameters": _ROPE})
    common = common_fields(fields, default_theta=1.5e5, default_eps=1e-5)
    fields.take("experts_per_token", "initial_context_length")  # said by other fields, too
    layers, window = common["num_layers"], fields.take("sliding_window", default=_WINDOW)
    bias = bool(fields.take("attention_bias", default=True))
    limit, alpha = fields.take("swiglu_limit", default=7.0), fields.take("swiglu_alpha", default=1.702)
    return ModelConfig(
        family="gpt_oss",
        **all_routed(fields, common)
        | {
            "head_dim": int(fields.require("head_dim")),
            "sliding_windows": layer_windows(fields, layers, window, [i % 2 == 0 for i in range(layers)]),
            "router": RouterConfig(bias=True),
            "expert_bias": True,
            "expert_swiglu": ClampedSwiglu(float(limit), float(alpha)),
            "attention_sinks": True,
            "qkv_bias": bias,
            "attention_out_bias": bias,
            # Published checkpoints do not say it.
            "dtype": common["dtype"] if fields.take("dtype", "torch_dtype") else "bfloat16",
        },
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    swiglu = config.expert_swiglu or ClampedSwiglu()
    return {
        "intermediate_size": config.moe_intermediate_size,
        "num_local_experts": config.num_experts,
        "head_dim": config.head_dim,
        "layer_types": layer_types(config.sliding_windows),
        "sliding_window": next((w for w in config.sliding_windows if w is not None), _WINDOW),
        "attention_bias": config.qkv_bias,
        "swiglu_limit": swiglu.limit,
        "swiglu_alpha": swiglu.alpha,
    }


GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", _read, _write)
