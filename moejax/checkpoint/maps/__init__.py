"""Key tables by family."""

from moejax.checkpoint.maps import (
    deepseek,
    dense,
    gemma3,
    gpt_oss,
    granite_moe,
    hunyuan,
    mixtral,
    olmoe,
    phimoe,
    qwen_moe,
)
from moejax.checkpoint.maps.rules import Rule

TABLES: dict[str, tuple[Rule, ...]] = {
    "mixtral": mixtral.RULES,
    "qwen2_moe": qwen_moe.QWEN2_RULES,
    "qwen3_moe": qwen_moe.QWEN3_RULES,
    "two_level_moe": qwen_moe.TWO_LEVEL_RULES,
    "olmoe": olmoe.RULES,
    "phimoe": phimoe.RULES,
    "deepseek_v2": deepseek.RULES,
    "deepseek_v3": deepseek.RULES,
    "glm4_moe": deepseek.GROUPED_QUERY_RULES,
    "dots1": deepseek.GROUPED_QUERY_RULES,
    "minimax": mixtral.LIGHTNING_RULES,
    "minimax_m2": mixtral.MINIMAX_RULES,
    "ernie4_5_moe": deepseek.ERNIE_RULES,
    "hunyuan_v1_moe": hunyuan.RULES,
    "gemma3_text": gemma3.RULES,
    "granitemoe": granite_moe.RULES,
    "llama": dense.LLAMA_RULES,
    "qwen3": dense.QWEN3_RULES,
    "gpt_oss": gpt_oss.RULES,
}
