"""The families by Hugging Face's `model_type`."""

from typing import Any

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError, unknown
from moejax.models.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from moejax.models.dense import LLAMA, QWEN3
from moejax.models.ernie import ERNIE4_5_MOE
from moejax.models.family import Family
from moejax.models.gemma3 import GEMMA3, GEMMA3_TEXT
from moejax.models.glm_dots import DOTS1, GLM4_MOE
from moejax.models.gpt_oss import GPT_OSS
from moejax.models.granite_moe import GRANITE_MOE
from moejax.models.hunyuan import HUNYUAN_V1_MOE
from moejax.models.mixtral import MINIMAX, MINIMAX_M2, MIXTRAL
from moejax.models.olmoe import OLMOE
from moejax.models.phimoe import PHIMOE
from moejax.models.qwen_moe import QWEN2_MOE, QWEN3_MOE, TWO_LEVEL_MOE

_ALL = (
    MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE, DOTS1, MINIMAX_M2, ERNIE4_5_MOE,
    HUNYUAN_V1_MOE, LLAMA, QWEN3, GRANITE_MOE, GEMMA3_TEXT, GEMMA3, GPT_OSS, PHIMOE, MINIMAX, TWO_LEVEL_MOE,
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    **{family.name: family for family in _ALL},
    "kimi_k2": DEEPSEEK_V3,  # Moonshot's name for V3's model in other sizes
}


def get_family(name: str, source: str = "config.json") -> Family:
    """Raises `ConfigError` naming the supported families."""
    if name not in FAMILIES:
        raise ConfigError(f"{source}: {unknown('model_type', name, FAMILIES)}")
    return FAMILIES[name]


def config_from_hf(raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Reads a Hugging Face `config.json`, as a dictionary, into a `ModelConfig`.

    Raises:
        ConfigError: unsupported `model_type`, missing or bad fields, or fields that change the computation
            and are not implemented; the message names them.
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise ConfigError(f"{source}: no 'model_type'; is this a Hugging Face model configuration?")
    family = get_family(raw["model_type"], source)
    try:
        return family.from_hf(raw, source)
    except ConfigError as error:
        if str(error).startswith(source):
            raise
        raise ConfigError(f"{source}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{source}: a field has the wrong type ({error})") from error


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Inverts `config_from_hf`."""
    return get_family(config.family).to_hf(config)
