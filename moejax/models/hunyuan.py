"""Hunyuan-A13B (its technical report by Tencent, 2025): query/key norm after rotary embedding, a shared expert as
wide as the others."""

from typing import Any

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.models.family import Family, common_fields
from moejax.models.hf_config import HfFields

# Published fields that choose between variants, of which transformers implements this one.
_ONLY: dict[str, Any] = {
    "use_qk_norm": True, "use_mixed_mlp_moe": True, "use_rotary_pos_emb": True, "norm_topk_prob": True,
    "use_cla": False, "use_mla": False, "mlp_bias": False, "position_embedding_xdrope": False,
    "group_limited_greedy": False, "moe_layer_num_skipped": 0, "routed_scaling_factor": 1.0,
    "add_classification_head": False, "moe_drop_tokens": False,
}  # fmt: skip
# Of what these are off, of further inputs, tokens and heads, and of training.
_UNUSED = (
    "norm_type", "cla_share_factor", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
    "v_head_dim", "n_group", "topk_group", "moe_random_routing_dropped_token", "capacity_factor", "dense_list",
    "class_num", "pool_type", "pad_id", "eod_token_id", "sep_token_id", "im_start_id", "im_end_id",
    "im_newline_id", "image_token_id", "video_start_id", "video_end_id", "text_start_id", "text_end_id",
    "mask_init_id", "num_media_embeds", "skip_cls_token", "xdrope_section", "anyres_pooling_size",
    "anyres_vit_max_image_size", "anyres_vit_two_views",
)  # fmt: skip


def _same_in_all_layers(fields: HfFields, *names: str, default: int) -> int:
    """Returns a field that is a number, or a list with one for each layer."""
    value = fields.take(*names, default=default)
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise ConfigError(f"{fields.source}: {names[0]} differs between layers: {value} (one number for all)")
    return int(values.pop())


def _read(fields: HfFields) -> ModelConfig:
    top_k = _same_in_all_layers(fields, "moe_topk", "num_experts_per_tok", default=1)
    common = common_fields(fields, default_theta=1e4, default_eps=1e-5, top_k=top_k, ntk_alpha=True)
    for name, value in _ONLY.items():
        fields.only(name, value)
    fields.only("attention_head_dim", common["head_dim"])
    fields.take(*_UNUSED, *(name for name in fields.raw if name.startswith("vit_")))
    layers, hidden = common["num_layers"], int(fields.require("intermediate_size"))
    shared = _same_in_all_layers(fields, "num_shared_expert", default=1)
    width = _same_in_all_layers(fields, "moe_intermediate_size", default=hidden)
    if (shared, width) != (1, hidden):
        raise ConfigError(
            f"{fields.source}: num_shared_expert {shared} and moe_intermediate_size {width} are not "
            f"implemented (only 1 and intermediate_size {hidden} are)"
        )
    bias = bool(fields.take("attention_bias", default=False))
    return ModelConfig(
        family="hunyuan_v1_moe",
        num_experts=_same_in_all_layers(fields, "num_experts", "num_local_experts", default=1),
        moe_intermediate_size=hidden,
        intermediate_size=hidden,
        moe_layers=(True,) * layers,
        sliding_windows=(None,) * layers,
        shared_expert_intermediate_size=hidden,
        shared_expert_gate=False,
        qk_norm="rotated",
        qkv_bias=bias,
        attention_out_bias=bias,
        **common,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "head_dim": config.head_dim,
        "intermediate_size": config.moe_intermediate_size,
        "num_experts": config.num_experts,
        "moe_topk": config.num_experts_per_tok,
        "attention_bias": config.qkv_bias,
    }


HUNYUAN_V1_MOE = Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", _read, _write)
