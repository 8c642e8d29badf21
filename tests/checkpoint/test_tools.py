"""Checkpoints as particular tools write them, in names, words and files of their own."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moejax.checkpoint.directory import resolve_model_dir
from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.core.errors import CheckpointError, ConfigError
from moejax.engine.opening.resolve import find_model
from moejax.quantization.checkpoints.gptq import GptqScheme
from moejax.quantization.formats import WeightFormat
from tests.checkpoint import packing
from tests.checkpoint.meshes import FAMILIES
from tests.checkpoint.packing import CONVENTIONS, Convention, load_bytes, quantize_directory
from tests.checkpoint.quantized_models import assert_same_values, same_weights
from tests.decoding import random_model

SINGLE = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj"
NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    for name in ("mixtral", "qwen3_moe"):
        save_pretrained(random_model(FAMILIES[name]), root / name)
    return root


@pytest.fixture
def make(sources, tmp_path):
    """(model, convention) → directories of the quantized checkpoint and of its values."""

    def directories(model: str, convention: Convention) -> tuple[Path, Path]:
        quantize_directory(sources / model, tmp_path / "quantized", tmp_path / "plain", convention)
        return tmp_path / "quantized", tmp_path / "plain"

    return directories


def rewrite(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file({key: np.array(value, order="C") for key, value in tensors.items()}, directory / SINGLE)


# --- GPTQ ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "word", "zeros"),
    [
        (4, 0xEEEEEEEF, [0] * 8),
        (4, 0x00000000, [1] * 8),
        (4, 0x77777777, [8] * 8),
        (4, 0xF10E7F3F, [0, 5, 0, 9, 15, 1, 2, 0]),
        (4, 0xEEEEEEEE, [15] * 8),
        (8, 0xFEFEFEFF, [0] * 4),
        (8, 0x7F7F7F7F, [128] * 4),
        (8, 0x7EFEFEFF, [0, 0, 0, 128]),
        (8, 0xFEFF0200, [1, 3, 0, 0]),
    ],
)
def test_zero_points_less_one_by_words(bits: int, word: int, zeros: list[int]):
    """`word` is the zero points' less 0x11111111 (0x01010101), modulo 2^32: 0 borrows from its neighbour."""
    packed = sum(zero << (bits * place) for place, zero in enumerate(zeros))
    assert (packed - (0x11111111 if bits == 4 else 0x01010101)) % 2**32 == word
    fmt = WeightFormat("int4" if bits == 4 else "int8", "channel", symmetric=False, scale_dtype="float16")
    F = 32 // bits
    tensors = {
        "qweight": np.zeros((1, F), np.int32),
        "qzeros": np.asarray([[word]], np.uint32).view(np.int32),
        "scales": np.ones((1, F), np.float16),
    }
    parts = GptqScheme(fmt, less_one=True).read(tensors, 32 // bits, F, pytest.fail)
    read = parts["zeros"].astype(int) + (128 if bits == 8 else 0)  # those of 8 bits we count from -128
    np.testing.assert_array_equal(read, [zeros])


GPTQ_ZEROS = Convention(packing.gptq(bias=True), packing.gptq_config(), "int4_g8_sf16")


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_biases_of_zeros_are_dropped(make, model):
    """AutoGPTQ gives each quantized module one."""
    directory, plain = make(model, GPTQ_ZEROS)
    assert sum(key.endswith(".bias") for key in load_file(directory / SINGLE)) > 30
    assert_same_values(load_pretrained(directory).model, load_pretrained(plain).model, "int4_g8_sf16")


def test_other_biases_are_refused_by_name(make):
    directory, _ = make("qwen3_moe", GPTQ_ZEROS)
    tensors, expert = load_file(directory / SINGLE), "model.layers.1.mlp.experts.3.up_proj"
    tensors[f"{Q}.bias"][2] = tensors[f"{expert}.bias"][0] = 0.5
    rewrite(directory, tensors)
    with pytest.raises(CheckpointError, match="2 biases other than 0, which the architecture") as caught:
        load_pretrained(directory)
    assert f"{Q}.bias" in str(caught.value) and f"{expert}.bias" in str(caught.value)
    assert "unmapped" not in str(caught.value)


def test_biases_that_the_architecture_has_are_read(tmp_path):
    """Qwen2-MoE's, of a quantized module, are the model's; its experts have none."""
    save_pretrained(random_model(FAMILIES["qwen2_moe"]), tmp_path / "source")
    convention = Convention(packing.gptq(), packing.gptq_config(), "int4_g8_sf16")
    quantize_directory(tmp_path / "source", tmp_path / "quantized", tmp_path / "plain", convention)
    bias = load_pretrained(tmp_path / "quantized").model.layers[0].attention.q_proj.bias[...]
    np.testing.assert_array_equal(bias, load_file(tmp_path / "source" / SINGLE)[f"{Q}.bias"])
    assert np.asarray(bias).any()


@pytest.mark.parametrize(
    ("name", "file", "stored"),
    [
        ("gptq", "quantize_config.json", "gptq_model-4bit-8g.safetensors"),
        ("awq", "quant_config.json", SINGLE),
    ],
)
def test_a_file_beside_config_json_says_how(make, name, file, stored):
    """AutoGPTQ and AutoAWQ once wrote nothing into config.json."""
    directory, plain = make("qwen3_moe", CONVENTIONS[name])
    config = json.loads((directory / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    if name == "awq":
        settings["q_group_size"], settings["w_bit"] = settings.pop("group_size"), settings.pop("bits")
    (directory / "config.json").write_text(json.dumps(config))
    (directory / file).write_text(json.dumps(settings))
    (directory / SINGLE).rename(directory / stored)
    loaded, expected = load_pretrained(directory).model, load_pretrained(plain).model
    assert_same_values(loaded, expected, CONVENTIONS[name].format)
    with pytest.raises(ConfigError, match=f"{file} has a quantization_config"):
        find_model(directory, "dummy")


# --- llmcompressor ------------------------------------------------------------------------------------------


def rename_experts(directory: Path, names: dict[str, str]) -> None:
    tensors = load_bytes(directory / SINGLE)
    for key in list(tensors):
        parts = key.split(".")
        if "experts" in parts and parts[-2] in names:
            parts[-2] = names[parts[-2]]
            tensors[".".join(parts)] = tensors.pop(key)
    rewrite(directory, tensors)


@pytest.mark.parametrize("name", ["ct-int4-asym", "ct-w8a8"])
def test_experts_of_mixtral_in_their_new_names_under_the_old_block(make, name):
    """As llmcompressor 0.14 with transformers 5 writes them."""
    directory, plain = make("mixtral", CONVENTIONS[name])
    rename_experts(directory, NAMES)
    keys = load_bytes(directory / SINGLE)
    assert any(key.startswith("model.layers.0.block_sparse_moe.experts.0.gate_proj.weight") for key in keys)
    expected = load_pretrained(plain).model
    assert_same_values(load_pretrained(directory).model, expected, CONVENTIONS[name].format)


def test_names_that_do_not_match_are_shown_as_names(make):
    directory, _ = make("mixtral", CONVENTIONS["ct-int4"])
    rename_experts(directory, {"w1": "linear_v"})
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(directory)
    message = str(caught.value)
    assert "of a dtype" not in message
    assert "unmapped: model.layers.0.block_sparse_moe.experts.0.linear_v.weight_packed" in message
    assert "missing: model.layers.0.block_sparse_moe.experts.0.w1" in message


def test_the_configuration_under_its_old_key(make):
    """compressed-tensors once said `compression_config`, without a method, and "frozen"."""
    directory, plain = make("qwen3_moe", CONVENTIONS["ct-int4"])
    config = json.loads((directory / "config.json").read_text())
    old = config.pop("quantization_config") | {"quantization_status": "frozen"}
    del old["quant_method"]
    (directory / "config.json").write_text(json.dumps(config | {"compression_config": old}))
    assert_same_values(load_pretrained(directory).model, load_pretrained(plain).model, "int4_g8")


def test_more_than_four_bits_in_int8(make):
    directory, _ = make("qwen3_moe", CONVENTIONS["ct-int4-in-int8"])
    tensors = load_bytes(directory / SINGLE)
    tensors[f"{Q}.weight"][3, 4] = 8
    rewrite(directory, tensors)
    with pytest.raises(CheckpointError, match=f"{Q}.weight: -8 to 8 where 4 bits have -8 to 7"):
        load_pretrained(directory)


# --- transformers -------------------------------------------------------------------------------------------


def stack_scales(directory: Path, plain: Path, block: str, names: tuple[str, ...], static: bool) -> None:
    """Scales of all experts of a layer in one tensor, gate before up; one for both where it is a tensor's.

    As transformers 5.23 saves `FP8Experts`.
    """
    tensors, values = load_bytes(directory / SINGLE), load_file(plain / SINGLE)
    experts = range(FAMILIES["qwen3_moe"].num_experts)
    gate, up, down = ([f"{block}.experts.{e}.{name}" for e in experts] for name in names)

    def take(modules: list[str], kind: str) -> np.ndarray:
        return np.stack([tensors.pop(f"{module}.{kind}") for module in modules])

    first, second, last = (take(modules, "weight_scale_inv") for modules in (gate, up, down))
    whole = first.shape[1:] == (1, 1)
    stacked = first if whole else np.concatenate([first, second], 1)
    if whole:
        for e, module in enumerate(up):
            values[f"{module}.weight"] = tensors[f"{module}.weight"].astype(np.float32) * first[e]
    tensors[f"{block}.experts.gate_up_proj_scale_inv"] = stacked
    tensors[f"{block}.experts.down_proj_scale_inv"] = last
    if static:
        inputs, _, outputs = (take(modules, "activation_scale").reshape(-1) for modules in (gate, up, down))
        tensors[f"{block}.experts.gate_up_proj_activation_scale"] = inputs
        tensors[f"{block}.experts.down_proj_activation_scale"] = outputs
    rewrite(directory, tensors)
    save_file(values, plain / SINGLE)


def transformers_fp8(static: bool) -> Convention:
    """With one scale a tensor."""
    make = packing.plain("float", "tensor", scale="weight_scale_inv", input_scale="activation_scale",
                         stored=(1, 1), static=static)  # fmt: skip
    scheme = "static" if static else "dynamic"
    config = packing.TENSOR | {"activation_scheme": scheme, "weight_block_size": None}
    return Convention(make, config, f"float8_e4m3fn_tensor_a8{'static' if static else ''}")


def test_static_scales_under_their_names_in_transformers(make):
    directory, plain = make("qwen3_moe", transformers_fp8(static=True))
    stored = load_bytes(directory / SINGLE)[f"{Q}.activation_scale"]
    loaded = load_pretrained(directory).model
    assert_same_values(loaded, load_pretrained(plain).model, "float8_e4m3fn_tensor_a8static")
    kept = loaded.layers[0].attention.q_proj.kernel.input_scale[...]
    np.testing.assert_array_equal(kept, stored.reshape(1))


@pytest.mark.parametrize("kind", ["static", "dynamic", "blocks"])
@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_stacked_scales(make, model, kind):
    convention = CONVENTIONS["fp8-blocks"] if kind == "blocks" else transformers_fp8(kind == "static")
    directory, plain = make(model, convention)
    block = {"qwen3_moe": "mlp", "mixtral": "block_sparse_moe"}[model]
    names = tuple(NAMES) if model == "mixtral" else tuple(NAMES.values())
    config = json.loads((directory / "config.json").read_text())
    stored = load_bytes(directory / SINGLE)
    for layer in range(config["num_hidden_layers"]):
        if f"model.layers.{layer}.{block}.experts.0.{names[0]}.weight" in stored:
            stack_scales(directory, plain, f"model.layers.{layer}.{block}", names, kind == "static")
    keys = load_bytes(directory / SINGLE)
    assert not any(key.endswith("weight_scale_inv") and "experts" in key for key in keys)
    loaded, expected = load_pretrained(directory).model, load_pretrained(plain).model
    assert_same_values(loaded, expected, convention.format)
    same_weights(load_pretrained(directory, dequantize=True).model, expected)


def test_a_scale_beside_a_weight_that_is_not_quantized(tmp_path):
    """transformers leaves the shared expert's gate, whose row is no block, as it is, and saves a scale."""
    save_pretrained(random_model(FAMILIES["qwen2_moe"]), tmp_path / "source")
    directory, plain = tmp_path / "quantized", tmp_path / "plain"
    quantize_directory(tmp_path / "source", directory, plain, CONVENTIONS["fp8-blocks"])
    tensors = load_bytes(directory / SINGLE)
    for key in [key for key in tensors if key.endswith("shared_expert_gate.weight")]:
        tensors[f"{key}_scale_inv"] = np.full((1, 4), np.nan, np.float32)
    rewrite(directory, tensors)
    assert any("shared_expert_gate.weight_scale_inv" in key for key in tensors)
    loaded, expected = load_pretrained(directory).model, load_pretrained(plain).model
    assert_same_values(loaded, expected, "float8_e4m3fn_b8")


def test_a_stack_that_does_not_fit(make):
    directory, _ = make("qwen3_moe", CONVENTIONS["fp8-blocks"])
    tensors = load_bytes(directory / SINGLE)
    for name in [key for key in tensors if ".layers.1." in key and "experts" in key and "scale" in key]:
        del tensors[name]
    tensors["model.layers.1.mlp.experts.gate_up_proj_scale_inv"] = np.ones((8, 3, 4), np.float32)
    tensors["model.layers.1.mlp.experts.down_proj_scale_inv"] = np.ones((), np.float32)
    rewrite(directory, tensors)
    with pytest.raises(CheckpointError) as caught:
        load_pretrained(directory)
    message = str(caught.value)
    assert "1.mlp.experts.0.up_proj.weight_scale_inv is [1, 4], expected [2, 4]" in message
    assert "unmapped: model.layers.1.mlp.experts.down_proj_scale_inv" in message
    assert "model.layers.1.mlp.experts.7.down_proj.weight_scale_inv" in message


# --- What is not read ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model-q4_0.gguf", ""])
def test_gguf_is_refused_by_name(tmp_path, name):
    (tmp_path / "model-q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="is GGUF, which is not read; give its model's safetensors"):
        resolve_model_dir(tmp_path / name)
