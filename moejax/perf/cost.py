"""Sizes of a layer's parts, and the least time that a step takes on a device."""

from moejax.core.config import ModelConfig
from moejax.core.hardware import Hardware
from moejax.perf.attribution import Bound, OpCost, bound
from moejax.perf.sizes import DTYPE_BYTES, KV_CODE_BYTES, KV_SCALE_BYTES, HeldWeights, kv_head_bytes

__all__ = [
    "DTYPE_BYTES", "KV_CODE_BYTES", "KV_SCALE_BYTES", "HeldWeights", "attention_params",
    "expert_params", "kv_head_bytes", "step_bound",
]  # fmt: skip


def attention_params(config: ModelConfig) -> int:
    """Returns projection weights of one layer."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * heads + 2 * kv)


def expert_params(config: ModelConfig) -> int:
    """Weights of one expert of one layer."""
    return 3 * config.hidden_size * config.moe_intermediate_size


def step_bound(cost: OpCost, hardware: Hardware | None, dtype: str) -> Bound | None:
    """Returns a step's bound; None without a known bandwidth. Compute counts where its peak is known."""
    if hardware is None or hardware.bandwidth is None:
        return None
    return bound(cost.flops, cost.bytes, hardware.flops.get(dtype, float("inf")), hardware.bandwidth)
