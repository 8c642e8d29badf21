"""OLMoE's keys."""

from moejax.checkpoint.maps.rules import COMMON, QK_NORM, fused_experts, routed

RULES = (*COMMON, *QK_NORM, *routed("mlp"), *fused_experts("mlp"))
