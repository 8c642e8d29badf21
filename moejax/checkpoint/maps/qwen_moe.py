"""Keys of Qwen2-MoE (with shared expert) and Qwen3-MoE."""

from moejax.checkpoint.maps.rules import COMMON, DENSE_MLP, QK_NORM, fused_experts, linear, routed

_SHARED = (
    *linear("model.layers.{l}.mlp.shared_expert.gate_proj", "layers.{l}.moe.shared_expert.gate_proj"),
    *linear("model.layers.{l}.mlp.shared_expert.up_proj", "layers.{l}.moe.shared_expert.up_proj"),
    *linear("model.layers.{l}.mlp.shared_expert.down_proj", "layers.{l}.moe.shared_expert.down_proj"),
    *linear("model.layers.{l}.mlp.shared_expert_gate", "layers.{l}.moe.shared_gate"),
)

QWEN2_RULES = (*COMMON, *DENSE_MLP, *routed("mlp"), *fused_experts("mlp"), *_SHARED)
QWEN3_RULES = (*COMMON, *QK_NORM, *DENSE_MLP, *routed("mlp"), *fused_experts("mlp"))
