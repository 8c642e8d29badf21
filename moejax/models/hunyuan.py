"""Hunyuan-A13B (its technical report by Tencent, 2025): query/key norm after rotary embedding."""

from typing import Any

from moejax.core.config import ModelConfig
from moejax.models.family import Family, all_routed, common_fields
from moejax.models.hf_config import HfFields

# Beginnings of the names of fields for what these turn off, for images, further tokens and training.
_UNUSED = (
    "anyres_", "capacity_", "cla_", "class_", "dense_list", "eod_", "im_", "image_", "kv_lora_", "mask_init_",
    "moe_random_", "n_group", "norm_type", "num_media_", "pad_id", "pool_", "q_lora_", "qk_nope_", "qk_rope_",
    "sep_", "skip_cls_", "text_", "topk_group", "v_head_", "video_", "vit_", "xdrope_",
)  # fmt: skip


def _read(fields: HfFields) -> ModelConfig:
    for name in ("moe_topk", "num_experts", "num_shared_expert", "moe_intermediate_size"):
        if isinstance(given := fields.raw.get(name), list) and given:  # one for each layer
            fields.only(name, given[:1] * len(given))
            fields.raw = {**fields.raw, name: given[0]}
    top_k = int(fields.take("moe_topk", "num_experts_per_tok", default=1))
    head = int(fields.require("head_dim", "attention_head_dim"))
    common = common_fields(fields, default_theta=1e4, default_eps=1e-5, top_k=top_k, alpha_head_dim=head)
    # Which of the published variants it is; transformers has this one.
    fields.only_at(
        use_qk_norm=True, use_mixed_mlp_moe=True, use_rotary_pos_emb=True, norm_topk_prob=True, use_cla=False,
        use_mla=False, mlp_bias=False, position_embedding_xdrope=False, group_limited_greedy=False,
        moe_layer_num_skipped=0, routed_scaling_factor=1.0, add_classification_head=False,
        moe_drop_tokens=False, num_shared_expert=1, attention_head_dim=head,
        moe_intermediate_size=fields.raw.get("intermediate_size"),
    )  # fmt: skip
    fields.take(*(name for name in fields.raw if name.startswith(_UNUSED)))
    bias = bool(fields.take("attention_bias", default=False))
    return ModelConfig(
        family="hunyuan_v1_moe",
        shared_expert_intermediate_size=int(fields.require("intermediate_size")),
        shared_expert_gate=False,
        qk_norm="rotated",
        qkv_bias=bias,
        attention_out_bias=bias,
        **all_routed(fields, common | {"head_dim": head}),
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
