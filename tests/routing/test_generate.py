"""Generated traces have the statistics that they are named after."""

import itertools
from typing import Any

import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.routing import analysis, locality
from moejax.routing.capture import RoutingCapture, load_capture
from moejax.routing.generate import KINDS, generate

SHAPE: dict[str, Any] = {
    "num_experts": 32, "top_k": 4, "layers": 3, "requests": 16, "prompt_len": 64, "output_len": 65,
}  # fmt: skip


def make(kind: str, **changes: Any) -> RoutingCapture:
    return generate(kind, **{**SHAPE, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_whole_routings_in_the_order_of_steps(kind: str, tmp_path: Any) -> None:
    trace = make(kind, layers=(1, 3, 4))
    assert trace.ids.shape == trace.weights.shape == (16 * 128, 3, 4) and trace.ids.dtype == np.uint8
    assert trace.layers == (1, 3, 4) and trace.origin == "generated"
    ordered = np.sort(trace.ids, axis=-1)
    assert (ordered[..., 1:] > ordered[..., :-1]).all() and trace.ids.max() < 32
    assert (trace.weights > 0).all() and (np.diff(trace.weights, axis=-1) <= 0).all()
    np.testing.assert_allclose(trace.weights.sum(-1), 1, rtol=1e-6)
    # The prompts in step 0, then a token of every request in each of 64 steps; the last one is not computed.
    assert trace.num_steps == 65 and (np.diff(trace.step) >= 0).all()
    assert (trace.prefill == (trace.step == 0)).all() and trace.prefill.sum() == 16 * 64
    decode = trace.phase("decode")
    assert (decode.request.reshape(64, 16) == np.arange(16)).all()
    assert (decode.position.reshape(64, 16) == 64 + np.arange(64)[:, None]).all()
    again = load_capture(trace.save(tmp_path / "routing.npz"))
    np.testing.assert_array_equal(again.ids, trace.ids)
    assert again.meta["generator"]["kind"] == kind and again.meta["generator"]["requests"] == 16


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind: str) -> None:
    first, same, other = (make(kind, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.ids, same.ids)
    np.testing.assert_array_equal(first.weights, same.weights)
    assert (first.ids != other.ids).mean() > 0.5


def test_uniform_loads_are_even_and_nothing_goes_with_anything() -> None:
    trace = make("uniform")
    skew = analysis.skew(trace.counts())
    assert (skew.max_over_mean < 1.25).all() and (skew.entropy > 0.998).all()
    assert (abs(analysis.burstiness(trace) - 1) < 0.15).all()
    near = locality.temporal_locality(trace)
    np.testing.assert_allclose(near.reuse, 4 / 32, atol=0.01)
    np.testing.assert_allclose(near.chance, 4 / 32, atol=0.002)
    for layer in (0, 1):
        table = analysis.transition(trace, layer)
        assert analysis.mutual_information(table) < 0.03


@pytest.mark.parametrize("exponent", [0.6, 1.2, 2.0])
def test_first_choices_follow_zipfs_law(exponent: float) -> None:
    trace = make("zipf", exponent=exponent, requests=64)
    first = np.stack([np.bincount(trace.ids[:, layer, 0], minlength=32) for layer in range(3)])
    np.testing.assert_allclose(analysis.zipf_exponent(first), exponent, atol=0.05)
    # No expert is visited twice by a token, which flattens the law of all choices.
    assert (analysis.zipf_exponent(trace.counts()) < exponent + 0.02).all()
    popular = trace.counts().argsort(axis=1)[:, ::-1]
    other = make("zipf", exponent=exponent, requests=64, seed=1).counts().argsort(axis=1)[:, ::-1]
    assert len({tuple(row[:4]) for row in (*popular, *other)}) == 6  # by layer, by seed


def test_bursts_show_in_a_window_and_not_in_the_whole() -> None:
    trace = make("bursty", period=16, intensity=32.0, hot=4)
    assert (analysis.skew(trace.counts()).max_over_mean < 1.3).all()
    assert (analysis.burstiness(trace.phase("decode")) > 5).all()
    decode = trace.phase("decode")
    for layer in range(3):
        hot = []
        for first in range(64, 128, 16):
            window = decode.select((decode.position >= first) & (decode.position < first + 16))
            loads = window.counts()[layer]
            best = set(np.argsort(-loads)[:4].tolist())
            assert loads[list(best)].sum() > 0.7 * loads.sum()
            hot.append(best)
        assert all(not a & b for a, b in itertools.pairwise(hot))


def test_correlated_tokens_repeat_as_often_as_asked() -> None:
    trace = make("correlated", token_correlation=0.5, layer_correlation=0.0, requests=64)
    near = locality.temporal_locality(trace)
    np.testing.assert_allclose(near.reuse, 0.5 + 0.5 * 4 / 32, atol=0.015)
    np.testing.assert_allclose(near.chance, 4 / 32, atol=0.005)


def test_correlated_layers_tell_of_each_other() -> None:
    alone = make("correlated", token_correlation=0.0, layer_correlation=0.0)
    bits = []
    for share in (0.0, 0.4, 0.8):
        trace = make("correlated", token_correlation=0.0, layer_correlation=share)
        bits.append(analysis.mutual_information(analysis.transition(trace, 0)))
        # The share of tokens whose experts in the next layer are the partners of those in this one.
        table = np.zeros((32, 32), int)
        np.add.at(table, (trace.ids[:, 0, :, None], trace.ids[:, 1, None, :]), 1)
        kept = table.max(axis=1).sum() / trace.counts()[0].sum()
        assert kept == pytest.approx(share + (1 - share) * 4 / 32, abs=0.05)
    chance = analysis.mutual_information(analysis.transition(alone, 0))
    assert chance < 0.03 and bits[0] < 0.03 < 0.5 < bits[1] < bits[2]
    # Log2 of 32 at most, and popularity is even.
    assert bits[2] < 5 and (analysis.skew(trace.counts()).max_over_mean < 1.4).all()


def test_groups_meet_more_often_than_others() -> None:
    trace = make("correlated", token_correlation=0.0, layer_correlation=0.0, groups=4, group_correlation=0.9)
    lift = analysis.co_activation_lift(analysis.co_activation(trace, 1))
    friends = lift > 1
    assert (friends.sum(axis=1) == 7).all()  # 8 experts in each group
    assert np.nanmin(lift[friends]) > 2.5 and np.nanmax(lift[~friends]) < 0.7
    assert (friends == friends.T).all() and (friends @ friends)[friends].all()


def test_a_correlated_popularity_is_kept_through_layers_and_tokens() -> None:
    trace = make("correlated", exponent=1.0, token_correlation=0.3, layer_correlation=0.5, requests=64)
    plain = make("zipf", exponent=1.0, requests=64)
    ranked = [-np.sort(-t.counts(), axis=1) / t.num_rows for t in (trace, plain)]
    np.testing.assert_allclose(ranked[0], ranked[1], atol=0.06)


def test_as_many_experts_as_a_token_visits() -> None:
    trace = make("zipf", num_experts=4)
    assert (np.sort(trace.ids, axis=-1) == np.arange(4)).all()
    assert make("uniform", num_experts=300).ids.dtype == np.uint16
    assert make("bursty", prompt_len=1, output_len=1).num_rows == 16


MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("zip", {}, "generate.kind: unknown kind of trace 'zip'; did you mean 'zipf'"),
    ("uniform", {"exponent": 1.0}, "exponent is no parameter of kind 'uniform': it has no parameters;"
     " zipf, bursty, correlated have it"),
    ("zipf", {"exponent": -1}, r"generate.exponent must be a number in \[0, 5\], got -1"),
    ("zipf", {"exponent": "1"}, "generate.exponent must be a number"),
    ("bursty", {"period": 0}, "generate.period must be an integer of at least 1, got 0"),
    ("bursty", {"period": 2.5}, "generate.period must be an integer"),
    ("bursty", {"hot": 17}, "generate.hot=17 of 32 experts: with more than half"),
    ("bursty", {"intensity": 0.5}, r"generate.intensity must be a number in \[1, 1e"),
    ("correlated", {"token_correlation": 0.7, "layer_correlation": 0.4}, "together at most 1"),
    ("correlated", {"groups": 9}, "groups=9: 32 experts in so many groups are 3 .* at most 8 groups"),
    ("zipf", {"top_k": 33}, "33 of 32 experts a token"),
    ("zipf", {"requests": 0}, "generate.requests must be an integer of at least 1, got 0"),
    ("zipf", {"layers": ()}, "generate.layers must be a positive number or a list"),
    ("zipf", {"layers": 0}, "generate.layers must be a positive number or a list"),
    ("zipf", {"seed": -1}, "generate.seed must be an integer"),
    ("zipf", {"requests": 10**7}, "choices, at most 2,000,000,000; lower generate.requests"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "message"), MISTAKES)
def test_mistakes_are_named(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(kind, **changes)
