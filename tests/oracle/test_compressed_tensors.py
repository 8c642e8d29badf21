"""What the compressed-tensors library makes of our files, and we of its."""

import json
import re

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors")

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file

from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.nn.quantized import quantized_weights
from moejax.quantization.arithmetic import dequantize
from tests.checkpoint.meshes import FAMILIES
from tests.checkpoint.quantized_models import quantized_model

pytestmark = pytest.mark.oracle

SINGLE = "model.safetensors"
CONFIG = FAMILIES["qwen3_moe"].replace(
    hidden_size=64, moe_intermediate_size=64, num_experts=2, head_dim=8, num_layers=1, moe_layers=(True,),
    sliding_windows=(None,),
)  # fmt: skip

EXACT = [
    "int8", "int8_tensor_asym", "int8_g8_asym", "w8a8", "w8a8_static", "int4_sf16", "int4_g8",
    "int4_g32_asym", "int4_g64_asym_sf16", "int4_tensor_asym", "int4_asym", "fp8", "float8_e4m3fn_b32",
    "float8_e4m3fn_g8", "float8_e4m3fn_a8", "float8_e4m3fn_g32_se8m0", "mxfp4",
]  # fmt: skip


def matching(config: QuantizationConfig, module: str) -> QuantizationScheme:
    (group,) = config.config_groups.values()
    assert group.targets == ["Linear"]
    assert not any(re.match(name[3:], module) for name in config.ignore if name.startswith("re:"))
    return group


def theirs(config: QuantizationConfig, tensors: dict, module: str) -> torch.Tensor:
    """The library's dequantized weight, computed in the dtype of the scales."""
    scheme = matching(config, module)
    state = {k.removeprefix(f"{module}."): v for k, v in tensors.items() if k.startswith(f"{module}.")}
    state.pop("input_scale", None)
    compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
    return compressor.decompress(state, scheme)["weight"]


def ours(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """float32 `[D, F]`, rounded once: what a product of exact factors in `dtype` is."""
    return torch.tensor(np.asarray(values).T).to(dtype)


@pytest.mark.parametrize("name", [*EXACT, "nvfp4"])
def test_the_library_reads_what_we_write(tmp_path, name):
    model = quantized_model(CONFIG, name)
    save_pretrained(model, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config, tensors = QuantizationConfig.model_validate(raw), load_file(tmp_path / SINGLE)
    values = {path: dequantize(weight.tensor()) for path, weight in quantized_weights(model)}
    for module, expected in (
        ("model.layers.0.self_attn.q_proj", values["layers.0.attention.q_proj.kernel"]),
        ("model.layers.0.mlp.experts.1.down_proj", values["layers.0.moe.experts.down_proj"][1]),
    ):
        found = theirs(config, tensors, module)
        assert found.shape == expected.T.shape
        if name == "nvfp4":  # theirs rounds scales and product to bfloat16
            wide = torch.tensor(np.asarray(expected).T)
            assert (found.float() - wide).abs().max() <= wide.abs().max() * 2**-7
        else:
            assert torch.equal(found, ours(expected, found.dtype)), module


@pytest.mark.parametrize("name", ["int8_g8_asym_sf32" if name == "int8_g8_asym" else name for name in EXACT])
def test_we_read_what_the_library_writes(tmp_path, name):
    """Scales are drawn, weights are multiples of them: the library finds the codes and packs them.

    It computes in the scales' dtype; codes of 8 bits less a zero point need more than bfloat16 for that.
    """
    model = quantized_model(CONFIG, name)
    save_pretrained(model, tmp_path / "ours")
    raw = json.loads((tmp_path / "ours" / "config.json").read_text())
    config = QuantizationConfig.model_validate(raw["quantization_config"])
    tensors = load_file(tmp_path / "ours" / SINGLE)
    modules = {key.rpartition(".")[0] for key in tensors if key.endswith("weight_scale")}
    written = {k: v for k, v in tensors.items() if k.rpartition(".")[0] not in modules or "input_scale" in k}
    for module in modules:
        scheme = matching(config, module)
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        state = {k.removeprefix(f"{module}."): v for k, v in tensors.items() if k.startswith(f"{module}.")}
        opened = compressor.decompress(state, scheme)
        made = compressor.compress({k: v for k, v in opened.items() if k != "input_scale"}, scheme)
        written |= {f"{module}.{name}": value.contiguous() for name, value in made.items()}
    (tmp_path / "theirs").mkdir()
    save_file(written, tmp_path / "theirs" / SINGLE)
    (tmp_path / "theirs" / "config.json").write_text(
        json.dumps(raw | {"quantization_config": json.loads(config.model_dump_json())})
    )
    values = dict(quantized_weights(load_pretrained(tmp_path / "theirs").model))
    for path, weight in quantized_weights(model):
        assert values[path].format == weight.format
        np.testing.assert_array_equal(dequantize(values[path].tensor()), dequantize(weight.tensor()))
