"""Weights of a vocabulary that is padded for a mesh: drawn, read, rounded and saved without it."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from moejax import QuantConfig
from moejax.checkpoint.directory import load_config
from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.core.config import ModelConfig
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantRule
from moejax.engine.opening.resolve import resolve
from moejax.engine.opening.weights import load
from moejax.models.decoder import Decoder
from moejax.nn.param import num_params, specs
from moejax.nn.quantized import weight_size
from tests.checkpoint.meshes import FAMILIES, values_of
from tests.decoding import random_model

pytestmark = pytest.mark.multidevice

MODEL = FAMILIES["qwen3_moe"].replace(
    vocab_size=333, num_layers=1, moe_layers=(False,), sliding_windows=(None,)
)
MODELS = {
    "untied": MODEL,
    "tied": MODEL.replace(tie_word_embeddings=True),
    # Of 17 rows over 8 devices, 3 each, the last two have none.
    "devices without a row": MODEL.replace(vocab_size=17),
}
TP8 = ParallelConfig(tp=8)


def on_mesh(
    config: ModelConfig, parallel: ParallelConfig, source: Path | None, quant: QuantConfig | None = None
) -> Decoder:
    """Returns the model as an engine opens it: from a directory, or with random weights."""
    resolved = resolve(
        config if source is None else source,
        parallel=parallel,
        quant=quant,
        seed=3,
        load_format="dummy" if source is None else "auto",
    )
    (model,) = load(resolved).stages
    return model


def assert_same_but_for_padding(padded: Decoder, plain: Decoder) -> None:
    """The numbers of the one are those of the other, bit for bit, and then there are zeros."""
    expected, declared = values_of(plain), specs(padded)
    longer = set()
    for name, value in values_of(padded).items():
        spec, wanted = declared[name], expected.pop(name)
        assert spec.true_shape == wanted.shape, name
        np.testing.assert_array_equal(spec.without_padding(value), wanted, err_msg=name)
        rest = value.astype(np.float32)
        rest[tuple(slice(n) for n in wanted.shape)] = 0
        assert not rest.any(), name
        longer |= {name} if value.shape != wanted.shape else set()
    assert not expected and all("vocab" in declared[name].axes for name in longer)
    assert "embedding.table" in longer
    assert num_params(padded) == num_params(plain) and weight_size(padded)[1] == weight_size(plain)[1]


@pytest.mark.parametrize("name", ["untied", pytest.param("tied", marks=pytest.mark.slow)])
def test_random_weights_are_those_of_one_device(name):
    config = MODELS[name]
    assert_same_but_for_padding(on_mesh(config, TP8, None), Decoder(config, seed=3))


@pytest.mark.parametrize("name", MODELS)
def test_a_directory_is_read_and_written_without_padding(name, tmp_path):
    plain = random_model(MODELS[name])
    save_pretrained(plain, tmp_path / "one")
    padded = on_mesh(MODELS[name], TP8, tmp_path / "one")
    assert_same_but_for_padding(padded, plain)
    save_pretrained(padded, tmp_path / "again")
    first, again = (load_file(tmp_path / folder / "model.safetensors") for folder in ("one", "again"))
    assert first.keys() == again.keys() and load_config(tmp_path / "again") == MODELS[name]
    for key, value in first.items():
        np.testing.assert_array_equal(again[key], value, err_msg=key)


FORMATS = ["int8_tensor", *(pytest.param(f, marks=pytest.mark.slow) for f in ("int8", "int4_g8_asym", "fp8"))]


@pytest.mark.parametrize("form", FORMATS)
def test_a_quantized_head(form, tmp_path):
    """Rounded while it is read, saved, and read as codes: those of one device, and zeros."""
    quant = QuantConfig("rtn", "int8", rules=[QuantRule("lm_head", "rtn", form)], clip="percentile")
    save_pretrained(random_model(MODEL), tmp_path / "plain")
    one = on_mesh(MODEL, ParallelConfig(), tmp_path / "plain", quant)
    assert_same_but_for_padding(on_mesh(MODEL, TP8, tmp_path / "plain", quant), one)
    save_pretrained(one, tmp_path / "codes")
    padded = on_mesh(MODEL, TP8, tmp_path / "codes")
    assert_same_but_for_padding(padded, one)
    save_pretrained(padded, tmp_path / "again")
    assert_equal(load_pretrained(tmp_path / "again").model, one)


def assert_equal(found: Decoder, wanted: Decoder) -> None:
    values = values_of(wanted)
    assert {name: value.shape for name, value in values_of(found).items()} == {
        name: value.shape for name, value in values.items()
    }
    for name, value in values_of(found).items():
        # An engine on CPU keeps float8 as its bits; files have the numbers.
        value = value.view(np.uint8) if values[name].dtype == np.uint8 else value
        np.testing.assert_array_equal(value, values[name], err_msg=name)
