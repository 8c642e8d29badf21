"""Granite-MoE's keys: all experts' gate and up in one tensor, all down in one; quantized ones by expert."""

from dataclasses import replace

from moejax.checkpoint.maps.rules import COMMON, Rule, fused_experts, routed

_BLOCK = "block_sparse_moe"
_MEMORY = fused_experts(_BLOCK)
_STORED = tuple(
    replace(rule, key=f"model.layers.{{l}}.{_BLOCK}.{name}.weight", canonical=True)
    for rule, name in zip(_MEMORY, ("input_linear", "output_linear"), strict=True)
)
_GATE, *_EXPERTS = routed(_BLOCK)
_ROUTERS: tuple[Rule, ...] = tuple(
    replace(_GATE, key=f"model.layers.{{l}}.{_BLOCK}.{name}.weight", canonical=name == "router.layer")
    for name in ("router.layer", "router")
)

RULES = (*COMMON, *_STORED, *_ROUTERS, *_MEMORY, *_EXPERTS)
