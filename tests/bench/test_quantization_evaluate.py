"""Models beside models: every figure against the same computed plainly from logits and traces."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.bench.common.held_out import Windows, read_windows
from moejax.bench.quantization.config import QuantizationSection, SpeedSection
from moejax.bench.quantization.evaluate import Evaluator, routing_changes
from moejax.bench.quantization.metrics import WindowBootstrap
from moejax.bench.quantization.rows import by_document
from moejax.bench.quantization.sizes import model_sizes
from moejax.core.errors import ConfigError
from moejax.core.quant import QuantConfig
from moejax.models.decoder import Decoder
from moejax.moe.router import Replay
from moejax.nn.param import iter_params, num_params
from moejax.ptq.reduce import expert_outputs
from tests.decoding import forward, random_model
from tests.model_shapes import LINEAR
from tests.numerics import assert_close, tolerance

E, T = 8, 6


def windows(count: int, seed: int = 0) -> Windows:
    """Of which the last is cut short."""
    tokens = np.random.default_rng(seed).integers(0, 96, (count, T + 1), dtype=np.int32)
    scored = np.ones((count, T), bool)
    scored[-1, 4:] = False
    tokens[-1, 5:] = 0
    return Windows(tokens, scored, "made up", 2.0)


def disturbed(model, size):
    """The same model with noise in all its weights, as quantization puts there."""
    graph, state = nnx.split(model)
    other = nnx.merge(graph, jax.tree.map(lambda a: a, state))
    rng = np.random.default_rng(9)
    for _, param in iter_params(other):
        value = np.asarray(param[...])
        param.set_value(jnp.asarray(value * (1 + size * rng.normal(size=value.shape)), jnp.float32))
    return other


@pytest.fixture
def models(request, tiny_config):
    config = tiny_config.replace(moe_layers=(True, False, True), num_layers=3, sliding_windows=(None,) * 3)
    config = config.replace(**getattr(request, "param", {}))
    full = random_model(config)
    return full, disturbed(full, 0.2)


def plain(model, text, replays=None):
    """Logits float64 `[W, T, V]` and traces, all windows in one batch."""
    tokens = jnp.asarray(text.tokens[:, :-1])
    run = jax.jit(
        lambda s: nnx.merge(graph, s)(tokens, valid=text.scored, routing=replays, return_routing=True)
    )
    graph, state = nnx.split(model)
    logits, traces = run(state)
    return np.asarray(logits, np.float64), traces


def log_softmax(logits):
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize(
    "models",
    [{}, pytest.param(LINEAR | {"linear_layers": (True, False, True)}, marks=pytest.mark.slow)],
    ids=["softmax", "linear"],
    indirect=True,
)
def test_every_figure_against_a_plain_computation(models):
    full, other = models
    text = windows(5)
    steps = []
    found = Evaluator(full, text, batch_size=2)(other, advance=lambda: steps.append(1))
    assert len(steps) == 3 and found.tokens == 5 * T - 2
    base, traces = plain(full, text)
    replays = tuple(t and Replay(t.ids, t.weights) for t in traces)
    passes = [base, (free := plain(other, text))[0], (forced := plain(other, text, replays))[0]]
    logs = [log_softmax(p) for p in passes]
    limit = tolerance(*[32] * 20)
    for i, log in enumerate(logs):
        picked = -np.take_along_axis(log, text.tokens[:, 1:, None].astype(np.int64), -1)[..., 0]
        np.testing.assert_allclose(found.nats[i], (picked * text.scored).sum(1), rtol=20 * limit)
    for i, log in enumerate(logs[1:]):
        kl = (np.exp(logs[0]) * (logs[0] - log)).sum(-1) * text.scored
        np.testing.assert_allclose(found.kl[i], kl.sum(1), rtol=1e-3)
        same = (passes[i + 1].argmax(-1) == base.argmax(-1)) & text.scored
        np.testing.assert_array_equal(found.agree[i], same.sum(1))
    assert found.kl[0].sum() > found.kl[1].sum() > 0  # replaying takes a part of the difference away
    np.testing.assert_allclose(Evaluator(full, text, 3).baseline(), found.nats[0], rtol=20 * limit)

    for layer, (recorded, ours, shadow) in enumerate(zip(traces, free[1], forced[1], strict=True)):
        if recorded is None:
            assert not found.counts[:, layer].any() and not found.flipped[:, layer].any()
            continue
        wished = np.argsort(-np.asarray(shadow.logits), -1, kind="stable")[..., :2]
        for which, ids in enumerate((np.asarray(ours.ids), wished)):
            pairs = zip(np.asarray(recorded.ids)[text.scored], ids[text.scored], strict=True)
            missed = [2 - len(set(a) & set(b)) for a, b in pairs]
            assert found.flipped[which, layer] == np.count_nonzero(missed)
            assert found.changed[which, layer] == sum(missed)
        for which, trace in enumerate((recorded, ours)):
            np.testing.assert_array_equal(found.counts[which, layer], trace.counts)
    assert found.flipped[0, 2] > 0


def test_a_model_beside_itself_differs_in_nothing(models):
    full, _ = models
    found = Evaluator(full, windows(4), 2)(full)
    assert not found.flipped.any() and not found.changed.any() and not found.squared_error.any()
    # Replayed is the same to the bit, so the split has nothing to explain.
    np.testing.assert_array_equal(found.nats[1], found.nats[2])
    # Its first pass goes layer by layer in a program of its own.
    np.testing.assert_allclose(found.nats[0], found.nats[1], rtol=tolerance(*[32] * 20))
    assert found.agree.sum() == 2 * found.tokens


def test_an_experts_error_is_its_own(models):
    """Only one expert's weights differ: only its error is there, whatever follows from it downstream."""
    full, _ = models
    graph, state = nnx.split(full)
    other = nnx.merge(graph, jax.tree.map(lambda a: a, state))
    weight = other.layers[0].moe.experts.down_proj
    weight.set_value(weight[...].at[3].multiply(1.5))
    found = Evaluator(full, windows(6), 4)(other)
    share = found.squared_error / np.maximum(found.squared_norm, 1e-30)
    assert share[0, 3] == pytest.approx(0.25, rel=1e-5)
    share[0, 3] = 0
    assert not share.any()
    assert found.nats[0].sum() != found.nats[1].sum()


