"""Fewer experts: scores and merging beside plain loops, a small model beside a plain router's choices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.checkpoint.hf import load_pretrained, save_pretrained
from moejax.core.config import RouterConfig
from moejax.core.errors import ConfigError
from moejax.core.quant import CalibrationConfig, ExpertReduction, QuantConfig
from moejax.models.decoder import Decoder
from moejax.moe.router import Replay
from moejax.nn.param import iter_params
from moejax.ptq import reduce
from moejax.ptq.apply import embedded, quantize_model
from moejax.ptq.observers import advance, observe_at, run_stage
from moejax.ptq.reduce import expert_usage, merged, reduce_experts, reduced_config, stand_ins
from moejax.ptq.sites import stages_of
from tests.examples import slow_but
from tests.ptq.models import FAMILIES, build, logits, tokens

MODELS = {
    "gqa": FAMILIES["qwen2_moe"],
    "mla": FAMILIES["deepseek_v3"].replace(router=RouterConfig("sigmoid", True, 2, 1, "top2")),
    "sinks": FAMILIES["gpt_oss"].replace(num_layers=1, moe_layers=(True,), sliding_windows=(5,)),
    "qwen3": FAMILIES["qwen3_moe"],
    "sparsemixer": FAMILIES["phimoe"],
}
KEEP = {"mla": 4}


def config_of(name, method="prune", keep=None, criterion="reap", **how):
    experts = ExpertReduction(method, keep or KEEP.get(name, 5), criterion)
    return QuantConfig(experts=experts, calibration=CalibrationConfig(batch_size=4), **how)


@functools.cache
def reduced(name, method="prune", criterion="reap", layout="edf"):
    model, quant = build(MODELS[name], layout=layout), config_of(name, method, criterion=criterion)
    small = Decoder(reduced_config(model.config, quant.experts), moe=model.in_order()[-1].moe.moe)
    return model, small, reduce_experts(model, small, quant, tokens(), None)


def traced(model, ids, replay=None):
    graph, state = nnx.split(model)
    run = jax.jit(lambda s, x: nnx.merge(graph, s)(x, return_routing=True, routing=replay))
    return run(state, jnp.asarray(ids))


def routed(model, ids, layer):
    """What a layer's router reads, float64 `[N, D]`."""
    x = embedded(model, ids, len(ids)).values
    valid, stages = jnp.ones(ids.shape, bool), stages_of(model)[: layer + 1]
    for stage in stages[:-1]:
        x = advance(*nnx.split(stage.module), x, valid, stage.share)
    graph, state = nnx.split(stages[-1].module)

    def run(state):
        module, rows = nnx.merge(graph, state), []
        observe_at(module, "moe.router", lambda x, *_: rows.append(x))
        run_stage(module, jnp.asarray(x), valid, stages[-1].share)
        return rows[0]

    return np.asarray(jax.jit(run)(state), np.float64)


def expert(model, layer, e, x, swiglu):
    """One expert's output in float64."""
    experts = model.in_order()[layer].moe.experts
    named = {n: np.asarray(p[...], np.float64) for n, p in iter_params(experts)}
    gate, up = x @ named["gate_proj"][e], x @ named["up_proj"][e]
    if "gate_bias" in named:
        gate, up = gate + named["gate_bias"][e], up + named["up_bias"][e]
    if swiglu is None:
        hidden = gate / (1 + np.exp(-gate)) * up
    else:
        gate, up = np.minimum(gate, swiglu.limit), np.clip(up, -swiglu.limit, swiglu.limit)
        hidden = (up + 1) * gate / (1 + np.exp(-swiglu.alpha * gate))
    out = hidden @ named["down_proj"][e]
    return out + named["down_bias"][e] if "down_bias" in named else out


