"""Recorded routing, forced again: the same bits for its own model, its experts for any other."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder
from moejax.moe.router import Replay
from tests.decoding import forward, random_model
from tests.examples import slow_but


@jax.jit
def _replayed(graph_state: Any, tokens: jax.Array, valid: Any, routing: Any) -> Any:
    return nnx.merge(*graph_state)(tokens, valid=valid, routing=routing, return_routing=True)


def replayed(model: Decoder, tokens: np.ndarray, routing: Any, valid: np.ndarray | None = None) -> Any:
    return _replayed(nnx.split(model), jnp.asarray(tokens, jnp.int32), valid, tuple(routing))


def only_choice(traces: Any, weights: bool = True) -> tuple[Replay | None, ...]:
    return tuple(t and Replay(t.ids, t.weights if weights else None) for t in traces)


EXECUTIONS = [
    MoeConfig("dense"),
    MoeConfig("grouped"),
    MoeConfig("grouped", grouped_matmul="ragged_dot"),
    MoeConfig("capacity", capacity_factor=8.0),
    MoeConfig("capacity", capacity_factor=0.7),
    MoeConfig("capacity", capacity_factor=0.7, overflow="reroute"),
]


@pytest.mark.optimized
@pytest.mark.parametrize(
    "moe",
    slow_but([EXECUTIONS[1], EXECUTIONS[4]], EXECUTIONS),
    ids=lambda m: f"{m.execution}-{m.grouped_matmul}-{m.capacity_factor}-{m.overflow}",
)
def test_its_own_trace_gives_the_same_bits(tiny_config, moe):
    config = tiny_config.replace(shared_expert_intermediate_size=12, moe_layers=(True, False))
    model = random_model(config, moe)
    tokens = np.random.default_rng(0).integers(0, 96, (2, 11), dtype=np.int32)
    valid = np.arange(11)[None] < np.array([[11], [7]])
    free, traces = forward(model, tokens, valid)
    assert (int(traces[0].dropped) + int(traces[0].rerouted) > 0) == (moe.capacity_factor < 1)
    again, same = replayed(model, tokens, traces, valid)
    np.testing.assert_array_equal(again, free)
    for name in ("ids", "weights", "logits", "counts"):
        np.testing.assert_array_equal(getattr(same[0], name), getattr(traces[0], name))
    # What had found room then finds it again.
    assert int(same[0].dropped) == 0 and same[1] is None


@pytest.mark.parametrize("normalize", slow_but([False], [True, False]))
def test_experts_alone_take_the_routers_own_weights(tiny_config, normalize):
    model = random_model(tiny_config.replace(norm_topk_prob=normalize))
    tokens = np.random.default_rng(1).integers(0, 96, (1, 9), dtype=np.int32)
    free, traces = forward(model, tokens)
    again, same = replayed(model, tokens, only_choice(traces, weights=False))
    np.testing.assert_array_equal(again, free)
    np.testing.assert_array_equal(same[1].weights, traces[1].weights)


def test_another_models_experts_run(tiny_config):
    """Ids and weights are the recorded ones to the bit, the logits the router's own."""
    first, other = random_model(tiny_config), random_model(tiny_config, seed=1)
    tokens = np.random.default_rng(2).integers(0, 96, (2, 8), dtype=np.int32)
    _, recorded = forward(first, tokens)
    free, own = forward(other, tokens)
    forced, traces = replayed(other, tokens, only_choice(recorded))
    assert (np.asarray(own[0].ids) != np.asarray(recorded[0].ids)).any()
    assert np.abs(np.asarray(forced) - np.asarray(free)).max() > 1e-3
    for got, wanted in zip(traces, recorded, strict=True):
        np.testing.assert_array_equal(got.ids, wanted.ids)
        np.testing.assert_array_equal(got.weights, wanted.weights)
    np.testing.assert_array_equal(traces[0].logits, own[0].logits)
    # A layer without an entry goes by its router.
    _, mixed = replayed(other, tokens, (None, only_choice(recorded)[1]))
    np.testing.assert_array_equal(mixed[0].ids, own[0].ids)
    np.testing.assert_array_equal(mixed[1].ids, recorded[1].ids)


def test_no_expert_is_a_choice_too(tiny_config):
    """Id E runs nothing, and the layer's output is then the residual alone, as for padding."""
    model = random_model(tiny_config)
    tokens = np.zeros((1, 4), np.int32)
    none = Replay(np.full((1, 4, 2), 8, np.int32))
    _, traces = replayed(model, tokens, (none, none))
    assert not np.asarray(traces[0].weights).any() and not np.asarray(traces[0].counts).any()


BAD = [
    ("length", lambda r: r[:1], r"1 entries for 2 layers"),
    ("tokens", lambda r: [Replay(r[0].ids[:, :3]), r[1]], r"layer 0: ids of shape \(1, 3, 2\).*\(1, 5, 2\)"),
    ("experts a token", lambda r: [Replay(r[0].ids[..., :1]), r[1]], r"num_experts_per_tok"),
    ("weights", lambda r: [r[0], Replay(r[1].ids, r[1].weights[:, :2])], r"layer 1: weights of shape"),
    ("dtype", lambda r: [Replay(r[0].weights), r[1]], r"layer 0: ids cannot be float32"),
    ("no expert", lambda r: [Replay(r[0].ids + 9), r[1]], r"has 8 experts"),
    ("twice", lambda r: [Replay(r[0].ids * 0), r[1]], r"the same expert twice"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_routing_that_does_not_fit_is_named(tiny_config, change, message):
    model = Decoder(tiny_config)
    ids = np.tile(np.arange(2, dtype=np.int32), (1, 5, 1))
    routing = [Replay(ids, np.ones(ids.shape, np.float32))] * 2
    with pytest.raises(ConfigError, match=message):
        model._replays(change(routing), (1, 5))


def test_a_dense_layer_has_none(tiny_config):
    model = Decoder(dataclasses.replace(tiny_config, moe_layers=(False, True)))
    entry = Replay(np.zeros((1, 5, 2), np.int32))
    with pytest.raises(ConfigError, match="layer 0 is dense"):
        model._replays([entry, None], (1, 5))