def test_what_is_folded_into_the_norm_belongs_to_the_expert(models):
    """Half the norm, doubled gate and up: the same function, though not of the same normed input."""
    full, _ = models
    graph, state = nnx.split(full)
    other = nnx.merge(graph, jax.tree.map(lambda a: a, state))
    layer = other.layers[0]
    for weight, factor in (
        (layer.post_attention_norm.scale, 0.5), (layer.moe.experts.gate_proj, 2.0),
        (layer.moe.experts.up_proj, 2.0), (layer.moe.router.kernel, 2.0),
    ):  # fmt: skip
        weight.set_value(weight[...] * factor)
    found = Evaluator(full, windows(3), 3)(other)
    assert not found.squared_error.any() and not found.flipped.any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "stand_ins",
    [[0, -1, 2, 3, -1, 5, 6, 7], pytest.param([0, 2, 2, 3, 7, 5, 6, 7], marks=pytest.mark.slow)],
    ids=["pruned", "merged"],
)
def test_fewer_experts_are_counted_in_the_full_models_numbers(models, stand_ins):
    """The small model's figures are a full one's whose router never takes the experts that are gone."""
    full, _ = models
    small = Decoder(full.config.replace(num_experts=6), moe=full.layers[0].moe.moe)
    stand_ins, gone = np.array(stand_ins), [1, 4]
    kept = np.flatnonzero(stand_ins == np.arange(E))
    source, places = dict(iter_params(full)), {0: stand_ins, 2: stand_ins}
    for name, param in iter_params(small):
        value = source[name][...]
        if value.shape != param.shape:
            value = jnp.take(value, kept, axis=-1 if "router" in name else 0)
        param.set_value(value)
    text = windows(5)
    found = Evaluator(full, text, 2)(small, stand_ins=places)
    logits, own = plain(small, text)
    logs = log_softmax(logits)
    picked = -np.take_along_axis(logs, text.tokens[:, 1:, None].astype(np.int64), -1)[..., 0]
    np.testing.assert_allclose(found.nats[1], (picked * text.scored).sum(1), rtol=1e-4)
    _, traces = plain(full, text)
    for layer in places:
        mine = kept[np.asarray(own[layer].ids).clip(max=5)][text.scored]
        theirs = np.asarray(traces[layer].ids)[text.scored]
        sets = [(set(stand_ins[a]) - {-1}, set(b)) for a, b in zip(theirs, mine, strict=True)]
        assert found.flipped[0, layer] == sum(a != b for a, b in sets)
        np.testing.assert_array_equal(found.counts[1, layer], np.bincount(mine.ravel(), minlength=E))
        np.testing.assert_array_equal(found.counts[0, layer], traces[layer].counts)
        share = found.squared_error[layer] / np.maximum(found.squared_norm[layer], 1e-30)
        assert np.delete(share, gone).max() < 1e-12 and (share[gone] > 0.1).all()
        if (stand_ins < 0).any():
            np.testing.assert_allclose(share[gone], 1.0, rtol=1e-6)
    sizes, whole = model_sizes(small, full), model_sizes(full)
    assert sizes["bits_per_weight"] == pytest.approx(
        32 * sizes["quantizable_bytes"] / whole["quantizable_bytes"]
    )
    assert sizes["model_bytes"] < whole["model_bytes"]