@pytest.mark.parametrize("name", slow_but(["gqa"], ["gqa", "mla", "sinks"]))
def test_scores_are_those_of_a_loop_over_tokens(name):
    model, ids = build(MODELS[name]), tokens()
    usage = expert_usage(model, ids, 4)
    assert list(usage) == [i for i, sparse in enumerate(model.config.moe_layers) if sparse]
    layer = max(usage)
    x, trace = routed(model, ids, layer), traced(model, ids)[1][layer]
    E, k = model.config.num_experts, model.config.num_experts_per_tok
    count, mass, reap = np.zeros(E), np.zeros(E), np.zeros(E)
    outputs = [expert(model, layer, e, x, model.config.expert_swiglu) for e in range(E)]
    weights = np.asarray(trace.weights).reshape(-1, k)
    for token, chosen in enumerate(np.asarray(trace.ids).reshape(-1, k)):
        for place, e in enumerate(chosen):
            count[e] += 1
            mass[e] += weights[token, place]
            reap[e] += weights[token, place] * np.linalg.norm(outputs[e][token])
    np.testing.assert_array_equal(usage[layer]["frequency"], count)
    np.testing.assert_allclose(usage[layer]["router_mass"], mass, rtol=1e-5)
    np.testing.assert_allclose(usage[layer]["reap"], reap / np.maximum(count, 1), rtol=1e-4, atol=1e-7)
    scores = np.asarray(trace.logits, np.float64).reshape(-1, E)
    scores /= np.linalg.norm(scores, axis=0)
    np.testing.assert_allclose(usage[layer]["likeness"], scores.T @ scores, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "criterion"),
    slow_but(
        [("gqa", "reap"), ("mla", "frequency"), ("sinks", "router_mass")],
        [(n, c) for n in MODELS for c in ("frequency", "router_mass", "reap")],
    ),
)
def test_a_pruned_model_is_the_model_whose_router_has_the_experts_that_stay_alone(name, criterion):
    """The whole model, told to make the choices of a router without the other rows."""
    model, small, reports = reduced(name, criterion=criterion)
    ids = tokens(seed=2)
    got, traces = traced(small, ids)
    E = model.config.num_experts
    kept = {}
    for report, (layer, used) in zip(reports, expert_usage(model, tokens(), 4).items(), strict=True):
        score = used[criterion].reshape(model.config.router.groups, -1)
        each = small.config.num_experts // len(score)
        best = [g * score.shape[1] + np.argsort(-s, kind="stable")[:each] for g, s in enumerate(score)]
        kept[layer] = np.sort(np.concatenate(best))
        assert report.name == f"layer {layer}" and sum(report.expert_tokens) == 2 * tokens().size
        assert report.stand_ins == [e if e in kept[layer] else -1 for e in range(E)]
    replay = [
        None if trace is None else Replay(jnp.asarray(kept[layer][np.asarray(trace.ids)]), trace.weights)
        for layer, trace in enumerate(traces)
    ]
    want, full = traced(model, ids, replay)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
    first = min(kept)  # whose inputs no other choice has changed
    small_router, router = (m.in_order()[first].moe.router for m in (small, model))
    rows = np.asarray(full[first].logits)[..., kept[first]]
    np.testing.assert_allclose(traces[first].logits, rows, rtol=1e-4, atol=1e-5)
    for attribute in ("bias", "correction_bias"):
        if getattr(router, attribute) is not None:
            whole, part = (getattr(r, attribute)[...] for r in (router, small_router))
            np.testing.assert_array_equal(part, np.asarray(whole)[kept[first]])


@pytest.mark.parametrize("layout", slow_but(["edf"], ["edf", "efd"]))
def test_a_merged_expert_is_the_average_by_tokens_of_experts_put_in_one_order(layout):
    model, small, reports = reduced("sinks", "merge", "frequency", layout)
    E, F = model.config.num_experts, model.config.moe_intermediate_size
    source = dict(iter_params(model))
    for report in reports:
        layer, places = int(report.name.split()[1]), np.array(report.stand_ins)
        assert set(places) == set(np.flatnonzero(places == np.arange(E)))
        prefix = f"layers.{layer}.moe.experts."
        spec = {n: source[prefix + n] for n in ("gate_proj", "up_proj", "down_proj", "down_bias")}
        old = {n: np.asarray(p.get_metadata("spec").canonical(p[...])) for n, p in spec.items()}
        now = dict(iter_params(small.in_order()[layer].moe.experts))
        visits = np.array(report.expert_tokens, float)
        for new, kept in enumerate(np.unique(places)):
            group = np.flatnonzero(places == kept)
            bias = np.average(old["down_bias"][group], axis=0, weights=np.maximum(visits[group], 1e-9))
            np.testing.assert_allclose(now["down_bias"][...][new], bias, rtol=1e-4, atol=1e-6)
            if len(group) == 1:
                gate = now["gate_proj"].get_metadata("spec").canonical(now["gate_proj"][...])
                np.testing.assert_allclose(gate[new], old["gate_proj"][kept], rtol=1e-6)
    assert F == now["gate_bias"].shape[1]


