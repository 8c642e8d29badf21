"""Keys of Qwen2-MoE (with shared expert), of Qwen3-MoE, and of that with a gate of groups."""

from moejax.checkpoint.maps.rules import (
    COMMON,
    DENSE_MLP,
    QK_NORM,
    fused_experts,
    gated_mlp,
    linear,
    routed,
    tensor,
)

_SHARED = (
    *gated_mlp("model.layers.{l}.mlp.shared_expert", "layers.{l}.moe.shared_expert"),
    *linear("model.layers.{l}.mlp.shared_expert_gate", "layers.{l}.moe.shared_gate"),
)

QWEN2_RULES = (*COMMON, *DENSE_MLP, *routed("mlp"), *fused_experts("mlp"), *_SHARED)
QWEN3_RULES = (*COMMON, *QK_NORM, *DENSE_MLP, *routed("mlp"), *fused_experts("mlp"))
TWO_LEVEL_RULES = (
    *QWEN3_RULES,
    tensor("model.layers.{l}.mlp.group_gate.weight", "layers.{l}.moe.router.group_kernel", "transpose"),
)
