"""gpt-oss's keys: experts stacked as `x @ weight` takes them, gate and up in turn in one tensor."""

from moejax.checkpoint.maps.rules import COMMON, Rule, Target, linear, routed, tensor

_LAYER, _EXPERTS = "model.layers.{l}", "layers.{l}.moe.experts"


def _experts(key: str, kind: str) -> tuple[Rule, ...]:
    """Returns the rules of the three matrices ("proj") or their biases ("bias")."""
    pair = Target(f"{_EXPERTS}.gate_{kind}", "stacked_even"), Target(f"{_EXPERTS}.up_{kind}", "stacked_odd")
    prefix = f"{_LAYER}.mlp.experts"
    return (
        Rule(f"{prefix}.gate_up_{key}", pair),
        tensor(f"{prefix}.down_{key}", f"{_EXPERTS}.down_{kind}", "stacked"),
    )


RULES = (
    *COMMON,
    tensor(f"{_LAYER}.self_attn.sinks", "layers.{l}.attention.sinks"),
    *linear(f"{_LAYER}.mlp.router", "layers.{l}.moe.router", bias=True),
    *_experts("proj", "proj"),
    *_experts("proj_bias", "bias"),
    *routed("mlp")[1:],  # quantized weights, one expert at a time
)
