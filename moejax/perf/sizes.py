"""Numbers of a layer's matrices, and bytes as they are held: dtypes, cache entries, a model's weights."""

from collections.abc import Mapping

from moejax.core.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_CODE_BYTES = {"int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
KV_SCALE_BYTES = 4

HeldWeights = Mapping[tuple[int | None, str], float]
"""Bytes of a model's matrices as they are held, codes and scales of quantized ones, by (layer or None,
operation): None is outside of the layers, operations are those of `moejax.perf.operation_costs`. Of
"experts_gate_up" and "experts_down" they are one expert's; the embedding counts only as output."""


def attention_params(config: ModelConfig) -> int:
    """Counts the projection weights of one layer."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * heads + 2 * kv)


def expert_params(config: ModelConfig) -> int:
    """Counts the weights of one expert of one layer."""
    return 3 * config.hidden_size * config.moe_intermediate_size


def kv_head_bytes(head_dim: int, dtype: str) -> int:
    """Returns the bytes of a token's key, or value, of one head in a cache of that dtype, scale included."""
    if dtype in KV_CODE_BYTES:
        return head_dim * KV_CODE_BYTES[dtype] + KV_SCALE_BYTES
    return head_dim * DTYPE_BYTES[dtype]
