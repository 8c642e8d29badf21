"""Strict settings for every test: eight virtual CPU devices, no implicit dtype or rank promotion.

They must be set before JAX starts its backend, hence the environment at import time.
"""

import os
from collections.abc import Iterator
from pathlib import Path

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


MANY_MAPS = 16_000


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Compiled programs take memory maps, of which Linux allows a process 65,530 (vm.max_map_count): past
    them XLA crashes when it compiles. So a file's programs are dropped once there are many."""
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists() or maps.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()


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
