"""Keys of Qwen2-MoE (with shared expert) and Qwen3-MoE."""

from moejax.checkpoint.maps.rules import COMMON, DENSE_MLP, QK_NORM, fused_experts, gated_mlp, linear, routed

_SHARED = (
    *gated_mlp("model.layers.{l}.mlp.shared_expert", "layers.{l}.moe.shared_expert"),
    *linear("model.layers.{l}.mlp.shared_expert_gate", "layers.{l}.moe.shared_gate"),
)

QWEN2_RULES = (*COMMON, *DENSE_MLP, *routed("mlp"), *fused_experts("mlp"), *_SHARED)
QWEN3_RULES = (*COMMON, *QK_NORM, *DENSE_MLP, *routed("mlp"), *fused_experts("mlp"))
