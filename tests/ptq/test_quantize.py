"""Whole models: what every method leaves behind, and what the report says of it."""

import json

import jax
import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.core.files import dump_json
from moejax.core.quant import CalibrationConfig, QuantConfig, QuantRule
from moejax.models.decoder import Decoder
from moejax.nn.param import iter_params
from moejax.nn.quantized import quantized_weights
from moejax.ptq import collect_statistics
from moejax.ptq.apply import quantize_model
from moejax.ptq.methods import quantize as round_one
from moejax.ptq.sites import stages_of, statistics_of
from moejax.quantization.arithmetic import dequantize
from moejax.quantization.formats import parse_format
from moejax.quantization.gptq import gptq
from moejax.quantization.rtn import round_to_nearest
from moejax.quantization.rules import Chosen
from tests.examples import slow_but
from tests.numerics import assert_close, relative_l2, tolerance
from tests.ptq.models import BASE, FAMILIES, build, fold, in_float, logits, quant, tokens
from tests.ptq.test_observers import collected


def quantized(family, method, fmt, *, layout="edf", config=None, **how):
    config = config or FAMILIES[family]
    model = build(config, layout=layout)
    report = quantize_model(model, quant(method, fmt, **how), tokens())
    return model, report


def values(model):
    return {name: np.asarray(dequantize(weight.tensor())) for name, weight in quantized_weights(model)}


METHODS = ("gptq", "awq", "smoothquant", "rtn")


@pytest.mark.parametrize(
    ("family", "method"),
    slow_but(
        [("qwen2_moe", method) for method in METHODS if method != "awq"],
        [(family, method) for family in FAMILIES for method in METHODS],
    ),
)
def test_eight_bits_change_little_and_the_report_counts_every_weight(family, method):
    # Experts of a handful of tokens fall back: AWQ would clip what these few do not use.
    model, report = quantized(family, method, "w8a8" if method == "smoothquant" else "int8", min_tokens=20)
    held = dict(quantized_weights(model))
    assert {w.path for w in report.weights} == {name.removesuffix(".kernel") for name in held}
    assert not any("router" in name or "lm_head" in name or "shared_gate" in name for name in held)
    before = logits(build(FAMILIES[family]), tokens())
    after = logits(in_float(model, FAMILIES[family]), tokens())
    if method != "smoothquant":  # whose activations are not rounded in the float twin
        executed = np.linalg.norm(logits(model, tokens()) - after, axis=-1)
        assert np.median(executed / np.linalg.norm(after, axis=-1)) < tolerance(*[32] * 9)
    # A flipped expert changes a token's logits altogether; most tokens keep theirs.
    errors = np.linalg.norm(after - before, axis=-1) / np.linalg.norm(before, axis=-1)
    assert np.median(errors) < 0.05
    for weight in report.weights:
        one = next(w for name, w in held.items() if name.removesuffix(".kernel") == weight.path)
        assert weight.bytes == one.tensor().nbytes and weight.shape == one.tensor().shape
        assert weight.float_bytes == 4 * np.prod(weight.shape)
        assert len(weight.weight_error) == (8 if "experts." in weight.path else 1)
        assert (weight.output_error is None) == (method == "rtn")
        assert max(weight.weight_error) < 0.03
    assert report.bytes == sum(np.asarray(param[...]).nbytes for _, param in iter_params(model))
    assert report.float_bytes == sum(
        np.asarray(p[...]).nbytes for _, p in iter_params(build(FAMILIES[family]))
    )
    assert report.bits_per_parameter == 8 * report.bytes / report.num_params
    json.loads(dump_json(report.to_dict()))


