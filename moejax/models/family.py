"""What a model family is: how its Hugging Face configuration reads and writes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moejax.core.config import ModelConfig
from moejax.models.hf_config import HfFields, rope_to_hf


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        name: Hugging Face's `model_type`.
        architecture: the class that transformers loads a checkpoint with.
        read: family fields of a `config.json` → `ModelConfig`.
        write: the fields that only this family has, for a `config.json` that `read` and transformers take.
    """

    name: str
    architecture: str
    read: Callable[[HfFields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]

    def from_hf(self, raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
        """Raises `ConfigError` for a missing or bad field and for any field it does not implement."""
        fields = HfFields(raw, source)
        config = self.read(fields)
        fields.finish()
        return config

    def to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """A `config.json` for transformers."""
        eos = config.eos_token_ids
        scaling = rope_to_hf(config.rope)
        common = {
            "architectures": [self.architecture],
            "model_type": self.name,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "num_experts_per_tok": config.num_experts_per_tok,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "hidden_act": config.hidden_act,
            "tie_word_embeddings": config.tie_word_embeddings,
            "initializer_range": config.initializer_range,
            "rope_parameters": scaling,
            "bos_token_id": config.bos_token_id,
            "eos_token_id": (eos[0] if len(eos) == 1 else list(eos)) if eos else None,
            "pad_token_id": config.pad_token_id,
            "dtype": config.dtype,
            "use_cache": True,
        }
        return common | self.write(config)


def common_fields(fields: HfFields, *, default_theta: float, default_eps: float) -> dict[str, Any]:
    """The fields that all families share, as keyword arguments of `ModelConfig`."""
    hidden, heads = int(fields.require("hidden_size")), int(fields.require("num_attention_heads"))
    layers = int(fields.require("num_hidden_layers"))
    longest = int(fields.require("max_position_embeddings"))
    return {
        "vocab_size": int(fields.require("vocab_size")),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": int(fields.take("num_key_value_heads", default=heads)),
        "head_dim": int(fields.take("head_dim", default=hidden // heads)),
        "num_experts_per_tok": int(fields.require("num_experts_per_tok")),
        "max_position_embeddings": longest,
        "rope": fields.rope(default_theta=default_theta, max_position_embeddings=longest),
        "rms_norm_eps": float(fields.take("rms_norm_eps", default=default_eps)),
        "hidden_act": str(fields.take("hidden_act", default="silu")),
        "tie_word_embeddings": bool(fields.take("tie_word_embeddings", default=False)),
        "initializer_range": float(fields.take("initializer_range", default=0.02)),
        "dtype": fields.dtype(),
        **fields.special_tokens(),
    }
