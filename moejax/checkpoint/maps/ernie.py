"""ERNIE 4.5's keys."""

from moejax.checkpoint.maps.deepseek import SHARED_EXPERTS
from moejax.checkpoint.maps.rules import COMMON, DENSE_MLP, Rule, Target, fused_experts, routed

_MLP, _OURS = "model.layers.{l}.mlp", (Target("layers.{l}.moe.router.correction_bias", "row"),)

RULES = (
    *COMMON,
    *DENSE_MLP,
    *routed("mlp"),
    *fused_experts("mlp"),
    *SHARED_EXPERTS,
    Rule(f"{_MLP}.moe_statics.e_score_correction_bias", _OURS),
    Rule(f"{_MLP}.gate.moe_statics.e_score_correction_bias", _OURS, canonical=False),
)
