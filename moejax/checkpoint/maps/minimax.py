"""MiniMax-M2's keys: Mixtral's, with norms of queries and keys and a correction bias beside the router."""

from moejax.checkpoint.maps import mixtral
from moejax.checkpoint.maps.rules import QK_NORM, Rule, Target

_BIAS, _OURS = "e_score_correction_bias", (Target("layers.{l}.moe.router.correction_bias"),)

RULES = (
    *mixtral.RULES,
    *QK_NORM,
    Rule(f"model.layers.{{l}}.block_sparse_moe.{_BIAS}", _OURS),
    Rule(f"model.layers.{{l}}.mlp.{_BIAS}", _OURS, canonical=False),
)
