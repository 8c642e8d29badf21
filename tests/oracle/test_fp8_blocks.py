"""A checkpoint with blocks of float8, packed by hand, as transformers dequantizes it."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers wants it for fp8: pip install accelerate")

import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from moejax.checkpoint.hf import load_pretrained, save_pretrained
from tests.checkpoint import packing
from tests.checkpoint.meshes import FAMILIES
from tests.decoding import random_model

pytestmark = pytest.mark.oracle

CONFIG = FAMILIES["qwen3_moe"].replace(
    hidden_size=256, head_dim=32, moe_intermediate_size=128, num_experts=2, num_layers=1, moe_layers=(True,),
    sliding_windows=(None,),
)  # fmt: skip


def test_dequantized_weights_are_theirs(tmp_path):
    left = ["lm_head", "model.layers.0.mlp.gate"]
    config = packing.BLOCK | {"weight_block_size": [128, 128], "modules_to_not_convert": left}
    make = packing.plain("float", "block", 128, scale="weight_scale_inv")
    save_pretrained(random_model(CONFIG), tmp_path / "source")
    convention = packing.Convention(make, config, "float8_e4m3fn_b128")
    packing.quantize_directory(tmp_path / "source", tmp_path / "fp8", tmp_path / "plain", convention)
    ask = FineGrainedFP8Config(dequantize=True, weight_block_size=(128, 128))
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", quantization_config=ask, dtype=torch.float32
    )
    layer, other = theirs.model.layers[0], load_pretrained(tmp_path / "fp8", dequantize=True).model.layers[0]
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        expected = getattr(layer.self_attn, name).weight.detach().numpy().T
        np.testing.assert_array_equal(getattr(other.attention, name).kernel[...], expected)
    expected = layer.mlp.experts.down_proj.detach().numpy().swapaxes(1, 2)
    np.testing.assert_array_equal(other.moe.experts.down_proj[...], expected)