def test_losses_by_document_are_those_of_its_tokens(models):
    full, other = models
    text = windows(5)
    mask = np.zeros_like(text.scored)
    mask[1:3, 2:] = True
    text = dataclasses.replace(text, documents={"one": mask, "others": text.scored & ~mask})
    sums = Evaluator(full, text, 2)(other)
    np.testing.assert_allclose(sum(sums.document_nats.values()), sums.nats)
    alone = Evaluator(full, dataclasses.replace(text, scored=text.scored), 2)(other).document_nats["one"]
    assert not alone[:, [0, 3, 4]].any() and alone[:, 1:3].all()
    boot = WindowBootstrap(text.scored.sum(1), resamples=200)
    losses, row = by_document(sums, text.documents, boot)
    ratio = np.exp((sums.document_nats["one"][1] - sums.document_nats["one"][0]).sum() / mask.sum())
    assert losses["one"]["document_loss_percent"] == pytest.approx(100 * (ratio - 1))
    assert losses["one"]["document_tokens"] == mask.sum() == 8
    assert row == {"worst_document": row["worst_document"], **losses[row["worst_document"]]}
    assert by_document(Evaluator(full, windows(5), 2)(other), {}, boot) == ({}, {})


def test_expert_outputs_add_up_to_the_layers(models):
    full, _ = models
    layer = full.layers[2]
    x = np.random.default_rng(0).normal(size=(1, 5, 32)).astype(np.float32)
    _, out, trace = layer.feed_forward(jnp.asarray(x), None, None)
    rows = layer.post_attention_norm(jnp.asarray(x[0]))
    each = expert_outputs(layer.moe, rows, trace.ids[0]).reshape(5, 2, 32)
    assert_close((each * trace.weights[0][..., None]).sum(1), out[0], tolerance(32, 16, 2))


def test_routing_changes_by_hand():
    base = jnp.array([[0, 1], [2, 3], [4, 8], [8, 8]])
    other = jnp.array([[1, 0], [2, 5], [4, 6], [8, 8]])
    flipped, changed = routing_changes(base, other, 8)
    # Order does not count; an expert beside none (8) is one assignment more.
    assert (int(flipped), int(changed)) == (2, 2)


class Letters:
    def encode(self, text):
        return [ord(c) for c in text]

    def decode(self, ids):
        return "".join(map(chr, ids))


def read(text: str = "auto", max_windows: int | None = None, **changes: Any) -> Windows:
    section = QuantizationSection(
        text=text, seq_len=5, max_windows=max_windows, methods=["rtn"], presets={"rtn": QuantConfig("rtn")}
    )
    how: dict[str, Any] = {"model_dir": None, "tokenizer": Letters(), "seed": 0, "max_model_len": 64}
    return read_windows(section, **how | changes)


