"""Granite-MoE (IBM's Granite 3.0, PowerMoE of arXiv 2408.13359): every layer routed; factors on embeddings,
residuals, attention and logits."""

from typing import Any

from moejax.core.config import ModelConfig
from moejax.models.family import Family, all_routed, common_fields
from moejax.models.hf_config import HfFields

_FACTORS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")


def _read(fields: HfFields) -> ModelConfig:
    common = common_fields(fields, default_theta=1e4, default_eps=1e-6)
    bias = bool(fields.take("attention_bias", default=False))
    factors: dict[str, Any] = {name: float(fields.take(name, default=1.0)) for name in _FACTORS}
    return ModelConfig(
        family="granitemoe",
        norm_topk_prob=True,
        qkv_bias=bias,
        attention_out_bias=bias,
        **factors,
        **all_routed(fields, common),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.moe_intermediate_size,
        "num_local_experts": config.num_experts,
        "attention_bias": config.qkv_bias,
        "head_dim": config.head_dim,
        **{name: getattr(config, name) for name in _FACTORS},
        "attention_multiplier": config.attention_scale,
    }


GRANITE_MOE = Family("granitemoe", "GraniteMoeForCausalLM", _read, _write)
