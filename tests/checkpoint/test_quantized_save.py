"""What is saved of quantized weights is loaded again, to the bit; in words that other libraries know where
they have some."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.core.errors import ConfigError
from moejax.nn.quantized import quantized_weights
from moejax.quantization.checkpoints.layouts import divisor_of
from tests.checkpoint import packing
from tests.checkpoint.meshes import FAMILIES
from tests.checkpoint.quantized_models import quantized_model, same_arrays
from tests.decoding import random_model
from tests.model_shapes import GEMMA, GRANITE, LLAMA

SINGLE = "model.safetensors"
CONFIG = FAMILIES["qwen3_moe"]
MODELS = FAMILIES | {
    "llama": CONFIG.replace(**LLAMA | {"moe_intermediate_size": 16}),
    "gemma3_text": CONFIG.replace(**GEMMA | {"moe_intermediate_size": 16}),
    "granitemoe": CONFIG.replace(**GRANITE),
}
WIDE = CONFIG.replace(hidden_size=64, moe_intermediate_size=64, num_experts=4, head_dim=8)

COMPRESSED = {
    "int8": "pack-quantized", "int8_tensor_asym": "pack-quantized", "int8_g8_asym": "pack-quantized",
    "int8_b8": "pack-quantized", "w8a8": "int-quantized", "w8a8_static": "int-quantized",
    "int8_tensor_asym_a8static": "int-quantized", "int4": "pack-quantized", "int4_g8": "pack-quantized",
    "int4_asym": "pack-quantized", "int4_g8_asym_sf16": "pack-quantized", "int4_b8_asym": "pack-quantized",
    "int4_tensor_asym": "pack-quantized", "fp8": "naive-quantized", "float8_e4m3fn_b8": "naive-quantized",
    "float8_e4m3fn_g8": "naive-quantized", "float8_e4m3fn_a8": "float-quantized",
    "float8_e4m3fn_tensor_a8static_sbf16": "float-quantized",
}  # fmt: skip

OWN = [
    "int4_g8_indexed", "int8_g8_asym_indexed", "fp8_e5m2", "int8_g8_se8m0", "fp8_e5m2_a8",
    "bf16_2of4", "int8_2of4",
]  # fmt: skip


def quantization_config(directory):
    return json.loads((directory / "config.json").read_text())["quantization_config"]


@pytest.mark.each_value
@pytest.mark.parametrize("choice", ["auto", "moejax"])
@pytest.mark.parametrize("name", [*COMPRESSED, *OWN])
def test_every_format_comes_back(tmp_path, name, choice):
    model = quantized_model(CONFIG, name)
    save_pretrained(model, tmp_path, quantized_format=choice)
    config, own = quantization_config(tmp_path), choice == "moejax" or name in OWN
    assert config["quant_method"] == ("moejax" if own else "compressed-tensors")
    if not own:
        assert config["format"] == COMPRESSED[name]
        (group,) = config["config_groups"].values()
        assert group["targets"] == ["Linear"]
        assert config["ignore"] == ["lm_head", r"re:model\.layers\.\d+\.mlp\.gate$"]
    loaded = load_pretrained(tmp_path)
    same_arrays(loaded.model, model)
    assert loaded.config == CONFIG


@pytest.mark.parametrize("choice", ["auto", "moejax"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "float8_e4m3fn_g32_se8m0", "int4_g64_asym"])
def test_formats_of_wide_weights_come_back(tmp_path, name, choice):
    model = quantized_model(WIDE, name)
    save_pretrained(model, tmp_path, quantized_format=choice)
    same_arrays(load_pretrained(tmp_path).model, model)
    if choice == "auto":
        layout = {"float8_e4m3fn_g32_se8m0": "mxfp8-quantized", "int4_g64_asym": "pack-quantized"}
        assert quantization_config(tmp_path)["format"] == layout.get(name, f"{name}-pack-quantized")


@pytest.mark.each_value
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("choice", ["compressed-tensors", "moejax"])
def test_every_family_in_shards_and_several_formats(tmp_path, family, choice):
    """Some weights stay in full precision; those of one layer have another format than their like."""
    formats = {
        "layers.0.attention.k_proj": "w8a8", "attention.o_proj": "int4_g8_asym", "q_proj": "int8",
        "experts.down_proj": "int4_g8", "layers.1.moe.experts": "fp8_a8",
    }  # fmt: skip
    model = quantized_model(MODELS[family], formats)
    if family in ("granitemoe", "gpt_oss") and choice == "compressed-tensors":
        with pytest.raises(ConfigError, match="all experts of this model in one tensor"):
            save_pretrained(model, tmp_path, quantized_format=choice)
        save_pretrained(model, tmp_path)
        assert quantization_config(tmp_path)["quant_method"] == "moejax"
        return
    save_pretrained(model, tmp_path, max_shard_bytes=3000, quantized_format=choice)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    same_arrays(load_pretrained(tmp_path).model, model)
    if choice == "compressed-tensors":
        config = quantization_config(tmp_path)
        assert config["format"] == "mixed-precision"
        targets = [target for group in config["config_groups"].values() for target in group["targets"]]
        assert all(target.startswith("re:") and re.compile(target[3:]) for target in targets)


def test_tied_embeddings(tmp_path):
    model = quantized_model(CONFIG.replace(tie_word_embeddings=True), "int4_g8")
    save_pretrained(model, tmp_path)
    assert "lm_head" not in quantization_config(tmp_path)["ignore"]
    same_arrays(load_pretrained(tmp_path).model, model)


def test_what_is_written_is_what_the_format_says(tmp_path):
    """Held against codes that are unpacked by hand."""
    model = quantized_model(CONFIG, "int4_g8_asym")
    save_pretrained(model, tmp_path)
    tensors, module = load_file(tmp_path / SINGLE), "model.layers.1.mlp.experts.5.down_proj"
    stored = {key.rpartition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{module}.")}
    assert {name: (value.shape, value.dtype.name) for name, value in stored.items()} == {
        "weight_packed": ((32, 2), "int32"),
        "weight_shape": ((2,), "int64"),
        "weight_scale": ((32, 2), "bfloat16"),
        "weight_zero_point": ((4, 2), "int32"),
    }
    weight = model.layers[1].moe.experts.down_proj
    assert weight.pack == 2  # two neighbours a byte
    octets = np.asarray(weight.values[...])[5]
    codes = [[nibble for octet in row for nibble in (octet & 15, octet >> 4)] for row in octets]
    np.testing.assert_array_equal(packing.rows_in_words(np.asarray(codes), 4), stored["weight_packed"])
    zeros = np.asarray(weight.zeros[...])[5]
    np.testing.assert_array_equal(packing.rows_in_words(zeros, 4).T, stored["weight_zero_point"])
    assert stored["weight_shape"].tolist() == [32, 16]


def test_a_tensor_scale_without_a_reciprocal_is_kept_in_our_layout(tmp_path):
    """compressed-tensors divides by the tensor's scale, we multiply by it."""
    scale = next(
        s
        for s in np.linspace(1.99, 1.9999, 50, dtype=np.float32) * np.float32(2**-12)
        if divisor_of(s) is None
    )
    model = quantized_model(WIDE, "nvfp4")
    weight = model.layers[0].attention.q_proj.kernel
    weight.tensor_scale.set_value(weight.tensor_scale[...] * 0 + scale)
    with pytest.raises(
        ConfigError, match=r"cannot say 1 of 14 weights, layers\.0\.attention\.q_proj\.kernel"
    ):
        save_pretrained(model, tmp_path / "no", quantized_format="compressed-tensors")
    assert not (tmp_path / "no").exists()
    save_pretrained(model, tmp_path / "auto")
    assert quantization_config(tmp_path / "auto")["quant_method"] == "moejax"
    same_arrays(load_pretrained(tmp_path / "auto").model, model)


