"""Mixtral (Jiang et al., arXiv 2401.04088): every layer routed, top-k renormalised, one sliding window."""

from typing import Any

from moejax.core.config import ModelConfig
from moejax.models.family import Family, all_routed, common_fields
from moejax.models.hf_config import HfFields


def _read(fields: HfFields) -> ModelConfig:
    common = common_fields(fields, default_theta=1e6, default_eps=1e-5)
    windows = (fields.take("sliding_window"),) * common["num_layers"]
    return ModelConfig(
        family="mixtral",
        norm_topk_prob=True,
        **all_routed(fields, common) | {"sliding_windows": windows},
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.moe_intermediate_size,
        "num_local_experts": config.num_experts,
        "head_dim": config.head_dim,
        "sliding_window": config.sliding_windows[0],
    }


MIXTRAL = Family("mixtral", "MixtralForCausalLM", _read, _write)
