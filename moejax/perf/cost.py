"""What a decode step must at least move and compute, from the configuration and the experts it visits."""

from dataclasses import dataclass

import numpy as np

from moejax.core.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_CODE_BYTES = {"int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1}
KV_SCALE_BYTES = 4


def kv_head_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of one token's key, or value, of one head in a cache of that dtype, scale included."""
    if dtype in KV_CODE_BYTES:
        return head_dim * KV_CODE_BYTES[dtype] + KV_SCALE_BYTES
    return head_dim * DTYPE_BYTES[dtype]


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


@dataclass(frozen=True)
class HeldWeights:
    """Bytes of a model's matrices as they are held, codes and scales of quantized ones.

    Attributes:
        always: of those that every step reads: all but the experts', and the embedding only as output.
        expert: float `[L]`, of one expert in each layer; 0 in dense layers.
    """

    always: float
    expert: np.ndarray


def decode_step_cost(
    config: ModelConfig,
    batch: int,
    mean_context: float,
    mean_hits: np.ndarray,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    held: HeldWeights | None = None,
) -> StepCost:
    """Lower bound of a decode step.

    Args:
        batch: rows, each with one new token.
        mean_context: mean number of tokens in a row's cache during the step.
        mean_hits: float `[L]`, mean number of distinct experts that the batch visits in each layer (0 for a
            dense layer), as recorded from real routing.
        dtype: storage of the weights; None is the configuration's.
        kv_dtype: storage of the cache; None is `dtype`.
        held: weights as they are held (`moejax.perf.memory.held_weights`); None: all in `dtype`.

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
    weights = (always + visited) * size
    if held is not None:
        weights = held.always + float(np.sum(np.asarray(mean_hits) * held.expert))
    routed = sum(config.moe_layers) * config.num_experts_per_tok * expert_params(config)
    heads = 0.0  # of keys, and as many of values, that are read
    for window in config.sliding_windows:
        seen = mean_context if window is None else min(mean_context, window)
        heads += batch * config.num_kv_heads * seen
    attention_flops = 2 * heads * config.head_dim * config.num_heads / config.num_kv_heads * 2
    return StepCost(
        weight_bytes=weights,
        cache_bytes=2 * heads * kv_head_bytes(config.head_dim, kv_dtype or dtype or config.dtype),
        flops=2.0 * batch * (always + routed) + attention_flops,
    )
