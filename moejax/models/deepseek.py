"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437), and Kimi-K2, which has V3's configuration: latent
attention, experts in groups, ungated shared experts, first layers dense."""

from typing import Any

from moejax.core.config import LatentConfig, ModelConfig, RouterConfig
from moejax.core.errors import ConfigError
from moejax.models.family import Family, common_fields
from moejax.models.hf_config import HfFields

# What training used: the loss that balances experts, and how they were spread.
_TRAINING = ("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_lambda")


def read_experts(fields: HfFields, common: dict[str, Any], dense: int = 0, shared: int = 0) -> dict[str, Any]:
    """Returns `common` with the fields on experts, ungated shared ones and dense layers before; `dense` and
    `shared` are the family's default numbers of them."""
    hidden = int(fields.require("moe_intermediate_size"))
    dense = int(fields.take("first_k_dense_replace", default=dense))
    fields.only("moe_layer_freq", 1)
    return common | {
        "num_experts": int(fields.require("n_routed_experts", "num_local_experts")),
        "moe_intermediate_size": hidden,
        "intermediate_size": int(fields.require("intermediate_size")),
        "moe_layers": tuple(layer >= dense for layer in range(common["num_layers"])),
        "shared_expert_intermediate_size": hidden * int(fields.take("n_shared_experts", default=shared)),
        "shared_expert_gate": False,
    }


def read_v3_router(fields: HfFields) -> RouterConfig:
    """Returns DeepSeek-V3's router: sigmoid with a correction bias, groups by their two best experts."""
    fields.only_at(topk_method="noaux_tc", scoring_func="sigmoid")
    return RouterConfig(
        scores="sigmoid",
        correction_bias=True,
        groups=fields.count("n_group", 1),
        top_groups=fields.count("topk_group", 1),
        group_score="top2",
        scaling=float(fields.take("routed_scaling_factor", default=1.0)),
    )


def _read_common(fields: HfFields, interleaved: bool) -> dict[str, Any]:
    common = common_fields(fields, default_theta=1e4, default_eps=1e-6, interleaved=interleaved)
    fields.take(*_TRAINING)
    fields.take("qk_head_dim")  # the sum of two others
    latent = LatentConfig(
        kv_rank=fields.count("kv_lora_rank"),
        rope_dim=fields.count("qk_rope_head_dim"),
        nope_dim=fields.count("qk_nope_head_dim"),
        value_dim=fields.count("v_head_dim"),
        q_rank=fields.take("q_lora_rank"),
    )
    if common["num_kv_heads"] != common["num_heads"]:
        raise ConfigError(
            f"{fields.source}: num_key_value_heads {common['num_kv_heads']} is not num_attention_heads "
            f"{common['num_heads']}; with latent attention every head has keys and values of its own"
        )
    bias = bool(fields.take("attention_bias", default=False))
    return read_experts(fields, common) | {
        "num_kv_heads": 1,
        "head_dim": latent.nope_dim + latent.rope_dim,
        "latent": latent,
        "sliding_windows": (None,) * common["num_layers"],
        "qkv_bias": bias,
        "attention_out_bias": bias,
    }


def _read_v2(fields: HfFields) -> ModelConfig:
    method = str(fields.take("topk_method", default="greedy"))
    if method not in ("greedy", "group_limited_greedy"):
        raise ConfigError(
            f"{fields.source}: topk_method {method!r} is not implemented (greedy, group_limited_greedy)"
        )
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False)
    fields.only("mlp_bias", False)
    groups, top = fields.count("n_group", 1), fields.count("topk_group", 1)
    limited = method == "group_limited_greedy"
    router = RouterConfig(
        groups=groups if limited else 1,
        top_groups=top if limited else 1,
        scaling=float(fields.take("routed_scaling_factor", default=1.0)),
    )
    common = _read_common(fields, interleaved=True)
    return ModelConfig(family="deepseek_v2", router=router, norm_topk_prob=False, **common)


def _read_v3(fields: HfFields) -> ModelConfig:
    return ModelConfig(
        family="deepseek_v3",
        router=read_v3_router(fields),
        norm_topk_prob=bool(fields.take("norm_topk_prob", default=True)),
        mtp_layers=int(fields.take("num_nextn_predict_layers", "num_mtp_layers", default=0)),
        **_read_common(fields, interleaved=bool(fields.take("rope_interleave", default=True))),
    )


def write_experts(config: ModelConfig) -> dict[str, Any]:
    """Inverts `read_experts`, and `read_v3_router`."""
    dense = config.moe_layers.index(True) if any(config.moe_layers) else config.num_layers
    return {
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_expert_intermediate_size // config.moe_intermediate_size,
        "first_k_dense_replace": dense,
        "routed_scaling_factor": config.router.scaling,
        "n_group": config.router.groups,
        "topk_group": config.router.top_groups,
        "norm_topk_prob": config.norm_topk_prob,
        "attention_bias": config.qkv_bias,
    }


def _write_common(config: ModelConfig) -> dict[str, Any]:
    assert config.latent is not None
    return write_experts(config) | {
        "num_key_value_heads": config.num_heads,
        "kv_lora_rank": config.latent.kv_rank,
        "q_lora_rank": config.latent.q_rank,
        "qk_rope_head_dim": config.latent.rope_dim,
        "qk_nope_head_dim": config.latent.nope_dim,
        "v_head_dim": config.latent.value_dim,
    }


def _write_v2(config: ModelConfig) -> dict[str, Any]:
    if config.router.groups > 1:
        return _write_common(config) | {"topk_method": "group_limited_greedy"}
    return _write_common(config) | {"topk_method": "greedy", "n_group": None, "topk_group": None}


def _write_v3(config: ModelConfig) -> dict[str, Any]:
    return _write_common(config) | {
        "rope_interleave": config.rope.interleaved,
        "num_nextn_predict_layers": config.mtp_layers,
    }


DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", _read_v2, _write_v2)
DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3ForCausalLM", _read_v3, _write_v3)
