"""Keys of Mixtral and MiniMax's models: w1 is the gate, w3 up, w2 down. Some say `mlp` for
`block_sparse_moe`."""

from moejax.checkpoint.maps.rules import COMMON, QK_NORM, Rule, fused_experts, linear, routed, tensor

RULES = (
    *COMMON,
    *routed("block_sparse_moe", ("w1", "w3", "w2")),
    *routed("block_sparse_moe", canonical=False)[1:],  # llmcompressor's; the router is there already
    *routed("mlp", canonical=False),
    *fused_experts("mlp"),
    *fused_experts("block_sparse_moe"),
)

_BIAS, _OURS = "e_score_correction_bias", "layers.{l}.moe.router.correction_bias"

MINIMAX_RULES = (
    *RULES,
    *QK_NORM,
    tensor(f"model.layers.{{l}}.block_sparse_moe.{_BIAS}", _OURS),
    tensor(f"model.layers.{{l}}.mlp.{_BIAS}", _OURS, canonical=False),
)

_ATTENTION, _LINEAR = "model.layers.{l}.self_attn", "layers.{l}.attention"

LIGHTNING_RULES = (
    *RULES,
    *(
        rule
        for name in ("qkv_proj", "output_gate", "out_proj")
        for rule in linear(f"{_ATTENTION}.{name}", f"{_LINEAR}.{name}")
    ),
    tensor(f"{_ATTENTION}.norm.weight", f"{_LINEAR}.norm.scale"),
    # transformers stores the decay, in the weights' dtype, though it follows from the configuration.
    *(
        Rule(f"{_ATTENTION}.{name}", (), canonical=False)
        for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    ),
)
