"""Mixtral's keys: w1 is the gate, w3 up, w2 down. Newer checkpoints may say `mlp` for `block_sparse_moe`."""

from moejax.checkpoint.maps.rules import COMMON, fused_experts, routed

RULES = (
    *COMMON,
    *routed("block_sparse_moe", ("w1", "w3", "w2")),
    *routed("block_sparse_moe", canonical=False)[1:],  # llmcompressor's; the router is there already
    *routed("mlp", canonical=False),
    *fused_experts("mlp"),
    *fused_experts("block_sparse_moe"),
)
