"""The router alone, and the layer's trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.core.config import RouterConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.moe.layer import MoELayer
from moejax.moe.router import Replay, Router, expert_counts
from moejax.moe.router import top_k as best_of
from moejax.nn.param import initialize
from tests.examples import slow_but
from tests.model_shapes import experts_only
from tests.moe import reference
from tests.numerics import assert_close, tolerance


def router_and_input(normalize: bool, top_k: int = 3):
    config = experts_only(16, 8, 8, top_k).replace(norm_topk_prob=normalize, initializer_range=0.5)
    router = Router(config, jnp.float32)
    initialize(router, 0)
    return router, np.random.default_rng(0).normal(size=(20, 16)).astype(np.float32)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_router_against_float64(normalize, top_k):
    router, x = router_and_input(normalize, top_k)
    logits = x.astype(np.float64) @ np.asarray(router.kernel[...], np.float64)
    probabilities = reference.softmax(logits)
    ids = np.argsort(-probabilities, axis=-1)[:, :top_k]
    weights = np.take_along_axis(probabilities, ids, 1)
    if normalize:
        weights /= weights.sum(-1, keepdims=True)
    got = router(jnp.asarray(x))
    assert got.logits.dtype == got.weights.dtype == jnp.float32 and got.ids.dtype == jnp.int32
    np.testing.assert_array_equal(got.ids, ids)
    assert_close(got.logits, logits, tolerance(16))
    assert_close(got.weights, weights, tolerance(16, 8))
    assert (np.diff(got.weights, axis=-1) <= 0).all()


@pytest.mark.parametrize(
    ("groups", "chosen", "top_k", "normalize"),
    slow_but(
        [(4, 2, 3, True), (12, 3, 3, False)],
        [(4, 2, 3, True), (6, 1, 2, False), (3, 3, 12, True), (12, 3, 3, False)],
    ),
)
def test_two_levels_against_float64(groups: int, chosen: int, top_k: int, normalize: bool) -> None:
    """One token, whose groups' part of the kernel is read alone, and many; replay reads all of it."""
    E = 12
    shape = experts_only(16, 8, E, top_k).replace(norm_topk_prob=normalize, initializer_range=0.5)
    router = Router(
        shape.replace(router=RouterConfig(groups=groups, top_groups=chosen, group_gate=True)), jnp.float32
    )
    initialize(router, 0)
    x = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)
    first = reference.softmax(x.astype(np.float64) @ np.asarray(router.group_kernel[...], np.float64))
    inner = (x.astype(np.float64) @ np.asarray(router.kernel[...], np.float64)).reshape(40, groups, -1)
    joint = first[:, :, None] * reference.softmax(inner)
    joint[np.arange(40)[:, None], np.argsort(-first)[:, chosen:]] *= 1e-12  # in order, behind all others
    ids = np.argsort(-joint.reshape(40, E), axis=-1)[:, :top_k]
    weights = np.take_along_axis(joint.reshape(40, E), ids, 1)
    weights /= weights.sum(-1, keepdims=True) if normalize else 1.0
    for rows in (slice(0, 1), slice(0, 40)):
        got = router(jnp.asarray(x[rows]))
        np.testing.assert_array_equal(got.ids, ids[rows])
        assert_close(got.weights, weights[rows], tolerance(16, 16, 8))
        again = router(jnp.asarray(x[rows]), replay=Replay(got.ids))
        assert_close(again.weights, weights[rows], tolerance(16, 16, 8))


@pytest.mark.parametrize(("E", "k"), [(4096, 1), (4160, 8), (8192, 16), (5000, 4), (4096, 70)])
def test_the_best_of_many_are_those_of_a_whole_search(E: int, k: int) -> None:
    """Few distinct scores, so that most of what is compared is equal; some rows have none but -inf."""
    scores = np.random.default_rng(E).integers(0, 40, size=(30, E)).astype(np.float32)
    scores[3], scores[4, :-3] = -np.inf, -np.inf
    found, ids = jax.jit(best_of, static_argnums=1)(jnp.asarray(scores), k)
    expected, places = jax.lax.top_k(jnp.asarray(scores), k)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(ids, places)


