"""Gemma 3's keys: four norms a layer. A model with images has the text's below another name, and more."""

from dataclasses import replace

from moejax.checkpoint.maps.dense import QWEN3_RULES
from moejax.checkpoint.maps.rules import Rule, tensor

_NORMS = {
    "post_attention_layernorm": "attention_output_norm",
    "pre_feedforward_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "feed_forward_output_norm",
}
_TEXT = (
    *(rule for rule in QWEN3_RULES if "post_attention_layernorm" not in rule.key),
    *(
        tensor(f"model.layers.{{l}}.{key}.weight", f"layers.{{l}}.{name}.scale")
        for key, name in _NORMS.items()
    ),
)
_WITH_IMAGES = tuple(
    replace(rule, key=rule.key.replace("model.", name, 1), canonical=False)
    for name in ("language_model.model.", "model.language_model.")
    for rule in _TEXT
    if rule.key.startswith("model.")
)
_NOT_READ = ("vision_tower.", "multi_modal_projector.", "language_model.lm_head.")

RULES = (
    *_TEXT,
    *_WITH_IMAGES,
    *(Rule(f"{outer}{name}{{rest}}", (), canonical=False) for outer in ("", "model.") for name in _NOT_READ),
)