def test_merging_an_expert_with_itself_in_another_order_gives_the_expert():
    rng = np.random.default_rng(0)
    values = {n: rng.normal(size=(3, 4, 6)).astype(np.float32) for n in ("gate_proj", "up_proj")}
    values |= {"down_proj": rng.normal(size=(3, 6, 4)).astype(np.float32), "up_bias": rng.normal(size=(3, 6))}
    order = rng.permutation(6)
    for name, axis in (("gate_proj", 1), ("up_proj", 1), ("down_proj", 0), ("up_bias", 0)):
        values[name][2] = np.take(values[name][1], order, axis)
    found = merged(values, np.array([0, 1, 1]), np.array([1.0, 3.0, 5.0]))
    for name, value in found.items():
        np.testing.assert_allclose(value, values[name][:2], rtol=1e-5, atol=1e-6)


def test_those_that_stay_are_as_many_of_each_group_and_merge_within_it():
    usage = {"frequency": np.arange(8.0), "likeness": np.eye(8) + np.flip(np.eye(8), 0)}
    prune = stand_ins(usage, ExpertReduction("prune", 4, "frequency"), 4, 2)
    assert prune.tolist() == [-1, -1, 2, 3, -1, -1, 6, 7]
    usage["likeness"][0, 3] = 0.5
    merge = stand_ins(usage, ExpertReduction("merge", 4, "frequency"), 4, 2)
    assert merge.tolist() == [3, 2, 2, 3, 6, 6, 6, 7]


@pytest.mark.parametrize(
    ("name", "method"), slow_but([("mla", "merge")], [(n, "merge") for n in ("gqa", "mla", "qwen3")])
)
def test_it_is_saved_and_read_again_as_any_other(name, method, tmp_path):
    _, small, _ = reduced(name, method)
    save_pretrained(small, tmp_path / "small")
    loaded, config = load_pretrained(tmp_path / "small", dtype="float32")
    assert config.num_experts == small.config.num_experts == KEEP.get(name, 5)
    assert config.replace(router=small.config.router) == small.config
    for (path, a), (_, b) in zip(iter_params(loaded), iter_params(small), strict=True):
        np.testing.assert_array_equal(a[...], b[...], err_msg=path)


def test_bytes_fall_by_the_experts_and_the_router_rows_that_are_gone():
    model, small, _ = reduced("gqa")
    sizes = [sum(p[...].nbytes for _, p in iter_params(m)) for m in (model, small)]
    c = model.config
    gone = c.num_experts - small.config.num_experts
    assert sizes[0] - sizes[1] == 4 * 2 * gone * (3 * c.hidden_size * c.moe_intermediate_size + c.hidden_size)


@pytest.mark.slow
def test_what_stays_can_be_quantized_after():
    _, small, _ = reduced("gqa")
    twin = Decoder(small.config, seed=0)
    for (_, a), (_, b) in zip(iter_params(twin), iter_params(small), strict=True):
        a.set_value(b[...])
    report = quantize_model(twin, QuantConfig(method="rtn", format="int8"))
    assert len(report.weights) and np.abs(logits(twin, tokens()) - logits(small, tokens())).max() < 1.0


@pytest.mark.parametrize(
    ("name", "experts", "said"),
    [
        (
            "gqa",
            ExpertReduction("prune", 1),
            "keep=1 leaves too few of 8 experts: num_experts_per_tok 2 exceeds",
        ),
        ("gqa", ExpertReduction("prune", 8), "keep=8 keeps 8 of 8 experts"),
        ("gqa", ExpertReduction("merge", 0.99), "keep=0.99 keeps 8 of 8 experts"),
        ("gqa", ExpertReduction("prune", 2.5), "keep=2.5: give a share below 1 or a number"),
        (
            "mla",
            ExpertReduction("prune", 5),
            "keep=5: give a share below 1 or a number that its 2 groups divide",
        ),
        ("mla", ExpertReduction("prune", 0.01), "keeps 0 of 8"),
        ("llama", ExpertReduction("prune", 0.5), "does not go with a model without experts"),
    ],
)
def test_a_number_that_cannot_be_is_refused_in_one_line(name, experts, said):
    with pytest.raises(ConfigError, match=said) as error:
        reduced_config((MODELS | FAMILIES)[name], experts)
    assert "\n" not in str(error.value)


def test_it_needs_text_that_the_model_can_run():
    model, quant = build(MODELS["gqa"]), config_of("gqa")
    small = Decoder(reduced_config(model.config, quant.experts))
    with pytest.raises(ConfigError, match=r"quant.method=prune.*calibration needs text"):
        reduce_experts(model, small, quant, None, None)
    assert reduce.reduced_config(model.config, ExpertReduction()) is model.config
