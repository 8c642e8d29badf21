"""Statistics: what observers collect is what the weights read, for each linear layer and each expert."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.quant import CalibrationConfig
from moejax.nn.activation import activation
from moejax.ptq import collect_statistics
from moejax.ptq.batches import HiddenStates
from moejax.ptq.collect_statistics import StatisticsCollector, chunk_of
from moejax.ptq.fold import canonical
from moejax.ptq.sites import stages_of
from moejax.quantization.calibration import SAMPLE_TOKENS, Statistics, cover
from moejax.quantization.formats import parse_format
from moejax.quantization.rules import Chosen
from tests.examples import in_turns, slow_but
from tests.numerics import assert_close, tolerance
from tests.ptq.models import FAMILIES, build, tokens

GPTQ = Chosen("gptq", parse_format("int8"))


def everything(stage):
    return {name: GPTQ for site in stage.sites for name in site.readers}


def collected(model, ids, layer=1, calibration=None, batch_size=4):
    """Statistics of one layer of a float model, whose input comes from the layers before it."""
    stage, x = stages_of(model)[layer], np.asarray(model.embed(jnp.asarray(ids)))
    for before in model.in_order()[:layer]:
        x = np.asarray(_layer_output(before, jnp.asarray(x)))
    calibration = calibration or CalibrationConfig(min_tokens=0)
    found = StatisticsCollector(stage, everything(stage), calibration, HiddenStates(x, batch_size))
    found.run()
    return found, x


def _layer_output(layer, x):
    from moejax.ptq.observers import run_stage

    return run_stage(layer, x, jnp.ones(x.shape[:2], bool))


def reference(model, x, layer=1):
    """Inputs of every weight by site, and of each expert, float64, by the plainest way."""
    layer, seen = model.in_order()[layer], {}
    x = jnp.asarray(x)
    normed, _ = layer.input_norm.add(x, None)
    seen["attention"] = normed
    original = type(layer.attention.o_proj).__call__

    def spy(self, y):
        if self is layer.attention.o_proj:
            seen["attention.o_proj"] = y
        return original(self, y)

    type(layer.attention.o_proj).__call__ = spy
    try:
        _layer_output(layer, x)
        total = x + _attended(layer, x)
    finally:
        type(layer.attention.o_proj).__call__ = original
    normed, _ = layer.post_attention_norm.add(total, None)
    flat = normed.reshape(-1, normed.shape[-1])
    act = activation(layer.attention.config.hidden_act)
    if layer.moe is None:
        mlp = layer.mlp
        seen["mlp"] = flat
        seen["mlp.down_proj"] = act(mlp.gate_proj(flat)) * mlp.up_proj(flat)
        return {k: np.asarray(v, np.float64).reshape(-1, v.shape[-1]) for k, v in seen.items()}, {}
    seen["moe"] = flat
    if layer.moe.shared_expert is not None:
        mlp = layer.moe.shared_expert
        seen["moe.shared_expert.down_proj"] = act(mlp.gate_proj(flat)) * mlp.up_proj(flat)
    ids = np.asarray(layer.moe.router(flat).ids)
    gate, up = canonical(layer.moe.experts.gate_proj), canonical(layer.moe.experts.up_proj)
    hidden = [np.asarray(act(flat @ gate[e]) * (flat @ up[e]), np.float64) for e in range(len(gate))]
    rows = [(ids == e).any(1) for e in range(len(gate))]
    experts = {"rows": rows, "in": np.asarray(flat, np.float64), "hidden": hidden}
    return {k: np.asarray(v, np.float64).reshape(-1, v.shape[-1]) for k, v in seen.items()}, experts


def _attended(layer, x):
    from moejax.nn.rope import rope_tables

    B, T, _ = x.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    rope = rope_tables(layer.attention.config, positions, jnp.full(B, T, jnp.int32))
    return layer.attention(layer.input_norm(x), rope, positions)[0]


def check(found: Statistics, rows: np.ndarray, lengths=(32, 32, 32)):
    limit = tolerance(len(rows) + 1, *lengths)
    assert int(found.count) == len(rows)
    if not len(rows):
        assert not np.asarray(found.gram).any() and not np.asarray(found.max_abs).any()
        return
    assert_close(found.gram, rows.T @ rows, limit)
    assert_close(found.sum_abs, np.abs(rows).sum(0), limit)
    assert_close(found.max_abs, np.abs(rows).max(0), limit)
    assert_close(found.mean_gram(), rows.T @ rows / len(rows), limit)
    assert_close(found.mean_abs(), np.abs(rows).mean(0), limit)


@pytest.mark.parametrize(
    ("family", "layout", "execution"),
    slow_but(
        [("qwen2_moe", "edf", "dense"), ("olmoe", "edf", "capacity")],
        [
            ("mixtral", "edf", "grouped"),
            ("qwen2_moe", "efd", "grouped"),
            ("qwen2_moe", "edf", "dense"),
            ("olmoe", "edf", "capacity"),
            ("qwen3_moe", "efd", "grouped"),
        ],
    ),
)
def test_every_weight_of_a_layer(family, layout, execution):
    """6 samples in batches of 4: the second batch is half padding, which must not count."""
    model, ids = build(FAMILIES[family], layout=layout, execution=execution), tokens()
    found, x = collected(model, ids)
    plain, experts = reference(model, x)
    assert set(found.plain) == set(plain)
    for name, rows in plain.items():
        check(found.plain[name], rows)
    stats = found.experts(found.chunks[0])
    for e, mine in enumerate(experts["rows"]):
        one = {name: _entry(covered, e) for name, covered in stats.items()}
        check(one["moe.experts"], experts["in"][mine])
        check(one["moe.experts.down_proj"], experts["hidden"][e][mine])
    assert list(found.visits) == [int(mine.sum()) for mine in experts["rows"]]


def test_a_dense_layer():
    model = build(FAMILIES["qwen3_moe"])
    found, x = collected(model, tokens(), layer=0)
    plain, _ = reference(model, x, layer=0)
    assert set(found.plain) == set(plain) == {"attention", "attention.o_proj", "mlp", "mlp.down_proj"}
    for name, rows in plain.items():
        check(found.plain[name], rows)
    assert not found.chunks


def _entry(stats, e):
    return Statistics(stats.gram[e], stats.sum_abs[e], stats.max_abs[e], stats.count[e])


def test_chunks_of_experts_see_the_same(monkeypatch):
    model, ids = build(FAMILIES["qwen2_moe"]), tokens()
    whole, _ = collected(model, ids)
    monkeypatch.setattr(collect_statistics, "GRAM_BYTES", 2 * 4 * (32**2 + 16**2))
    parts, _ = collected(model, ids)
    assert parts.chunk == 2 and parts.chunks == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    for part in (*parts.chunks, parts.chunks[1]):
        for name, covered in parts.experts(part).items():
            together = whole.experts(whole.chunks[0])[name]
            for i in range(2):
                want, got = _entry(together, part.start + i), _entry(covered, i)
                np.testing.assert_array_equal(got.gram, want.gram)
                np.testing.assert_array_equal(got.count, want.count)
    np.testing.assert_array_equal(parts.visits, whole.visits)


def test_the_bound_gives_a_divisor_and_at_least_one(monkeypatch):
    # Mixtral-8x7B: gate and up read 4096 channels, down 14336.
    assert chunk_of(8, 4 * (4096**2 + 14336**2)) == 2
    for bound, chunk in ((1000, 12), (70, 6), (59, 4), (1, 1)):
        monkeypatch.setattr(collect_statistics, "GRAM_BYTES", bound)
        assert chunk_of(12, 10) == chunk


@pytest.mark.parametrize("layout, fallback", in_turns([("edf",), ("efd",)], ["shared", "all"]))
def test_cold_experts_fall_back(fallback, layout):
    model, ids = build(FAMILIES["qwen2_moe"], layout=layout), tokens()
    plain, _ = collected(model, ids)
    least = int(np.median(plain.visits)) + 1
    found, x = collected(model, ids, calibration=CalibrationConfig(min_tokens=least, fallback=fallback))
    _, experts = reference(model, x)
    visits = np.array([int(mine.sum()) for mine in experts["rows"]])
    assert 0 < (visits < least).sum() < 8
    np.testing.assert_array_equal(found.visits, visits)
    np.testing.assert_array_equal(found.cold, visits < least)
    stats = found.experts(found.chunks[0])
    for e, mine in enumerate(experts["rows"]):
        inputs, hidden = experts["in"][mine], experts["hidden"][e][mine]
        if visits[e] < least:  # all tokens; with "all" beside its own
            own = fallback == "all"
            inputs = np.concatenate([inputs] * own + [experts["in"]])
            hidden = np.concatenate([hidden] * own + [experts["hidden"][e]])
        check(_entry(stats["moe.experts"], e), inputs)
        check(_entry(stats["moe.experts.down_proj"], e), hidden)


def test_the_sample_of_fallback_all_is_bounded(monkeypatch):
    monkeypatch.setattr(collect_statistics, "SAMPLE_TOKENS", 16)
    model, ids = build(FAMILIES["mixtral"]), tokens()  # 96 tokens: every 6th
    calibration = CalibrationConfig(min_tokens=10_000, fallback="all")
    found, x = collected(model, ids, calibration=calibration, batch_size=3)
    _, experts = reference(model, x)
    sample = experts["in"][::6]
    for e, mine in enumerate(experts["rows"]):
        check(
            _entry(found.experts(found.chunks[0])["moe.experts"], e),
            np.concatenate([experts["in"][mine], sample]),
        )
    assert SAMPLE_TOKENS == 4096


def test_warm_experts_keep_what_they_have():
    own, other = Statistics.zeros((2,), 3), Statistics.zeros((2,), 3)
    own = Statistics(own.gram + 1, own.sum_abs + 1, own.max_abs + 1, own.count + 5)
    other = Statistics(other.gram + 9, other.sum_abs + 9, other.max_abs + 9, other.count + 7)
    cold = jnp.asarray([False, True])
    for fallback, gram, count in (("shared", 9, 7), ("all", 10, 12)):
        found = cover(own, other, cold, fallback)
        np.testing.assert_array_equal(found.gram[:, 0, 0], [1, gram])
        np.testing.assert_array_equal(found.count, [5, count])


def test_dividing_the_input_divides_its_statistics():
    rows = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    scales = np.array([0.5, 2, 4, 1], np.float32)

    def of(x):
        from moejax.quantization.calibration import of_rows

        return of_rows(jnp.asarray(x), jnp.ones(len(x), bool))

    got, want = of(rows).divided(jnp.asarray(scales)), of(rows / scales)
    for a, b in zip(
        (got.gram, got.sum_abs, got.max_abs), (want.gram, want.sum_abs, want.max_abs), strict=True
    ):
        np.testing.assert_array_equal(a, b)  # powers of two divide exactly
