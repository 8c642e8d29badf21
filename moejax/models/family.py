"""Model families: how each one's Hugging Face configuration is read and written."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.models.hf_config import HfFields, rope_to_hf
from moejax.nn.activation import activation


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        name: Hugging Face's `model_type`.
        architecture: the class that transformers loads a checkpoint with.
        read: family fields of a `config.json` → `ModelConfig`.
        write: the fields that only this family has, for a `config.json` that `read` and transformers take.
        lacks: fields that other families share and this one does not have.
    """

    name: str
    architecture: str
    read: Callable[[HfFields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    lacks: tuple[str, ...] = ()

    def from_hf(self, raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
        """Raises `ConfigError` for a missing or bad field and for any field it does not implement."""
        taken = HfFields(raw, source)
        config = self.read(taken)
        taken.finish()
        return config

    def to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Returns a `config.json` for transformers.

        Raises:
            ConfigError: the family's `config.json` has no words for something in `config`, so that a model
                loaded from it would compute something else.
        """
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
        common = {name: value for name, value in common.items() if name not in self.lacks}
        written = common | self.write(config)
        back = self.from_hf(written)
        lost = [
            f"{item.name}={getattr(config, item.name)!r}"
            for item in dataclasses.fields(config)
            if not _same(item.name, config, back)
        ]
        if lost:
            raise ConfigError(f"config.json of {self.name} cannot say {', '.join(lost)}; use another family")
        return written


def _same(name: str, config: ModelConfig, back: ModelConfig) -> bool:
    """Returns whether a field survived writing, as far as it has any effect."""
    if name == "rope" or (name == "local_rope" and config.local_rope and back.local_rope):
        mine, other = getattr(config, name), getattr(back, name)
        return bool(mine.interleaved == other.interleaved) and rope_to_hf(mine) == rope_to_hf(other)
    if name == "intermediate_size" and all(config.moe_layers):
        return True
    return bool(getattr(config, name) == getattr(back, name))


def common_fields(
    fields: HfFields, *, default_theta: float, default_eps: float, top_k: int | None = None, **rope: Any
) -> dict[str, Any]:
    """Returns the fields that all families share, as keyword arguments of `ModelConfig`; `top_k` where the
    family has another name for it, `rope` as in `HfFields.rope`."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    layers = int(fields.require("num_hidden_layers"))
    longest = int(fields.require("max_position_embeddings"))
    act = str(fields.take("hidden_act", default="silu"))
    activation(act)  # raises for one that is not known, before any weight is read
    return {
        "vocab_size": int(fields.require("vocab_size")),
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": fields.count("num_key_value_heads", heads),
        "head_dim": int(fields.take("head_dim", default=hidden // heads)),
        "num_experts_per_tok": int(fields.require("num_experts_per_tok")) if top_k is None else top_k,
        "max_position_embeddings": longest,
        "rope": fields.rope(default_theta=default_theta, max_position_embeddings=longest, **rope),
        "rms_norm_eps": float(fields.take("rms_norm_eps", default=default_eps)),
        "hidden_act": act,
        "tie_word_embeddings": bool(fields.take("tie_word_embeddings", default=False)),
        "initializer_range": float(fields.take("initializer_range", default=0.02)),
        "dtype": fields.dtype(),
        **fields.special_tokens(),
    }


def all_routed(fields: HfFields, common: dict[str, Any]) -> dict[str, Any]:
    """Returns `common` for a family without dense layers and windows: `intermediate_size` is the experts'."""
    layers, hidden = common["num_layers"], int(fields.require("intermediate_size"))
    return common | {
        "num_experts": int(fields.require("num_experts", "num_local_experts")),
        "moe_intermediate_size": hidden,
        "intermediate_size": hidden,
        "moe_layers": (True,) * layers,
        "sliding_windows": (None,) * layers,
    }
