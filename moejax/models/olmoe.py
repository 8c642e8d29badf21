"""OLMoE (Muennighoff et al., arXiv 2409.02060): query/key norm over the whole projection, clipped q, k, v."""

from typing import Any

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.models.family import Family, all_routed, common_fields
from moejax.models.hf_config import HfFields


def _read(fields: HfFields) -> ModelConfig:
    common = common_fields(fields, default_theta=1e4, default_eps=1e-5)
    if common["head_dim"] * common["num_heads"] != common["hidden_size"]:
        raise ConfigError(
            f"{fields.source}: head_dim {common['head_dim']} x {common['num_heads']} heads is not "
            f"hidden_size {common['hidden_size']}; OLMoE's query norm spans hidden_size"
        )
    bias, clip = bool(fields.take("attention_bias", default=False)), fields.take("clip_qkv")
    return ModelConfig(
        family="olmoe",
        norm_topk_prob=bool(fields.take("norm_topk_prob", default=False)),
        qk_norm="projection",
        qkv_bias=bias,
        attention_out_bias=bias,
        clip_qkv=None if clip is None else float(clip),
        **all_routed(fields, common),
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.moe_intermediate_size,
        "num_experts": config.num_experts,
        "norm_topk_prob": config.norm_topk_prob,
        "attention_bias": config.qkv_bias,
        "clip_qkv": config.clip_qkv,
    }


OLMOE = Family("olmoe", "OlmoeForCausalLM", _read, _write)