def test_windows_predict_every_token_once(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(40 + i) for i in range(23)))
    found = read(str(file))
    assert found.tokens.shape == (5, 6) and found.num_tokens == 22
    assert found.tokens[:, 1:][found.scored].tolist() == list(range(41, 63))
    drawn = read(str(file), 3)
    assert len(drawn.tokens) == 3 and len({row.tobytes() for row in drawn.tokens}) == 3
    again = read(str(file), 3)
    assert drawn.fingerprint == again.fingerprint != found.fingerprint


def test_documents_end_with_their_token_and_small_ones_go_together(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("first one\nmore.\nab.cd." + "second " * 20)
    section = QuantizationSection(
        text=str(file), seq_len=7, methods=["rtn"], presets={"rtn": QuantConfig("rtn")}
    )
    found = read_windows(section, None, Letters(), 64, 0, [ord(".")])
    assert list(found.documents) == ["first one", "others", "second second second sec"]
    assert (sum(mask.astype(int) for mask in found.documents.values()) == found.scored).all()
    targets = found.tokens[:, 1:]
    text = {name: "".join(map(chr, targets[mask])) for name, mask in found.documents.items()}
    assert text["first one"] == "irst one\nmore." and text["others"] == "\nab.cd."
    assert not read(str(file)).documents
    file.write_text("one without end" * 4)
    assert not read_windows(section, None, Letters(), 64, 0, [ord(".")]).documents


def test_a_text_that_cannot_be_scored_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"has no held_out\.txt; give one with quantization\.text=FILE"):
        read(model_dir=tmp_path)
    with pytest.raises(ConfigError, match="a model without a folder"):
        read()
    (tmp_path / "held_out.txt").write_text("short")
    with pytest.raises(ConfigError, match="has 5 tokens, and two windows"):
        read(model_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        read(model_dir=tmp_path, tokenizer=None)
    with pytest.raises(ConfigError, match="cannot read"):
        read(str(tmp_path / "none.txt"))


def test_sizes_of_a_model_in_full_precision(tiny_config):
    model = random_model(tiny_config)
    sizes = model_sizes(model)
    assert sizes["bits_per_weight"] == sizes["bits_per_parameter"] == 32
    assert sizes["quantizable_bytes"] == 4 * 2 * (3 * 32 * 16 * 8 + 32 * 32 * 2 + 32 * 16 * 2)
    assert sizes["model_bytes"] == 4 * num_params(model)


PRESETS = {"int8": QuantConfig(method="rtn"), "nothing": QuantConfig()}
BAD = [
    ({"methods": ["int9"]}, r"unknown method 'int9'; did you mean 'int8'"),
    ({"methods": []}, "is empty: choose among int8"),
    ({"methods": ["nothing"]}, "changes nothing"),
    ({"methods": ["int8", "int8"]}, "stands there twice"),
    ({"seq_len": 0}, r"quantization\.seq_len"),
    ({"max_windows": 1}, "at least 2"),
    ({"resamples": 5}, "at least 100"),
    ({"confidence": 1.0}, "below 1"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_wrong_sections_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        QuantizationSection(**({"methods": ["int8"], "presets": PRESETS} | fields))


def test_wrong_speed_sections_are_refused():
    with pytest.raises(ConfigError, match="output_len"):
        SpeedSection(output_len=1)
    with pytest.raises(ConfigError, match="iterations"):
        SpeedSection(iterations=-1)


def test_unused_forward_is_the_engines(models):
    """The layer-by-layer reference is the decoder's own pass."""
    full, _ = models
    text = windows(2)
    logits, _ = forward(full, text.tokens[:, :-1], text.scored)
    found = Evaluator(full, text, 2).baseline()
    picked = -np.take_along_axis(
        log_softmax(np.asarray(logits, np.float64)), text.tokens[:, 1:, None].astype(int), -1
    )
    np.testing.assert_allclose(found, (picked[..., 0] * text.scored).sum(1), rtol=tolerance(*[32] * 20))
