"""Keys of the layer after the last one (`moejax.models.mtp`), in DeepSeek-V3's layout."""

from collections.abc import Iterable

from moejax.checkpoint.maps.rules import Rule, Target, linear, tensor


def mtp_prefix(num_layers: int) -> str:
    """Returns what the layer's keys begin with, after so many layers of the model."""
    return f"model.layers.{num_layers}."


def mtp_rules(rules: Iterable[Rule], num_layers: int) -> tuple[Rule, ...]:
    """Returns the table of the layer alone, given its family's: of layer 0 of a decoder of one layer."""
    prefix = mtp_prefix(num_layers)
    block = [
        Rule(
            rule.key.replace("model.layers.{l}.", prefix),
            tuple(Target(t.param.replace("{l}", "0"), t.transform) for t in rule.targets),
            rule.canonical,
        )
        for rule in rules
        if rule.key.startswith("model.layers.{l}.")
    ]
    return (
        *block,
        *(tensor(f"{prefix}{name}.weight", f"{name}.scale") for name in ("enorm", "hnorm")),
        *linear(f"{prefix}eh_proj", "eh_proj"),
        tensor(f"{prefix}shared_head.norm.weight", "norm.scale"),
        # The model's own, stored again.
        *(
            Rule(f"{prefix}{name}.weight", (), canonical=False)
            for name in ("embed_tokens", "shared_head.head")
        ),
    )
