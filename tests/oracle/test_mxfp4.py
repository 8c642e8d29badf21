"""gpt-oss's MXFP4 checkpoints against what transformers makes of their blocks."""

import json

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from moejax import LLM, EngineConfig, QuantConfig, SamplingParams
from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.core.errors import CheckpointError
from moejax.nn.quantized import quantized_weights
from moejax.quantization.formats import MXFP4
from tests.checkpoint.quantized_models import same_arrays
from tests.decoding import forward
from tests.examples import slow_but
from tests.numerics import assert_close, relative_l2
from tests.oracle import hf
from tests.oracle.cases import by_name

pytestmark = pytest.mark.oracle

CASE = by_name("gpt_oss-published")
CASE = CASE._replace(fields=CASE.fields | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory as it is published, and transformers' model of the dequantized blocks."""
    directory = tmp_path_factory.mktemp("mxfp4")
    model = hf.build(CASE)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                tensors[key] = value.to(torch.bfloat16)
                value.copy_(tensors[key].float())
                continue
            E, D, F = value.shape
            blocks = torch.randint(0, 256, (E, F, D // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 127, (E, F, D // 32), generator=generator, dtype=torch.uint8)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            value.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_file(tensors, directory / "model.safetensors")
    fields = {k: v for k, v in model.config.to_dict().items() if k not in ("dtype", "torch_dtype")}
    (directory / "config.json").write_text(json.dumps(fields | {"quantization_config": CONFIG}))
    return directory, model


@pytest.mark.parametrize("dequantize", [False, True])
def test_logits(published, dequantize):
    directory, theirs = published
    ours, config = load_pretrained(directory, dtype="float32", dequantize=dequantize)
    weights = dict(quantized_weights(ours))
    assert {weight.format for weight in weights.values()} == (set() if dequantize else {MXFP4})
    assert len(weights) == (0 if dequantize else 3 * config.num_layers)
    tokens = hf.random_tokens(96, 2, 40)
    expected = hf.logits(theirs, tokens)
    logits = np.asarray(forward(ours, tokens)[0])
    assert_close(logits, expected, 1e-4)
    assert relative_l2(logits, expected) <= 1e-5


def test_dequantized_weights_are_theirs_bit_for_bit(published, tmp_path):
    directory, theirs = published
    ours, config = load_pretrained(directory, dequantize=True)
    assert config.dtype == "bfloat16"
    save_pretrained(ours, tmp_path, dtype="float32")
    back = dict(hf.load(tmp_path).named_parameters())
    for key, value in theirs.named_parameters():
        assert torch.equal(value, back[key]), key


@pytest.mark.parametrize("kernels", slow_but([True], [False, True]))
def test_greedy_tokens_through_the_engine(published, kernels):
    """On kernels: interpreted, experts on their codes."""
    directory, theirs = published
    engine = EngineConfig(compile_cache=False, kernels="pallas_triton" if kernels else "auto")
    quant = QuantConfig(implementation="pallas_triton" if kernels else "auto")
    prompts = [hf.random_tokens(96, 1, length, seed=length)[0] for length in (3, 16, 9)]
    llm = LLM(directory, dtype="float32", engine=engine, quant=quant)
    values = {r.key: r.value for r in llm.resolutions}
    assert not kernels or values["quant.implementation"] == values["engine.kernels"] == "pallas_triton"
    tokens = 8 if kernels else 24
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        np.testing.assert_array_equal(output.outputs[0].token_ids, hf.greedy(theirs, prompt[None], tokens)[0])


@pytest.mark.parametrize("layout", ["auto", "moejax"])
def test_saved_and_read_again(published, tmp_path, layout):
    ours, _ = load_pretrained(published[0])
    save_pretrained(ours, tmp_path, quantized_format=layout)
    back, _ = load_pretrained(tmp_path)
    same_arrays(ours, back)


def test_without_a_configuration_it_is_refused(published, tmp_path):
    directory, _ = published
    fields = json.loads((directory / "config.json").read_text())
    del fields["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"quantized weights.*no quantization_config"):
        load_pretrained(tmp_path)