OTHERS = [
    (RouterConfig(scores="sigmoid"), 3),
    (RouterConfig(correction_bias=True, scaling=2.5), 4),
    (RouterConfig(groups=4, top_groups=2, scaling=16.0), 6),
    (RouterConfig("sigmoid", True, groups=4, top_groups=2, group_score="top2"), 6),
    (RouterConfig("sigmoid", True, groups=3, top_groups=3, group_score="top2"), 12),
    (RouterConfig("sigmoid", True, groups=6, top_groups=1, group_score="top2"), 1),
]
"""Of 12 experts, and how many are chosen."""


def other_router(config: RouterConfig, top_k: int, normalize: bool, kernels: str = "xla") -> Router:
    shape = experts_only(16, 8, 12, top_k).replace(norm_topk_prob=normalize, initializer_range=0.5)
    router = Router(shape.replace(router=config), jnp.float32, kernels)
    initialize(router, 0)
    for bias in filter(None, (router.bias, router.correction_bias)):
        bias.set_value(jnp.asarray(np.random.default_rng(1).normal(size=12) / 4, jnp.float32))
    return router


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("config", "top_k"), OTHERS)
def test_other_routers_against_float64(config: RouterConfig, top_k: int, normalize: bool) -> None:
    E, router = 12, other_router(config, top_k, normalize)
    bias = np.asarray(router.correction_bias[...]) if config.correction_bias else np.zeros(E)
    x = np.random.default_rng(0).normal(size=(40, 16)).astype(np.float32)
    logits = x.astype(np.float64) @ np.asarray(router.kernel[...], np.float64)
    scores = reference.softmax(logits) if config.scores == "softmax" else 1 / (1 + np.exp(-logits))
    got = router(jnp.asarray(x))
    for row, ids, weights in zip(scores, np.asarray(got.ids), got.weights, strict=True):
        groups = np.split(np.arange(E), config.groups)
        best = 1 if config.group_score == "max" else 2
        strength = [np.sort(row[group] + bias[group])[-best:].sum() for group in groups]
        allowed = np.concatenate([groups[g] for g in np.argsort(strength)[-config.top_groups :]])
        chosen = sorted(allowed, key=lambda expert: -(row[expert] + bias[expert]))[:top_k]
        np.testing.assert_array_equal(ids, chosen)
        expected = row[chosen] / (row[chosen].sum() if normalize else 1.0) * config.scaling
        assert_close(weights, expected, tolerance(16, 8))
    again = router(jnp.asarray(x), replay=Replay(got.ids))
    np.testing.assert_array_equal(again.weights, got.weights)
    np.testing.assert_array_equal(router.ranking(got.logits)[:, :top_k], got.ids)


LESS_USUAL = [
    (RouterConfig("softmax", True, 4, 2, "max", bias=True), 3),
    (RouterConfig("sigmoid", False, 3, 2, "top2"), 5),
    (RouterConfig("softmax", True, norm_min=0.7, scaling=3.0), 2),
]


@pytest.mark.parametrize(
    ("config", "top_k", "normalize"),
    slow_but(
        [(*OTHERS[2], False), (*OTHERS[3], True), (*LESS_USUAL[0], False), (*LESS_USUAL[2], True)],
        [(*case, normalize) for case in OTHERS + LESS_USUAL for normalize in (True, False)],
    ),
)
def test_kernels_route_as_the_plain_path(config: RouterConfig, top_k: int, normalize: bool) -> None:
    """Ids, weights, padding rows, and what a replay says of the kernel's own choice."""
    plain, ours = (other_router(config, top_k, normalize, kernels) for kernels in ("xla", "pallas_triton"))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(40, 16)), jnp.float32)
    valid = jnp.arange(40) % 5 != 1
    want, got = (jax.jit(router)(x, valid) for router in (plain, ours))
    np.testing.assert_array_equal(got.ids, want.ids)
    assert_close(got.weights, np.asarray(want.weights, np.float64), tolerance(16, 8))
    assert_close(got.logits, np.asarray(want.logits, np.float64), tolerance(16))
    again = ours(x, valid, Replay(got.ids))
    assert_close(again.weights, np.asarray(got.weights, np.float64), tolerance(16, 8))


