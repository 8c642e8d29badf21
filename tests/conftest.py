"""Strict settings for every test: eight virtual CPU devices, no implicit dtype or rank promotion.

They must be set before JAX starts its backend, hence the environment at import time.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()
# XLA's CPU client has a thread a core; programs of eight devices wait for each other, and would hang.
os.environ.setdefault("PJRT_NPROC", "64")
# Tests never talk to a W&B server of the user's.
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")

import jax
import pytest

from moejax.core.config import ModelConfig

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def tiny_config() -> ModelConfig:
    """A Qwen3-MoE of two layers that compiles in a second or two."""
    return ModelConfig(
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
