"""Phi-MoE's keys: Mixtral's experts, layer norms, a bias of the output projection."""

from dataclasses import replace

from moejax.checkpoint.maps.mixtral import RULES as MIXTRAL
from moejax.checkpoint.maps.rules import BACKBONE, Target, tensor

_NORM_BIASES = tuple(
    replace(
        rule, key=rule.key.replace(".weight", ".bias"), targets=(Target(target.replace(".scale", ".bias")),)
    )
    for rule in BACKBONE
    for target in (each.param for each in rule.targets)
    if target.endswith("norm.scale")
)
# As transformers 5 names it; published checkpoints have Mixtral's name.
_ROUTER = tensor("model.layers.{l}.mlp.router.weight", "layers.{l}.moe.router.kernel", "transpose", False)

RULES = (*MIXTRAL, *_NORM_BIASES, _ROUTER, tensor("lm_head.bias", "lm_head.bias"))
