"""Keys of Mixtral and MiniMax-M2: w1 is the gate, w3 up, w2 down. Some say `mlp` for `block_sparse_moe`."""

from moejax.checkpoint.maps.rules import COMMON, QK_NORM, Rule, Target, fused_experts, routed

RULES = (
    *COMMON,
    *routed("block_sparse_moe", ("w1", "w3", "w2")),
    *routed("block_sparse_moe", canonical=False)[1:],  # llmcompressor's; the router is there already
    *routed("mlp", canonical=False),
    *fused_experts("mlp"),
    *fused_experts("block_sparse_moe"),
)

_BIAS, _OURS = "e_score_correction_bias", (Target("layers.{l}.moe.router.correction_bias"),)

MINIMAX_RULES = (
    *RULES,
    *QK_NORM,
    Rule(f"model.layers.{{l}}.block_sparse_moe.{_BIAS}", _OURS),
    Rule(f"model.layers.{{l}}.mlp.{_BIAS}", _OURS, canonical=False),
)
