"""PEFT directories: what is read, in either layout of experts, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moejax.checkpoint.peft import CONFIG, WEIGHTS, merge_adapter, read_adapter, save_adapter
from moejax.core.config import ModelConfig
from moejax.core.errors import CheckpointError, ConfigError
from moejax.models.decoder import Decoder
from moejax.nn.param import iter_params
from tests.adapters import random_factors, write_adapter
from tests.decoding import random_model
from tests.model_shapes import DENSE, GRANITE, LATENT, LINEAR, ONE_LAYER, SINKS, TWO_LAYERS

FAMILIES = {
    "qwen3": TWO_LAYERS,
    "latent": TWO_LAYERS.replace(**LATENT),
    "sinks": TWO_LAYERS.replace(**SINKS),
    "linear": TWO_LAYERS.replace(**LINEAR),
    "granite": TWO_LAYERS.replace(**GRANITE),
    "dense": TWO_LAYERS.replace(family="qwen3", **DENSE),
}


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_what_is_written_is_read_and_merged(config: ModelConfig, tmp_path: Path) -> None:
    factors = random_factors(config, 0)
    save_adapter(factors, config, tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter", config)
    assert adapter.rank == 3 and adapter.factors.keys() == factors.keys()
    model, before = random_model(config), dict(iter_params(random_model(config)))
    merge_adapter(model, adapter)
    for name, param in iter_params(model):
        expected = np.asarray(before[name][...])
        if name in factors:
            a, b = factors[name]
            for mine, theirs in zip(adapter.factors[name], (a, b), strict=True):
                np.testing.assert_array_equal(mine, theirs)
            expected = expected + a @ b
        np.testing.assert_allclose(np.asarray(param[...]), expected, rtol=1e-6, atol=1e-7)


def test_the_digest_is_the_contents(tmp_path: Path) -> None:
    one, same, other = (
        write_adapter(tmp_path / name, ONE_LAYER, seed) for name, seed in zip("abc", (1, 1, 2), strict=True)
    )
    digests = [read_adapter(path, ONE_LAYER).digest for path in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]


def fold(factors: dict[str, Any], names: tuple[str, ...], first_is_a: bool) -> tuple[np.ndarray, np.ndarray]:
    """PEFT's two matrices of a stack `[E, out, in]`, which has the outputs of each name in turn; with
    `first_is_a` as early PEFT had it, where A takes the outputs."""
    parts = [factors[f"layers.0.moe.experts.{name}"] for name in names]
    a = parts[0][0].swapaxes(1, 2)  # [E, r, in], which the parts share
    b = np.concatenate([part[1] for part in parts], axis=2).swapaxes(1, 2)  # [E, out, r]
    if first_is_a:
        a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
    return a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)


@pytest.mark.parametrize("width", [16, 20])  # of 16, 2 · 16 is the model's width: shapes tell nothing
@pytest.mark.parametrize("first_is_a", [False, True])
def test_folded_experts_are_those_one_by_one(tmp_path: Path, first_is_a: bool, width: int) -> None:
    config = ONE_LAYER.replace(moe_intermediate_size=width)
    factors = random_factors(config, 0, only="experts")
    factors["layers.0.moe.experts.up_proj"] = (
        factors["layers.0.moe.experts.gate_proj"][0],
        factors["layers.0.moe.experts.up_proj"][1],
    )
    save_adapter(factors, config, tmp_path)
    expected = read_adapter(tmp_path, config)
    tensors, module = {}, "base_model.model.model.layers.0.mlp.experts"
    for inside, names in ((".base_layer", ("gate_proj", "up_proj")), ("", ("down_proj",))):
        for half, matrix in zip("AB", fold(factors, names, first_is_a), strict=True):
            tensors[f"{module}{inside}.lora_{half}.weight"] = np.ascontiguousarray(matrix)
    save_file(tensors, tmp_path / WEIGHTS)
    dated = {} if first_is_a else {"peft_version": "0.21.2"}
    change_settings(
        tmp_path, target_parameters=["experts.gate_up_proj", "mlp.experts.down_proj"], lora_alpha=6, **dated
    )
    adapter = read_adapter(tmp_path, config)
    for name, (a, b) in expected.factors.items():
        np.testing.assert_allclose(np.matmul(*adapter.factors[name]), 2 * a @ b, rtol=1e-5, atol=1e-6)


def change_settings(directory: Path, **fields: Any) -> None:
    path = directory / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({"lora_alpha": 12}, 4.0),
        ({"lora_alpha": 12, "use_rslora": True}, 12 / 3**0.5),
        ({"alpha_pattern": {"q_proj": 9}, "rank_pattern": {"q_proj": 3}}, 3.0),
    ],
)
def test_scales(tmp_path: Path, fields: dict[str, Any], factor: float) -> None:
    write_adapter(tmp_path, ONE_LAYER, 0, only="q_proj")
    ((_, before),) = read_adapter(tmp_path, ONE_LAYER).factors.values()
    change_settings(tmp_path, **fields)
    ((_, after),) = read_adapter(tmp_path, ONE_LAYER).factors.values()
    np.testing.assert_allclose(after, factor * before, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "use_dora=True is more than LoRA's two matrices"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"tomorrows_field": 1}, "tomorrows_field=1"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'; only LORA is read"),
        ({"r": None}, "r must be a positive number, got None"),
    ],
)
def test_what_is_more_than_lora_is_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    write_adapter(tmp_path, ONE_LAYER, 0)
    change_settings(tmp_path, **fields)
    with pytest.raises(ConfigError) as error:
        read_adapter(tmp_path, ONE_LAYER)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_every_key_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    write_adapter(tmp_path, ONE_LAYER, 0, only="attention")
    tensors = load_file(tmp_path / WEIGHTS)
    module = "base_model.model.model.layers.0.self_attn"
    tensors[f"{module}.q_proj.lora_A.weight"] = np.zeros((3, 31), np.float32)
    tensors[f"{module}.k_proj.lora_A.weight"][0, 0] = np.nan
    del tensors[f"{module}.v_proj.lora_B.weight"]
    for strange in (
        "model.layers.0.mlp.experts.lora_A.weight",
        "model.layers.5.self_attn.q_proj.lora_A.weight",
    ):
        tensors[f"base_model.model.{strange}"] = tensors[f"{module}.o_proj.lora_A.weight"]
    tensors["base_model.model.model.layers.5.self_attn.q_proj.lora_B.weight"] = np.zeros((32, 3), np.float32)
    tensors["base_model.model.lm_head.modules_to_save.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError) as error:
        read_adapter(tmp_path, ONE_LAYER)
    for words in (
        "1 that are no LoRA matrix: base_model.model.lm_head.modules_to_save.weight",
        "without their other half: base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight",
        "misshapen: model.layers.0.self_attn.q_proj.weight of [32, 32] has [3, 31] and [32, 3]",
        "with NaN or infinite values: model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.mlp.experts, model.layers.5.self_attn.q_proj",
    ):
        assert words in str(error.value)


def test_a_directory_that_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"adapter_config.json: not found"):
        read_adapter(tmp_path, ONE_LAYER)
    write_adapter(tmp_path, ONE_LAYER, 0)
    (tmp_path / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(
        CheckpointError, match=r"no adapter_model.safetensors; PEFT's save_pretrained writes it"
    ):
        read_adapter(tmp_path, ONE_LAYER)


def test_a_model_that_takes_no_merging(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path, TWO_LAYERS, 0), TWO_LAYERS)
    with pytest.raises(ConfigError, match=r"cannot be merged: it is quantized, or has replicas"):
        merge_adapter(Decoder(ONE_LAYER), adapter)
