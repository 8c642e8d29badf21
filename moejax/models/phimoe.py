"""Phi-MoE (GRIN, arXiv 2409.12136): two experts a token by SparseMixer, layer norms, biases."""

from typing import Any

from moejax.core.config import ModelConfig, RouterConfig
from moejax.models.family import Family, all_routed, common_fields
from moejax.models.hf_config import HfFields


def _read(fields: HfFields) -> ModelConfig:
    common = common_fields(fields, default_theta=1e6, default_eps=1e-5)
    fields.only("num_experts_per_tok", 2)  # transformers chooses two whatever it says
    fields.take("input_jitter_noise")  # of training
    bias = bool(fields.take("attention_bias", default=False))
    if common["tie_word_embeddings"]:
        fields.only("lm_head_bias", False)  # the embedding has none
    windows = (fields.take("sliding_window"),) * common["num_layers"]
    return ModelConfig(
        family="phimoe",
        router=RouterConfig("sparsemixer", tolerance=fields.take("router_jitter_noise", default=0.01)),
        norm="layer",
        norm_topk_prob=False,
        qkv_bias=bias,
        attention_out_bias=bias,
        lm_head_bias=bool(fields.take("lm_head_bias", default=False)),
        **all_routed(fields, common) | {"sliding_windows": windows},
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.moe_intermediate_size,
        "num_local_experts": config.num_experts,
        "router_jitter_noise": config.router.tolerance,
        "attention_bias": config.qkv_bias,
        "lm_head_bias": config.lm_head_bias,
        "sliding_window": config.sliding_windows[0],
        "head_dim": config.head_dim,
    }


PHIMOE = Family("phimoe", "PhimoeForCausalLM", _read, _write)
