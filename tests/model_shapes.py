"""The models that tests of all folders share. A test that needs another value replaces just that.

Equal shapes are compiled once in a run: its cache of programs is shared by all files (`tests/conftest.py`).
"""

from typing import Any

from moejax.core.config import (
    ClampedSwiglu,
    LatentConfig,
    ModelConfig,
    NormedResidual,
    RopeConfig,
    RouterConfig,
)

TWO_LAYERS = ModelConfig(
    family="qwen3_moe",
    vocab_size=96,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    intermediate_size=48,
    moe_layers=(True, True),
    sliding_windows=(None, None),
    max_position_embeddings=64,
    qk_norm="head",
    initializer_range=0.3,
)
"""Two layers of experts; logits well apart, so that rounding does not change the greedy token."""

ONE_LAYER = TWO_LAYERS.replace(num_layers=1, moe_layers=(True,), sliding_windows=(None,))
"""The fastest to compile."""

LATENT: dict[str, Any] = {
    "family": "deepseek_v3", "qk_norm": "none", "num_kv_heads": 1, "head_dim": 14,
    "latent": LatentConfig(kv_rank=16, rope_dim=6, nope_dim=8, value_dim=12, q_rank=20),
    "rope": RopeConfig(interleaved=True), "shared_expert_intermediate_size": 16, "shared_expert_gate": False,
    "router": RouterConfig("sigmoid", True, groups=4, top_groups=2, group_score="top2"),
}  # fmt: skip
"""Latent attention, with the router and the shared expert that come with it in DeepSeek-V3."""

GLM: dict[str, Any] = {
    "family": "glm4_moe", "shared_expert_intermediate_size": 16, "shared_expert_gate": False,
    "rope": RopeConfig(partial_rotary_factor=0.5),
    "router": RouterConfig("sigmoid", True, groups=4, top_groups=2, group_score="top2", scaling=1.5),
}  # fmt: skip
"""Half of each head rotated after its norm, and DeepSeek-V3's router."""

DENSE: dict[str, Any] = {
    "moe_layers": (False, False), "num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 48,
}  # fmt: skip
LLAMA: dict[str, Any] = DENSE | {
    "family": "llama", "qk_norm": "none", "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
}  # fmt: skip
GEMMA: dict[str, Any] = DENSE | {
    "family": "gemma3_text", "norm": "rms_unit_offset", "post_norms": True, "sliding_windows": (5, None),
    "local_rope": RopeConfig(theta=100.0), "attention_multiplier": 0.25, "embedding_multiplier": 32**0.5,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
"""Two layers without experts: with every bias; with norms after, a window and a rotary base of its own."""

GRANITE: dict[str, Any] = {
    "family": "granitemoe", "qk_norm": "none", "attention_multiplier": 0.4, "embedding_multiplier": 2.0,
    "residual_multiplier": 0.6, "logits_scaling": 0.9,
}  # fmt: skip
"""Factors on embeddings, residuals, attention and logits."""
SINKS: dict[str, Any] = {
    "family": "gpt_oss", "qk_norm": "none", "attention_sinks": True, "qkv_bias": True, "expert_bias": True,
    "attention_out_bias": True, "expert_swiglu": ClampedSwiglu(limit=0.8), "router": RouterConfig(bias=True),
}  # fmt: skip
"""Attention with sinks, and biased experts with a clamped SwiGLU, as in gpt-oss."""

LINEAR: dict[str, Any] = {
    "family": "minimax", "qk_norm": "none", "linear_layers": (True, False),
    "normed_residual": NormedResidual((1.2, 0.7), (0.8, 1.3), (0.9, 1.1)),
}  # fmt: skip
"""Linear attention with a state a sequence, then softmax attention; residuals taken after the norm."""

EIGHT_WAY = TWO_LAYERS.replace(hidden_size=64, num_heads=8, num_experts=16, num_experts_per_tok=4)
"""Every dimension that layouts split divides by eight devices, but for the two key/value heads."""


def experts_only(D: int, F: int, E: int, k: int = 1) -> ModelConfig:
    """Returns the configuration of one expert layer by its sizes, with the least of everything else."""
    return ONE_LAYER.replace(
        vocab_size=8, hidden_size=D, num_heads=1, num_kv_heads=1, num_experts=E, num_experts_per_tok=k,
        moe_intermediate_size=F, intermediate_size=F,
    )  # fmt: skip
