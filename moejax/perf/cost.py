"""Least bytes and operations of a decode step, from the configuration and the experts it visits."""

import numpy as np

from moejax.core.config import ModelConfig
from moejax.core.hardware import Hardware
from moejax.perf.attribution import Bound, OpCost, attribute, bound, total
from moejax.perf.sizes import DTYPE_BYTES, KV_CODE_BYTES, KV_SCALE_BYTES, HeldWeights, kv_head_bytes

__all__ = [
    "DTYPE_BYTES", "KV_CODE_BYTES", "KV_SCALE_BYTES", "HeldWeights", "attention_params",
    "decode_step_cost", "expert_params", "kv_head_bytes", "step_bound",
]  # fmt: skip


def attention_params(config: ModelConfig) -> int:
    """Returns projection weights of one layer."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * heads + 2 * kv)


def expert_params(config: ModelConfig) -> int:
    """Weights of one expert of one layer."""
    return 3 * config.hidden_size * config.moe_intermediate_size


def decode_step_cost(
    config: ModelConfig,
    batch: int,
    mean_context: float,
    mean_hits: np.ndarray,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    weights: HeldWeights | None = None,
) -> OpCost:
    """Returns the lower bound of a decode step.

    Args:
        batch: rows, each with one new token.
        mean_context: mean number of tokens in a row's cache during the step.
        mean_hits: float `[L]`, mean number of distinct experts that the batch visits in each layer (0 for a
            dense layer), as recorded from real routing.
        dtype: storage of the weights; None is the configuration's.
        kv_dtype: storage of the cache; None is `dtype`.
        weights: weights as they are held (`moejax.perf.memory.held_weights`); None: all in `dtype`.

    Norms, biases and activations are left out: they are small, and a bound must not exceed the truth. It is
    the sum of `moejax.perf.attribution.attribute`.
    """
    ops = attribute(
        config,
        new_tokens=np.ones(batch),
        context=np.full(batch, mean_context),
        phase="decode",
        hits=mean_hits,
        dtype=dtype,
        kv_dtype=kv_dtype,
        weights=weights,
    )
    return total(ops)


def step_bound(cost: OpCost, hardware: Hardware | None, dtype: str) -> Bound | None:
    """Returns a step's bound; None without a known bandwidth. Compute counts where its peak is known."""
    if hardware is None or hardware.bandwidth is None:
        return None
    return bound(cost.flops, cost.bytes, hardware.flops.get(dtype, float("inf")), hardware.bandwidth)
