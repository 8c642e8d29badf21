"""Numbers of a layer's matrices, and bytes as they are held: dtypes, cache entries, a model's weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from moejax.core.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_CODE_BYTES = {"int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
KV_SCALE_BYTES = 4

EXPERT_OPERATIONS = ("experts_gate_up", "experts_down")
"""Operations whose weights are read for the experts visited only."""


def attention_params(config: ModelConfig) -> int:
    """Returns projection weights of one layer."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * heads + 2 * kv)


def expert_params(config: ModelConfig) -> int:
    """Returns weights of one expert of one layer."""
    return 3 * config.hidden_size * config.moe_intermediate_size


def kv_head_bytes(head_dim: int, dtype: str) -> int:
    """Returns the bytes of a token's key, or value, of one head in a cache of that dtype, scale included."""
    if dtype in KV_CODE_BYTES:
        return head_dim * KV_CODE_BYTES[dtype] + KV_SCALE_BYTES
    return head_dim * DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class HeldWeights:
    """Bytes of a model's matrices as they are held, codes and scales of quantized ones.

    Attributes:
        num_layers: L.
        parts: by (layer, or None outside of the layers; operation of `moejax.perf.attribution`); for
            `EXPERT_OPERATIONS` those of one expert. The embedding counts only as output.
    """

    num_layers: int
    parts: Mapping[tuple[int | None, str], float] = field(default_factory=dict)

    @property
    def expert(self) -> np.ndarray:
        """float `[L]`, of one expert in each layer; 0 in dense layers."""
        sizes = [
            sum(self.parts.get((layer, name), 0.0) for name in EXPERT_OPERATIONS)
            for layer in range(self.num_layers)
        ]
        return np.array(sizes)
