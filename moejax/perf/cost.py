"""What a decode step must at least move and compute, from the configuration and the experts it visits."""

from dataclasses import dataclass

import numpy as np

from moejax.core.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class StepCost:
    """Of one decode step of a batch: bytes that must be read, and multiply-adds times two."""

    weight_bytes: float
    cache_bytes: float
    flops: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.cache_bytes


def attention_params(config: ModelConfig) -> int:
    """Projection weights of one layer."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * heads + 2 * kv)


def expert_params(config: ModelConfig) -> int:
    """Weights of one expert of one layer."""
    return 3 * config.hidden_size * config.moe_intermediate_size


def decode_step_cost(
    config: ModelConfig, batch: int, mean_context: float, mean_hits: np.ndarray, *, dtype: str | None = None
) -> StepCost:
    """Lower bound of a decode step.

    Args:
        batch: rows, each with one new token.
        mean_context: mean number of tokens in a row's cache during the step.
        mean_hits: float `[L]`, mean number of distinct experts that the batch visits in each layer (0 for a
            dense layer), as recorded from real routing.
        dtype: storage of weights and cache; None is the configuration's.

    Norms, biases and activations are left out: they are small, and a bound must not exceed the truth.
    """
    size = DTYPE_BYTES[dtype or config.dtype]
    dense = shared = 0
    for sparse in config.moe_layers:
        if sparse:
            shared += 3 * config.hidden_size * config.shared_expert_intermediate_size
            shared += config.hidden_size * config.num_experts
        else:
            dense += 3 * config.hidden_size * config.intermediate_size
    head = config.hidden_size * config.vocab_size
    always = attention_params(config) * config.num_layers + dense + shared + head
    visited = float(np.sum(mean_hits)) * expert_params(config)
    routed = sum(config.moe_layers) * config.num_experts_per_tok * expert_params(config)
    cache = 0.0
    for window in config.sliding_windows:
        seen = mean_context if window is None else min(mean_context, window)
        cache += batch * 2 * config.num_kv_heads * config.head_dim * seen
    attention_flops = cache * config.num_heads / config.num_kv_heads * 2
    return StepCost(
        weight_bytes=(always + visited) * size,
        cache_bytes=cache * size,
        flops=2.0 * batch * (always + routed) + attention_flops,
    )
