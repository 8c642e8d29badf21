"""Key tables by family."""

from moejax.checkpoint.maps import mixtral, olmoe, qwen_moe
from moejax.checkpoint.maps.rules import Rule

TABLES: dict[str, tuple[Rule, ...]] = {
    "mixtral": mixtral.RULES,
    "qwen2_moe": qwen_moe.QWEN2_RULES,
    "qwen3_moe": qwen_moe.QWEN3_RULES,
    "olmoe": olmoe.RULES,
}