@pytest.mark.parametrize("layout", ["edf", "efd"])
def test_rtn_is_round_to_nearest_of_each_weight(layout):
    model, report = quantized("qwen2_moe", "rtn", "int4_g8_asym", layout=layout)
    source = dict(iter_params(build(FAMILIES["qwen2_moe"])))
    for name, weight in quantized_weights(model):
        want = round_to_nearest(source[name][...], weight.format)
        assert all(map(np.array_equal, jax.tree.leaves(weight.tensor()), jax.tree.leaves(want))), name
    assert [stage.name for stage in report.stages] == ["weights"]


@pytest.mark.slow
def test_the_layout_of_experts_does_not_matter():
    models = [quantized("qwen2_moe", "gptq", "int4_g8", layout=layout)[0] for layout in ("edf", "efd")]
    for (name, a), (_, b) in zip(*(quantized_weights(model) for model in models), strict=True):
        assert relative_l2(dequantize(a.tensor()), dequantize(b.tensor())) < 0.02, name


@pytest.mark.slow
def test_gptq_loses_on_weights_and_wins_on_outputs_and_awq_is_no_worse_than_rounding():
    """Two-sided, on the first layer, whose statistics do not depend on what comes before."""
    fmt, rules = "int4_g8", [QuantRule("layers.1.*", method="none")]
    by_gptq = quantized("qwen2_moe", "gptq", fmt, rules=rules)[1]
    by_awq = quantized("qwen2_moe", "awq", fmt, rules=rules)[1]
    source = build(FAMILIES["qwen2_moe"])
    found, _ = collected(source, tokens(), layer=0)
    stage, plain = stages_of(source)[0], {}
    for site in stage.sites:
        for name in set(site.readers) & set(stage.params()):
            key = statistics_of(name, site)
            stats = found.plain[key] if key in found.plain else found.experts(found.chunks[0])[key]
            rtn, w = Chosen("rtn", parse_format(fmt)), stage.params()[name][...]
            if w.shape[-2] % 8 == 0:
                plain[f"layers.0.{name}".removesuffix(".kernel")] = round_one(
                    name, w, rtn, QuantConfig(), stats
                )
    sums = {"awq": 0.0, "rtn": 0.0}
    for mine, awq in zip(by_gptq.weights, by_awq.weights, strict=True):
        rounded = plain[mine.path]
        assert np.mean(mine.weight_error) > np.mean(rounded.weight_error)
        assert np.mean(mine.output_error) < np.mean(rounded.output_error), mine.path
        sums["awq"] += np.mean(awq.output_error)
        sums["rtn"] += np.mean(rounded.output_error)
    assert sums["awq"] < sums["rtn"]


def test_gptq_takes_each_experts_own_hessian():
    """Against the core, called by hand with statistics collected from the same model."""
    found, _ = collected(build(FAMILIES["qwen2_moe"]), tokens(), layer=0)
    model, _ = quantized("qwen2_moe", "gptq", "int4_g8")
    name = "layers.0.moe.experts.down_proj"
    weight = dict(quantized_weights(model))[name]
    source = dict(iter_params(build(FAMILIES["qwen2_moe"])))[name][...]
    stats = found.experts(found.chunks[0])["moe.experts.down_proj"]
    for e in range(8):
        want = gptq(source[e], stats.gram[e], weight.format)
        got = jax.tree.map(lambda a, e=e: a[e], weight.tensor())
        assert relative_l2(dequantize(got), dequantize(want.tensor)) < 0.02, e


@pytest.mark.slow
def test_the_second_layer_sees_what_the_quantized_first_gives_out():
    """Coarse weights in layer 0 change what layer 1 is calibrated with."""
    fine = quantized("mixtral", "gptq", "int8")[0]
    rules = [QuantRule("layers.0.*", format="int4")]
    coarse = quantized("mixtral", "gptq", "int8", rules=rules)[0]
    a, b = (values(model)["layers.1.moe.experts.up_proj"] for model in (fine, coarse))
    assert not np.array_equal(a, b)
    hessian_free = quantized("mixtral", "rtn", "int8", rules=[QuantRule("layers.0.*", format="int4")])[0]
    plain = quantized("mixtral", "rtn", "int8")[0]
    name = "layers.1.moe.experts.up_proj"
    np.testing.assert_array_equal(values(hessian_free)[name], values(plain)[name])


