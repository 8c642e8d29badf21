"""Models with 2:4 sparse experts beside their dense twins, and saved."""

import numpy as np
import pytest

from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.core.quant import QuantRule
from moejax.nn.param import iter_params
from moejax.nn.quantized import quantized_weights
from moejax.ptq.apply import quantize_model
from moejax.quantization.arithmetic import dequantize
from tests.examples import slow_but
from tests.ptq.models import FAMILIES, build, in_float, logits, quant, tokens
from tests.quantization.test_sparse import masked


@pytest.mark.parametrize(
    ("family", "method"),
    slow_but(
        [("gpt_oss", "magnitude")],
        [(f, m) for f in ("qwen2_moe", "deepseek_v3", "gpt_oss") for m in ("wanda", "magnitude")],
    ),
)
def test_a_sparse_model_computes_what_its_dense_twin_does_and_is_saved(family, method, tmp_path):
    config = FAMILIES[family]
    rules = [QuantRule("layers.*.moe.experts.*"), QuantRule("layers.*", method="none")]
    model = build(config)
    report = quantize_model(model, quant(method, "float32_2of4", rules=rules, min_tokens=4), tokens())
    source = {name: np.asarray(p[...]) for name, p in iter_params(build(config))}
    held = {name: np.asarray(dequantize(weight.tensor())) for name, weight in quantized_weights(model)}
    assert held.keys() == {name for name in source if ".experts." in name and name.endswith("_proj")}
    for name, value in held.items():
        zero = value == 0
        assert (zero.reshape(*zero.shape[:-2], -1, 4, zero.shape[-1]).sum(-2) == 2).all(), name
        np.testing.assert_array_equal(np.where(zero, 0, source[name]), value)
        if method == "magnitude":
            np.testing.assert_array_equal(value[0], masked(source[name][0]))
    assert all(abs(w.bytes / w.float_bytes - 17 / 32) < 0.02 for w in report.weights)
    np.testing.assert_allclose(logits(model, tokens()), logits(in_float(model, config), tokens()), atol=2e-4)
    save_pretrained(model, tmp_path / "sparse")
    loaded = load_pretrained(tmp_path / "sparse").model
    for (name, a), (_, b) in zip(iter_params(loaded), iter_params(model), strict=True):
        np.testing.assert_array_equal(a[...], b[...], err_msg=name)
