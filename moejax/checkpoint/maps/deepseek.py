"""Keys of DeepSeek-V2 and V3, and of families with their experts and grouped-query attention."""

from moejax.checkpoint.maps.rules import (
    BACKBONE,
    COMMON,
    DENSE_MLP,
    QK_NORM,
    Rule,
    fused_experts,
    gated_mlp,
    linear,
    routed,
    tensor,
)

_ATTENTION, _OURS = "model.layers.{l}.self_attn", "layers.{l}.attention"

_LATENT: tuple[Rule, ...] = (
    *linear(f"{_ATTENTION}.q_proj", f"{_OURS}.q_proj"),
    *linear(f"{_ATTENTION}.q_a_proj", f"{_OURS}.q_a_proj", bias=True),
    *linear(f"{_ATTENTION}.q_b_proj", f"{_OURS}.q_b_proj"),
    *linear(f"{_ATTENTION}.kv_a_proj_with_mqa", f"{_OURS}.kv_a_proj", bias=True),
    *linear(f"{_ATTENTION}.kv_b_proj", f"{_OURS}.kv_b_proj"),
    *linear(f"{_ATTENTION}.o_proj", f"{_OURS}.o_proj", bias=True),
    tensor(f"{_ATTENTION}.q_a_layernorm.weight", f"{_OURS}.q_a_norm.scale"),
    tensor(f"{_ATTENTION}.kv_a_layernorm.weight", f"{_OURS}.kv_a_norm.scale"),
)

_EXPERTS = (
    *DENSE_MLP,
    *routed("mlp"),
    *fused_experts("mlp"),
    *gated_mlp("model.layers.{l}.mlp.shared_experts", "layers.{l}.moe.shared_expert"),
)

_MLP, _BIAS = "model.layers.{l}.mlp", "e_score_correction_bias"
_PARAM = "layers.{l}.moe.router.correction_bias"
CORRECTION_BIAS = tensor(f"{_MLP}.gate.{_BIAS}", _PARAM)

RULES = (*BACKBONE, *_LATENT, *_EXPERTS, CORRECTION_BIAS)
GROUPED_QUERY_RULES = (*COMMON, *QK_NORM, *_EXPERTS, CORRECTION_BIAS)
ERNIE_RULES = (
    *COMMON,
    *_EXPERTS,
    tensor(f"{_MLP}.moe_statics.{_BIAS}", _PARAM, "row"),
    tensor(f"{_MLP}.gate.moe_statics.{_BIAS}", _PARAM, "row", canonical=False),
)