@pytest.mark.parametrize("method", slow_but(["smoothquant"], ["gptq", "awq", "smoothquant"]))
def test_chunks_of_experts_give_the_same_model(method, monkeypatch):
    fmt = "w8a8" if method == "smoothquant" else "int4_g8"
    whole, report = quantized("qwen2_moe", method, fmt, min_tokens=25)
    monkeypatch.setattr(collect_statistics, "GRAM_BYTES", 2 * 4 * (32**2 + 16**2))
    parts, again = quantized("qwen2_moe", method, fmt, min_tokens=25)
    for (name, a), (_, b) in zip(quantized_weights(whole), quantized_weights(parts), strict=True):
        # Sums over experts in another order: a weight on the edge may fall to the other side.
        assert relative_l2(dequantize(a.tensor()), dequantize(b.tensor())) < 0.02, name
    assert report.stages[0].expert_tokens == again.stages[0].expert_tokens
    assert report.stages[0].fallback_experts == again.stages[0].fallback_experts != []


def test_progress_does_not_go_back_where_experts_take_several_passes(monkeypatch):
    monkeypatch.setattr(collect_statistics, "GRAM_BYTES", 2 * 4 * (32**2 + 16**2))
    shares: list[float] = []
    say = lambda share, text: shares.append(share)  # noqa: E731
    quantize_model(build(FAMILIES["qwen2_moe"]), quant("gptq", "int8"), tokens(), progress=say)
    assert shares == sorted(shares) and len(shares) > 2 * 4 * 2


@pytest.mark.parametrize("fallback", ["shared", "all"])
def test_fallbacks_are_counted_and_coverage_is_reported(fallback):
    _, report = quantized("qwen2_moe", "gptq", "int8", min_tokens=24, fallback=fallback)
    for stage in report.stages:
        assert sum(stage.expert_tokens) == 2 * 6 * 16 and stage.tokens == 6 * 16
        cold = [e for e, n in enumerate(stage.expert_tokens) if n < 24]
        assert stage.fallback_experts == cold and stage.fallback == (fallback if cold else None)
    assert report.fallbacks == sum(len(stage.fallback_experts) for stage in report.stages) > 0


def test_a_hessian_that_is_not_positive_definite_raises_damping_and_says_so():
    """2 tokens for 32 inputs, and no damping."""
    config = QuantConfig(
        method="gptq", format="int8", damping=0.0, calibration=CalibrationConfig(min_tokens=0)
    )
    report = quantize_model(build(BASE), config, tokens(1, 2))
    assert report.damping_raised > 0
    assert any("not positive definite; damping raised to" in note for note in report.notes)
    weight = next(w for w in report.weights if w.path.endswith("q_proj"))
    assert weight.damping_raised == [0] and weight.damping[0] >= 1e-3


@pytest.mark.parametrize("method", ["rtn", "smoothquant", "gptq"])
def test_static_activation_scales_cover_what_was_seen(method):
    model, _ = quantized("qwen2_moe", method, "w8a8_static", min_tokens=0)
    found, _ = collected(build(FAMILIES["qwen2_moe"]), tokens(), layer=0)
    held = {name: weight.tensor() for name, weight in quantized_weights(model)}
    assert all((np.asarray(t.input_scale) > 0).all() for t in held.values())
    if method == "smoothquant":
        return
    got = np.asarray(held["layers.0.attention.o_proj.kernel"].input_scale)
    assert_close(
        got, np.asarray(found.plain["attention.o_proj"].max_abs).max(keepdims=True) / 127, tolerance(32)
    )
    most = np.asarray(found.experts(found.chunks[0])["moe.experts.down_proj"].max_abs).max(-1, keepdims=True)
    seen = np.asarray(found.visits) > 0
    got = np.asarray(held["layers.0.moe.experts.down_proj"].input_scale)
    assert_close(got[seen], most[seen] / 127, tolerance(32, 32))


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_what_was_folded_is_reported_and_a_clip_is_not_folded_through(method):
    fmt = "w8a8" if method == "smoothquant" else "int4_g8"
    _, report = quantized("olmoe-clip", method, fmt)
    for stage in report.stages:
        assert sorted(stage.folded) == ["attention", "moe", "moe.experts.down_proj"]
    assert report.notes == [
        f"attention.o_proj is not scaled ({method}), because clip_qkv=0.7 stands between v_proj and it "
        "(2 layers)"
    ]
    _, report = quantized("qwen2_moe", method, fmt)
    assert set(report.stages[0].folded) >= {"attention.o_proj", "moe.shared_expert.down_proj"}


