"""Hunyuan's keys."""

from moejax.checkpoint.maps.rules import COMMON, fused_experts, gated_mlp, linear, routed, tensor

_ATTENTION, _OURS = "model.layers.{l}.self_attn", "layers.{l}.attention"

RULES = (
    *COMMON,
    tensor(f"{_ATTENTION}.query_layernorm.weight", f"{_OURS}.q_norm.scale"),
    tensor(f"{_ATTENTION}.key_layernorm.weight", f"{_OURS}.k_norm.scale"),
    *linear("model.layers.{l}.mlp.gate.wg", "layers.{l}.moe.router"),
    *routed("mlp")[1:],
    *fused_experts("mlp"),
    *gated_mlp("model.layers.{l}.mlp.shared_mlp", "layers.{l}.moe.shared_expert"),
)