def test_divisors_give_their_scale_exactly():
    rng = np.random.default_rng(0)
    divisors = rng.uniform(1e-3, 1e6, 500).astype(np.float32)
    for scale in np.float32(1) / divisors:
        found = divisor_of(scale)
        assert found is not None and np.float32(1) / found == scale


def test_formats_without_words_and_unknown_choices_are_errors(tmp_path):
    model = quantized_model(CONFIG, {"q_proj": "fp8_e5m2", "": "int8"})
    with pytest.raises(
        ConfigError, match=r"cannot say 2 of 14 weights.*float8_e5m2.*quantized_format='moejax'"
    ):
        save_pretrained(model, tmp_path, quantized_format="compressed-tensors")
    with pytest.raises(ConfigError, match="quantized_format"):
        save_pretrained(model, tmp_path, quantized_format="gptq")


def test_a_plain_model_has_no_quantization_config(tmp_path):
    save_pretrained(random_model(CONFIG), tmp_path, quantized_format="moejax")
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "fp8-blocks", "ct-int4-asym-old-zeros"])
def test_a_published_checkpoint_saved_again(tmp_path, name):
    convention = packing.CONVENTIONS[name]
    save_pretrained(random_model(CONFIG), tmp_path / "source")
    packing.quantize_directory(tmp_path / "source", tmp_path / "first", tmp_path / "plain", convention)
    model = load_pretrained(tmp_path / "first").model
    save_pretrained(model, tmp_path / "again")
    own = "indexed" in convention.format
    assert quantization_config(tmp_path / "again")["quant_method"] == (
        "moejax" if own else "compressed-tensors"
    )
    again = load_pretrained(tmp_path / "again").model
    same_arrays(again, model)
    assert {weight.format.name for _, weight in quantized_weights(again)} == {convention.format}


def test_codes_in_tiles_are_written_in_rows(tmp_path):
    model, rows = (quantized_model(WIDE, {"experts": "int4_g32_asym"}) for _ in range(2))
    for _, weight in quantized_weights(model):
        weight.tile()
    save_pretrained(model, tmp_path)
    same_arrays(load_pretrained(tmp_path).model, rows)


def test_dtype_is_of_what_is_not_quantized(tmp_path):
    model = quantized_model(CONFIG, "int8")
    save_pretrained(model, tmp_path, dtype="bfloat16")
    stored = packing.load_bytes(tmp_path / SINGLE)
    assert stored["model.norm.weight"].dtype == packing.BF16
    assert stored["model.layers.0.self_attn.q_proj.weight_scale"].dtype == np.float32