def test_a_site_is_scaled_though_only_one_of_its_readers_is_quantized():
    rules = [QuantRule("layers.0.moe.experts.up_proj", method="awq", format="int4_g8")]
    model, report = quantized("qwen2_moe", "none", "int8", rules=rules)
    assert [w.path for w in report.weights] == ["layers.0.moe.experts.up_proj"]
    assert report.stages[0].folded == ["moe"]
    after = logits(in_float(model, FAMILIES["qwen2_moe"]), tokens())
    assert np.median(np.abs(after - logits(build(FAMILIES["qwen2_moe"]), tokens()))) < 0.1


def test_router_and_output_projection_by_name():
    rules = [QuantRule("layers.*.moe.router", format="int8"), QuantRule("lm_head", format="int8")]
    model, report = quantized("qwen2_moe", "gptq", "int4_g8", rules=rules)
    held = dict(quantized_weights(model))
    assert held["layers.1.moe.router.kernel"].format.name == "int8"
    assert held["lm_head.kernel"].format.name == "int8"
    assert [stage.name for stage in report.stages] == ["layer 0", "layer 1", "lm_head"]
    assert report.stages[-1].weights[0].output_error[0] < 0.01


def test_awq_folds_the_output_projections_scales_into_the_last_norm():
    rules = [QuantRule("lm_head", method="awq", format="int4_g8")]
    model, report = quantized("qwen2_moe", "none", "int8", rules=rules)
    assert report.stages[-1].folded == ["lm_head"]
    assert not np.array_equal(model.norm.scale[...], build(FAMILIES["qwen2_moe"]).norm.scale[...])
    assert [stage.name for stage in report.stages] == ["layer 0", "layer 1", "lm_head"]


def test_stages_behind_the_last_calibrated_one_are_not_run():
    rules = [QuantRule("layers.0.attention.*", method="gptq")]
    _, report = quantized("mixtral", "rtn", "int8", rules=rules)
    assert [stage.name for stage in report.stages] == ["layer 0", "weights"]
    assert len(report.stages[0].weights) == 7 and len(report.stages[1].weights) == 7


def test_two_scaling_methods_for_one_input_are_refused():
    rules = [QuantRule("*.q_proj", method="smoothquant", format="w8a8")]
    with pytest.raises(ConfigError, match=r"layers.0.attention: .*both awq and smoothquant"):
        quantized("mixtral", "awq", "w8a8", rules=rules)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "calibration needs text"),
        (np.zeros((2, 4), np.float32), "must be integers"),
        (np.zeros(4, np.int32), "must be integers"),
        (np.full((2, 4), 96), "vocabulary has 96"),
        (np.full((2, 4), -1), "vocabulary has 96"),
        (np.zeros((2, 65), np.int32), "64 positions"),
    ],
)
def test_tokens_that_the_model_cannot_run(given, words):
    with pytest.raises(ConfigError, match=words):
        quantize_model(build(BASE), quant("gptq", "int8"), given)


