"""Tiny checkpoints on disk, and their tensors as a dictionary that a test may spoil."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moejax.checkpoint.hf import save_pretrained
from moejax.models.decoder import Decoder
from tests.decoding import random_model
from tests.model_shapes import TWO_LAYERS


@pytest.fixture(scope="session")
def tiny_model() -> Decoder:
    """A Qwen3-MoE with one dense layer: 4 experts in layer 1."""
    config = TWO_LAYERS.replace(
        vocab_size=40, hidden_size=16, num_heads=2, num_kv_heads=1, num_experts=4, moe_intermediate_size=8,
        intermediate_size=24, moe_layers=(False, True), max_position_embeddings=32,
    )  # fmt: skip
    return random_model(config, seed=0)


@pytest.fixture
def saved(tmp_path: Path, tiny_model: Decoder) -> Path:
    """`tiny_model`'s directory."""
    save_pretrained(tiny_model, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def change_weights(saved: Path) -> Callable[[Callable[[dict[str, np.ndarray]], object]], Path]:
    """Rewrites `saved`'s only file after a function has changed its tensors in place."""

    def change(edit: Callable[[dict[str, np.ndarray]], object]) -> Path:
        tensors = load_file(saved / "model.safetensors")
        edit(tensors)
        save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
        return saved

    return change


@pytest.fixture
def change_config(saved: Path) -> Callable[..., Path]:
    """Rewrites `saved`'s config.json with other fields; a value of None removes one."""

    def change(**fields: object) -> Path:
        path = saved / "config.json"
        config = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
        return saved

    return change
