"""Quantized weights on meshes: loaded by parts, gathered and saved."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.checkpoint.tensors import TensorFiles
from moejax.core.parallel import ParallelConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import iter_params, specs
from moejax.nn.quantized import quantized_weights
from tests.checkpoint.meshes import (
    FAMILIES,
    PRESETS,
    REPLICAS,
    assert_placed,
    placement,
    replicated,
    values_of,
)
from tests.checkpoint.packing import CONVENTIONS, WIDE, quantize_directory
from tests.checkpoint.quantized_models import same_arrays
from tests.decoding import random_model

pytestmark = pytest.mark.multidevice

# Wide enough that every split leaves whole groups.
MODEL = FAMILIES["qwen3_moe"].replace(head_dim=16, moe_intermediate_size=64)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Checkpoints by convention."""
    root = tmp_path_factory.mktemp("checkpoints")
    save_pretrained(random_model(MODEL), root / "source")
    for name in ("gptq-act-order", "awq", "ct-int4-asym", "ct-w8a8-static", "fp8-blocks"):
        quantize_directory(root / "source", root / name, root / f"{name}-plain", CONVENTIONS[name])
    return root


@pytest.mark.each_value
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "ct-w8a8-static", "fp8-blocks"])
def test_same_arrays_as_on_one_device(directories, monkeypatch, name, preset):
    expected = load_pretrained(directories / name).model
    place, reads = placement(PRESETS[preset], MODEL), []
    read = TensorFiles.read

    def watched(self, key, index):
        reads.append((key, str(index)))
        return read(self, key, index)

    monkeypatch.setattr(TensorFiles, "read", watched)
    loaded = load_pretrained(directories / name, shardings=place).model
    assert_placed(loaded, place(specs(loaded)), values_of(expected))
    assert len(reads) == len(set(reads))
    dequantized = load_pretrained(directories / name, shardings=place, dequantize=True).model
    plain = load_pretrained(directories / f"{name}-plain").model
    assert_placed(dequantized, place(specs(dequantized)), values_of(plain))


@pytest.mark.parametrize("preset", ["ep8", "tp8"])
def test_replicas_of_experts(directories, preset):
    """Each slot has the arrays of its expert, and saving writes each expert once."""
    parallel = PRESETS[preset] if preset == "ep8" else ParallelConfig(ep=4, tp=2)
    plan = ParallelConfig(**(vars(parallel) | {"redundant_experts": 8}))
    build = replicated(parallel)
    experts = [name for name, _ in iter_params(build(MODEL)) if ".experts." in name]
    expert_of = {name: REPLICAS[int(name.split(".")[1])] for name in experts}
    directory = directories / "gptq-act-order"
    loaded = load_pretrained(
        directory, build=build, shardings=placement(plan, MODEL), expert_of=expert_of
    ).model
    whole = values_of(load_pretrained(directory).model)
    for name, value in values_of(loaded).items():
        if ".experts." in name:
            slots = REPLICAS[int(name.split(".")[1])]
            np.testing.assert_array_equal(value, whole[name][list(slots)])
        else:
            np.testing.assert_array_equal(value, whole[name])


def test_replicas_are_saved_once(directories, tmp_path):
    parallel = ParallelConfig(ep=8)
    build = replicated(parallel)
    experts = [name for name, _ in iter_params(build(MODEL)) if ".experts." in name]
    expert_of = {name: REPLICAS[int(name.split(".")[1])] for name in experts}
    plan = ParallelConfig(**(vars(parallel) | {"redundant_experts": 8}))
    options = {"build": build, "shardings": placement(plan, MODEL), "expert_of": expert_of}
    model = load_pretrained(directories / "awq", **options).model
    save_pretrained(model, tmp_path, expert_of=expert_of)
    again, first = load_pretrained(tmp_path).model, load_pretrained(directories / "awq").model
    same_arrays(again, first)


@pytest.mark.parametrize("layers", [range(0, 1), range(1, 2)])
def test_a_stage_reads_its_layers(directories, layers):
    directory = directories / "ct-int4-asym"
    expected = values_of(load_pretrained(directory).model)
    loaded = load_pretrained(directory, build=lambda config: Decoder(config, layers=layers))
    found = values_of(loaded.model)
    assert any(f"layers.{layers[0]}." in name and name.endswith(".values") for name in found)
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name])
    other = f"layers.{1 - layers[0]}."
    assert not any(name.startswith(other) for name in found)
    keys = load_file(directory / "model.safetensors")
    assert loaded.stats.tensors < len(keys)


@pytest.mark.parametrize("choice", ["compressed-tensors", "moejax"])
@pytest.mark.parametrize("preset", ["tp8", "ep4_tp2"])
def test_saved_from_a_mesh(directories, tmp_path, preset, choice):
    expected = load_pretrained(directories / "ct-int4-asym").model
    place = placement(PRESETS[preset], MODEL)
    spread = load_pretrained(directories / "ct-int4-asym", shardings=place).model
    save_pretrained(spread, tmp_path, quantized_format=choice)
    same_arrays(load_pretrained(tmp_path).model, expected)


def test_wide_packed_weights_split_between_pieces(tmp_path):
    """Packed bytes of 64 inputs stay together on a device."""
    config = FAMILIES["qwen3_moe"].replace(
        hidden_size=64, head_dim=64, moe_intermediate_size=512, num_experts=2, num_layers=1,
        moe_layers=(True,), sliding_windows=(None,),
    )  # fmt: skip
    save_pretrained(random_model(config), tmp_path / "source")
    quantize_directory(tmp_path / "source", tmp_path / "q", tmp_path / "plain", WIDE["ct-int4-g64"])
    place = placement(PRESETS["tp8"], config)
    model = load_pretrained(tmp_path / "q", shardings=place).model
    down = model.layers[0].moe.experts.down_proj
    assert {shard.data.shape for shard in down.values[...].addressable_shards} == {(2, 64, 32)}
    assert {shard.data.shape for shard in down.scales[...].addressable_shards} == {(2, 1, 64)}
    assert all(isinstance(param[...], jax.Array) for _, param in iter_params(model))
    assert len(dict(quantized_weights(model))) == 7
