"""Models on a mesh, saved as Hugging Face directories."""

import tracemalloc
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from moejax.checkpoint.directory import load_config
from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder
from moejax.moe.replicas import held_experts
from moejax.nn.param import iter_params, specs
from tests.checkpoint.meshes import (
    FAMILIES,
    PRESETS,
    placement,
    replicated,
    slots_by_path,
    spread,
)
from tests.decoding import random_model

pytestmark = pytest.mark.multidevice

SINGLE = "model.safetensors"
ROOT = Path(__file__).resolve().parents[2]
CONFIG = FAMILIES["qwen3_moe"]


def on_mesh(preset: str | None, config: ModelConfig = CONFIG, **options) -> Decoder:
    """A random model, spread."""
    model = random_model(config, **options)
    if preset is not None:
        spread(model, placement(PRESETS[preset], config)(specs(model)))
    return model


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("layout", ["edf", "efd"])
def test_a_spread_model_saves_as_one_that_is_not(tmp_path, preset, layout):
    save_pretrained(on_mesh(None), tmp_path / "one")
    save_pretrained(on_mesh(preset, moe=MoeConfig(expert_layout=layout)), tmp_path / "mesh")
    expected, found = load_file(tmp_path / "one" / SINGLE), load_file(tmp_path / "mesh" / SINGLE)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    assert load_config(tmp_path / "mesh") == CONFIG


def test_each_expert_is_saved_once_whatever_its_slots(tmp_path):
    save_pretrained(on_mesh(None), tmp_path / "one")
    build, place = replicated(PRESETS["ep8"]), placement(PRESETS["ep8"], CONFIG)
    slots = slots_by_path(build(CONFIG))
    model, _ = load_pretrained(tmp_path / "one", build=build, shardings=place, expert_of=slots)
    save_pretrained(model, tmp_path / "again", expert_of=slots)
    expected, found = load_file(tmp_path / "one" / SINGLE), load_file(tmp_path / "again" / SINGLE)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)
    with pytest.raises(ConfigError, match="16 slots for 1 experts, and the model has 8"):
        save_pretrained(model, tmp_path / "wrong", expert_of=dict.fromkeys(slots, (0,) * 16))
    assert not list(tmp_path.glob("wrong/*"))


def test_replica_tables_say_which_expert_is_where(tmp_path):
    """A fresh model with replicas, saved without `expert_of`: by its own tables."""
    save_pretrained(on_mesh(None), tmp_path / "one")
    build, place = replicated(PRESETS["ep8"]), placement(PRESETS["ep8"], CONFIG)
    slots = held_experts(build(CONFIG))
    assert slots is not None
    model, _ = load_pretrained(tmp_path / "one", build=build, shardings=place, expert_of=slots)
    save_pretrained(model, tmp_path / "again")
    expected, found = load_file(tmp_path / "one" / SINGLE), load_file(tmp_path / "again" / SINGLE)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    model = on_mesh("ep8")
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    save_pretrained(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_saving_leaves_no_copy_on_the_host(tmp_path):
    """JAX keeps what `np.asarray` made of an array that is spread; one tensor at a time must be there."""
    config = CONFIG.replace(vocab_size=8192, hidden_size=128, moe_intermediate_size=256)
    model = on_mesh("ep4_tp2", config)
    total = sum(param[...].nbytes for _, param in iter_params(model))
    largest = max(param[...].nbytes for _, param in iter_params(model))
    tracemalloc.start()
    try:
        save_pretrained(model, tmp_path, max_shard_bytes=largest)
        alive, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert alive < 500_000 < total / 10
    # A shard that is full, the tensor that did not fit into it, and that one before it was turned.
    assert peak < 3 * largest + 500_000 < total, (peak, largest, total)