@pytest.mark.parametrize(
    ("config", "top_k", "what"),
    [
        (RouterConfig(groups=5), 1, "num_experts 12 is not a multiple of n_group 5"),
        (RouterConfig(groups=4, top_groups=5), 1, "topk_group 5 exceeds n_group 4"),
        (RouterConfig(groups=4, top_groups=2), 7, "exceeds the 6 experts of topk_group 2"),
        (RouterConfig(groups=12, top_groups=2, group_score="top2"), 2, "fewer than 2"),
    ],
)
def test_groups_that_do_not_fit(config: RouterConfig, top_k: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        experts_only(16, 8, 12, top_k).replace(router=config)


def test_padding_is_assigned_to_no_expert():
    router, x = router_and_input(True)
    valid = np.arange(20) % 3 != 0
    masked, plain = router(jnp.asarray(x), jnp.asarray(valid)), router(jnp.asarray(x))
    assert (np.asarray(masked.ids)[~valid] == 8).all() and not np.asarray(masked.weights)[~valid].any()
    np.testing.assert_array_equal(np.asarray(masked.ids)[valid], np.asarray(plain.ids)[valid])
    counts = expert_counts(masked.ids, 8)
    assert int(counts.sum()) == int(valid.sum()) * 3
    np.testing.assert_array_equal(counts, np.bincount(np.asarray(plain.ids)[valid].ravel(), minlength=8))


@pytest.mark.parametrize(
    "execution, overflow", [("grouped", "drop"), ("capacity", "drop"), ("capacity", "reroute")]
)
def test_trace_accounts_for_every_assignment(tiny_config, execution, overflow):
    """counts + dropped = k · valid tokens, and counts are those of the ids."""
    layer = MoELayer(tiny_config, MoeConfig(execution, capacity_factor=0.6, overflow=overflow), jnp.float32)
    initialize(layer, 0)
    x = np.random.default_rng(1).normal(size=(2, 9, 32)).astype(np.float32)
    valid = np.arange(9)[None] < np.array([[9], [5]])
    _, trace = jax.jit(layer)(x, valid)
    E, k = tiny_config.num_experts, tiny_config.num_experts_per_tok
    assert trace.ids.shape == trace.weights.shape == (2, 9, k) and trace.logits.shape == (2, 9, E)
    counted = np.bincount(np.asarray(trace.ids).ravel(), minlength=E + 1)
    np.testing.assert_array_equal(trace.counts, counted[:E])
    assert int(trace.counts.sum() + trace.dropped) == k * valid.sum()
    assert (np.asarray(trace.ids)[~valid] == E).all()
    # Room for ceil(0.6 · 18 · 2 / 8) = 3 rows an expert, for 28 assignments: some must overflow.
    assert (int(trace.dropped + trace.rerouted) > 0) == (execution == "capacity")
    np.testing.assert_array_equal(np.asarray(trace.weights) != 0, np.asarray(trace.ids) < E)


def test_shared_expert_runs_on_every_token_with_its_gate(tiny_config):
    config = tiny_config.replace(shared_expert_intermediate_size=12)
    layer = MoELayer(config, MoeConfig(), jnp.float32)
    initialize(layer, 0)
    x = np.random.default_rng(1).normal(size=(1, 5, 32)).astype(np.float32)
    graph, state = nnx.split(layer)
    out, trace = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    experts = layer.experts
    routed = reference.moe(
        x[0],
        trace.ids[0],
        trace.weights[0],
        *(w[...] for w in (experts.gate_proj, experts.up_proj, experts.down_proj)),
    )
    x64 = x[0].astype(np.float64)
    shared, gate = layer.shared_expert, np.asarray(layer.shared_gate.kernel[...], np.float64)
    kernels = [
        np.asarray(p.kernel[...], np.float64) for p in (shared.gate_proj, shared.up_proj, shared.down_proj)
    ]
    hidden = reference.silu(x64 @ kernels[0]) * (x64 @ kernels[1])
    expected = routed + (hidden @ kernels[2]) / (1 + np.exp(-(x64 @ gate)))
    assert_close(out[0], expected, tolerance(32, 32, 16, 2))
