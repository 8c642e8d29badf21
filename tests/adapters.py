"""Random adapters in PEFT's format."""

from pathlib import Path
from typing import get_args

from moejax.checkpoint.peft import Factors, save_adapter
from moejax.core.adapters import AdaptedMatrices
from moejax.core.config import ModelConfig
from moejax.engine.adapters import random_factors as drawn


def random_factors(
    config: ModelConfig, seed: int, rank: int = 3, only: str = "", scale: float = 0.15
) -> dict[str, Factors]:
    """A and B of every matrix whose path has `only` in it; products as large as the weights."""
    factors = drawn(config, seed, rank, get_args(AdaptedMatrices), scale / rank**0.25)
    return {name: pair for name, pair in factors.items() if only in name}


def write_adapter(directory: Path, config: ModelConfig, seed: int, rank: int = 3, only: str = "") -> Path:
    save_adapter(random_factors(config, seed, rank, only, scale=0.4), config, directory)
    return directory