def test_a_model_without_weights_and_one_quantized_already():
    with pytest.raises(ConfigError, match="no values yet"):
        quantize_model(Decoder(BASE), quant("rtn", "int8"))
    model = build(BASE)
    quantize_model(model, quant("rtn", "int8"))
    with pytest.raises(ConfigError, match="quantized already"):
        quantize_model(model, quant("rtn", "int8"))


def test_a_wrong_rule_changes_nothing():
    model = build(BASE)
    with pytest.raises(ConfigError, match="not used"):
        quantize_model(model, quant("rtn", "int8", rules=[QuantRule("nothing")]))
    assert not list(quantized_weights(model))


def test_progress_rises_to_one():
    said = []
    quantize_model(
        build(BASE), quant("gptq", "int8"), tokens(), progress=lambda share, text: said.append((share, text))
    )
    shares = [share for share, _ in said]
    assert shares == sorted(shares) and shares[-1] == 1.0 and len(set(shares)) > 6
    assert {"calibrating layer 0", "quantizing layer 1", "running layer 0, quantized"} <= {t for _, t in said}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "fmt"), [("gptq", "mxfp4"), ("awq", "nvfp4"), ("gptq", "fp8")])
def test_bfloat16_models_and_floats_of_few_bits(method, fmt):
    config = FAMILIES["qwen2_moe"].replace(
        dtype="bfloat16", hidden_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=32
    )
    model, report = quantized(None, method, fmt, config=config, min_tokens=20)
    assert max(max(w.output_error) for w in report.weights) < (0.05 if fmt == "fp8" else 0.25)
    after = logits(model, tokens())
    assert np.isfinite(after).all() and model.config.dtype == "bfloat16"


def with_outliers(config):
    """The same float function, with a channel in each activation that is 64 times as large."""
    model = build(config)
    for stage in stages_of(model):
        scales = {}
        for site in stage.sites:
            shape = stage.params()[site.readers[0]].get_metadata("spec").canonical_shape
            lead = shape[:1] if site.name == "moe.experts.down_proj" else ()
            one = np.ones((*lead, shape[-2]), np.float32)
            one[..., 3 :: max(8, shape[-2] // site.group)] = 1 / 64
            if site.group > 1:
                one = np.where(np.arange(shape[-2]) % 8 == 3, np.float32(1 / 64), one)
            scales[site.name] = jax.numpy.asarray(one)
        fold(stage, scales)
    return model


@pytest.mark.slow
def test_smoothquant_tames_outliers_that_round_to_nearest_cannot():
    config = FAMILIES["mixtral"]
    want = logits(build(config), tokens())
    np.testing.assert_allclose(logits(with_outliers(config), tokens()), want, atol=1e-3 * np.abs(want).max())
    errors = {}
    for method in ("rtn", "smoothquant"):
        model = with_outliers(config)
        quantize_model(model, quant(method, "w8a8"), tokens())
        errors[method] = np.median(np.linalg.norm(logits(model, tokens()) - want, axis=-1))
    assert errors["smoothquant"] < 0.3 * errors["rtn"], errors


def peak_bytes(layers):
    """Most bytes of arrays alive between two steps of a calibrated run, above those before it."""
    several = {"num_layers": layers, "moe_layers": (True,) * layers, "sliding_windows": (None,) * layers}
    config = BASE.replace(**several, hidden_size=64)
    begin = sum(array.nbytes for array in jax.live_arrays())
    model, most = build(config), 0

    def look(share, text):
        nonlocal most
        most = max(most, sum(array.nbytes for array in jax.live_arrays()) - begin)

    report = quantize_model(model, quant("gptq", "int8"), tokens(), progress=look)
    return most, report.float_bytes


@pytest.mark.slow
def test_memory_above_the_model_does_not_grow_with_layers():
    (few, few_float), (many, many_float) = peak_bytes(2), peak_bytes(6)
    layer = (many_float - few_float) / 4
    assert many - many_float < few - few_float + 0.1 * layer
