"""Random adapters in PEFT's format."""

from pathlib import Path

import numpy as np

from moejax.checkpoint.peft import Factors, save_adapter
from moejax.core.config import ModelConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import specs


def matrices(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The canonical shape of every matrix within layers that an adapter can change in an engine."""
    shapes = {
        name: spec.canonical_shape
        for name, spec in specs(Decoder(config)).items()
        if name.startswith("layers.") and len(spec.matrix_shape) == 2
    }
    return {name: shape for name, shape in shapes.items() if "kv_b_proj" not in name and "group" not in name}


def random_factors(
    config: ModelConfig, seed: int, rank: int = 3, only: str = "", scale: float = 0.15
) -> dict[str, Factors]:
    """A and B of every matrix whose path has `only` in it; products as large as the weights."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (scale / rank**0.25 * rng.normal(size=shape)).astype(np.float32)

    shapes = {name: shape for name, shape in matrices(config).items() if only in name}
    return {name: (draw(*s[:-1], rank), draw(*s[:-2], rank, s[-1])) for name, s in shapes.items()}


def write_adapter(directory: Path, config: ModelConfig, seed: int, rank: int = 3, only: str = "") -> Path:
    save_adapter(random_factors(config, seed, rank, only, scale=0.4), config, directory)
    return directory
