"""Gemma 3 (arXiv 2503.19786), its text model: layers with a window and a rotary base of their own between
full ones, norms before and after attention and MLP. Of a model with images only the text part is read."""

from typing import Any

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.models.dense import LACKS, read_dense, write_dense, write_windows
from moejax.models.family import Family
from moejax.models.hf_config import HfFields, layer_windows, rope_to_hf

# Published configurations leave out what transformers has as a default.
_DEFAULTS = {
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "sliding_window": 4096, "tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip
_OF_BOTH = ("pad_token_id", "eos_token_id", "bos_token_id", "dtype", "torch_dtype", "tie_word_embeddings")
_OF_IMAGES = (
    "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
    "initializer_range", "text_config",
)  # fmt: skip


def _read(fields: HfFields) -> ModelConfig:
    fields.raw = {**_DEFAULTS, **fields.raw}
    fields.raw["hidden_act"] = fields.take("hidden_activation", default="gelu_pytorch_tanh")
    local_theta = fields.take("rope_local_base_freq", default=1e4)
    by_kind = fields.raw.get("rope_parameters") or {}
    if not by_kind.keys() <= {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"{fields.source}: rope_parameters must be by full_attention and sliding_attention, got {by_kind}"
        )
    fields.raw["rope_parameters"] = by_kind.get("full_attention")
    local = HfFields({"rope_parameters": by_kind.get("sliding_attention")}, fields.source)
    common = read_dense(fields, default_theta=1e6)
    fields.take("cache_implementation")
    fields.only_at(attn_logit_softcapping=None, use_bidirectional_attention=False)
    every = int(fields.take("sliding_window_pattern", "_sliding_window_pattern", default=6))
    sliding = [(i + 1) % every != 0 for i in range(common["num_layers"])]
    longest = common["max_position_embeddings"]
    return ModelConfig(
        family="gemma3_text",
        sliding_windows=layer_windows(fields, len(sliding), fields.take("sliding_window"), sliding),
        local_rope=local.rope(default_theta=local_theta, max_position_embeddings=longest),
        qk_norm="head",
        attention_multiplier=int(fields.take("query_pre_attn_scalar", default=256)) ** -0.5,
        embedding_multiplier=common["hidden_size"] ** 0.5,
        logits_softcap=fields.take("final_logit_softcapping"),
        norm="rms_unit_offset",
        post_norms=True,
        **common,
    )


def _read_with_images(fields: HfFields) -> ModelConfig:
    shared = {name: fields.raw[name] for name in _OF_BOTH if fields.raw.get(name) is not None}
    text = HfFields({**fields.require("text_config"), **shared}, f"{fields.source}: text_config")
    config = _read(text)
    text.finish()
    fields.take(*_OF_BOTH, *_OF_IMAGES)
    return config


def _write(config: ModelConfig) -> dict[str, Any]:
    assert config.local_rope is not None
    ropes = {"full_attention": rope_to_hf(config.rope), "sliding_attention": rope_to_hf(config.local_rope)}
    windows = write_windows(config)
    return {
        **write_dense(config),
        "hidden_activation": config.hidden_act,
        "query_pre_attn_scalar": round(config.attention_scale**-2),
        "final_logit_softcapping": config.logits_softcap,
        "rope_parameters": ropes,
        **windows,
        "sliding_window": windows["sliding_window"] or _DEFAULTS["sliding_window"],  # not null even if unused
    }


_LACKS = (*LACKS, "hidden_act")
GEMMA3_TEXT = Family("gemma3_text", "Gemma3ForCausalLM", _read, _write, _LACKS)
GEMMA3 = Family("gemma3", "Gemma3ForConditionalGeneration", _read_with_images, _write, _LACKS)
