"""Qwen2-MoE (shared expert with a sigmoid gate, biased q, k and v) and Qwen3-MoE (per-head query/key norm,
no shared expert; Yang et al., arXiv 2505.09388); a model type of our own, Qwen3-MoE routed by two levels."""

from typing import Any

from moejax.core.config import ModelConfig, RouterConfig
from moejax.models.family import Family, common_fields
from moejax.models.hf_config import HfFields, layer_types, layer_windows, sparse_layers


def _qwen2_windows(fields: HfFields, layers: int) -> tuple[int | None, ...]:
    """Returns each layer's window; without `layer_types`, those of even layers below max_window_layers."""
    use, window = bool(fields.take("use_sliding_window", default=False)), fields.take("sliding_window")
    below = int(fields.take("max_window_layers", default=28))
    even = [use and i % 2 == 0 and i < below for i in range(layers)]
    return layer_windows(fields, layers, int(window) if use and window else None, even)


def _read_common(fields: HfFields) -> dict[str, Any]:
    common = common_fields(fields, default_theta=1e4, default_eps=1e-6)
    return common | {
        "num_experts": int(fields.require("num_experts", "num_local_experts")),
        "moe_intermediate_size": int(fields.require("moe_intermediate_size")),
        "intermediate_size": int(fields.require("intermediate_size")),
        "moe_layers": sparse_layers(fields, common["num_layers"]),
        "norm_topk_prob": bool(fields.take("norm_topk_prob", default=False)),
    }


def _read_qwen2(fields: HfFields) -> ModelConfig:
    common = _read_common(fields)
    return ModelConfig(
        family="qwen2_moe",
        shared_expert_intermediate_size=int(fields.require("shared_expert_intermediate_size")),
        sliding_windows=_qwen2_windows(fields, common["num_layers"]),
        qkv_bias=bool(fields.take("qkv_bias", default=True)),
        **common,
    )


def _read_qwen3(fields: HfFields) -> ModelConfig:
    common = _read_common(fields)
    use, window = bool(fields.take("use_sliding_window", default=False)), fields.take("sliding_window")
    fields.take("max_window_layers")  # transformers does not read it for this family either
    bias = bool(fields.take("attention_bias", default=False))
    return ModelConfig(
        family="qwen3_moe",
        sliding_windows=(int(window) if use and window else None,) * common["num_layers"],
        qk_norm="head",
        qkv_bias=bias,
        attention_out_bias=bias,
        **common,
    )


def _read_two_levels(fields: HfFields) -> ModelConfig:
    groups, chosen = fields.count("n_group"), fields.count("topk_group")
    router = RouterConfig(groups=groups, top_groups=chosen, group_gate=True)
    return _read_qwen3(fields).replace(family="two_level_moe", router=router)


def _write_common(config: ModelConfig) -> dict[str, Any]:
    window = next((w for w in config.sliding_windows if w is not None), None)
    return {
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "num_experts": config.num_experts,
        "norm_topk_prob": config.norm_topk_prob,
        "head_dim": config.head_dim,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(config.moe_layers) if not sparse],
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    return _write_common(config) | {
        "shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "qkv_bias": config.qkv_bias,
        "layer_types": layer_types(config.sliding_windows),
    }


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return _write_common(config) | {"attention_bias": config.qkv_bias}


def _write_two_levels(config: ModelConfig) -> dict[str, Any]:
    groups = {"n_group": config.router.groups, "topk_group": config.router.top_groups}
    return _write_qwen3(config) | groups


QWEN2_MOE = Family("qwen2_moe", "Qwen2MoeForCausalLM", _read_qwen2, _write_qwen2)
QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3, _write_qwen3)
TWO_LEVEL_MOE = Family("two_level_moe", "TwoLevelMoeForCausalLM", _read_two_levels, _write_two_levels)
